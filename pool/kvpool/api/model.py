"""What the API's responses look like: names as in the custom resources, a unit in each description."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

Count = Annotated[int, Field(ge=0)]
Bytes = Annotated[int, Field(ge=0, description="bytes")]
Percent = Annotated[float, Field(ge=0, le=100)]
Seconds = Annotated[float, Field(ge=0, description="seconds")]

HIT_RATE = (
    "Percent of the looked-up blocks that were served, one decimal; null before the first lookup. "
    "The same number as status.hitRate of the KVPool."
)
AGE_S = "Seconds since this was true: how old the news is that the rest of the object was made from."
STALE = "True when the news is so old that something keeps it from coming; values are the last known ones."


class Model(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, serialize_by_alias=True)


class Aged(Model):
    """Something that can be out of date."""

    age_s: float = Field(0.0, ge=0, alias="age_s", description=AGE_S, examples=[1.2])
    stale: bool = Field(False, description=STALE)


class Condition(Model):
    """A condition as in Kubernetes."""

    type: str = Field(examples=["Ready"])
    status: Literal["True", "False", "Unknown"]
    reason: str = Field("", examples=["AllNodesReady"])
    message: str = Field("", description="What is the case, with numbers and the next step.")
    last_transition_time: str | None = Field(None, description="RFC 3339")
    observed_generation: Count | None = None


class Event(Model):
    """Something that a person should know; what happened again is counted."""

    type: Literal["Normal", "Warning"] = "Warning"
    reason: str = Field(examples=["DamageFound"])
    tier: str = ""
    node: str = Field("", description="name of the KVPoolNode, or of the host")
    message: str = Field("", description="What happened, and what to do.")
    count: Annotated[int, Field(ge=1)] = 1
    at: str = Field(description="RFC 3339, the last time", examples=["2026-01-31T08:00:00Z"])


class Shard(Model):
    """One host's part of a tier that hosts share."""

    shard: Count
    owner: Count = Field(description="host number of the node that owns it: its own, unless it was adopted")
    epoch: Count = 0
    settled: bool = Field(True, description="False while the owner is still taking it over")
    used_bytes: Bytes = 0
    blocks: Count = 0


class Tier(Model):
    """One tier, as in status.tiers of the custom resources."""

    name: str = Field(examples=["dram"])
    medium: str = Field(examples=["DRAM"])
    capacity_bytes: Bytes = 0
    used_bytes: Bytes = 0
    blocks: Count = Field(0, description="blocks that can be found now")
    evictions: Count = Field(0, description="blocks removed to make room, since the region was made")
    lookups: Count = Field(
        0,
        description="lookups counted in this tier, since the region was made: the blocks that it served "
        "and, in the first tier, all misses",
    )
    hits: Count = Field(0, description="blocks served by this tier, since the region was made")
    hit_rate: Percent | None = Field(
        None,
        description="Percent of all blocks that the pool (or node) looked up that this tier served, one "
        "decimal: the rates of all tiers add up to the pool's. It is no rate of `lookups`, because "
        "a region counts a miss once for the pool, and not in each tier that was asked.",
        examples=[97.4],
    )
    shared: bool = Field(False, description="one region for all nodes")
    shards: list[Shard] = Field(default_factory=list, description="of shared tiers: one for each host")


class NodeCounts(Model):
    """How many nodes run the pool."""

    desired: Count = 0
    ready: Count = 0
    out_of_date: Count = Field(0, description="nodes that run an older specification than the pool's")


class Saved(Model):
    """What engines did not have to compute."""

    tokens: Count = Field(
        description="prompt tokens whose KV was loaded instead of computed", examples=[1_204_224]
    )
    exact: bool = Field(
        description="False when some hits are of engines that report nothing (older ones, or of other "
        "machines) and blocks differ in size: the tokens of these are an average over what is stored."
    )
    prefill_seconds: float | None = Field(
        None,
        ge=0,
        description="seconds of prefill, as the engines that loaded would have taken by their own measured "
        "curve; null as long as no engine has measured one",
    )
    prefill_coverage: Percent | None = Field(
        None, description="percent of the hits that prefillSeconds is of: the others were not measured"
    )
    prefill_note: str = Field("", description="why prefillSeconds is null")


