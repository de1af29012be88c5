"""What composing CXL memory means, whoever does it: the words, and the protocol that backends keep.

A *memory* is a CXL type-3 device as this machine sees it. A *region* interleaves whole memories into one
range of physical addresses; a *device* is the DAX device (or the file) through which it is mapped. Machines
that see the same memory agree on a region by its UUID and on a memory by its serial number: paths and kernel
names differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol
from uuid import UUID

from kvpool.errors import KvpoolError, WrongUse

Kind = Literal["pmem", "ram"]

GRANULARITY_BYTES = 256  # of interleaving, when nothing else is asked for: the smallest that CXL 2.0 has
ALIGN_BYTES = 2 << 20  # of a DAX device's mappings, when nothing else is asked for


class ComposeError(KvpoolError):
    """A region cannot be composed, resized or removed as asked; what was begun was taken back."""


class WrongWanted(ComposeError, WrongUse):
    """No machine has such a region or backend: a number or a name that cannot be meant."""


class RegionInUse(ComposeError):
    """A region holds a valid kvpool superblock, or is mapped: it is not removed without being told twice."""


@dataclass(frozen=True, slots=True)
class Memory:
    """A CXL memory device."""

    serial: str  # the same on each machine that sees it, like 0xc1
    name: str  # the kernel's name here, like mem0; nothing to agree on
    size_bytes: int
    kind: Kind = "pmem"
    numa_node: int | None = None
    healthy: bool = True
    problem: str = ""  # why it is not healthy
    poison: tuple[tuple[int, int], ...] = ()  # (first byte, bytes) of the memory that cannot be read


@dataclass(frozen=True, slots=True)
class Wanted:
    """The region to have."""

    uuid: UUID
    memories: tuple[str, ...]  # serials, in the order of interleaving; as many as there are ways
    size_bytes: int  # at least; rounded up to what memories and mappings need
    granularity_bytes: int = GRANULARITY_BYTES
    align_bytes: int = ALIGN_BYTES


@dataclass(frozen=True, slots=True)
class Device:
    """Where programs map a composed region."""

    path: str  # /dev/dax1.0, or a file
    size_bytes: int  # that can be mapped: less than the region's, by the kernel's own notes
    align_bytes: int
    numa_node: int | None = None
    poison: tuple[tuple[int, int], ...] = ()  # (first byte, bytes) of the device


@dataclass(frozen=True, slots=True)
class Composed:
    """A region that exists on this machine."""

    uuid: UUID
    memories: tuple[str, ...]
    size_bytes: int
    granularity_bytes: int
    device: Device | None  # None: composed in part, as a crash leaves it
    problem: str = ""  # why it cannot be used, and what to do; what is not known of it is empty then


class Backend(Protocol):
    """Finds memories and composes regions on this machine.

    Calls block, for seconds at most, and may come from several processes at once; each takes back what it had
    begun when a step fails.
    """

    def memories(self) -> list[Memory]:
        """Every memory that this machine sees, in the order of their serials."""
        ...

    def regions(self) -> list[Composed]:
        """Every region that exists here, whoever made it; what the caller does not want is an orphan."""
        ...

    def compose(self, wanted: Wanted) -> Composed:
        """The region `wanted`, found by its UUID or made; its bytes are left as they are.

        Raises:  ComposeError when a memory is missing, too small, ill or in another region, when the region
                 exists with another geometry, or when a step fails: nothing is changed then.
        """
        ...

    def resize(self, uuid: UUID, size_bytes: int) -> Composed:
        """The region with another size, its bytes kept where they stay.

        Raises:  ComposeError when it does not exist, or the new size does not fit; RegionInUse when it cuts
                 a kvpool region that lies in it.
        """
        ...

    def destroy(self, uuid: UUID, *, with_blocks: bool = False) -> None:
        """The region is gone; none there is no error.

        Raises:  RegionInUse when a valid kvpool superblock lies in it and not `with_blocks`, or when somebody
                 maps it.
        """
        ...


def serials(memories: Sequence[Memory]) -> str:
    """The memories in a sentence."""
    return ", ".join(memory.serial for memory in memories) or "none"
