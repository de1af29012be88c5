"""Real processes for tests: forked, so that starting one costs milliseconds; none outlives its test."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvpool.daemon.lock import holder

TIMEOUT_S = 60


class Child:
    """A forked process that runs one function. It has to attach for itself: regions do not survive a fork."""

    def __init__(self, function: Callable[..., Any], *args: Any, timeout_s: int = TIMEOUT_S) -> None:
        fd, result = tempfile.mkstemp(prefix="kvpool-child-")
        self._result = Path(result)
        self.status: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            self._run(function, args, timeout_s, fd)
        os.close(fd)

    def _run(self, function: Callable[..., Any], args: tuple[Any, ...], timeout_s: int, fd: int) -> None:
        code = 1
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(timeout_s)  # a hang kills the child, and the test sees -SIGALRM
            value = function(*args)
            with os.fdopen(fd, "wb") as f:  # not by name: it may have become another user
                f.write(pickle.dumps(value))
            code = 0
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(code)

    def wait(self) -> int:
        """0, the exit code, or minus the signal that killed it."""
        if self.status is None:
            _, status = os.waitpid(self.pid, 0)
            self.status = os.waitstatus_to_exitcode(status)
        return self.status

    def result(self) -> Any:
        """What the function returned. Fails when it did not."""
        code = self.wait()
        assert code == 0, (
            f"the child ended with {code} ({signal.Signals(-code).name if code < 0 else 'exception above'})"
        )
        return pickle.loads(self._result.read_bytes())

    def wait_stopped(self) -> bool:
        """Until the child stops itself. False: it ended instead."""
        _, status = os.waitpid(self.pid, os.WUNTRACED)
        if os.WIFSTOPPED(status):
            return True
        self.status = os.waitstatus_to_exitcode(status)
        return False

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def end(self) -> None:
        if self.status is None:
            os.kill(self.pid, signal.SIGKILL)
            self.wait()
        self._result.unlink(missing_ok=True)


@contextmanager
def children() -> Iterator[Callable[..., Child]]:
    """Starts children; what still runs at the end is killed."""
    started: list[Child] = []

    def start(function: Callable[..., Any], *args: Any, timeout_s: int = TIMEOUT_S) -> Child:
        child = Child(function, *args, timeout_s=timeout_s)
        started.append(child)
        return child

    try:
        yield start
    finally:
        for child in started:
            child.end()


def rss_bytes() -> int:
    """Memory of this process that is its own: mapped regions do not count."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) * 1024


def fd_count() -> int:
    return len(os.listdir("/proc/self/fd"))


def until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """Waits for something that another process does."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.002)


def kill_holders(locks: Iterable[Path]) -> None:
    """Ends the daemons and APIs that hold these locks, which a test left behind."""
    for lock in locks:
        if pid := holder(lock):
            os.kill(pid, signal.SIGKILL)
