"""The compiled yardsticks of reference.c."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from array import array
from pathlib import Path


def compiler() -> str | None:
    return shutil.which("cc") or shutil.which("gcc") or shutil.which("c++")


def _pointer(numbers: array[int]) -> ctypes.c_void_p:
    return ctypes.c_void_p(numbers.buffer_info()[0])


class Reference:
    """Calls run without the GIL."""

    def __init__(self) -> None:
        cc = compiler()
        if cc is None:
            raise SystemExit("bench: no C compiler; install one (gcc), the yardsticks are written in C")
        with tempfile.TemporaryDirectory() as folder:
            library = Path(folder) / "reference.so"
            source = Path(__file__).with_name("reference.c")
            subprocess.run(
                [cc, "-O2", "-shared", "-fPIC", "-x", "c", str(source), "-o", str(library)], check=True
            )
            self._c = ctypes.CDLL(str(library))
        self._c.first_difference.restype = ctypes.c_uint64
        self._c.follow.restype = ctypes.c_uint64

    def copy(self, to: array[int], source: array[int], piece_bytes: int) -> None:
        """memcpy of pieces at the given addresses."""
        self._c.copy_pieces(
            _pointer(to), _pointer(source), ctypes.c_uint64(piece_bytes), ctypes.c_uint64(len(to))
        )

    def equal(self, a: array[int], b: array[int], piece_bytes: int) -> bool:
        found: int = self._c.first_difference(
            _pointer(a), _pointer(b), ctypes.c_uint64(piece_bytes), ctypes.c_uint64(len(a))
        )
        return found == len(a)


class Chase:
    """One random memory access after the other over `footprint_bytes`: the least that a cache miss costs."""

    def __init__(self, reference: Reference, footprint_bytes: int) -> None:
        self._c = reference._c
        self._lines = max(16, footprint_bytes // 64)
        self._memory = (ctypes.c_uint64 * (self._lines * 8))()
        order = (ctypes.c_uint32 * self._lines)()
        self._c.make_cycle(
            self._memory, order, ctypes.c_uint64(self._lines), ctypes.c_uint64(88172645463325252)
        )
        self._at = 0

    def run(self, steps: int) -> None:
        self._at = self._c.follow(self._memory, ctypes.c_uint64(self._at), ctypes.c_uint64(steps))
