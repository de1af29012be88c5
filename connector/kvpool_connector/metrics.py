"""The connector's numbers in vLLM's own log lines and Prometheus metrics."""

from __future__ import annotations

from typing import Any

from prometheus_client import Counter, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from . import tally

# vLLM's own names begin so, which is also how it finds its metrics to take them back.
PREFIX = "vllm:kvpool_"
SECONDS_BUCKETS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)


class KVPoolStats(KVConnectorStats):  # type: ignore[misc]
    """One interval of a connector, or the sum of several; `data` is as in `tally`."""

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        super().__init__(data=tally.add(tally.empty(), data or {}))

    def reset(self) -> None:
        self.data = tally.empty()

    def aggregate(self, other: KVConnectorStats) -> KVPoolStats:
        tally.add(self.data, other.data)
        return self

    def is_empty(self) -> bool:
        return tally.is_empty(self.data)

    def reduce(self) -> dict[str, int | float]:
        """What the log line says about the interval."""
        data = self.data
        summary: dict[str, int | float] = {name: data[name] for name in tally.COUNTERS if data[name]}
        for name in tally.REASON_COUNTERS:
            summary.update({f"{name}[{reason}]": count for reason, count in sorted(data[name].items())})
        for name in tally.DURATIONS:
            if data[name]:
                summary[name] = round(sum(data[name]), 6)
        if data["requested_blocks"]:
            missed = sum(data["missed_blocks"].values())
            summary["hit_rate"] = round(1 - missed / max(missed, data["requested_blocks"]), 4)
        return summary


class KVPoolPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """Registers the metrics once in a process, and adds each interval to them."""

    def __init__(self, config: Any, metric_types: Any, label_names: list[str], engine_labels: Any) -> None:
        super().__init__(config, metric_types, label_names, engine_labels)
        counter, histogram = metric_types[Counter], metric_types[Histogram]
        self._labels: dict[int, list[object]] = engine_labels
        self._counters = {
            name: counter(name=PREFIX + name, documentation=text, labelnames=label_names)
            for name, text in tally.COUNTERS.items()
        }
        self._reasons = {
            name: counter(name=PREFIX + name, documentation=text, labelnames=[*label_names, "reason"])
            for name, text in tally.REASON_COUNTERS.items()
        }
        self._durations = {
            name: histogram(
                name=PREFIX + name, documentation=text, labelnames=label_names, buckets=SECONDS_BUCKETS
            )
            for name, text in tally.DURATIONS.items()
        }
        # So that a rate can be taken from the first moment on.
        for labels in engine_labels.values():
            for metric in self._counters.values():
                metric.labels(*labels)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self._labels[engine_idx]
        for name, metric in self._counters.items():
            metric.labels(*labels).inc(transfer_stats_data.get(name, 0))
        for name, metric in self._reasons.items():
            for reason, count in transfer_stats_data.get(name, {}).items():
                metric.labels(*labels, reason).inc(count)
        for name, metric in self._durations.items():
            for seconds in transfer_stats_data.get(name, ()):
                metric.labels(*labels).observe(seconds)
