"""What engines did not have to compute, from what they counted, and from the blocks that were loaded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kvpool.api.model import Saved, percent
from kvpool.report import NamespaceReport, NamespaceUsage

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
    reported = sum(n.counts.hits for n in told if _tokens(n.description))
    tokens = sum(n.counts.hits * _tokens(n.description) for n in told)
    rest = max(0, hits - reported)
    mean, uniform = _mean(namespaces)
    if mean is None and not reported:
        return None
    timed = sum(n.counts.timed_hits for n in told)
    return Saved(
        tokens=int(tokens + rest * (mean or 0.0)),
        exact=rest == 0 or (mean is not None and uniform),
        prefill_seconds=round(sum(seconds_of(n) or 0.0 for n in told), 3) if timed else None,
        prefill_coverage=percent(timed, max(hits, reported)) if timed else None,
        prefill_note="" if timed or not hits else NOT_MEASURED,
    )


def tokens_of(report: NamespaceReport) -> int | None:
    """Tokens that engines of a namespace loaded; None when it does not say how long a block is."""
    tokens = _tokens(report.description)
    return int(report.counts.hits * tokens) if tokens else None


def seconds_of(report: NamespaceReport) -> float | None:
    """Seconds of prefill that hits of a namespace have saved; None as long as nothing was measured."""
    if not report.counts.timed_hits:
        return None
    return round(report.counts.saved_us / 1e6 / _ranks(report.description), 3)


def _mean(namespaces: Iterable[NamespaceUsage]) -> tuple[float | None, bool]:
    """Tokens of a block on average, and whether all have as many."""
    shares = [
        (tokens, namespace.blocks) for namespace in namespaces if (tokens := _tokens(namespace.description))
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


def _tokens(description: Mapping[str, object]) -> float:
    """Tokens that one block of one rank stands for; 0 when it is not said."""
    return _number(description.get("block_tokens"), 0) / _ranks(description)


def _ranks(description: Mapping[str, object]) -> int:
    return _number(description.get("tp_size"), 1) * _number(description.get("pp_size"), 1)


def _number(value: object, otherwise: int) -> int:
    if isinstance(value, str) and value.isdecimal() and len(value) < 10:  # as custom resources have it
        value = int(value)
    return value if isinstance(value, int) and 0 < value < 1 << 32 else otherwise
