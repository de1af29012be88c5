"""What the files of a folder say of memories and regions, read strictly: anybody may have written them."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

from kvpool.cxl.backend import ALIGN_BYTES, ComposeError, Memory, Wanted
from kvpool.cxl.refusals import Geometry, check_numbers

SIZE_END = 1 << 62  # no file is as large, and sums and multiples of what is below stay exact
_FILE_BYTES_MAX = 1 << 20
_POISON_RANGES_MAX = 1024  # of a memory
_POISON_PIECES_MAX = 64  # of a range, in a region that is interleaved


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a region is composed."""

    uuid: UUID
    memories: tuple[str, ...]
    size_bytes: int
    granularity_bytes: int
    align_bytes: int

    def to_object(self) -> dict[str, Any]:
        return {
            "memories": list(self.memories),
            "sizeBytes": self.size_bytes,
            "granularityBytes": self.granularity_bytes,
            "alignBytes": self.align_bytes,
        }

    def geometry(self) -> Geometry:
        return Geometry(self.memories, self.size_bytes, self.granularity_bytes, self.align_bytes)

    @classmethod
    def from_file(cls, uuid: UUID, path: Path) -> Recipe:
        """Raises: FileNotFoundError; ValueError with what is wrong; OSError."""
        d = read_object(path)
        try:
            wanted = Wanted(
                uuid,
                _serials(d),
                whole(d, "sizeBytes", least=1),
                whole(d, "granularityBytes", least=1),
                whole(d, "alignBytes", least=1, default=ALIGN_BYTES),
            )
            check_numbers(wanted)
        except ComposeError as error:
            raise ValueError(str(error)) from None
        return cls(uuid, wanted.memories, wanted.size_bytes, wanted.granularity_bytes, wanted.align_bytes)


def memory_from(path: Path, name: str) -> Memory:
    """What the file of a memory says; a file that cannot be used is an ill memory, not an error."""
    try:
        d = read_object(path)
        healthy, problem = d.get("healthy", True), d.get("problem", "")
        if not isinstance(healthy, bool) or not isinstance(problem, str):
            raise ValueError("healthy is true or false, and problem a text")
        size = whole(d, "sizeBytes", least=1)
        node = None if d.get("numaNode") is None else whole(d, "numaNode", least=0)
        return Memory(
            serial=path.stem,
            name=name,
            size_bytes=size,
            numa_node=node,
            healthy=healthy,
            problem=problem,
            poison=_poison_of(d, size),
        )
    except (OSError, ValueError) as error:
        problem = f"{path.name} cannot be read: {error}"
        return Memory(path.stem, name, 0, healthy=False, problem=problem)


def read_object(path: Path) -> dict[str, Any]:
    """The object in a small regular file. Raises: OSError, ValueError."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a FIFO must not keep us waiting
    with open(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_size > _FILE_BYTES_MAX:
            raise ValueError(f"it is no regular file of at most {_FILE_BYTES_MAX} bytes")
        text = file.read(_FILE_BYTES_MAX)
    try:
        found = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(found, dict):
        raise ValueError("it holds no object")
    return found


def whole(d: dict[str, Any], key: str, *, least: int, default: int | None = None) -> int:
    """A whole number in bounds. Raises: ValueError."""
    return _number(d.get(key, default), key, least)


def _number(value: object, name: str, least: int) -> int:
    # True is an int to Python, and 1e999 a float.
    if type(value) is not int or not least <= value < SIZE_END:
        raise ValueError(f"{name} is no whole number of at least {least}, below 2^62")
    return value


def serials_in(path: Path) -> tuple[str, ...]:
    """The memories that a recipe names, whatever else is wrong with it; none when it does not say."""
    try:
        return _serials(read_object(path))
    except (OSError, ValueError):
        return ()


def _serials(d: dict[str, Any]) -> tuple[str, ...]:
    serials = d.get("memories")
    if not isinstance(serials, list) or not all(isinstance(s, str) and s for s in serials):
        raise ValueError("memories is no list of serials")
    return tuple(serials)


def _poison_of(d: dict[str, Any], size: int) -> tuple[tuple[int, int], ...]:
    """The bad ranges of a memory, in order and apart from each other, as far as they lie in it."""
    ranges = d.get("poison", [])
    if not isinstance(ranges, list) or len(ranges) > _POISON_RANGES_MAX:
        raise ValueError(f"poison is no list of at most {_POISON_RANGES_MAX} ranges")
    found = []
    for pair in ranges:
        if not isinstance(pair, list) or len(pair) != 2:
            raise ValueError("poison is no list of [first byte, bytes]")
        first, length = _number(pair[0], "poison's first byte", 0), _number(pair[1], "poison's length", 0)
        end = min(first + length, size)
        if first < end:
            found.append((first, end))
    return _merged(found)


def poison_in(recipe: Recipe, parts: Sequence[Memory]) -> tuple[tuple[int, int], ...]:
    """The memories' bad ranges as ranges of the region, through the interleaving.

    A long one covers what lies of other memories between its pieces: nothing larger than a turn of all
    of them is whole there anyway.
    """
    granule, ways, found = recipe.granularity_bytes, len(parts), []

    def place(way: int, at: int) -> int:
        return at if ways == 1 else (at // granule * ways + way) * granule + at % granule

    for way, memory in enumerate(parts):
        for first, length in memory.poison:
            end = first + length
            if ways == 1 or length > _POISON_PIECES_MAX * granule:
                found.append((place(way, first), place(way, end - 1) + 1))
                continue
            at = first
            while at < end:
                step = min(granule - at % granule, end - at)
                found.append((place(way, at), place(way, at) + step))
                at += step
    size = recipe.size_bytes
    return _merged([(first, min(end, size)) for first, end in found if first < size])


def _merged(ranges: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """(first, end) in any order as (first, length), in order and apart from each other."""
    found: list[tuple[int, int]] = []
    for first, end in sorted(ranges):
        if found and first <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((first, end))
    return tuple((first, end - first) for first, end in found)
