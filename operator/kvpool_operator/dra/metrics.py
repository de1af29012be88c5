"""The driver's own metrics."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

RESULTS = ("done", "refused", "failed")


class Metrics:
    """Counters of one driver process, in a registry of their own.

    `claims`: how many it has a record of now.
    """

    def __init__(self, claims: Callable[[], float]) -> None:
        self.registry = CollectorRegistry()
        self.prepares = Counter(
            "kvpool_dra_prepares_total",
            "Calls of the kubelet to prepare a claim: done, refused (the claim has to change), failed (it is "
            "tried again).",
            ["result"],
            registry=self.registry,
        )
        self.unprepares = Counter(
            "kvpool_dra_unprepares_total",
            "Calls of the kubelet to take a claim back, by how they ended.",
            ["result"],
            registry=self.registry,
        )
        self.duration = Histogram(
            "kvpool_dra_prepare_duration_seconds",
            "Time of one prepare, with composing its region.",
            buckets=(0.01, 0.05, 0.25, 1, 5, 20, 45),
            registry=self.registry,
        )
        prepared = Gauge(
            "kvpool_dra_prepared_claims", "Claims that this node has a record of.", registry=self.registry
        )
        prepared.set_function(claims)
        for counter in (self.prepares, self.unprepares):
            for result in RESULTS:
                counter.labels(result)  # a rate needs the zero before the first
