"""Damages are tried by forked processes: a crash or a hang is a count with a name, not the end of it all.

A worker that died is started again behind the damage that killed it.
"""

from __future__ import annotations

import os
import select
import signal
import struct
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from mmap import mmap
from typing import NoReturn, TypeVar

from damage.tally import TALLY, Row

T = TypeVar("T")
WORKERS = 2
STUCK_S = 30.0  # one damage, or one call, on a busy machine
DEATHS_MAX = 20

Use = Callable[[T], None]
Going = Callable[[], bool]
User = Callable[[Row, Going], None]


class Number:
    """One that parent and child share."""

    def __init__(self) -> None:
        self._map = mmap(-1, 8)

    def set(self, at: int) -> None:
        struct.pack_into("q", self._map, 0, at)

    def get(self) -> int:
        return int(struct.unpack_from("q", self._map)[0])


def try_all(items: Sequence[T], prepare: Callable[[int, Row], Use[T]]) -> None:
    """Calls `prepare(worker, row)(item)` for every item, in forked workers; fails after all were tried.

    Each call has to do its damage and to count it in its row: that so many damages happened is checked.
    """
    before = TALLY.damages
    TALLY.here.add("intended", len(items))
    shares = [items[w::WORKERS] for w in range(WORKERS)]
    places = [Number() for _ in shares]
    rows = [TALLY.row() for _ in shares]
    running: dict[int, int] = {}
    failures: list[str] = []

    def start(worker: int, first: int) -> None:
        def body() -> None:
            share, place = shares[worker], places[worker]
            place.set(first)
            _watch()
            use = prepare(worker, rows[worker])
            for i in range(first, len(share)):
                place.set(i)
                _watch()
                use(share[i])

        running[_fork(body, rows[worker])] = worker

    for worker, share in enumerate(shares):
        if share:
            start(worker, 0)
    while running:
        pid, status = _wait_any(list(running))
        worker = running.pop(pid)
        if end := _count_end(status, rows[worker]):
            at = places[worker].get()
            failures.append(f"{shares[worker][at]!r}: {end}")
            if len(failures) < DEATHS_MAX and at + 1 < len(shares[worker]):
                start(worker, at + 1)
    _no_wrong_bytes(rows)
    assert not failures, "\n".join(failures)
    assert TALLY.damages - before >= len(items), "fewer damages than intended"


@contextmanager
def users(*bodies: User) -> Iterator[None]:
    """Processes that go on while `going()` is true and the block does its damage. All of them must live.

    The block begins when all have asked `going()` once: they have attached.
    """
    stop = Number()
    rows = [TALLY.row() for _ in bodies]
    pids: dict[int, Row] = {}
    ready = [Number() for _ in bodies]

    def start(body: User, row: Row, is_ready: Number) -> None:
        def going() -> bool:
            _watch()
            is_ready.set(1)
            return not stop.get()

        _watch()
        body(row, going)

    for i, (body, row) in enumerate(zip(bodies, rows, strict=True)):
        pids[_fork(lambda i=i, body=body, row=row: start(body, row, ready[i]), row)] = row  # type: ignore[misc]
    try:
        deadline = time.monotonic() + STUCK_S
        while not all(r.get() for r in ready) and time.monotonic() < deadline:
            time.sleep(0.001)
        yield
    finally:
        stop.set(1)
        ends = [_count_end(os.waitpid(pid, 0)[1], row) for pid, row in pids.items()]
    _no_wrong_bytes(rows)
    assert not any(ends), "\n".join(filter(None, ends))


def _wait_any(pids: Sequence[int]) -> tuple[int, int]:
    """The first of these to end, and how; the process may have other children."""
    ends = {os.pidfd_open(pid): pid for pid in pids}
    try:
        ready, _, _ = select.select(list(ends), [], [])
        return os.waitpid(ends[ready[0]], 0)
    finally:
        for fd in ends:
            os.close(fd)


def _watch() -> None:
    """From now on the alarm kills the process unless it calls this again in time."""
    signal.setitimer(signal.ITIMER_REAL, STUCK_S)


def _count_end(status: int, row: Row) -> str:
    """Nothing when the child ended well."""
    code = os.waitstatus_to_exitcode(status)
    if code == 0:
        return ""
    if code == -signal.SIGALRM:
        TALLY.here.add("stuck")
        return f"stuck for {STUCK_S} s"
    if code < 0:
        TALLY.here.add("crashed")
        return f"died of {signal.Signals(-code).name}"
    TALLY.here.add("failed")
    return row.text()


def _no_wrong_bytes(rows: Sequence[Row]) -> None:
    wrong = [row.text() for row in rows if row.get("wrong")]
    assert not wrong, f"WRONG BYTES were served: {wrong}"


def _fork(body: Callable[[], None], row: Row) -> int:
    pid = os.fork()
    if pid == 0:
        _run(body, row)
    return pid


def _run(body: Callable[[], None], row: Row) -> NoReturn:
    code = 1
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        body()
        code = 0
    except BaseException:
        if not row.get("wrong"):  # a wrong block's note is worth more than what followed from it
            row.note(traceback.format_exc()[-1900:])
    finally:
        os._exit(code)
