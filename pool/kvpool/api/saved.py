"""What engines did not have to compute, from what they counted, and from the blocks that were loaded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kvpool.api.model import Saved, percent
from kvpool.report import NamespaceReport, NamespaceUsage, tokens_of_block

NOT_MEASURED = (
    "no engine has told how long it computes: it takes some prompts of different lengths that the engine "
    "computes itself, and a connector that measures"
)


def saved(
    hits: int, namespaces: Iterable[NamespaceUsage], reports: Mapping[str, NamespaceReport] | None = None
) -> Saved | None:
    """None when nothing says how many tokens a block has.

    A block is of one rank: a token counts when all ranks of an engine have loaded it, and so does a second.
    Hits that no engine reports (older ones, or of other machines) count with the mean of what is stored.
    """
    told = list((reports or {}).values())
    reported = sum(n.counts.hits for n in told if tokens_of_block(n.description))
    tokens = sum(n.counts.hits * tokens_of_block(n.description) for n in told)
    rest = max(0, hits - reported)
    mean, uniform = _mean(namespaces)
    if mean is None and not reported:
        return None
    timed = sum(n.counts.timed_hits for n in told)
    return Saved(
        tokens=int(tokens + rest * (mean or 0.0)),
        exact=rest == 0 or (mean is not None and uniform),
        prefill_seconds=round(sum(n.saved_ms or 0 for n in told) / 1000, 3) if timed else None,
        prefill_coverage=percent(timed, max(hits, reported)) if timed else None,
        prefill_note="" if timed or not hits else NOT_MEASURED,
    )


def _mean(namespaces: Iterable[NamespaceUsage]) -> tuple[float | None, bool]:
    """Tokens of a block on average, and whether all have as many."""
    shares = [
        (tokens, namespace.blocks)
        for namespace in namespaces
        if (tokens := tokens_of_block(namespace.description))
    ]
    if not shares:
        return None, False
    # What is stored weighs; with nothing stored any more, each engine alike.
    weights = sum(blocks for _, blocks in shares)
    mean = (
        sum(tokens * blocks for tokens, blocks in shares) / weights
        if weights
        else sum(tokens for tokens, _ in shares) / len(shares)
    )
    return mean, len({tokens for tokens, _ in shares}) == 1
