"""A pool's past: one row an interval, fine for hours and coarse for a week, kept in memory."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Literal, NamedTuple, Protocol

from kvpool.api import model, times
from kvpool.api.meter import Amount, quantile_s
from kvpool.api.status import Key, PoolStatus

UNKNOWN = math.nan


class Resolution(NamedTuple):
    """Rows of one length, and for how long they are kept; seconds."""

    step_s: int
    keep_s: int


FINE = Resolution(10, 3600)
COARSE = Resolution(900, 7 * 86400)
POINTS_MAX = 2000  # in one answer


@dataclass(slots=True)
class Row:
    """One interval. All are numbers, so that a row is a slice of an array; NaN is unknown."""

    at: float  # Unix time of its beginning in s, a multiple of its length
    lookups: float = 0
    hits: float = 0
    evictions: float = 0
    bytes_loaded: float = UNKNOWN
    bytes_stored: float = UNKNOWN
    used_bytes: float = 0
    capacity_bytes: float = 0
    nodes_ready: float = 0
    load_p50: float = UNKNOWN
    load_p99: float = UNKNOWN
    lookup_p50: float = UNKNOWN
    lookup_p99: float = UNKNOWN

    def values(self) -> list[float]:
        return [getattr(self, name) for name in COLUMNS]


COLUMNS = tuple(f.name for f in fields(Row))
WIDTH = len(COLUMNS)


def row_of(at: float, amount: Amount, status: PoolStatus, *, sees_bytes: bool) -> Row:
    """The row of an interval that has just ended."""

    def known(seconds: float | None) -> float:
        return UNKNOWN if seconds is None else seconds

    return Row(
        at=at,
        lookups=amount.lookups,
        hits=amount.hits,
        evictions=amount.evictions,
        bytes_loaded=amount.bytes_loaded if sees_bytes else UNKNOWN,
        bytes_stored=amount.bytes_stored if sees_bytes else UNKNOWN,
        used_bytes=status.pool.used_bytes,
        capacity_bytes=status.pool.capacity_bytes,
        nodes_ready=status.pool.nodes.ready,
        load_p50=known(quantile_s(amount.load_latency, 0.5)),
        load_p99=known(quantile_s(amount.load_latency, 0.99)),
        lookup_p50=known(quantile_s(amount.lookup_latency, 0.5)),
        lookup_p99=known(quantile_s(amount.lookup_latency, 0.99)),
    )


def joined(at: float, rows: Sequence[Row]) -> Row:
    """Several rows as one: amounts add up, the slowest percentile stands for all, the rest is the last's."""
    last = rows[-1]
    return Row(
        at=at,
        lookups=sum(r.lookups for r in rows),
        hits=sum(r.hits for r in rows),
        evictions=sum(r.evictions for r in rows),
        bytes_loaded=_sum(r.bytes_loaded for r in rows),
        bytes_stored=_sum(r.bytes_stored for r in rows),
        used_bytes=last.used_bytes,
        capacity_bytes=last.capacity_bytes,
        nodes_ready=last.nodes_ready,
        load_p50=_middle([r.load_p50 for r in rows]),
        load_p99=_largest(r.load_p99 for r in rows),
        lookup_p50=_middle([r.lookup_p50 for r in rows]),
        lookup_p99=_largest(r.lookup_p99 for r in rows),
    )


