"""The node's numbers in Prometheus' form."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from kvpool.report import in_seconds
from kvpool_operator.nodes.board import Board

GAUGES = (
    ("capacity_bytes", "Capacity of the tier, its directory included.", "capacity_bytes"),
    (
        "used_bytes",
        "Bytes of the slots that hold a block; of all hosts, where the tier is shared.",
        "used_bytes",
    ),
    ("blocks", "Blocks in the tier; of all hosts, where it is shared.", "blocks"),
)
COUNTERS = (
    ("lookups", "Blocks that processes of this node looked up.", "lookups"),
    ("hits", "Blocks that were served to processes of this node.", "hits"),
    ("stored_blocks", "Blocks that processes of this node stored.", "stored"),
    ("evictions", "Blocks that processes of this node evicted.", "evictions"),
    ("loaded_bytes", "Bytes that processes of this node loaded.", "bytes_loaded"),
    ("stored_bytes", "Bytes that processes of this node stored.", "bytes_stored"),
    ("damaged_blocks", "Damaged blocks that were found on this node and dropped.", "scrub_bad"),
    ("reaped_slots", "Slots that were freed after processes that died.", "reaped"),
)
TIER = ("pool", "tier", "medium")


class NodeCollector(Collector):
    """Reads the board when somebody asks."""

    def __init__(self, board: Board, pool: str, version: str) -> None:
        self._board, self._pool, self._version = board, pool, version

    def collect(self) -> Iterable[Metric]:
        truth = self._board.truth()
        tiers = truth.report.get("tiers", ())
        yield InfoMetricFamily(
            "kvpool_node", "Which build runs.", {"version": self._version, "pool": self._pool}
        )
        yield self._one(
            "kvpool_node_ready", "1 when the pool is served here as declared.", float(truth.ready)
        )
        yield self._one("kvpool_node_host", "The host number of this node in the pool.", truth.host)
        yield self._one("kvpool_node_problems", "Problems that the status lists.", len(truth.problems))
        served, watched = self._board.silent_s()
        yield self._one("kvpool_node_served_age_seconds", "Since the pool's thread was heard of.", served)
        if watched is not None:
            yield self._one("kvpool_node_watch_age_seconds", "Since the apiserver was heard of.", watched)
        for name, text, key in GAUGES:
            family = GaugeMetricFamily(f"kvpool_tier_{name}", text, labels=TIER)
            for tier in tiers:
                family.add_metric(self._labels(tier), tier[key])
            yield family
        for name, text, key in COUNTERS:
            counted = CounterMetricFamily(f"kvpool_tier_{name}", text, labels=TIER)
            for tier in tiers:
                counted.add_metric(self._labels(tier), truth.own.get(tier["name"], {}).get(key, 0))
            yield counted
        for name, text, key in (
            ("misses", "Blocks that were not served, by reason.", "misses"),
            ("declined_blocks", "Blocks that were not stored, by reason.", "declined"),
        ):
            reasons = CounterMetricFamily(f"kvpool_tier_{name}", text, labels=(*TIER, "reason"))
            for tier in tiers:
                for reason, count in truth.own.get(tier["name"], {}).get(key, {}).items():
                    reasons.add_metric([*self._labels(tier), reason], count)
            yield reasons
        for name, key in (("load", "load_latency"), ("lookup", "lookup_latency"), ("store", "store_latency")):
            durations = HistogramMetricFamily(
                f"kvpool_tier_{name}_duration_seconds",
                f"Duration of {name} calls of processes of this node; a call has many blocks.",
                labels=TIER,
            )
            for tier in tiers:
                bounds, total_s, calls = in_seconds(truth.own.get(tier["name"], {}).get(key, []))
                buckets = [(floatToGoString(bound), float(count)) for bound, count in bounds]
                durations.add_metric(self._labels(tier), [*buckets, ("+Inf", float(calls))], total_s)
            yield durations
        engines = truth.report.get("engines", {}).get("engines", ())
        living = sum(engine["ended_at"] is None for engine in engines)
        yield self._one("kvpool_node_engines", "Engines of this node that use the pool, and report.", living)
        found = CounterMetricFamily(
            "kvpool_node_events", "Events, by kind.", labels=("pool", "tier", "reason")
        )
        for event in truth.report.get("events", ()):
            found.add_metric([self._pool, event["subject"], event["kind"]], event["count"])
        yield found

    def _labels(self, tier: dict[str, Any]) -> list[str]:
        return [self._pool, str(tier["name"]), str(tier["medium"])]

    def _one(self, name: str, text: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(name, text, labels=("pool",))
        family.add_metric([self._pool], value)
        return family


def registry(board: Board, pool: str, version: str) -> CollectorRegistry:
    made = CollectorRegistry()
    for collector in (ProcessCollector, PlatformCollector, GCCollector):
        collector(registry=made)
    made.register(NodeCollector(board, pool, version))
    return made
