"""A pool of two tiers on two hosts, engines that live from beginning to end, and a daemon that may die."""

from __future__ import annotations

import mmap
import os
import random
import signal
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from children import Child, until
from crash import tally
from crash.readers import Readers
from crash.world import HONEST, LARGE, SMALL, SPACES, UNIT, World, clean, right, store, world
from kvpool import Pool, _native
from kvpool.daemon import loop
from kvpool.daemon.lock import holder
from kvpool.outcomes import MissReason
from kvpool.paths import daemon_lock_path, report_path
from kvpool.region import Coherence, Region
from kvpool.spec import PoolSpec
from strategies import buffers, small_geometry

DAMAGED = HONEST | {MissReason.FAILED_CHECKSUM}
NAME = "crash-test"
PERIODS = ("HEARTBEAT_S", "KEEP_FREE_S", "REAP_S", "SCRUB_S", "REPORT_S")
PERIOD_S = 0.004  # instead of seconds: a chore is always due


def pool_spec(folder: Path, shared: Path, coherence: Coherence, sizes: tuple[str, str]) -> PoolSpec:
    """Two tiers; small watermarks, so that there is always something to evict."""
    return PoolSpec.from_object(
        {
            "apiVersion": "kvpool.dev/v1alpha1",
            "kind": "KVPool",
            "metadata": {"name": NAME},
            "spec": {
                "hosts": 2,
                "tiers": [
                    {
                        "name": "dram",
                        "medium": "DRAM",
                        "capacity": sizes[0],
                        "source": {"path": str(folder / "dram")},
                    },
                    {
                        "name": "cxl",
                        "medium": "CXL",
                        "capacity": sizes[1],
                        "shared": True,
                        "coherence": coherence,
                        "source": {"path": str(shared)},
                    },
                ],
                "eviction": {"highWatermark": 60, "lowWatermark": 40},
            },
        }
    )


class Engines:
    """One process a host that stores and loads through the whole pool, alive from beginning to end."""

    def __init__(self, start: Callable[..., Child], spec: PoolSpec, dice: random.Random) -> None:
        self._calls = mmap.mmap(-1, 4096)  # calls that ended, a host; shared with the children
        self.children = [
            start(_engine, spec, host, dice.randrange(1 << 30), self._calls, timeout_s=600)
            for host in range(2)
        ]
        self.progress()

    def counts(self) -> tuple[int, int]:
        first, second = struct.unpack_from("<QQ", self._calls, 8)
        return first, second

    def progress(self) -> None:
        """Both end two more calls, whatever has died."""
        before = self.counts()
        try:
            until(lambda: all(n >= b + 2 for n, b in zip(self.counts(), before, strict=True)), tally.BOUND_S)
        except AssertionError:
            tally.count(tally.STUCK)
            raise AssertionError(f"engines do not go on: {before} calls, then {self.counts()}") from None

    def end(self) -> None:
        self._calls[0] = 1
        for child in self.children:
            tally.result(child)


def _engine(spec: PoolSpec, host: int, number: int, calls: mmap.mmap) -> None:
    dice = random.Random(number)
    with Pool.open(spec, host=host) as pool:
        done = 0
        while not calls[0]:
            ns = dice.choice(SPACES)
            keys, blocks = right(ns, tuple(dice.randrange(40) for _ in range(dice.choice((1, 4, 12)))))
            with tally.in_time("a store of an engine"):
                assert set(pool.store(keys, blocks).reasons) == {None}
            out = buffers(keys)
            with tally.in_time("a load of an engine"):
                result = pool.load(keys, out)
            wrong = [i for i, code in enumerate(result.codes) if code == 0 and out[i] != blocks[i]]
            tally.count(tally.LOADED, result.hit_count)
            tally.count(tally.WRONG, len(wrong))
            assert not wrong
            assert set(result.reasons) <= DAMAGED, list(result.reasons)
            done += 1
            struct.pack_into("<Q", calls, 8 + 8 * host, done)
            time.sleep(0.0005)


def serve_until(spec: PoolSpec, host: int, step: str, nth: int, record_s: float = 0) -> list[str]:
    """The daemon of a host; its chores are due every few milliseconds. With `record_s`, for so long."""
    for name in PERIODS:
        setattr(loop, name, PERIOD_S)
    if step:
        _native.stop_at(step, nth, signal.SIGKILL)
    elif record_s:
        _native.record_steps()
        signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
        signal.setitimer(signal.ITIMER_REAL, record_s)
    loop.serve(spec, host, {}, ready=lambda: None)
    return list(_native.recorded_steps()) if record_s else []


class PoolWorld:
    """The world's region as shared tier, one of its own for each host, engines, the other host's daemon."""

    def __init__(self, w: World, coherence: Coherence, dice: random.Random) -> None:
        self.w, self.dice = w, dice
        folder = w.path.parent
        self.spec = pool_spec(folder, w.path, coherence, ("1Mi", "1Mi"))
        self.own = [folder / "dram", folder / "dram.h1"]
        for path in self.own:
            Region.format(
                path,
                small_geometry(24, block_bytes=UNIT, slots_per_extent=4, participants=12, namespaces=24),
            )
        self.lock = daemon_lock_path(NAME, 0)
        self.other = w.start(serve_until, self.spec, 1, "", 0, timeout_s=600)
        self.engines = Engines(w.start, self.spec, dice)

    def work(self) -> None:
        """Dead engines to reap, and a damaged block to find."""
        first, second = (self.dice.randrange(1000, 1 << 30) for _ in range(2))  # nobody has stored them yet
        self.w.die_together(("store.payload", SMALL, [first]), ("store.header.word", SMALL, [second]))
        for index in self.dice.sample(range(40), 40):
            if self.w.damage(SMALL, index):
                return

    def judge(self) -> None:
        """The daemon has died."""
        self.engines.progress()
        for host, region in enumerate(self.w.survivors):
            assert store(region, LARGE, [self.dice.randrange(1000, 1 << 30)]) == [None], host
        assert self.other.status is None
        assert holder(self.lock) is None  # the next one can start at once

    def end(self) -> None:
        """One more daemon, which ends well; then the engines end, and everything is accounted for."""
        last = self.w.start(serve_until, self.spec, 0, "", 0, 0.5)
        tally.result(last)
        assert not report_path(NAME, 0).exists()
        self.engines.end()
        self.other.signal(signal.SIGTERM)
        tally.result(self.other)
        for region in self.w.survivors:
            region.scrub()
            assert region.reap().dead == 0
        for path in self.own:
            with Region.attach(path) as region:
                region.scrub()
                clean(region.check())
            clean(Region.fsck(path))
        self.w.honest = DAMAGED
        self.w.clean_up(self.dice)
        self.w.all_slots_are_usable()


@contextmanager
def pool_world(
    coherence: Coherence, dice: random.Random, readers: Readers, monkeypatch: pytest.MonkeyPatch
) -> Iterator[PoolWorld]:
    tally.use_row(tally.DAEMON)
    with world(coherence, DAMAGED) as w, readers.on(w.path, tally.DAEMON, DAMAGED):
        monkeypatch.setenv("KVPOOL_RUNTIME_DIR", str(w.path.parent / "run"))
        made = PoolWorld(w, coherence, dice)
        yield made
        made.end()
