"""Two processes that only load, one on each host, alive while others die around them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from children import Child
from crash import tally
from crash.world import HONEST, INDICES, SPACES, Reasons, right
from kvpool.region import Region
from strategies import buffers

PAUSE_S = 0.004  # between two loads: others need the processor too
ANSWER_S = 60.0


class Reader:
    """One process for the whole run. It attaches to the region it is told, and loads until told to stop."""

    def __init__(self, host: int) -> None:
        self.host = host
        self._orders, inside = Pipe()
        self.child = Child(_read, inside, self._orders, host, timeout_s=24 * 3600)
        inside.close()

    def ask(self, *order: object) -> Any:
        try:
            self._orders.send(order)
            if not self._orders.poll(ANSWER_S):
                tally.count(tally.STUCK)
                raise AssertionError(f"the reader of host {self.host} does not answer")
            return self._orders.recv()
        except (EOFError, OSError):
            tally.count(tally.CRASHED)
            raise AssertionError(
                f"the reader of host {self.host} crashed: it ended with {self.child.wait()}"
            ) from None

    def end(self) -> None:
        self.child.end()
        self._orders.close()


class Readers:
    def __init__(self) -> None:
        self.all = [Reader(host) for host in range(2)]

    @contextmanager
    def on(self, path: Path, row: str, honest: Reasons = HONEST) -> Iterator[None]:
        """They load from this region meanwhile; wrong bytes or another reason than the honest ones fail."""
        for host, reader in enumerate(self.all):
            if reader.child.status is not None:  # it crashed in another test, and was counted there
                self.all[host] = Reader(host)
        for reader in self.all:
            assert reader.ask(path, row, honest) == "reading"
        try:
            yield
        finally:
            reports = [reader.ask() for reader in self.all]
        for reader, (loads, complaints) in zip(self.all, reports, strict=True):
            assert not complaints, f"the reader of host {reader.host}: {complaints}"
            assert loads > 0

    def end(self) -> None:
        for reader in self.all:
            reader.end()


def _read(orders: Connection, parents_end: Connection, host: int) -> None:
    parents_end.close()  # so that the end of the tests is seen
    while True:
        try:
            path, row, honest = orders.recv()
        except EOFError:
            return
        tally.use_row(row)
        complaints: list[str] = []
        loads = 0
        with Region.attach(path, host=host) as region:
            orders.send("reading")
            while loads == 0 or not orders.poll():
                for ns in SPACES:
                    _load(region, ns, honest, complaints)
                loads += 1
                time.sleep(PAUSE_S)
        orders.recv()
        orders.send((loads, complaints))


def _load(region: Region, ns, honest: Reasons, complaints: list[str]) -> None:  # type: ignore[no-untyped-def]
    keys, blocks = right(ns, tuple(INDICES))
    out = buffers(keys)
    began = time.monotonic()
    result = region.load(keys, out)
    took_s = time.monotonic() - began
    wrong = [i for i, code in enumerate(result.codes) if code == 0 and out[i] != blocks[i]]
    tally.count(tally.LOADED, result.hit_count)
    tally.count(tally.BY_READERS, result.hit_count)
    tally.count(tally.WRONG, len(wrong))
    if wrong:
        complaints.append(f"wrong bytes: blocks {wrong} of {ns.model}")
    if not set(result.reasons) <= honest:
        complaints.append(f"reasons {set(map(str, result.reasons))}")
    if took_s > tally.BOUND_S:
        tally.count(tally.STUCK)
        complaints.append(f"a load took {took_s:.1f} s")
