"""What a connector did since it was last asked, as numbers that travel between processes and add up."""

from __future__ import annotations

from collections.abc import Mapping
from threading import Lock
from typing import Any

# Every counter, with what it counts. Maps count by reason; lists hold one duration a call, for histograms.
COUNTERS: Mapping[str, str] = {
    "requested_blocks": "Full prompt blocks that were asked of the pool, each once a request and rank",
    "hit_blocks": "Blocks that were loaded and verified",
    "stored_blocks": "Blocks that were written to the pool",
    "present_blocks": "Blocks that were not written because the pool had them",
    "failed_blocks": "Blocks that were promised and then failed to load; the engine recomputed them",
    "loaded_bytes": "Bytes that were loaded",
    "stored_bytes": "Bytes that were stored",
}
REASON_COUNTERS: Mapping[str, str] = {
    "missed_blocks": "Blocks that the pool did not serve, by reason",
    "declined_blocks": "Blocks that the pool did not take, by reason",
}
DURATIONS: Mapping[str, str] = {
    "load_seconds": "Duration of one load call",
    "store_seconds": "Duration of one store call",
    "lookup_seconds": "Duration of one lookup call on the scheduler's side",
}
# A step makes a handful of calls; what nobody collects must not grow without bound.
DURATIONS_MAX = 1024

Data = dict[str, Any]


def empty() -> Data:
    data: Data = dict.fromkeys(COUNTERS, 0)
    data.update({name: {} for name in REASON_COUNTERS})
    data.update({name: [] for name in DURATIONS})
    return data


def is_empty(data: Mapping[str, Any]) -> bool:
    return not any(data.values())


def add(into: Data, other: Mapping[str, Any]) -> Data:
    """Add `other` to `into`, which is returned."""
    for name in COUNTERS:
        into[name] += other.get(name, 0)
    for name in REASON_COUNTERS:
        mine: dict[str, int] = into[name]
        for reason, count in other.get(name, {}).items():
            mine[reason] = mine.get(reason, 0) + count
    for name in DURATIONS:
        into[name] = (into[name] + list(other.get(name, ())))[-DURATIONS_MAX:]
    return into


class Tally:
    """Counts from several threads; `take` hands the numbers over and starts again."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._data = empty()

    def count(self, name: str, amount: int) -> None:
        with self._lock:
            self._data[name] += amount

    def count_reason(self, name: str, reason: str, amount: int) -> None:
        if amount:
            with self._lock:
                counts: dict[str, int] = self._data[name]
                counts[reason] = counts.get(reason, 0) + amount

    def took(self, name: str, seconds: float) -> None:
        with self._lock:
            self._data[name].append(seconds)
            del self._data[name][:-DURATIONS_MAX]

    def take(self) -> Data | None:
        """The numbers since the last call; None when nothing happened."""
        with self._lock:
            if is_empty(self._data):
                return None
            data, self._data = self._data, empty()
            return data
