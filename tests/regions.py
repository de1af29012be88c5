"""Small regions in files, for tests of one region."""

from __future__ import annotations

from pathlib import Path

from kvpool.region import Region
from strategies import namespace, small_geometry

UNIT = 1024
NS = namespace(UNIT)
SUPERBLOCK = 4096


def make(path: Path, slots: int = 16, *, slots_per_extent: int = 4, **more: object) -> Path:
    Region.format(path, small_geometry(slots, block_bytes=UNIT, slots_per_extent=slots_per_extent, **more))  # type: ignore[arg-type]
    return path


def snapshot(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def patch(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as f:
        f.seek(offset)
        f.write(data)
