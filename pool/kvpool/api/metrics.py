"""Prometheus metrics: of every pool on the board, of the API itself.

Those of pools begin with kvpool_pool_: the daemons of a cluster have metrics of their own, kvpool_tier_* or
kvpool_node_*, and sums over both would count twice. Names and labels follow Prometheus's conventions: base
units, `_total` on counters, labels from closed sets (a miss reason that this version does not know becomes
"other"). What to do about each: docs/observability.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.process_collector import ProcessCollector

from kvpool.api.status import Board, PoolStatus, StatusSource
from kvpool.outcomes import MissReason
from kvpool.report import Counters, in_seconds

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
REASONS = frozenset(reason.value for reason in MissReason)
CONDITIONS = ("Ready", "Progressing", "Degraded", "Draining", "CoherenceVerified")
_CONDITION_VALUES = {"True": 1, "False": 0}

Sample = tuple[str, float]  # labels as text, value


@dataclass(frozen=True, slots=True)
class Family:
    """One metric of pools. `samples` gives what one pool has of it, with the pool's labels."""

    name: str
    kind: str
    text: str
    samples: Callable[[PoolStatus, str, float], Iterable[Sample]]


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _reasons(counts: dict[str, int], labels: str) -> Iterator[Sample]:
    known: dict[str, int] = {}
    for reason, count in counts.items():
        name = reason if reason in REASONS else "other"
        known[name] = known.get(name, 0) + count
    for reason, count in sorted(known.items()):
        yield f'{labels},reason="{reason}"', count


def _tiers(field: str) -> Callable[[PoolStatus, str, float], Iterator[Sample]]:
    def samples(status: PoolStatus, labels: str, now: float) -> Iterator[Sample]:
        for tier in status.pool.tiers:
            named = f'{labels},tier="{_escaped(tier.name)}",medium="{_escaped(tier.medium)}"'
            yield named, getattr(tier, field)

    return samples


def _counted(field: str) -> Callable[[PoolStatus, str, float], Iterator[Sample]]:
    """A counter that only a source that sees into the regions knows."""

    def samples(status: PoolStatus, labels: str, now: float) -> Iterator[Sample]:
        if status.namespaces is not None:
            yield labels, getattr(status.counters, field)

    return samples


def _nodes(
    value: Callable[[PoolStatus, int, float], float],
) -> Callable[[PoolStatus, str, float], Iterator[Sample]]:
    def samples(status: PoolStatus, labels: str, now: float) -> Iterator[Sample]:
        for i, node in enumerate(status.nodes):
            yield f'{labels},node="{_escaped(node.node_name or node.name)}"', value(status, i, now)

    return samples


def _conditions(status: PoolStatus, labels: str, now: float) -> Iterator[Sample]:
    for condition in status.pool.conditions:
        if condition.type in CONDITIONS:
            yield f'{labels},type="{condition.type}"', _CONDITION_VALUES.get(condition.status, -1)


def _hit_ratio(status: PoolStatus, labels: str, now: float) -> Iterator[Sample]:
    if status.pool.lookups:
        yield labels, min(status.pool.hits, status.pool.lookups) / status.pool.lookups


def _saved_tokens(status: PoolStatus, labels: str, now: float) -> Iterator[Sample]:
    if status.pool.saved is not None:
        yield labels, status.pool.saved.tokens


def _saved_seconds(status: PoolStatus, labels: str, now: float) -> Iterator[Sample]:
    if status.pool.saved is not None and status.pool.saved.prefill_seconds is not None:
        yield labels, status.pool.saved.prefill_seconds


def _engines(status: PoolStatus, labels: str, now: float) -> Iterator[Sample]:
    if status.namespaces is not None:
        yield labels, sum(engine.live for engine in status.engines)


