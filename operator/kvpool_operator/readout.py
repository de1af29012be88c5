"""What KVPool and KVPoolNode objects say, as the status API's models. Pure; no object is an error."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvpool.api import model, times
from kvpool.api.saved import saved
from kvpool.api.status import Key, PoolStatus
from kvpool.explain import merged
from kvpool.report import Counters, NamespaceCounts, NamespaceReport, NamespaceUsage, ranks_of

# A node writes its status once a minute when nothing changes: three missing in a row are no accident.
STALE_S = 180.0
PROBLEMS_MAX = 16
NAMESPACES_MAX = 32
FIELDS_MAX = 32
ENGINES_MAX = 64
BUCKETS_MAX = 64
STATUSES = ("True", "False", "Unknown")

Object = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class PoolObject:
    """What is kept of a KVPool."""

    key: Key
    pool: model.Pool
    reported: bool  # the operator has written numbers


@dataclass(frozen=True, slots=True)
class _Held:
    """Blocks of a namespace: in a node's own tiers, and in those that nodes share."""

    digest: str
    blocks: int
    bytes: int
    shared_blocks: int
    shared_bytes: int


@dataclass(frozen=True, slots=True)
class NodeObject:
    """What is kept of a KVPoolNode."""

    pool: Key
    node: model.Node
    updated_at: float | None
    counters: Counters
    events: tuple[model.Event, ...]
    reports: tuple[NamespaceReport, ...] | None  # None: a daemon of an older version
    held: tuple[_Held, ...]
    engines: tuple[model.EngineMisses, ...]


def key_of(body: Object) -> Key:
    metadata = _map(body.get("metadata"))
    return Key(_text(metadata.get("namespace")), _text(metadata.get("name")))


def pool_of(body: Object) -> PoolObject:
    key = key_of(body)
    status, spec = _map(body.get("status")), _map(body.get("spec"))
    nodes = _map(status.get("nodes"))
    lookups, hits = _count(status.get("lookups")), _count(status.get("hits"))
    tiers = _tiers(status.get("tiers"), spec, lookups)
    pool = model.Pool(
        namespace=key.namespace,
        name=key.name,
        conditions=_conditions(status.get("conditions")),
        nodes=model.NodeCounts(
            desired=_count(nodes.get("desired")),
            ready=_count(nodes.get("ready")),
            out_of_date=_count(nodes.get("outOfDate")),
        ),
        capacity_bytes=sum(tier.capacity_bytes for tier in tiers),
        used_bytes=sum(tier.used_bytes for tier in tiers),
        blocks=_count(status.get("blocks")),
        lookups=lookups,
        hits=hits,
        hit_rate=_rate(status.get("hitRate"), hits, lookups),
        misses=_counts(status.get("misses")),
        evictions=sum(tier.evictions for tier in tiers),
        tiers=tiers,
        paused=spec.get("paused") is True,
        observed_generation=_count(status.get("observedGeneration")) or None,
    )
    return PoolObject(key, pool, reported="lookups" in status)


def node_of(body: Object) -> NodeObject:
    key = key_of(body)
    spec, status = _map(body.get("spec")), _map(body.get("status"))
    lookups, hits = _count(status.get("lookups")), _count(status.get("hits"))
    tiers = _tiers(status.get("tiers"), _map(_map(spec.get("manifest")).get("spec")), lookups)
    misses = _counts(status.get("misses"))
    ready = status.get("ready") is True
    name = _text(spec.get("nodeName")) or key.name
    node = model.Node(
        name=key.name,
        node_name=_text(spec.get("nodeName")),
        host=_count(spec.get("host")),
        state=_text(spec.get("state")) or "Active",
        ready=ready,
        message=_text(status.get("message"))
        or (
            "" if status else "its daemon has not reported yet; look at the pod of the DaemonSet on this node"
        ),
        version=_text(status.get("version")),
        pod_name=_text(status.get("podName")),
        started_at=_text(status.get("startedAt")) or None,
        conditions=_conditions(status.get("conditions")),
        tiers=tiers,
        lookups=lookups,
        hits=hits,
        hit_rate=model.percent(hits, lookups),
        misses=misses,
        skipped_tiers={k: _text(v) for k, v in _map(status.get("skippedTiers")).items()},
        problems=[_text(problem) for problem in _list(status.get("problems"))][:PROBLEMS_MAX],
    )
    listed = [_map(n) for n in _list(status.get("namespaces"))[:NAMESPACES_MAX]]
    stored = sum(_count(_map(tier).get("storedBlocks")) for tier in _list(status.get("tiers")))
    evictions = sum(tier.evictions for tier in tiers)
    return NodeObject(
        pool=Key(key.namespace, _text(spec.get("pool"))),
        node=node,
        updated_at=times.unix(status.get("updatedAt")),
        counters=Counters(
            lookups=lookups,
            hits=hits,
            misses=misses,
            evictions=evictions,
            stored=stored,
            declined=_counts(status.get("declined")),
            bytes_loaded=_count(status.get("bytesLoaded")),
            bytes_stored=_count(status.get("bytesStored")),
            scrub_bad=_count(status.get("damagedBlocks")),
            reaped=_count(status.get("reapedSlots")),
            load_latency=_histogram(status.get("loadLatency")),
            lookup_latency=_histogram(status.get("lookupLatency")),
            store_latency=_histogram(status.get("storeLatency")),
        ),
        events=tuple(_events(status.get("events"), name)),
        reports=tuple(map(_report, listed)) if "namespaces" in status else None,
        held=tuple(map(_held, listed)),
        engines=tuple(_engine(e, name) for e in map(_map, _list(status.get("engines"))[:ENGINES_MAX])),
    )


