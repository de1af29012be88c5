"""One daemon for each host of a pool: a lock that the kernel drops with the process."""

from __future__ import annotations

import fcntl
import os
import signal
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvpool.errors import KvpoolError, MediumUnavailable, RegionBusyError

# struct flock of Linux on 64-bit machines: type, whence, start, length, pid.
_FLOCK = struct.Struct("hhqqi4x")
STOP_POLL_S = 0.05


class DaemonLock:
    """The lock of a running daemon; held until `close` or the end of the process.

    A record lock and not flock: the kernel tells anybody who asks the holder's process id, while a number
    in a file may be another process's by now. Its price: it is lost when the holder closes any descriptor
    of the file, so the process that holds it must not call `holder`.
    """

    def __init__(self, path: Path) -> None:
        """Raises: RegionBusyError when another process holds it, MediumUnavailable when it cannot be made."""
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise MediumUnavailable(
                f"{path}: {error.strerror}. Another user may have started this pool."
            ) from None
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._fd)
            raise RegionBusyError(
                f"{path} is held: {describe(holder(path))} serves this host already."
            ) from None

    def close(self) -> None:
        os.close(self._fd)


def holder(path: Path) -> int | None:
    """The process that holds the lock: its id, 0 when its container cannot be seen from here, else None."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise KvpoolError(f"{path}: {error.strerror}.") from None
    try:
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_GETLK, asked))
        return None if kind == fcntl.F_UNLCK else pid
    finally:
        os.close(fd)


def describe(pid: int | None) -> str:
    return f"process {pid}" if pid else "a process of another container"


@dataclass(frozen=True, slots=True)
class Stopped:
    """How a daemon ended."""

    pid: int
    killed: bool


def stop(
    path: Path, timeout_s: float, *, kill: bool = False, sleep: Callable[[float], None] = time.sleep
) -> Stopped | None:
    """Stop the process that holds the lock and wait until it is gone; None when nobody holds it.

    With `kill`, a process that does not stop in time is killed; that loses nothing, its work is crash-safe.

    Raises:  KvpoolError when it may not be stopped, or does not stop in time.
    """
    pid = holder(path)
    if pid is None:
        return None
    if pid == 0:
        raise KvpoolError(f"{path} is held by a process of another container; stop that container.")
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return Stopped(pid, killed=False)
    try:
        if holder(path) != pid:  # it ended just now, and the id may be another process's
            return Stopped(pid, killed=False)
        signal.pidfd_send_signal(process, signal.SIGTERM)
        if _gone(path, pid, timeout_s, sleep):
            return Stopped(pid, killed=False)
        if not kill:
            raise KvpoolError(
                f"the daemon (process {pid}) has not stopped within {timeout_s:g} s and still runs. "
                "Wait longer with --timeout, or end it with --kill: no block is lost."
            )
        signal.pidfd_send_signal(process, signal.SIGKILL)
        _gone(path, pid, timeout_s=10, sleep=sleep)
        return Stopped(pid, killed=True)
    except PermissionError:
        raise KvpoolError(
            f"the daemon (process {pid}) belongs to another user. Nothing was stopped."
        ) from None
    finally:
        os.close(process)


def _gone(path: Path, pid: int, timeout_s: float, sleep: Callable[[float], None]) -> bool:
    deadline = time.monotonic() + timeout_s
    while holder(path) == pid:
        if time.monotonic() >= deadline:
            return False
        sleep(STOP_POLL_S)
    return True