class Pool(Aged):
    """A pool as a whole."""

    namespace: str = Field(description='"local" for a pool of this machine', examples=["local"])
    name: str = Field(examples=["prefix-pool"])
    conditions: list[Condition] = Field(default_factory=list)
    nodes: NodeCounts = Field(default_factory=NodeCounts)
    capacity_bytes: Bytes = 0
    used_bytes: Bytes = 0
    blocks: Count = 0
    lookups: Count = Field(0, description="blocks looked up, since the regions were made")
    hits: Count = Field(0, description="blocks served, since the regions were made")
    hit_rate: Percent | None = Field(None, description=HIT_RATE, examples=[97.4])
    misses: dict[str, Count] = Field(default_factory=dict, description="blocks not served, by reason")
    evictions: Count = Field(0, description="blocks removed to make room, since the regions were made")
    tiers: list[Tier] = Field(default_factory=list, description="in the order in which they are asked")
    saved: Saved | None = Field(
        None, description="null when the source does not know the engines' block sizes"
    )
    problems: list[str] = Field(default_factory=list, description="what is not as it should be, in sentences")
    paused: bool = Field(False, description="the operator leaves everything as it is")
    observed_generation: Count | None = None


class Node(Aged):
    """A pool on one node, as in KVPoolNode."""

    name: str = Field(description="of the KVPoolNode, or of the host", examples=["prefix-pool-0"])
    node_name: str = Field("", examples=["worker-1"])
    host: Count = Field(0, description="number of the node's shard in shared tiers")
    state: str = Field("Active", description="Active, Draining or Removing")
    ready: bool = False
    message: str = Field("", description="why the node is not ready, with the next step")
    version: str = Field("", description="of kvpool")
    pod_name: str = ""
    started_at: str | None = Field(None, description="RFC 3339")
    updated_at: str | None = Field(None, description="RFC 3339")
    conditions: list[Condition] = Field(default_factory=list)
    tiers: list[Tier] = Field(default_factory=list)
    lookups: Count = 0
    hits: Count = 0
    hit_rate: Percent | None = Field(None, description=HIT_RATE)
    misses: dict[str, Count] = Field(default_factory=dict)
    skipped_tiers: dict[str, str] = Field(default_factory=dict, description="optional tiers left out: why")
    problems: list[str] = Field(default_factory=list)


class NamespaceOfEngine(Model):
    """All that has to be equal for engines to share blocks, and what is stored of it."""

    digest: str = Field(description="12 hex digits; `explain?engine=` takes them", examples=["5f2a90c1d3e4"])
    model: str = ""
    block_tokens: Count | None = Field(None, description="tokens in a block")
    block_bytes: Bytes = 0
    blocks: Count = Field(0, description="blocks that can be found now")
    bytes: Bytes = 0
    lookups: Count | None = Field(
        None, description="blocks that engines looked up in it; null: none that reports has used it"
    )
    hits: Count | None = Field(None, description="blocks that it served")
    hit_rate: Percent | None = Field(None, description="percent of its lookups, one decimal")
    misses: dict[str, Count] | None = Field(None, description="blocks not served, by reason")
    saved_tokens: Count | None = Field(None, description="prompt tokens loaded instead of computed")
    saved_prefill_seconds: Seconds | None = Field(
        None, description="seconds of prefill; null as long as no engine has measured how long it computes"
    )
    tenant: bool | None = Field(
        None,
        description="True: a tenant's key keeps it apart from engines with the same settings; whose it is, "
        "is in the digest and shown nowhere. null: no engine that reports has used it",
    )
    description: dict[str, str] = Field(
        default_factory=dict,
        description="every field of the namespace but the tenant, as text: dtype, layout, weights, ...",
    )


class MissReason(Model):
    """One reason for misses, or for stores that were declined."""

    reason: str = Field(examples=["evicted"])
    count: Count = Field(description="blocks")
    share: Annotated[float, Field(ge=0, le=1)] = Field(
        description="of all looked-up (or offered) blocks, 0 to 1"
    )
    meaning: str
    advice: str = Field("", description="what to do")


class EngineMisses(Model):
    """An engine that uses the pool, or did so within the last hour; counters since it opened the pool."""

    engine: str = Field(
        description="its pod, or its host's number, and the process id there; `explain?engine=` takes it",
        examples=["h0/4711"],
    )
    node: str = ""
    pod_name: str = ""
    live: bool = Field(True, description="False when it has ended")
    started_at: str | None = Field(None, description="RFC 3339")
    ended_at: str | None = Field(None, description="RFC 3339")
    tiers: list[str] = Field(default_factory=list, description="tiers that it is attached to")
    namespaces: list[str] = Field(default_factory=list, description="that it uses; 12 hex digits each")
    lookups: Count | None = Field(
        None, description="blocks; null: it reports nothing, because it could not write to the pool's folder"
    )
    hits: Count | None = Field(None, description="blocks")
    hit_rate: Percent | None = Field(None, description="percent of its lookups, one decimal")
    misses: dict[str, Count] | None = Field(None, description="blocks not served, by reason")


class FieldDifference(Model):
    """A setting in which an engine differs from the engine whose blocks it cannot use."""

    field: str = Field(examples=["block_tokens"])
    here: str
    there: str
    advice: str = Field(description="what to do")


