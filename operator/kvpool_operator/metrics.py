"""The operator's own metrics."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram


class Metrics:
    """Counters of one operator process, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.reconciles = Counter(
            "kvpool_operator_reconciles_total",
            "Reconciles of a KVPool, by how they ended.",
            ["result"],
            registry=self.registry,
        )
        self.duration = Histogram(
            "kvpool_operator_reconcile_duration_seconds",
            "Time of one reconcile.",
            buckets=(0.005, 0.02, 0.1, 0.5, 2, 10),
            registry=self.registry,
        )
        self.requests = Counter(
            "kvpool_operator_api_requests_total",
            "Requests to the API server, without watches.",
            ["method", "resource"],
            registry=self.registry,
        )
        self.queue = Gauge(
            "kvpool_operator_queue_length", "Pools that wait for a reconcile.", registry=self.registry
        )
        self.pools = Gauge("kvpool_operator_pools", "KVPools that are known.", registry=self.registry)
        self.leader = Gauge("kvpool_operator_leader", "1 when this replica acts.", registry=self.registry)
        self.last_success = Gauge(
            "kvpool_operator_last_success_timestamp_seconds",
            "When a reconcile last succeeded.",
            registry=self.registry,
        )
        self.watch_age = Gauge(
            "kvpool_operator_watch_check_timestamp_seconds",
            "When all watches were last seen to be alive.",
            registry=self.registry,
        )
        self.injections = Counter(
            "kvpool_operator_injections_total",
            "Pods that the webhook saw, by what became of them.",
            ["result"],
            registry=self.registry,
        )
