"""From counters that only grow, most of the time, to amounts of an interval that always make sense."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvpool.report import Counters

_GROWING = ("lookups", "hits", "evictions", "bytes_loaded", "bytes_stored", "stored")


@dataclass(frozen=True, slots=True)
class Amount:
    """What happened in an interval. Never negative, and hits never exceed lookups."""

    lookups: int = 0
    hits: int = 0
    evictions: int = 0
    bytes_loaded: int = 0
    bytes_stored: int = 0
    stored: int = 0
    load_latency: tuple[int, ...] = ()  # calls by duration, as in kvpool.report.Counters
    lookup_latency: tuple[int, ...] = ()


@dataclass
class Meter:
    """Turns the counters of a pool's series into amounts.

    A series is what counts by itself: a region, or a node. One that is new begins at its first value. One
    whose counters went backwards (it was made anew, it wrapped, or an old report came late) has begun again:
    what it counted in this interval is unknown, and left out rather than guessed.
    """

    _last: dict[str, Counters] = field(default_factory=dict)

    def step(self, series: Mapping[str, Counters]) -> Amount:
        """What happened since the last step."""
        sums = dict.fromkeys(_GROWING, 0)
        loads: list[int] = []
        looks: list[int] = []
        for name, now in series.items():
            before = self._last.get(name)
            if before is None or not _grew(before, now):
                continue
            amounts = {field_: getattr(now, field_) - getattr(before, field_) for field_ in _GROWING}
            # The two are read one after the other, while engines count.
            amounts["hits"] = min(amounts["hits"], amounts["lookups"])
            for field_, amount in amounts.items():
                sums[field_] += amount
            loads = _added(loads, _minus(now.load_latency, before.load_latency))
            looks = _added(looks, _minus(now.lookup_latency, before.lookup_latency))
        self._last = dict(series)
        return Amount(**sums, load_latency=tuple(loads), lookup_latency=tuple(looks))


def _grew(before: Counters, now: Counters) -> bool:
    return all(getattr(now, name) >= getattr(before, name) for name in _GROWING)


def _minus(now: list[int], before: list[int]) -> list[int]:
    return [max(0, n - (before[i] if i < len(before) else 0)) for i, n in enumerate(now)]


def _added(a: list[int], b: list[int]) -> list[int]:
    if not a or not b:
        return a or b
    longer, shorter = (a, b) if len(a) >= len(b) else (b, a)
    return [n + (shorter[i] if i < len(shorter) else 0) for i, n in enumerate(longer)]


def quantile_s(latency: tuple[int, ...], share: float) -> float | None:
    """The duration below which `share` of the calls stay, in seconds: the upper end of its bucket.

    None without a call. A bucket reaches to the double of its beginning, so this is at most twice too long.
    """
    total = sum(latency)
    if not total:
        return None
    seen = 0
    for i, count in enumerate(latency):
        seen += count
        if seen >= share * total:
            return 2.0 ** (i + 1) / 1e9
    return None