class NamespaceDifference(Model):
    """A namespace that cannot use the blocks of the one most like it."""

    namespace: str = Field(description="12 hex digits")
    blocks: Count
    nearest: str = Field(description="12 hex digits")
    nearest_blocks: Count
    differences: list[FieldDifference]


class OfPool(Aged):
    """Whose it is."""

    namespace: str = Field(examples=["local"])
    name: str = Field(examples=["prefix-pool"])


NEXT = "give it as `continue` for what comes next; null on the last page"


class PoolList(Model):
    """One page of pools, sorted by namespace and name."""

    items: list[Pool]
    total: Count = Field(description="pools that you may see")
    next: str | None = Field(None, description=NEXT)


class NodeList(OfPool):
    """One page of a pool's nodes, sorted by name."""

    items: list[Node]
    total: Count
    next: str | None = Field(None, description=NEXT)


class TierList(OfPool):
    """A pool's tiers, in the order in which they are asked."""

    items: list[Tier]


class NamespaceList(OfPool):
    """What is stored, by what has to be equal for engines to share it; the largest first."""

    known: bool = Field(description="False when the source cannot see into the regions; items is empty then")
    items: list[NamespaceOfEngine]


class Misses(OfPool):
    """Why blocks were not served."""

    lookups: Count
    hits: Count
    hit_rate: Percent | None = Field(None, description=HIT_RATE)
    misses: list[MissReason] = Field(description="the weightiest first")
    declined: list[MissReason] = Field(description="stores that were declined, the weightiest first")
    engines: list[EngineMisses] = Field(description="those that live first; at most 500")
    engines_total: Count = Field(description="engines that are known")


class Explanation(OfPool):
    """Why the hit rate is what it is."""

    headline: str = Field(description="the answer in a sentence")
    advice: str = Field(description="the next step")
    hit_rate: Percent | None = Field(None, description=HIT_RATE)
    lookups: Count
    hits: Count
    misses: list[MissReason] = Field(description="the weightiest first")
    declined: list[MissReason]
    engine: str | None = Field(None, description="whom it is about; null: the whole pool")
    own_counters: bool = Field(
        False, description="True: lookups, hits and misses are of `engine` alone; else of the whole pool"
    )
    namespaces: list[NamespaceDifference] = Field(description="settings in which engines differ")
    namespaces_known: bool = Field(description="False when the source cannot see into the regions")
    problems: list[str]


class HistoryPoint(Model):
    """One interval. Amounts are of this interval alone; what was not observed is null, never 0."""

    at: str = Field(description="RFC 3339, the interval's beginning")
    hit_rate: Percent | None = Field(description="percent of the interval's lookups; null without any")
    lookups: Count = Field(description="blocks")
    hits: Count = Field(description="blocks")
    evictions: Count = Field(description="blocks")
    bytes_loaded: Bytes | None
    bytes_stored: Bytes | None
    used_bytes: Bytes = Field(description="bytes, at the interval's end")
    capacity_bytes: Bytes = Field(description="bytes, at the interval's end")
    nodes_ready: Count
    load_p50_seconds: Seconds | None = Field(description="median duration of a load call")
    load_p99_seconds: Seconds | None = Field(description="largest 99th percentile within the interval")
    lookup_p50_seconds: Seconds | None = Field(description="median duration of a lookup call")
    lookup_p99_seconds: Seconds | None = Field(description="largest 99th percentile within the interval")


class History(OfPool):
    """A pool's past; intervals in which nobody watched are left out."""

    window_seconds: Count
    step_seconds: Count = Field(description="length of an interval; may be longer than asked for")
    store: Literal["memory", "redis"] = Field(description="where it was read from")
    notice: str = Field("", description="what is wrong with the store, if something is")
    points: list[HistoryPoint] = Field(description="the oldest first")


class Problem(BaseModel):
    """An error, as in RFC 9457."""

    type: str = "about:blank"
    title: str = Field(examples=["Not Found"])
    status: int = Field(ge=400, le=599, examples=[404])
    detail: str = Field(description="what happened, what was expected, what to do")
    instance: str = Field("", description="path of the request")


class Health(Model):
    """Whether the API serves, and from what."""

    ready: bool
    message: str = Field(description="why not, with the next step")
    source: Literal["local", "cluster"]
    pools: Count
    history: Literal["memory", "redis"]
    notice: str = Field("", description="what works less well than it should")


def with_rates(tiers: Iterable[Tier], lookups: int) -> list[Tier]:
    """The tiers with what they served of `lookups`."""
    return [tier.model_copy(update={"hit_rate": percent(tier.hits, lookups)}) for tier in tiers]


def percent(hits: int, lookups: int) -> float | None:
    """The hit rate in percent with one decimal, between 0 and 100 whatever the counters say."""
    if lookups <= 0:
        return None
    return round(100.0 * min(max(hits, 0), lookups) / lookups, 1)
