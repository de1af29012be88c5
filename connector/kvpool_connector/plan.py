"""What a scheduler tells its ranks about one step. Travels between processes."""

from __future__ import annotations

from dataclasses import dataclass, field

HASH_BYTES = 32


@dataclass(slots=True)
class Work:
    """What a step computes: tokens, and pairs of a token with one that stands before it."""

    tokens: int = 0
    pairs: float = 0.0

    def add(self, context: int, tokens: int) -> None:
        """`tokens` of one request, with `context` tokens before them."""
        self.tokens += tokens
        self.pairs += tokens * (context + tokens / 2)


@dataclass(slots=True)
class Transfer:
    """Blocks of one request that move: their 32-byte hashes, packed, and their ids in the engine's cache.

    `context_tokens`: how many of the request's tokens stand before the first block.
    """

    request_id: str
    hashes: bytes
    block_ids: list[int]
    in_background: bool = False
    context_tokens: int = 0


@dataclass(slots=True)
class StepPlan:
    """What every rank does around one forward pass.

    `epoch`: how many times the scheduler had heard of failed loads when it made the plan.
    """

    epoch: int = 0
    loads: list[Transfer] = field(default_factory=list)
    stores: list[Transfer] = field(default_factory=list)
    work: Work = field(default_factory=Work)
