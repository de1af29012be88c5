"""What became of each block of a batch: hit, miss with its reason, stored, present or declined."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import overload


class MissReason(str, Enum):
    """Why a block was not served, or not stored. The values are stable and shown to users."""

    NEVER_STORED = "never-stored"
    EVICTED = "evicted"
    WRONG_NAMESPACE = "wrong-namespace"
    BELOW_MINIMUM = "below-minimum"
    DECLINED_BY_COST = "declined-by-cost"
    FAILED_CHECKSUM = "failed-checksum"
    CHANGED_WHILE_READING = "changed-while-reading"
    TIER_ERROR = "tier-error"
    QUOTA = "quota"
    NO_SPACE = "no-space"
    NAMESPACES_FULL = "namespaces-full"
    FENCED = "fenced"

    def __str__(self) -> str:
        return self.value


# Outcome codes of the native core (layout.h, enum Outcome): 0 and 1 are successes, the others index a table.
HIT = 0
STORED = 0
PRESENT = 1
REASON_BY_CODE: tuple[MissReason | None, ...] = (
    None,
    None,
    MissReason.NEVER_STORED,
    MissReason.EVICTED,
    MissReason.WRONG_NAMESPACE,
    MissReason.BELOW_MINIMUM,
    MissReason.DECLINED_BY_COST,
    MissReason.FAILED_CHECKSUM,
    MissReason.CHANGED_WHILE_READING,
    MissReason.TIER_ERROR,
    MissReason.QUOTA,
    MissReason.NO_SPACE,
    MissReason.NAMESPACES_FULL,
    MissReason.FENCED,
)
CODE_BY_REASON: dict[MissReason, int] = {r: i for i, r in enumerate(REASON_BY_CODE) if r is not None}


class Reasons(Sequence["MissReason | None"]):
    """The outcome codes of a batch, seen as reasons; None is a success. Objects are made when asked for."""

    __slots__ = ("_codes",)

    def __init__(self, codes: bytes) -> None:
        self._codes = codes

    def __len__(self) -> int:
        return len(self._codes)

    @overload
    def __getitem__(self, index: int) -> MissReason | None: ...
    @overload
    def __getitem__(self, index: slice) -> Reasons: ...
    def __getitem__(self, index: int | slice) -> MissReason | Reasons | None:
        if isinstance(index, slice):
            return Reasons(self._codes[index])
        return REASON_BY_CODE[self._codes[index]]

    def __repr__(self) -> str:
        return f"Reasons({[r and r.value for r in self]})"


def _leading(codes: bytes) -> int:
    """The number of leading zero codes."""
    return len(codes) - len(codes.lstrip(b"\0"))


@dataclass(frozen=True, slots=True)
class _Outcomes:
    """`codes`: one outcome code a block; `reasons`: the same as MissReason, None for a success."""

    codes: bytes

    def __len__(self) -> int:
        return len(self.codes)

    @property
    def reasons(self) -> Reasons:
        return Reasons(self.codes)


@dataclass(frozen=True, slots=True)
class _Hits(_Outcomes):
    @property
    def hit_count(self) -> int:
        return self.codes.count(HIT)

    @property
    def prefix_count(self) -> int:
        """Leading hits: what an engine with chained block hashes can use."""
        return _leading(self.codes)


@dataclass(frozen=True, slots=True)
class LookupResult(_Hits):
    """Which keys of a batch are in the pool; a hit was found."""

    @property
    def found(self) -> bytes:
        """n bytes, 1 where the key was found."""
        return bytes(code == HIT for code in self.codes)


@dataclass(frozen=True, slots=True)
class LoadResult(_Hits):
    """What became of each key of a load. On a miss the caller's buffer holds garbage and must not be used."""

    bytes_loaded: int


@dataclass(frozen=True, slots=True)
class StoreResult(_Outcomes):
    """What became of each block of a store: stored now, present before, or declined with a reason."""

    @property
    def stored_count(self) -> int:
        return self.codes.count(STORED)

    @property
    def present_count(self) -> int:
        return self.codes.count(PRESENT)

    @property
    def declined_count(self) -> int:
        return len(self.codes) - self.stored_count - self.present_count
