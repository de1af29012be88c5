"""The sizes of a region: what one is asked to have, and what a superblock says that it has."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kvpool import _native
from kvpool.errors import GeometryError

Coherence = Literal["hardware", "software"]

# What the native core can be asked; what makes sense it says itself.
BYTES_MAX, COUNT_MAX = 2**63 - 1, 2**32 - 1
_NUMBERS = (
    "capacity_bytes",
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
    `min_block_bytes` waste the rest.
    """

    capacity_bytes: int
    hosts: int = 1
    extent_bytes: int | None = None
    min_block_bytes: int = 16384
    participants: int = 64
    namespaces: int = 256
    align_bytes: int | None = None
    coherence: Coherence = "hardware"

    def arguments(self, path: str | None) -> dict[str, Any]:
        """What the native core is asked for. Raises GeometryError for a number too large to tell it."""
        for name in _NUMBERS:
            value, most = getattr(self, name), BYTES_MAX if name.endswith("_bytes") else COUNT_MAX
            if value is not None and not 0 <= value <= most:
                raise GeometryError(f"{name}: {value}; it must be 0 to {most}")
        if self.coherence not in ("hardware", "software"):
            raise GeometryError(f"coherence: {self.coherence!r}; it must be hardware or software")
        return {
            "region_bytes": self.capacity_bytes,
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


@dataclass(frozen=True, slots=True)
class RegionInfo:
    """What a region's superblock says."""

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
    )


def medium_align(path: str) -> int:
    """The alignment in bytes that mappings of this medium need: 4 KiB, or more for huge pages and DAX."""
    try:
        st = os.stat(path)
        if stat.S_ISCHR(st.st_mode):
            dax = Path(f"/sys/dev/char/{os.major(st.st_rdev)}:{os.minor(st.st_rdev)}/align")
            return int(dax.read_text()) if dax.exists() else 2 << 20
        return max(4096, os.statvfs(path).f_bsize) if stat.S_ISREG(st.st_mode) else 4096
    except OSError:
        parent = os.path.dirname(path) or "."
        return max(4096, os.statvfs(parent).f_bsize) if os.path.isdir(parent) else 4096
