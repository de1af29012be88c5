"""Pages of a region that this process cannot read any more, as the kernel does it with poisoned memory.

Two ways. userfaultfd puts a poison marker in the place of a page: touching it is SIGBUS, in this process and
its mapping only. MADV_HWPOISON takes the page itself away from everybody until the next boot, so it is tried
only with KVPOOL_HWPOISON=1.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_SYS_USERFAULTFD = {"x86_64": 323, "aarch64": 282}
_UFFD_USER_MODE_ONLY = 1
_UFFD_API, _REGISTER_MISSING = 0xAA, 1
_MADV_DONTNEED, _MADV_HWPOISON = 4, 100
PAGE = mmap.PAGESIZE
WAYS = ("marker", "hardware")

_libc = ctypes.CDLL(None, use_errno=True)


def mapped_at(path: Path, offset: int) -> list[tuple[int, str]]:
    """Wherever this process has mapped byte `offset` of the file: address and rights, like r--s."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) < 6 or fields[5] != str(path):
            continue
        begin, end = (int(number, 16) for number in fields[0].split("-"))
        first = int(fields[2], 16)
        if first <= offset < first + end - begin:
            found.append((begin + offset - first, fields[1]))
    assert found, f"{path} is not mapped at {offset}"
    return found


def _madvise(address: int, advice: int) -> None:
    if _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(PAGE), advice) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


class Poison:
    """Poisons pages for as long as this process has them mapped."""

    def __init__(self, way: str) -> None:
        self._way, self._fd = way, -1
        if way == "hardware":
            if os.environ.get("KVPOOL_HWPOISON") != "1":
                pytest.skip("a page is lost until the next boot: set KVPOOL_HWPOISON=1 to allow it")
            return
        number = _SYS_USERFAULTFD.get(os.uname().machine)
        self._fd = -1 if number is None else _libc.syscall(number, os.O_CLOEXEC | _UFFD_USER_MODE_ONLY)
        if self._fd < 0:
            pytest.skip(f"this kernel lends no userfaultfd: {os.strerror(ctypes.get_errno())}")
        self._ask(0x3F, struct.pack("<QQQ", _UFFD_API, 0, 0))

    def _ask(self, number: int, argument: bytes) -> None:
        size = len(argument)
        fcntl.ioctl(self._fd, 3 << 30 | size << 16 | _UFFD_API << 8 | number, bytearray(argument))

    def page(self, path: Path, offset: int) -> None:
        """The page of the file in which byte `offset` lies, in every mapping of this process."""
        for address, _ in mapped_at(path, offset // PAGE * PAGE):
            try:
                self._page(address)
            except OSError as e:
                if e.errno in (errno.EINVAL, errno.EPERM, errno.ENOTTY):
                    pytest.skip(f"this kernel poisons no page ({self._way}): {e.strerror}")
                raise

    def _page(self, address: int) -> None:
        if self._way == "hardware":
            _madvise(address, _MADV_HWPOISON)
            return
        self._ask(0, struct.pack("<QQQQ", address, PAGE, _REGISTER_MISSING, 0))
        _madvise(address, _MADV_DONTNEED)
        self._ask(8, struct.pack("<QQQq", address, PAGE, 0, 0))

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)


@contextmanager
def poisoning(way: str = "marker") -> Iterator[Poison]:
    poison = Poison(way)
    try:
        yield poison
    finally:
        poison.close()
