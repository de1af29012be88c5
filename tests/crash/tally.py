"""What the crash tests really did, counted where it happens and added up over all processes.

Each fact is one line appended to a file in memory that forked children share, so that what a process
counted before it was killed stays counted. The table at the end of the run is made of nothing else. Wrong
bytes, stuck processes, crashes, or fewer kills than the tests set out to make fail the run, whatever the
tests say.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from children import Child

ONE = "one process, at a named step"
INSTRUCTION = "one process, between two steps"
SEVERAL = "two or three at once"
DAEMON = "the daemon"
RANDOM = "writers at random moments"
STOPPED = "stopped > 3 s, then continued"
REPAIRER = "a repairer of damage"
OTHER = "the other crash tests"
ROWS = (ONE, INSTRUCTION, SEVERAL, DAEMON, RANDOM, STOPPED, REPAIRER, OTHER)

KILLS, STOPS, LOADED, WRONG, STUCK, CRASHED, FSCK, INTENDED = (
    "kills",
    "stops",
    "blocks loaded",
    "wrong",
    "stuck",
    "crashed",
    "fsck not clean",
    "intended",
)
BY_READERS = "by readers"  # of the blocks loaded
COLUMNS = (KILLS, STOPS, LOADED, BY_READERS, WRONG, STUCK, CRASHED, FSCK)
MUST_BE_ZERO = (WRONG, STUCK, CRASHED, FSCK)

BOUND_S = 10.0  # a call takes microseconds; nobody has to wait this long however busy the machine is

_fd = os.memfd_create("kvpool-tally")
fcntl.fcntl(_fd, fcntl.F_SETFL, os.O_APPEND)  # so that two processes never write over each other
_row = OTHER
_sums: dict[str, Counter[str]] = {row: Counter() for row in ROWS}
_read_bytes = 0
_libc = ctypes.CDLL(None)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
_PUNCH_HOLE = 3  # and keep the size


def use_row(row: str) -> None:
    """The row for what this process, and children that it starts from now on, count."""
    global _row
    _row = row


def count(what: str, by: int = 1, row: str | None = None) -> None:
    if by:
        os.write(_fd, f"{ROWS.index(row or _row)}\t{what}\t{int(by)}\n".encode())


def intend(kills: int, row: str | None = None) -> None:
    """How many kills the test sets out to make; with fewer, the run fails."""
    count(INTENDED, kills, row)


def ended(child: Child, row: str | None = None) -> int:
    """How the child ended; a kill, a hang and a crash are counted."""
    known = child.status is not None
    code = child.wait()
    if not known:
        if code == -signal.SIGKILL:
            count(KILLS, row=row)
        elif code == -signal.SIGALRM:
            count(STUCK)
        elif code != 0:
            count(CRASHED)
    return code


def result(child: Child) -> Any:
    """What a child that has to survive returned."""
    if ended(child) == -signal.SIGKILL:
        count(CRASHED)  # nobody killed it on purpose
    return child.result()


@contextmanager
def in_time(what: str) -> Iterator[None]:
    began = time.monotonic()
    yield
    took_s = time.monotonic() - began
    if took_s > BOUND_S:
        count(STUCK)
        raise AssertionError(f"{what} took {took_s:.1f} s, more than {BOUND_S:g} s")


def facts() -> dict[str, Counter[str]]:
    """Row -> what was counted. Only in the process that runs the tests.

    What has been added up is given back to the system, so that a soak of hours does not fill the memory.
    """
    global _read_bytes
    written = os.pread(_fd, os.fstat(_fd).st_size - _read_bytes, _read_bytes)
    # Another process may be writing its line: what is half there is read the next time.
    whole = written[: written.rfind(b"\n") + 1]
    for line in whole.decode().splitlines():
        row, what, by = line.split("\t")
        _sums[ROWS[int(row)]][what] += int(by)
    _read_bytes += len(whole)
    _libc.fallocate(_fd, _PUNCH_HOLE, 0, _read_bytes)
    return _sums


def total(sums: dict[str, Counter[str]]) -> Counter[str]:
    return sum(sums.values(), Counter())


def problems(kills_min: int) -> list[str]:
    """Why the run is no success, whatever its tests say."""
    sums = facts()
    all_rows = total(sums)
    found = [f"{what}: {all_rows[what]}" for what in MUST_BE_ZERO if all_rows[what]]
    found += [
        f"{row}: {facts[KILLS]} kills of {facts[INTENDED]} that the tests set out to make"
        for row, facts in sums.items()
        if facts[KILLS] < facts[INTENDED]
    ]
    if all_rows[KILLS] < kills_min:
        found.append(f"{all_rows[KILLS]} kills, fewer than the {kills_min} that this run is for")
    return found


def table() -> list[str]:
    """The counts as lines of text; none when nothing was counted."""
    sums = {row: facts for row, facts in facts().items() if facts}
    if not sums:
        return []
    lines = [f"{'':32}" + "".join(f"{what:>15}" for what in COLUMNS)]
    for name, facts_ in [*sums.items(), ("all", total(sums))]:
        lines.append(f"{name:32}" + "".join(f"{facts_[what]:>15,}" for what in COLUMNS))
    return lines
