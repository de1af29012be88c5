"""The sizes of a region: what one is asked to have, and what a superblock says that it has."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from kvpool import _native
from kvpool.errors import GeometryError
from kvpool.medium import MediumInfo, device_align, medium_info

Coherence = Literal["hardware", "software"]

_ROOM_WORTH = 0.95  # of the blocks that would fit without room to grow

# What the native core can be asked; what makes sense it says itself.
BYTES_MAX, COUNT_MAX = 2**63 - 1, 2**32 - 1
_NUMBERS = (
    "capacity_bytes",
    "room_bytes",
    "min_block_bytes",
    "extent_bytes",
    "align_bytes",
    "hosts",
    "participants",
    "namespaces",
)


@dataclass(frozen=True, slots=True)
class Geometry:
    """What a region is formatted for. Sizes in bytes; `hosts` shards of equal size, one a host.

    `extent_bytes` None: a 64th of a shard. `align_bytes` None: what the medium needs. Blocks smaller than
    `min_block_bytes` waste the rest. `room_bytes`: what the capacity may grow to later; as a file it takes no
    more space until then, but its directory has to be as large as that needs.
    """

    capacity_bytes: int
    hosts: int = 1
    extent_bytes: int | None = None
    min_block_bytes: int = 16384
    participants: int = 64
    namespaces: int = 256
    align_bytes: int | None = None
    coherence: Coherence = "hardware"
    room_bytes: int | None = None

    @property
    def region_bytes(self) -> int:
        """What the region is laid out for."""
        return max(self.capacity_bytes, self.room_bytes or 0)

    def with_room(self, path: str | Path, room_bytes: int) -> Geometry:
        """The same with room to grow: up to `room_bytes`, or less where the directory for it costs much."""
        plain = self.plan(path)
        extents, slots = int(plain["extent_count"]), int(plain["slots_per_extent"])
        usable = extents * int(plain["extent_payload_bytes"])
        room = room_bytes
        while room > self.capacity_bytes:
            larger = replace(self, room_bytes=room)
            if self.extent_bytes is None:
                larger = larger._with_extents(path, extents, slots)
            with contextlib.suppress(GeometryError):
                plan = larger.plan(path)
                left = extents_within(plan, self.capacity_bytes) * int(plan["extent_payload_bytes"])
                if left >= usable * _ROOM_WORTH:
                    return larger
            room //= 2
        return self

    def _with_extents(self, path: str | Path, extents: int, slots_most: int) -> Geometry:
        """With the largest extents of which so many fit into the capacity; none is cut off at its end."""
        least, most = 1, slots_most
        while least < most:
            slots = (least + most + 1) // 2
            plan = replace(self, extent_bytes=slots * self.min_block_bytes).plan(path)
            if extents_within(plan, self.capacity_bytes) >= extents:
                least = slots
            else:
                most = slots - 1
        return replace(self, extent_bytes=least * self.min_block_bytes)

    def arguments(self, path: str | None) -> dict[str, Any]:
        """What the native core is asked for. Raises GeometryError for a number too large to tell it."""
        for name in _NUMBERS:
            value, most = getattr(self, name), BYTES_MAX if name.endswith("_bytes") else COUNT_MAX
            if value is not None and not 0 <= value <= most:
                raise GeometryError(f"{name}: {value}; it must be 0 to {most}")
        if self.coherence not in ("hardware", "software"):
            raise GeometryError(f"coherence: {self.coherence!r}; it must be hardware or software")
        return {
            "region_bytes": self.region_bytes,
            "hosts": self.hosts,
            "slot_bytes_min": self.min_block_bytes,
            "extent_bytes": self.extent_bytes or 0,
            "participants": self.participants,
            "namespaces": self.namespaces,
            "align_bytes": self.align_bytes or (medium_align(path) if path is not None else 4096),
            "hardware_coherent": self.coherence == "hardware",
        }

    def plan(self, path: str | Path | None = None) -> dict[str, int | str]:
        """The sizes that a region of this geometry would have at `path` (None: in a file).

        Raises: GeometryError when they do not fit.
        """
        plan: dict[str, int | str] = _native.plan(**self.arguments(None if path is None else os.fspath(path)))
        return plan


def extents_within(plan: Mapping[str, int | str], capacity_bytes: int) -> int:
    """How many extents of a shard lie within its share of `capacity_bytes` of the region."""
    n = {key: value for key, value in plan.items() if isinstance(value, int)}
    if capacity_bytes >= n["region_bytes"]:
        return n["extent_count"]
    share = (capacity_bytes - n["shard_offset"]) // n["host_count"]
    return max(0, min(n["extent_count"], (share - n["extent_offset"]) // n["extent_whole_bytes"]))


@dataclass(frozen=True, slots=True)
class RegionInfo:
    """What a region's superblock says.

    `capacity_bytes` is what the region was laid out for, `smallest_bytes` what it can shrink to.
    """

    path: str
    uuid: str
    format_version: int
    capacity_bytes: int
    hosts: int
    coherence: str
    min_block_bytes: int
    extent_bytes: int
    extents: int
    slots_per_extent: int
    align_bytes: int
    participants: int
    namespaces: int
    superblock_copies_ok: int
    created_unix_s: int
    smallest_bytes: int
    medium: MediumInfo


def region_info(path: str, d: dict[str, int | str]) -> RegionInfo:
    n = {k: v for k, v in d.items() if isinstance(v, int)}
    return RegionInfo(
        path=path,
        uuid=str(d["uuid"]),
        format_version=n["format_version"],
        capacity_bytes=n["region_bytes"],
        hosts=n["host_count"],
        coherence=str(d["coherence"]),
        min_block_bytes=n["slot_bytes_min"],
        extent_bytes=n["extent_payload_bytes"],
        extents=n["extent_count"],
        slots_per_extent=n["slots_per_extent"],
        align_bytes=n["align_bytes"],
        participants=n["participant_count"],
        namespaces=n["namespace_count"],
        superblock_copies_ok=n["superblock_copies_right"],
        created_unix_s=n["created_unix_s"],
        smallest_bytes=n["shard_offset"] + n["host_count"] * (n["extent_offset"] + n["extent_whole_bytes"]),
        medium=medium_info(path, d),
    )


def medium_align(path: str) -> int:
    """The alignment in bytes that mappings of this medium need: 4 KiB, or more for huge pages and DAX."""
    try:
        st = os.stat(path)
        if stat.S_ISCHR(st.st_mode):
            return device_align(path) or 2 << 20
        return max(4096, os.statvfs(path).f_bsize) if stat.S_ISREG(st.st_mode) else 4096
    except OSError:
        parent = os.path.dirname(path) or "."
        return max(4096, os.statvfs(parent).f_bsize) if os.path.isdir(parent) else 4096