def status_of(pool: PoolObject, nodes: Iterable[NodeObject], seen_at: float) -> PoolStatus:
    """A pool with its nodes. `seen_at`: when the cluster was last heard of, for a pool without any."""
    ordered = sorted(nodes, key=lambda n: n.node.name)
    reports = [n.updated_at for n in ordered if n.updated_at is not None]
    shown = pool.pool if pool.reported else _summed(pool.pool, ordered)
    problems = [
        f"node {n.node.node_name or n.node.name}: {problem}" for n in ordered for problem in n.node.problems
    ]
    if problems:
        shown = shown.model_copy(update={"problems": problems[:PROBLEMS_MAX]})
    counted, namespaces = _namespaces(ordered)
    total = sum((n.counters for n in ordered), Counters())
    if namespaces is not None:
        shown = shown.model_copy(update={"saved": saved(shown.hits, namespaces, counted)})
    events = sorted((event for n in ordered for event in n.events), key=lambda event: event.at)
    return PoolStatus(
        key=pool.key,
        pool=shown,
        observed_at=min(seen_at, max(reports)) if reports else seen_at,
        stale_after_s=STALE_S,
        counters=replace(
            total,
            lookups=shown.lookups,
            hits=shown.hits,
            misses=dict(shown.misses),
            evictions=shown.evictions,
            # What is there was stored, also when the node that stored it is gone.
            stored=max(total.stored, shown.blocks),
        ),
        nodes=[n.node for n in ordered],
        nodes_at={n.node.name: n.updated_at for n in ordered if n.updated_at is not None},
        namespaces=namespaces,
        reports=counted,
        engines=sorted(
            (engine for n in ordered for engine in n.engines), key=lambda e: (not e.live, e.node, e.engine)
        ),
        events=events,
        series={n.node.name: n.counters for n in ordered},
    )


def _namespaces(
    nodes: Iterable[NodeObject],
) -> tuple[dict[str, NamespaceReport], list[NamespaceUsage] | None]:
    """What engines of all nodes counted, and what is stored or used of late; None when no node says that."""
    reports: dict[str, NamespaceReport] = {}
    held: dict[str, _Held] = {}
    known = False
    used = set()
    for node in nodes:
        used |= {digest for engine in node.engines for digest in engine.namespaces}
        known = known or node.reports is not None
        for report in node.reports or ():
            before = reports.get(report.digest)
            reports[report.digest] = report if before is None else before + report
        for one in node.held:
            other = held.get(one.digest)
            held[one.digest] = one if other is None else _joined(other, one)
    if not known:
        return {}, None
    shown = [
        NamespaceUsage(
            digest,
            report.description,
            report.block_bytes,
            blocks=held[digest].blocks + held[digest].shared_blocks,
            bytes=held[digest].bytes + held[digest].shared_bytes,
        )
        for digest, report in reports.items()
        if held[digest].blocks + held[digest].shared_blocks or digest[:12] in used
    ]
    return reports, merged(shown)


def _joined(a: _Held, b: _Held) -> _Held:
    """Of two nodes. What they share is one thing, that each has looked at in another moment."""
    return _Held(
        a.digest,
        a.blocks + b.blocks,
        a.bytes + b.bytes,
        max(a.shared_blocks, b.shared_blocks),
        max(a.shared_bytes, b.shared_bytes),
    )


def _report(said: Object) -> NamespaceReport:
    settings = tuple(sorted((str(k), _text(v)) for k, v in _map(said.get("description")).items()))
    description = _description(settings[:FIELDS_MAX])
    counts = NamespaceCounts(
        hits=_count(said.get("hits")),
        misses=_counts(said.get("misses")),
        saved_us=_count(said.get("savedPrefillMilliseconds")) * 1000 * ranks_of(description),
        timed_hits=_count(said.get("timedHits")),
    )
    tenant, size = said.get("tenant") is True, _count(said.get("blockBytes"))
    return NamespaceReport(_digest(said), description, size, counts, keyed=tenant)