def _unreported(status: PoolStatus, labels: str, now: float) -> Iterator[Sample]:
    """Hits that no engine's report has: numbers by engine and by namespace leave them out."""
    if status.namespaces is not None:
        told = sum(report.counts.hits for report in status.reports.values())
        yield labels, max(0, status.pool.hits - told)


FAMILIES: tuple[Family, ...] = (
    Family(
        "kvpool_pool_lookups_total", "counter", "Blocks looked up", lambda s, at, _: [(at, s.pool.lookups)]
    ),
    Family("kvpool_pool_hits_total", "counter", "Blocks served", lambda s, at, _: [(at, s.pool.hits)]),
    Family(
        "kvpool_pool_misses_total",
        "counter",
        "Blocks not served",
        lambda s, at, _: _reasons(s.pool.misses, at),
    ),
    Family(
        "kvpool_pool_hit_ratio", "gauge", "Share of all looked-up blocks that were served, 0 to 1", _hit_ratio
    ),
    Family(
        "kvpool_pool_saved_tokens_total", "counter", "Prompt tokens loaded instead of computed", _saved_tokens
    ),
    Family(
        "kvpool_pool_saved_prefill_seconds_total",
        "counter",
        "Seconds of prefill that loads made needless, by the engines' own measured curves",
        _saved_seconds,
    ),
    Family("kvpool_pool_engines", "gauge", "Engines that use the pool", _engines),
    Family(
        "kvpool_pool_unreported_hits",
        "gauge",
        "Hits of engines that report nothing, left out by engine and namespace",
        _unreported,
    ),
    Family("kvpool_pool_stored_blocks_total", "counter", "Blocks stored", _counted("stored")),
    Family("kvpool_pool_loaded_bytes_total", "counter", "Bytes loaded", _counted("bytes_loaded")),
    Family("kvpool_pool_stored_bytes_total", "counter", "Bytes stored", _counted("bytes_stored")),
    Family(
        "kvpool_pool_declined_blocks_total",
        "counter",
        "Blocks that the pool did not take",
        lambda s, at, _: _reasons(s.counters.declined, at),
    ),
    Family(
        "kvpool_pool_damaged_blocks_total",
        "counter",
        "Damaged blocks that scrubbing found",
        _counted("scrub_bad"),
    ),
    Family(
        "kvpool_pool_reaped_slots_total",
        "counter",
        "Slots freed after processes that died",
        _counted("reaped"),
    ),
    Family(
        "kvpool_pool_tier_capacity_bytes", "gauge", "Bytes that a tier can hold", _tiers("capacity_bytes")
    ),
    Family("kvpool_pool_tier_used_bytes", "gauge", "Bytes in use, padding included", _tiers("used_bytes")),
    Family("kvpool_pool_tier_blocks", "gauge", "Blocks that can be found now", _tiers("blocks")),
    Family("kvpool_pool_tier_evictions_total", "counter", "Blocks removed to make room", _tiers("evictions")),
    Family("kvpool_pool_tier_lookups_total", "counter", "Blocks looked up in a tier", _tiers("lookups")),
    Family("kvpool_pool_tier_hits_total", "counter", "Blocks served by a tier", _tiers("hits")),
    Family(
        "kvpool_pool_nodes_desired",
        "gauge",
        "Nodes that should run the pool",
        lambda s, at, _: [(at, s.pool.nodes.desired)],
    ),
    Family(
        "kvpool_pool_nodes_ready", "gauge", "Nodes that run it", lambda s, at, _: [(at, s.pool.nodes.ready)]
    ),
    Family(
        "kvpool_pool_nodes_out_of_date",
        "gauge",
        "Nodes that run an older specification",
        lambda s, at, _: [(at, s.pool.nodes.out_of_date)],
    ),
    Family(
        "kvpool_pool_node_ready",
        "gauge",
        "1 when the node serves the pool",
        _nodes(lambda s, i, _: s.nodes[i].ready),
    ),
    Family(
        "kvpool_pool_node_age_seconds",
        "gauge",
        "Seconds since the node's last news",
        _nodes(lambda s, i, now: max(0.0, now - s.nodes_at.get(s.nodes[i].name, s.observed_at))),
    ),
    Family("kvpool_pool_condition", "gauge", "1 true, 0 false, -1 not known", _conditions),
    Family(
        "kvpool_pool_age_seconds",
        "gauge",
        "Seconds since the pool's last news",
        lambda s, at, now: [(at, s.age_s(now))],
    ),
)


