"""What a scheduler tells its ranks about one step. Travels between processes."""

from __future__ import annotations

from dataclasses import dataclass, field

HASH_BYTES = 32


@dataclass(slots=True)
class Transfer:
    """Blocks of one request that move: their 32-byte hashes, packed, and their ids in the engine's cache."""

    request_id: str
    hashes: bytes
    block_ids: list[int]
    in_background: bool = False


@dataclass(slots=True)
class StepPlan:
    """What every rank does around one forward pass.

    `epoch`: how many times the scheduler had heard of failed loads when it made the plan.
    """

    epoch: int = 0
    loads: list[Transfer] = field(default_factory=list)
    stores: list[Transfer] = field(default_factory=list)