@functools.lru_cache(maxsize=4096)
def _description(settings: tuple[tuple[str, str], ...]) -> dict[str, object]:
    """One object for all nodes on which a namespace is used: it is the largest part of them."""
    return dict(settings)


def _held(said: Object) -> _Held:
    names = ("blocks", "bytes", "sharedBlocks", "sharedBytes")
    return _Held(_digest(said), *(_count(said.get(name)) for name in names))


def _digest(said: Object) -> str:
    return sys.intern(_text(said.get("digest"))[:64])


def _engine(said: Object, node: str) -> model.EngineMisses:
    lookups, hits = _count(said.get("lookups")), _count(said.get("hits"))
    return model.EngineMisses(
        engine=_text(said.get("name")),
        node=node,
        pod_name=_text(said.get("podName")),
        live=said.get("live") is True,
        started_at=_text(said.get("startedAt")) or None,
        ended_at=_text(said.get("endedAt")) or None,
        tiers=[_text(tier) for tier in _list(said.get("tiers"))],
        namespaces=[sys.intern(_text(digest)) for digest in _list(said.get("namespaces"))],
        lookups=lookups,
        hits=hits,
        hit_rate=model.percent(hits, lookups),
        misses=_counts(said.get("misses")),
    )


def _histogram(given: object) -> list[int]:
    return [_count(count) for count in _list(given)[:BUCKETS_MAX]]


def _summed(pool: model.Pool, nodes: list[NodeObject]) -> model.Pool:
    """What the nodes say together, as long as the operator has said nothing."""
    total = sum((n.counters for n in nodes), Counters())
    return pool.model_copy(
        update={
            "lookups": total.lookups,
            "hits": total.hits,
            "hit_rate": model.percent(total.hits, total.lookups),
            "misses": total.misses,
            "evictions": total.evictions,
            "tiers": model.with_rates(pool.tiers, total.lookups),
            "nodes": model.NodeCounts(desired=len(nodes), ready=sum(n.node.ready for n in nodes)),
        }
    )


def _tiers(given: object, spec: Object, of: int) -> list[model.Tier]:
    """`of`: the lookups of whose tiers they are; their rates add up to its own."""
    shared = {
        _text(_map(tier).get("name")): _map(tier).get("shared") is True for tier in _list(spec.get("tiers"))
    }
    found = []
    for tier in map(_map, _list(given)):
        lookups, hits, name = _count(tier.get("lookups")), _count(tier.get("hits")), _text(tier.get("name"))
        found.append(
            model.Tier(
                name=name,
                medium=_text(tier.get("medium")),
                capacity_bytes=_count(tier.get("capacityBytes")),
                used_bytes=_count(tier.get("usedBytes")),
                blocks=_count(tier.get("blocks")),
                evictions=_count(tier.get("evictions")),
                lookups=lookups,
                hits=hits,
                hit_rate=_rate(tier.get("hitRate"), hits, of),
                shared=shared.get(name, False),
                shards=[
                    model.Shard(
                        shard=_count(shard.get("shard")),
                        owner=_count(shard.get("owner")),
                        epoch=_count(shard.get("epoch")),
                        settled=shard.get("settled") is not False,
                        used_bytes=_count(shard.get("usedBytes")),
                        blocks=_count(shard.get("blocks")),
                    )
                    for shard in map(_map, _list(tier.get("shards")))
                ],
            )
        )
    return found


def _conditions(given: object) -> list[model.Condition]:
    return [
        model.Condition(
            type=_text(condition.get("type")),
            status=condition["status"] if condition.get("status") in STATUSES else "Unknown",
            reason=_text(condition.get("reason")),
            message=_text(condition.get("message")),
            last_transition_time=_text(condition.get("lastTransitionTime")) or None,
            observed_generation=_count(condition.get("observedGeneration")) or None,
        )
        for condition in map(_map, _list(given))
    ]


def _events(given: object, node: str) -> Iterable[model.Event]:
    for event in map(_map, _list(given)):
        yield model.Event(
            type="Normal" if event.get("type") == "Normal" else "Warning",
            reason=_text(event.get("reason")),
            tier=_text(event.get("tier")),
            node=node,
            message=_text(event.get("message")),
            at=_text(event.get("at")),
        )


def _rate(given: object, hits: int, lookups: int) -> float | None:
    """The rate as the object has it, so that all who show it agree; else from the counters."""
    try:
        rate = float(given) if isinstance(given, (str, int, float)) else None
    except ValueError:
        rate = None
    return rate if rate is not None and 0.0 <= rate <= 100.0 else model.percent(hits, lookups)


def _map(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _count(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def _counts(value: object) -> dict[str, int]:
    return {str(name): _count(count) for name, count in _map(value).items()}