def regrouped(rows: Iterable[Row], step_s: int) -> list[Row]:
    """Rows in order, as rows of `step_s`."""
    found: list[Row] = []
    group: list[Row] = []
    for row in rows:
        if group and group[0].at // step_s != row.at // step_s:
            found.append(joined(group[0].at // step_s * step_s, group))
            group = []
        group.append(row)
    if group:
        found.append(joined(group[0].at // step_s * step_s, group))
    return found


def _known(values: Iterable[float]) -> list[float]:
    return [value for value in values if not math.isnan(value)]


def _sum(values: Iterable[float]) -> float:
    known = _known(values)
    return sum(known) if known else UNKNOWN


def _largest(values: Iterable[float]) -> float:
    return max(_known(values), default=UNKNOWN)


def _middle(values: Iterable[float]) -> float:
    known = sorted(_known(values))
    return known[len(known) // 2] if known else UNKNOWN


def point(row: Row) -> model.HistoryPoint:
    """A row as the API says it."""

    def number(value: float) -> float | None:
        return None if math.isnan(value) else value

    def count(value: float) -> int | None:
        return None if math.isnan(value) else int(value)

    return model.HistoryPoint(
        at=times.text(row.at),
        hit_rate=model.percent(int(row.hits), int(row.lookups)),
        lookups=int(row.lookups),
        hits=int(row.hits),
        evictions=int(row.evictions),
        bytes_loaded=count(row.bytes_loaded),
        bytes_stored=count(row.bytes_stored),
        used_bytes=int(row.used_bytes),
        capacity_bytes=int(row.capacity_bytes),
        nodes_ready=int(row.nodes_ready),
        load_p50_seconds=number(row.load_p50),
        load_p99_seconds=number(row.load_p99),
        lookup_p50_seconds=number(row.lookup_p50),
        lookup_p99_seconds=number(row.lookup_p99),
    )


def resolution_for(window_s: int, step_s: int) -> tuple[Resolution, int]:
    """Which rows answer a question, and the step that is answered with: a multiple of their length.

    It is longer than asked for when only coarse rows reach back so far, or when the answer grew too long.
    """
    kept = FINE if window_s <= FINE.keep_s else COARSE
    wanted = max(step_s, math.ceil(window_s / POINTS_MAX), kept.step_s)
    return kept, math.ceil(wanted / kept.step_s) * kept.step_s


class History(Protocol):
    """Where rows are kept. `append` gets the fine rows of all pools that end at the same time."""

    @property
    def store(self) -> Literal["memory", "redis"]: ...
    @property
    def notice(self) -> str: ...
    async def append(self, rows: Sequence[tuple[Key, Row]]) -> None: ...
    async def rows(self, key: Key, kept: Resolution, since: float) -> list[Row]: ...
    async def forget(self, key: Key) -> None: ...
    async def close(self) -> None: ...


class _Ring:
    """The latest rows of one length."""

    __slots__ = ("_limit", "_values")

    def __init__(self, kept: Resolution) -> None:
        self._limit = kept.keep_s // kept.step_s
        self._values = array("d")

    def add(self, row: Row) -> None:
        self._values.extend(row.values())
        surplus = len(self._values) // WIDTH - self._limit
        if surplus > self._limit // 8:  # seldom: it moves all that stays
            del self._values[: surplus * WIDTH]

    def since(self, at: float) -> list[Row]:
        values = self._values
        first = len(values)
        while first and values[first - WIDTH] >= at and (len(values) - first) // WIDTH < self._limit:
            first -= WIDTH
        return [Row(*values[i : i + WIDTH]) for i in range(first, len(values), WIDTH)]


class _Past:
    """The rows of one pool."""

    __slots__ = ("coarse", "fine", "open_rows")

    def __init__(self) -> None:
        self.fine, self.coarse = _Ring(FINE), _Ring(COARSE)
        self.open_rows: list[Row] = []  # fine rows of the coarse row that has not ended

    def add(self, row: Row) -> None:
        self.fine.add(row)
        if self.open_rows and self.open_rows[0].at // COARSE.step_s != row.at // COARSE.step_s:
            self.coarse.add(self._open())
            self.open_rows = []
        self.open_rows.append(row)

    def _open(self) -> Row:
        return joined(self.open_rows[0].at // COARSE.step_s * COARSE.step_s, self.open_rows)

    def since(self, kept: Resolution, at: float) -> list[Row]:
        if kept == FINE:
            return self.fine.since(at)
        return self.coarse.since(at) + ([self._open()] if self.open_rows else [])


class MemoryHistory:
    """Rows in this process, gone when it ends: 40 KiB a pool after an hour, 120 KiB after a week."""

    store: Literal["memory", "redis"] = "memory"
    notice = ""

    def __init__(self) -> None:
        self._pasts: dict[Key, _Past] = {}

    async def append(self, rows: Sequence[tuple[Key, Row]]) -> None:
        for key, row in rows:
            self._pasts.setdefault(key, _Past()).add(row)

    async def rows(self, key: Key, kept: Resolution, since: float) -> list[Row]:
        past = self._pasts.get(key)
        return past.since(kept, since) if past else []

    async def forget(self, key: Key) -> None:
        self._pasts.pop(key, None)

    async def close(self) -> None:
        self._pasts.clear()
