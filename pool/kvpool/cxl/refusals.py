"""What every backend refuses to compose, and in which words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from uuid import UUID

from kvpool.cxl.backend import Composed, ComposeError, Memory, Wanted, WrongWanted, serials
from kvpool.quantity import format_quantity

_GRANULARITIES = tuple(256 << shift for shift in range(7))  # CXL 2.0: 256 bytes to 16 KiB
_WAYS = (1, 2, 3, 4, 6, 8, 12, 16)  # CXL 2.0
_ALIGNS = (4096, 2 << 20, 1 << 30)  # the pages that a CPU maps


@dataclass(frozen=True, slots=True)
class Geometry:
    """How a region lies on its memories. `align_bytes` None: not known, as of a region without a device."""

    memories: tuple[str, ...]
    size_bytes: int
    granularity_bytes: int
    align_bytes: int | None


def chosen(wanted: Wanted, memories: Sequence[Memory]) -> list[Memory]:
    """The wanted memories. Raises: WrongWanted for numbers that no region has, ComposeError for ill ones."""
    check_numbers(wanted)
    by_serial = {memory.serial: memory for memory in memories}
    for serial in wanted.memories:
        memory = by_serial.get(serial)
        if memory is None:
            raise ComposeError(
                f"region {wanted.uuid}: there is no memory {serial} here; there are: {serials(memories)}. "
                "Nothing was changed."
            )
        if not memory.healthy:
            raise ComposeError(
                f"region {wanted.uuid}: memory {serial} is ill: {memory.problem}. Nothing was changed. "
                "Choose another memory, or repair this one."
            )
    return [by_serial[serial] for serial in wanted.memories]


def fitting_size(wanted: Wanted, parts: Sequence[Memory], step_bytes: int) -> int:
    """The wanted size, rounded up to steps. Raises: ComposeError when the memories are too small for it."""
    size = -(-wanted.size_bytes // step_bytes) * step_bytes
    least, ways = min(parts, key=lambda memory: memory.size_bytes), len(parts)
    most = least.size_bytes * ways // step_bytes * step_bytes
    if size > most:
        raise ComposeError(
            f"region {wanted.uuid}: {format_quantity(size)} are wanted, and {ways} way(s) of memory "
            f"{least.serial} ({format_quantity(least.size_bytes)}) give at most {format_quantity(most)}. "
            "Nothing was changed."
        )
    return size


def refuse_taken(wanted: Wanted, regions: Sequence[Composed]) -> None:
    """Raises: ComposeError when a wanted memory is in another region."""
    for region in regions:
        both = sorted(set(region.memories) & set(wanted.memories))
        if both and region.uuid != wanted.uuid:
            raise ComposeError(
                f"region {wanted.uuid}: memory {', '.join(both)} is in region {region.uuid} already. "
                "Nothing was changed. Use other memories, or destroy that region first."
            )


def refuse_other_geometry(uuid: UUID, asked: Geometry, there: Geometry) -> None:
    """Raises: ComposeError when the region that is there is not the one that is asked for, or smaller."""
    differences = [
        f"{name} {wanted}, it has {has}"
        for name, wanted, has in (
            ("memories", ", ".join(asked.memories), ", ".join(there.memories)),
            ("granularity", asked.granularity_bytes, there.granularity_bytes),
            ("align", asked.align_bytes, there.align_bytes or asked.align_bytes),
        )
        if wanted != has
    ]
    if asked.size_bytes > there.size_bytes:
        sizes = format_quantity(asked.size_bytes), format_quantity(there.size_bytes)
        differences.append(f"size {sizes[0]}, it has {sizes[1]}")
    if differences:
        raise ComposeError(
            f"region {uuid} exists with another geometry: wanted {'; '.join(differences)}. "
            "Nothing was changed. Ask for what it has, resize it, or destroy it first."
        )


def check_numbers(wanted: Wanted) -> None:
    """Raises: WrongWanted for numbers that no region can have."""
    name, ways, unchanged = f"region {wanted.uuid}", len(wanted.memories), "Nothing was changed."
    if not wanted.uuid.int:
        raise WrongWanted(
            f"{name}: a region needs a UUID of its own, the same on each machine; the nil UUID stands "
            f"for those that have none. {unchanged}"
        )
    if len(set(wanted.memories)) != ways or ways not in _WAYS:
        raise WrongWanted(
            f"{name}: memories {', '.join(wanted.memories) or 'none'}; a region takes "
            f"{', '.join(map(str, _WAYS))} different ones. {unchanged}"
        )
    if wanted.granularity_bytes not in _GRANULARITIES:
        allowed = ", ".join(map(str, _GRANULARITIES))
        raise WrongWanted(
            f"{name}: granularity {wanted.granularity_bytes}; it is one of {allowed} bytes. {unchanged}"
        )
    if wanted.align_bytes not in _ALIGNS:
        raise WrongWanted(f"{name}: align {wanted.align_bytes}; it is 4Ki, 2Mi or 1Gi. {unchanged}")
    if wanted.size_bytes <= 0:
        raise WrongWanted(f"{name}: size {wanted.size_bytes}; it is more than 0. {unchanged}")