def _labels(status: PoolStatus) -> str:
    return f'namespace="{_escaped(status.key.namespace)}",pool="{_escaped(status.key.name)}"'


def _value(value: float) -> str:
    return str(int(value)) if isinstance(value, (bool, int)) else repr(float(value))


async def pool_metrics(board: Board, now: float) -> str:
    """All pools as text. It gives the event loop a turn between families."""
    statuses = [(status, _labels(status)) for key in board.known() if (status := board.get(key))]
    lines: list[str] = []
    for family in FAMILIES:
        lines += [f"# HELP {family.name} {family.text}", f"# TYPE {family.name} {family.kind}"]
        for number, (status, labels) in enumerate(statuses):
            lines += [f"{family.name}{{{at}}} {_value(v)}" for at, v in family.samples(status, labels, now)]
            if number % 100 == 99:
                await asyncio.sleep(0)
        await asyncio.sleep(0)
    for name, text, which in (
        ("kvpool_pool_load_duration_seconds", "Duration of load calls", lambda c: c.load_latency),
        ("kvpool_pool_store_duration_seconds", "Duration of store calls", lambda c: c.store_latency),
        ("kvpool_pool_lookup_duration_seconds", "Duration of lookup calls", lambda c: c.lookup_latency),
    ):
        lines += [f"# HELP {name} {text}", f"# TYPE {name} histogram"]
        for status, labels in statuses:
            if status.namespaces is not None:
                lines += _histogram(name, labels, status.counters, which)
    return "\n".join(lines) + "\n"


def _histogram(
    name: str, labels: str, counters: Counters, which: Callable[[Counters], list[int]]
) -> Iterator[str]:
    """The counts of calls as a cumulative histogram."""
    bounds, total_s, calls = in_seconds(which(counters))
    for bound, count in bounds:
        yield f'{name}_bucket{{{labels},le="{bound:.9g}"}} {count}'
    yield f'{name}_bucket{{{labels},le="+Inf"}} {calls}'
    yield f"{name}_sum{{{labels}}} {total_s!r}"
    yield f"{name}_count{{{labels}}} {calls}"


class ApiMetrics:
    """What the API does, counted."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        names = ["route", "code"]
        self._requests = Counter("kvpool_api_requests", "Requests answered", names, registry=self._registry)
        self._durations = Histogram(
            "kvpool_api_request_duration_seconds",
            "Duration of requests",
            ["route"],
            buckets=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0),
            registry=self._registry,
        )
        self.streams = Gauge("kvpool_api_streams", "Open event streams", registry=self._registry)
        self.skipped = Counter(
            "kvpool_api_skipped_updates",
            "Updates that a slow reader of a stream did not get, because a newer one replaced them",
            registry=self._registry,
        )
        self._up = Gauge("kvpool_api_source_up", "1 when the source is up to date", registry=self._registry)
        self._shared = Gauge(
            "kvpool_api_history_shared", "1 when the history is the shared one", registry=self._registry
        )

    def request(self, route: str, status: int, seconds: float) -> None:
        self._requests.labels(route, str(status)).inc()
        if not route.endswith("/events"):  # a stream lasts as long as somebody reads
            self._durations.labels(route).observe(seconds)

    def text(self, source: StatusSource, *, shared: bool) -> str:
        self._up.set(source.readiness().ready)
        self._shared.set(shared)
        return str(generate_latest(self._registry).decode())
