"""Runs a test's body in a child process.

So a crash or a hang of the native core is a failure with a name and not the end of the test run.
"""

from __future__ import annotations

import mmap
import os
import signal
import traceback
from collections.abc import Callable

_TEXT_BYTES = 1 << 16


class Progress:
    """What the child is doing just now; the parent can read it after the child's death."""

    def __init__(self) -> None:
        self._map = mmap.mmap(-1, _TEXT_BYTES)

    def at(self, what: str) -> None:
        text = what.encode()[: _TEXT_BYTES - 1] + b"\0"
        self._map[: len(text)] = text

    def text(self) -> str:
        return self._map[: self._map.find(b"\0")].decode(errors="replace")


def isolated(body: Callable[[Progress], None], *, seconds: int = 100) -> None:
    """Fails with the child's traceback, or with the signal that killed it and what it was doing."""
    progress, report = Progress(), Progress()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(seconds)
            body(progress)
            code = 0
        except BaseException:  # also pytest's own outcomes: all of them end in the report
            report.at(f"while {progress.text()}:\n{traceback.format_exc()}")
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        how = (
            f"hung for {seconds} s" if number == signal.SIGALRM else f"died of {signal.Signals(number).name}"
        )
        raise AssertionError(f"the process {how} while {progress.text()}")
    assert os.WEXITSTATUS(status) == 0, report.text()
