"""Why a pool's hit rate is what it is: pure, from counters and the namespaces that its regions know."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from kvpool.outcomes import MissReason
from kvpool.report import Counters, NamespaceUsage

GOOD_HIT_RATE = 0.9  # above it there is nothing to explain, only to list
DECLINED_SHARE = 0.01  # stores declined below this are noise

# What each reason means, and what to do. A reason without a line here is shown by its name.
MEANINGS: dict[str, tuple[str, str]] = {
    MissReason.NEVER_STORED.value: (
        "nobody had stored these blocks",
        "Normal for new prompts. Where prompts should be shared, check that they begin with the same tokens "
        "(same system prompt and template, no time stamps), and that the first engine stores into this pool.",
    ),
    MissReason.EVICTED.value: (
        "the blocks were stored, then evicted to make room",
        "The working set is larger than the pool: raise the capacity of a tier, or add one.",
    ),
    MissReason.WRONG_NAMESPACE.value: (
        "blocks are there, but of engines that differ in a way that makes their blocks unusable",
        "See the differences below and start the engines with equal settings.",
    ),
    MissReason.BELOW_MINIMUM.value: (
        "the engine asked for fewer blocks than its minimum for using the pool",
        "Short prompts are not worth a load. Lower the connector's minimum if they are for you.",
    ),
    MissReason.DECLINED_BY_COST.value: (
        "computing the blocks anew was expected to be faster than loading them",
        "A faster tier, larger blocks or a larger model change this. It costs no correctness and no speed.",
    ),
    MissReason.FAILED_CHECKSUM.value: (
        "a stored block was damaged; it was not served",
        "Run 'kvpool scrub', and look for memory errors in the machine's log: bits flip in the medium.",
    ),
    MissReason.CHANGED_WHILE_READING.value: (
        "the block was replaced while it was read",
        "The pool turns over very fast: raise its capacity. A few of these are normal.",
    ),
    MissReason.TIER_ERROR.value: (
        "a tier could not be read",
        "Look at 'kvpool status' and the daemon's log; then run 'kvpool fsck --repair'.",
    ),
    MissReason.QUOTA.value: (
        "the tenant's quota was used up",
        "Raise the tenant's quota, or let fewer of its prompts be stored.",
    ),
    MissReason.NO_SPACE.value: (
        "no slot could be freed for the block",
        "The block may be larger than an extent, or all blocks are in use: raise capacity or extentSize.",
    ),
    MissReason.NAMESPACES_FULL.value: (
        "the region knows as many namespaces as it can hold, or the last row is held by a stopped process",
        "Too many different models or settings share this region: use a pool each. Or let the process that "
        "was stopped in the middle of its first store go on, or end it.",
    ),
    MissReason.FENCED.value: (
        "another host owns this host's shard now",
        "Two hosts run with the same number, or this one was given up: 'kvpool status' says who has its "
        "shard, 'kvpool adopt' takes it back.",
    ),
}

# What to do about each field of a namespace in which two engines differ.
FIELD_ADVICE: dict[str, str] = {
    "model": "different models cannot share blocks",
    "weights": "other weights (a revision, fine-tune or quantisation) make other blocks; load the same ones",
    "dtype": "start both engines with the same --dtype (or --kv-cache-dtype)",
    "kv_layout": "use the same attention backend and engine version, or the same KV layout setting, on both",
    "block_tokens": "start both engines with the same --block-size",
    "block_bytes": "follows from the other settings (dtype, layout, parallel sizes)",
    "tp_size": "start both engines with the same --tensor-parallel-size",
    "tp_rank": "ranks hold different parts of a block; each rank has its own namespace",
    "pp_size": "start both engines with the same --pipeline-parallel-size",
    "pp_rank": "ranks hold different layers; each rank has its own namespace",
    "cache_group": "groups of layers have namespaces of their own",
    "hash_scheme": "use the same prefix hash algorithm and the same PYTHONHASHSEED on both",
    "tenant": "tenants are kept apart on purpose",
}
# Two namespaces that differ only in these belong to the same engine: no reason for a miss.
RANK_FIELDS = frozenset({"tp_rank", "pp_rank", "cache_group"})


@dataclass(frozen=True, slots=True)
class Reason:
    """One reason for misses (or declined stores): how often, what it means, what to do. `share` is 0 to 1."""

    reason: str
    count: int
    share: float
    meaning: str
    advice: str


@dataclass(frozen=True, slots=True)
class FieldDifference:
    """One field in which an engine's namespace differs from another one that holds blocks."""

    field: str
    here: str
    there: str
    advice: str


@dataclass(frozen=True, slots=True)
class NamespaceDifference:
    """A namespace that cannot use the blocks of the one most like it."""

    namespace: str  # 12 hex digits
    blocks: int
    nearest: str
    nearest_blocks: int
    differences: tuple[FieldDifference, ...]


@dataclass(frozen=True, slots=True)
class Explanation:
    """All that `kvpool explain` says."""

    headline: str
    advice: str
    hit_rate: float
    lookups: int
    hits: int
    misses: tuple[Reason, ...]
    declined: tuple[Reason, ...]
    namespaces: tuple[NamespaceDifference, ...]


