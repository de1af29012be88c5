"""The medium below a region, as the kernel describes it: how it is mapped, where it is, what is poisoned.

All of it is read from sysfs. A device is never read from or written to but through a mapping.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

SYSFS = Path("/sys")
SECTOR_BYTES = 512  # of the kernel's lists of bad blocks, whatever the device's own

MediumKind = Literal["file", "dax-file", "device"]
Ranges = tuple[tuple[int, int], ...]  # (first byte, bytes)


@dataclass(frozen=True, slots=True)
class MediumInfo:
    """How a region's medium is mapped."""

    kind: MediumKind  # in the page cache; a file that is mapped directly (fsdax); a DAX device
    align_bytes: int = 4096  # of every mapping
    synchronous: bool = False  # mapped with MAP_SYNC
    numa_node: int | None = None  # that the medium is near, where the kernel says so


def medium_info(path: str, native: Mapping[str, int | str]) -> MediumInfo:
    """`native` is what the core says of the region at `path`."""
    return MediumInfo(
        kind=cast(MediumKind, native["medium_kind"]),
        align_bytes=int(native["medium_align_bytes"]),
        synchronous=bool(native["medium_synchronous"]),
        numa_node=numa_node(path) if native["medium_kind"] != "file" else None,
    )


def device_align(path: str, sysfs: Path = SYSFS) -> int | None:
    """The alignment in bytes that a DAX device's mappings need; None when it does not say."""
    folder = _device_folder(path, sysfs)
    return None if folder is None else _number(folder / "align")


def numa_node(path: str, sysfs: Path = SYSFS) -> int | None:
    """The node of a DAX device, or of the device below a file system; None when there is none to name."""
    folder = _device_folder(path, sysfs)
    for above in () if folder is None else (folder, *folder.parents):
        node = _number(above / "numa_node")
        if node is not None:
            return node if node >= 0 else None
        if above == sysfs:
            break
    return None


def poison(path: str, sysfs: Path = SYSFS) -> Ranges:
    """What of a DAX device the kernel knows to be poisoned, in bytes from its beginning.

    The list is that of the region that the device is part of. A file's is its file system's business: it
    refuses such pages, and they are found out when they are touched.
    """
    folder = _device_folder(path, sysfs)
    if folder is None or not _is_device(path):
        return ()
    size, start = _number(folder / "size"), _number(folder / "resource")
    for above in folder.parents:
        if above == sysfs or size is None:
            break
        if not (above / "badblocks").is_file():
            continue
        begin = _number(above / "resource")
        shift = 0 if start is None or begin is None else start - begin
        return tuple(_within(_bad_blocks(above / "badblocks"), shift, size))
    return ()


def _bad_blocks(path: Path) -> Iterator[tuple[int, int]]:
    try:
        text = path.read_text()
    except OSError:
        return
    for line in text.splitlines():
        sector, _, count = line.partition(" ")
        if sector.isdecimal() and count.strip().isdecimal():
            yield int(sector) * SECTOR_BYTES, int(count) * SECTOR_BYTES


def _within(ranges: Iterator[tuple[int, int]], shift: int, size: int) -> Iterator[tuple[int, int]]:
    for first, length in ranges:
        begin, end = max(0, first - shift), min(size, first + length - shift)
        if begin < end:
            yield begin, end - begin


def distance_note(node: int | None, sysfs: Path = SYSFS) -> str:
    """A sentence when this process may only run far from `node`, though other processors are nearer."""
    nodes = sysfs / "devices" / "system" / "node"
    processors = {
        int(folder.name[4:]): _listed(folder / "cpulist")
        for folder in nodes.glob("node[0-9]*")
        if folder.name[4:].isdecimal()
    }
    ours = os.sched_getaffinity(0)
    distances = {of: _distance(nodes / f"node{of}", node) for of, cpus in processors.items() if cpus}
    known = {of: distance for of, distance in distances.items() if distance is not None}
    reachable = {of: distance for of, distance in known.items() if processors[of] & ours}
    if node is None or not reachable:
        return ""
    best, here = min(known, key=known.__getitem__), min(reachable, key=reachable.__getitem__)
    if known[here] <= known[best]:
        return ""
    return (
        f"this process may only run on NUMA node {here}, at distance {known[here]} from its medium (node "
        f"{node}); node {best} is at distance {known[best]}. Loads and stores are slower for it: run it "
        f"there, as with 'numactl --cpunodebind={best}'."
    )


def _distance(folder: Path, to: int | None) -> int | None:
    try:
        distances = (folder / "distance").read_text().split()
        return None if to is None else int(distances[to])
    except (OSError, ValueError, IndexError):
        return None


def _listed(path: Path) -> set[int]:
    """Numbers as in 0-3,8."""
    numbers: set[int] = set()
    try:
        for part in path.read_text().strip().split(","):
            first, _, last = part.partition("-")
            if first:
                numbers.update(range(int(first), int(last or first) + 1))
    except (OSError, ValueError):
        return set()
    return numbers


def _is_device(path: str) -> bool:
    try:
        return stat.S_ISCHR(os.stat(path).st_mode)
    except OSError:
        return False


def _device_folder(path: str, sysfs: Path) -> Path | None:
    """Where sysfs describes the device at `path`, or the one below the file system that it lies on."""
    try:
        status = os.stat(path)
        is_device = stat.S_ISCHR(status.st_mode)
        number = status.st_rdev if is_device else status.st_dev
        kind = "char" if is_device else "block"
        return (sysfs / "dev" / kind / f"{os.major(number)}:{os.minor(number)}").resolve(strict=True)
    except (OSError, ValueError):
        return None


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text().strip(), 0)
    except (OSError, ValueError):
        return None
