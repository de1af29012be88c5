"""What engines did not have to compute, from the blocks that they loaded."""

from __future__ import annotations

from collections.abc import Iterable

from kvpool.api.model import Saved
from kvpool.report import NamespaceUsage


def saved(hits: int, namespaces: Iterable[NamespaceUsage]) -> Saved | None:
    """None when nothing says how many tokens a block has.

    A block is of one rank: a token counts when all ranks of an engine have loaded it.
    """
    shares: list[tuple[float, int]] = []  # tokens a block, blocks
    for namespace in namespaces:
        tokens = _number(namespace.description.get("block_tokens"), 0)
        if not tokens:
            continue
        ranks = _number(namespace.description.get("tp_size"), 1) * _number(
            namespace.description.get("pp_size"), 1
        )
        shares.append((tokens / ranks, namespace.blocks))
    if not shares:
        return None
    exact = len({tokens for tokens, _ in shares}) == 1
    # What is stored weighs; with nothing stored any more, each engine alike.
    weights = sum(blocks for _, blocks in shares)
    mean = (
        sum(tokens * blocks for tokens, blocks in shares) / weights
        if weights
        else sum(tokens for tokens, _ in shares) / len(shares)
    )
    return Saved(tokens=int(max(hits, 0) * mean), exact=exact, prefill_seconds=None)


def _number(value: object, otherwise: int) -> int:
    return value if isinstance(value, int) and 0 < value < 1 << 32 else otherwise
