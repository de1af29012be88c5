"""A stopped child is led on by a number of machine instructions: to places that no named step marks."""

from __future__ import annotations

import ctypes
import os
import platform
import signal

from children import Child

_SEIZE, _INTERRUPT, _SINGLESTEP = 0x4206, 0x4207, 9
_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.restype = ctypes.c_long
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]


def _ptrace(request: int, pid: int) -> None:
    if _libc.ptrace(request, pid, None, None) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def refused() -> str:
    """Why children cannot be led on here; empty when they can."""
    if platform.machine() not in ("x86_64", "aarch64"):
        return f"single steps are not known for {platform.machine()}"
    child = Child(signal.raise_signal, signal.SIGSTOP)
    try:
        assert child.wait_stopped()
        lead_on(child, 3)
    except OSError as e:
        return f"ptrace is not allowed here: {e.strerror}"
    finally:
        child.end()
    return ""


def lead_on(child: Child, instructions: int) -> bool:
    """Runs so many instructions of a child that stopped itself. False: it ended before."""
    _ptrace(_SEIZE, child.pid)
    _ptrace(_INTERRUPT, child.pid)
    os.waitpid(child.pid, 0)
    child.signal(signal.SIGCONT)  # else it would stop again; as a traced process it does not run on
    done = 0
    while done < instructions:
        _ptrace(_SINGLESTEP, child.pid)
        _, status = os.waitpid(child.pid, 0)
        if not os.WIFSTOPPED(status):
            child.status = os.waitstatus_to_exitcode(status)
            return False
        done += os.WSTOPSIG(status) == signal.SIGTRAP and status >> 16 == 0
    return True
