"""What the daemon does about memory that is known to be bad: a real region, a list in the kernel's place."""

from __future__ import annotations

import ctypes
import os
import signal
import struct
from pathlib import Path

import pytest

from children import children
from kvpool.daemon.events import EventLog
from kvpool.daemon.poison import PoisonWatch
from kvpool.medium import Ranges
from kvpool.region import Region
from poison import mapped_at, poisoning
from regions import NS, make
from strategies import buffers, contents, keys_of

BUS_MCEERR_AO = 5
SYS_RT_SIGQUEUEINFO = {"x86_64": 129, "aarch64": 138}


def _watch(path: Path, region: Region, bad: list[tuple[int, int]]) -> tuple[PoisonWatch, EventLog]:
    events = EventLog()

    def read(_: str) -> Ranges:
        return tuple(bad)

    return PoisonWatch("cxl", path, region, events, read), events


def test_poison_is_given_up_once_told_once_and_stays_a_problem(folder: Path) -> None:
    path, bad = make(folder / "region", 32), []
    keys = keys_of(NS, range(16))
    with Region.attach(path) as region:
        watch, events = _watch(path, region, bad)
        assert watch.run() is None
        assert watch.trouble(0) == ""
        assert region.store(keys, contents(keys)).stored_count == 16
        data = path.read_bytes()
        bad.append((data.index(contents(keys)[3]), 64))
        report = watch.run()
        assert report is not None
        assert (report.slots, report.blocks) == (1, 1)
        (event,) = events.to_object()
        assert event["kind"] == "MediumError"
        assert event["subject"] == "cxl"
        assert f"64 bytes of {path} are poisoned: 1 slots are not used any more, 1 blocks" in event["message"]
        assert "kvpool fsck --repair" in event["message"]
        watch.run()
        assert [one["count"] for one in events.to_object()] == [1]
        assert watch.trouble(1).startswith("1 slots lie in memory that cannot be read")
        assert region.load(keys, buffers(keys)).hit_count == 15
        assert region.store(keys, contents(keys)).stored_count == 1
        assert region.load(keys, buffers(keys)).hit_count == 16


def test_poison_in_the_directory_says_that_nothing_takes_its_place(folder: Path) -> None:
    path = make(folder / "region")
    with Region.attach(path) as region:
        watch, events = _watch(path, region, [(2 * region.info.align_bytes, 128)])
        watch.run()
        assert "128 bytes of the shard's directory lie in poisoned memory" in watch.trouble(0)
        assert "format the tier anew" in events.to_object()[0]["message"]


def _told(path: Path, queue: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]], int]:
    """The kernel tells all who map a page that went bad, whether they touch it or not."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Region.attach(path) as region, poisoning() as poison:
        first = 2 * region.info.align_bytes + 8192
        for page in (first, first + 3 * 4096):
            poison.page(path, page)
        for offset, log2 in ((first + 5, 12), (first + 5, 12), (first + 4096, 12), (first + 2 * 4096, 13)):
            ((address, _),) = mapped_at(path, offset)
            info = struct.pack("<iiiiQh", signal.SIGBUS, 0, BUS_MCEERR_AO, 0, address, log2)
            assert libc.syscall(queue, os.getpid(), signal.SIGBUS, info.ljust(128, b"\0")) == 0
        return region.told_bad(), region.told_bad(), first


def test_notice_of_the_kernel_ends_no_process_and_bad_pages_reach_the_daemon(folder: Path) -> None:
    """What is named and can be read is not bad; of a larger page only what cannot be read is."""
    path, queue = make(folder / "region", 64), SYS_RT_SIGQUEUEINFO.get(os.uname().machine)
    if queue is None:
        pytest.skip(f"the number of rt_sigqueueinfo on {os.uname().machine} is not known here")
    with poisoning():  # skips here where no page can be poisoned
        pass
    with children() as start:
        told, again, first = start(_told, path, queue).result()
    assert sorted(told) == [(first, 4096), (first + 3 * 4096, 4096)]
    assert again == []