def explain(
    counters: Counters, namespaces: Iterable[NamespaceUsage], *, of: Collection[str] = ()
) -> Explanation:
    """Why the hit rate is what it is, the weightiest reason first.

    `of`: digests, or their beginnings, of one engine's namespaces: `counters` are that engine's, and only
    settings in which it differs from others are told.
    """
    known = merged(namespaces)
    misses = _reasons(counters.misses, counters.lookups)
    stores = counters.stored + counters.present + sum(counters.declined.values())
    declined = _reasons(counters.declined, stores)
    differences = _differences(known, of)
    headline, advice = _verdict(counters, known, misses, declined, differences)
    return Explanation(
        headline=headline,
        advice=advice,
        hit_rate=counters.hit_rate,
        lookups=counters.lookups,
        hits=counters.hits,
        misses=misses,
        declined=declined,
        namespaces=differences,
    )


def merged(namespaces: Iterable[NamespaceUsage]) -> list[NamespaceUsage]:
    """One entry for each digest: a namespace has a row in every region, and in every shard of it."""
    found: dict[str, NamespaceUsage] = {}
    for n in namespaces:
        before = found.get(n.digest)
        if before is None:
            found[n.digest] = n
        else:
            description = before.description or n.description
            sums = before.blocks + n.blocks, before.bytes + n.bytes
            found[n.digest] = NamespaceUsage(n.digest, description, n.block_bytes, *sums)
    return sorted(found.values(), key=lambda n: (-n.blocks, n.digest))


def _reasons(counts: dict[str, int], total: int) -> tuple[Reason, ...]:
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return tuple(
        Reason(reason, count, count / total if total else 0.0, *MEANINGS.get(reason, (reason, "")))
        for reason, count in ordered
        if count
    )


def _differences(
    known: Sequence[NamespaceUsage], of: Collection[str] = ()
) -> tuple[NamespaceDifference, ...]:
    """How each namespace differs from the most similar one that holds at least as many blocks.

    Left out: what differs in rank only (the same engine), what holds blocks of another model (nothing to
    share), and what other ranks of the same engine say already.
    """
    found: dict[tuple[FieldDifference, ...], NamespaceDifference] = {}
    for index, n in enumerate(known):
        others = [other for other in known[:index] if other.blocks]
        if not others:
            continue
        nearest = min(others, key=lambda other: (len(differing_fields(n, other)), -other.blocks))
        if of and not any(each.digest.startswith(one) for each in (n, nearest) for one in of):
            continue
        fields = [name for name in differing_fields(n, nearest) if name not in RANK_FIELDS]
        if not fields or ("model" in fields and n.blocks):
            continue
        differences = tuple(
            FieldDifference(
                field=name,
                here=_shown(n.description.get(name)),
                there=_shown(nearest.description.get(name)),
                advice=FIELD_ADVICE.get(name, "make this setting equal on both"),
            )
            for name in fields
        )
        difference = NamespaceDifference(
            n.digest[:12], n.blocks, nearest.digest[:12], nearest.blocks, differences
        )
        found.setdefault(differences, difference)
    return tuple(found.values())


def differing_fields(a: NamespaceUsage, b: NamespaceUsage) -> list[str]:
    """The fields in which two namespaces differ, the ones that decide first."""
    order = {name: index for index, name in enumerate(FIELD_ADVICE)}
    names = sorted(a.description.keys() | b.description.keys(), key=lambda n: (order.get(n, len(order)), n))
    return [name for name in names if a.description.get(name) != b.description.get(name)]


def _shown(value: object) -> str:
    return "(not set)" if value is None or value == "" else str(value)


def _verdict(
    counters: Counters,
    known: Sequence[NamespaceUsage],
    misses: tuple[Reason, ...],
    declined: tuple[Reason, ...],
    differences: tuple[NamespaceDifference, ...],
) -> tuple[str, str]:
    blocks = sum(n.blocks for n in known)
    rate = f"{counters.hit_rate:.1%} of {counters.lookups} looked-up blocks were served"
    if not counters.lookups:
        if not blocks and not counters.stored:
            advice = "Check that an engine runs with the connector and names this pool; see the README."
            return "No engine has used this pool yet: nothing was looked up and nothing stored.", advice
        advice = (
            "Send a prompt with a shared beginning twice, or check that the reading engine names this pool."
        )
        return f"Nothing was looked up yet; {counters.stored} blocks were stored.", advice
    if not counters.stored and not blocks:
        return (
            f"{rate}: nothing was ever stored.{_why_not_stored(declined)}",
            declined[0].advice
            if declined
            else "Check that the engines may store: the connector's role or log.",
        )
    if counters.hit_rate >= GOOD_HIT_RATE or not misses:
        return f"{rate}. That is good.", misses[0].advice if misses else ""
    first = misses[0]
    headline = f"{rate}. Main reason ({first.share:.0%} of all): {first.meaning}."
    if first.reason == MissReason.NEVER_STORED.value:
        attempts = counters.stored + counters.present + sum(counters.declined.values())
        if declined and sum(r.count for r in declined) > DECLINED_SHARE * attempts:
            return f"{headline}{_why_not_stored(declined)}", declined[0].advice
        if differences:
            return f"{headline} Two engines differ in their settings.", _equalise(differences)
    if first.reason == MissReason.WRONG_NAMESPACE.value and differences:
        return headline, _equalise(differences)
    return headline, first.advice


def _why_not_stored(declined: tuple[Reason, ...]) -> str:
    return f" Stores were declined: {declined[0].meaning}." if declined else ""


def _equalise(differences: tuple[NamespaceDifference, ...]) -> str:
    """What to set, without the fields that only follow from others."""
    fields = differences[0].differences
    deciding = [d for d in fields if d.field != "block_bytes"] or fields
    return "Make equal: " + "; ".join(f"{d.field} ({d.advice})" for d in deciding) + "."
