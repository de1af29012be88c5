"""What sysfs says of a medium, and what follows: files stand in for sysfs, a device node for the device."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
from pathlib import Path

import pytest

from children import children
from kvpool.medium import device_align, distance_note, numa_node, poison
from kvpool.region import Coherence, Geometry, Region
from poison import mapped_at

DEVICE = "/dev/null"  # any character device: only its number is asked


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    """A DAX device of 1 GiB that begins 2 MiB into its region, near node 1."""
    root = tmp_path / "sys"
    region = root / "devices" / "ACPI0012:00" / "ndbus0" / "region0"
    device = region / "dax0.1" / "dax0.1"
    device.mkdir(parents=True)
    number = os.stat(DEVICE).st_rdev
    link = root / "dev" / "char" / f"{os.major(number)}:{os.minor(number)}"
    link.parent.mkdir(parents=True)
    link.symlink_to(device)
    (device / "size").write_text(f"{1 << 30}\n")
    (device / "align").write_text(f"{2 << 20}\n")
    (device / "resource").write_text("0x100200000\n")
    (region / "resource").write_text("0x100000000\n")
    (region / "numa_node").write_text("1\n")
    return root


def nodes(sysfs: Path, cpus: dict[int, str], distances: dict[int, str]) -> None:
    for node, listed in cpus.items():
        folder = sysfs / "devices" / "system" / "node" / f"node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(listed + "\n")
        (folder / "distance").write_text(distances[node] + "\n")


def test_device_says_its_alignment_and_the_node_of_its_region(sysfs: Path) -> None:
    assert device_align(DEVICE, sysfs) == 2 << 20
    assert numa_node(DEVICE, sysfs) == 1
    (sysfs / "devices" / "ACPI0012:00" / "ndbus0" / "region0" / "numa_node").write_text("-1\n")
    assert numa_node(DEVICE, sysfs) is None


def test_what_sysfs_does_not_say_is_none(tmp_path: Path) -> None:
    assert device_align(DEVICE, tmp_path) is None
    assert numa_node(DEVICE, tmp_path) is None
    assert numa_node(str(tmp_path / "missing")) is None
    assert poison(DEVICE, tmp_path) == ()
    assert poison(str(tmp_path)) == ()


def test_bad_blocks_of_a_region_are_bytes_of_the_device(sysfs: Path) -> None:
    """Sectors of 512 bytes from the region's beginning; what lies before and behind the device is not its."""
    blocks = sysfs / "devices" / "ACPI0012:00" / "ndbus0" / "region0" / "badblocks"
    begin, end = (2 << 20) // 512, ((2 << 20) + (1 << 30)) // 512
    blocks.write_text(f"0 8\n{begin - 1} 2\n{begin + 100} 1\n{end - 1} 100\n{end + 5} 1\nnonsense\n")
    assert poison(DEVICE, sysfs) == ((0, 512), (51200, 512), ((1 << 30) - 512, 512))
    blocks.write_text("")
    assert poison(DEVICE, sysfs) == ()


def test_process_far_from_its_medium_is_told_where_to_run(sysfs: Path) -> None:
    ours = ",".join(str(cpu) for cpu in os.sched_getaffinity(0))
    nodes(sysfs, {0: ours, 1: "9000-9003", 2: ""}, {0: "10 21 28", 1: "21 10 14", 2: "28 14 10"})
    note = distance_note(2, sysfs)  # memory without processors, as CXL is
    assert "NUMA node 0, at distance 28" in note
    assert "node 1 is at distance 14" in note
    assert "numactl --cpunodebind=1" in note
    assert distance_note(0, sysfs) == ""
    assert distance_note(None, sysfs) == ""
    assert distance_note(7, sysfs) == ""  # nobody says how far that is


def test_every_processor_is_as_far_nobody_is_told_anything(sysfs: Path) -> None:
    ours = ",".join(str(cpu) for cpu in os.sched_getaffinity(0))
    nodes(sysfs, {0: ours, 1: "9000"}, {0: "10 21 20", 1: "21 10 20"})
    assert distance_note(2, sysfs) == ""


def _store_into(path: Path, shard: int) -> None:
    faulthandler.disable()
    region = Region.attach(path, host=0)
    first = region.info.capacity_bytes - 4096 if shard else 2 * region.info.align_bytes
    ((address, _),) = mapped_at(path, first)
    ctypes.memset(address, 1, 8)


@pytest.mark.parametrize("align_bytes", [4096, 2 << 20])
@pytest.mark.parametrize("coherence", ["hardware", "software"])
def test_stray_store_into_another_hosts_shard_faults(
    folder: Path, coherence: Coherence, align_bytes: int
) -> None:
    path = folder / "region"
    geometry = Geometry(32 << 20, hosts=2, extent_bytes=1 << 20, align_bytes=align_bytes, coherence=coherence)
    info = Region.format(path, geometry)
    assert (info.align_bytes, info.medium.kind, info.medium.synchronous) == (align_bytes, "file", False)
    with Region.attach(path, host=0):
        ((own, own_rights),) = mapped_at(path, 2 * align_bytes)
        ((_, other_rights),) = mapped_at(path, info.capacity_bytes - 4096)
        assert (own_rights, other_rights) == ("rw-s", "r--s")
        assert own % (2 << 20) == 2 * align_bytes % (2 << 20)  # a huge page of the medium can be one of ours
    before = path.read_bytes()[-4096:]
    with children() as start:
        assert start(_store_into, path, 1).wait() == -signal.SIGSEGV
        assert start(_store_into, path, 0).wait() == 0
    assert path.read_bytes()[-4096:] == before
