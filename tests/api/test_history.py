"""Counters into amounts, amounts into rows, rows into points: nothing negative, nothing above 100 %."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.conftest import Ask
from api.statuses import NOW, Clock, StillSource, counters, pool
from kvpool.api.history import (
    COARSE,
    FINE,
    POINTS_MAX,
    MemoryHistory,
    Row,
    point,
    regrouped,
    resolution_for,
)
from kvpool.api.meter import Amount, Meter, quantile_s
from kvpool.api.recorder import Recorder
from kvpool.api.status import Key
from kvpool.report import Counters

KEY = Key("team", "p")


def test_meter_first_look_at_a_series_counts_nothing() -> None:
    assert Meter().step({"a": counters(1000, 900)}) == Amount()


def test_meter_growth_of_all_series_is_added() -> None:
    meter = Meter()
    meter.step({"a": counters(10, 5), "b": counters(100, 50)})
    amount = meter.step({"a": counters(20, 9), "b": counters(103, 51)})
    assert (amount.lookups, amount.hits) == (13, 5)


@pytest.mark.parametrize("now", [counters(3, 2), counters(10, 4), Counters(lookups=12, hits=6, evictions=0)])
def test_meter_series_that_goes_backwards_is_left_out_then_goes_on(now: Counters) -> None:
    meter = Meter()
    meter.step({"a": Counters(lookups=10, hits=5, evictions=7)})
    assert meter.step({"a": now}) == Amount()
    later = Counters(lookups=now.lookups + 4, hits=now.hits + 3, evictions=now.evictions)
    assert (meter.step({"a": later}).lookups, meter.step({"a": later}).lookups) == (4, 0)


def test_meter_series_that_comes_back_begins_anew() -> None:
    meter = Meter()
    meter.step({"a": counters(10, 5)})
    meter.step({})
    assert meter.step({"a": counters(10_000, 5000)}) == Amount()


wild = st.integers(-(2**70), 2**70) | st.integers(0, 100)
wild_counters = st.builds(
    Counters,
    lookups=wild,
    hits=wild,
    evictions=wild,
    bytes_loaded=wild,
    load_latency=st.lists(st.integers(0, 2**64), max_size=40),
)


@given(st.lists(st.dictionaries(st.sampled_from("abc"), wild_counters), max_size=8))
def test_meter_whatever_the_counters_do_the_rate_is_between_0_and_100(
    looks: list[dict[str, Counters]],
) -> None:
    meter = Meter()
    for series in looks:
        amount = meter.step(series)
        assert 0 <= amount.hits <= amount.lookups
        assert min(amount.evictions, amount.bytes_loaded, amount.stored) >= 0
        assert all(n >= 0 for n in amount.load_latency)
        row = Row(NOW, lookups=amount.lookups, hits=amount.hits)
        rate = point(row).hit_rate
        assert rate is None or 0.0 <= rate <= 100.0


def test_quantile_is_the_end_of_the_bucket() -> None:
    assert quantile_s((), 0.5) is None
    assert quantile_s((0, 0), 0.99) is None
    assert quantile_s((0,) * 10 + (99, 1), 0.5) == 2**11 / 1e9
    assert quantile_s((0,) * 10 + (90, 10), 0.99) == 2**12 / 1e9


def test_regrouped_amounts_add_up_and_gauges_are_the_last() -> None:
    rows = [Row(NOW + 10 * i, lookups=10, hits=i, used_bytes=i, load_p99=float(i)) for i in range(6)]
    (joined,) = regrouped(rows, 60)
    assert (joined.at, joined.lookups, joined.hits, joined.used_bytes, joined.load_p99) == (
        NOW,
        60,
        15,
        5,
        5.0,
    )
    assert math.isnan(joined.bytes_loaded)
    assert point(joined).bytes_loaded is None


@given(st.integers(1, COARSE.keep_s), st.integers(1, COARSE.keep_s))
def test_resolution_answers_are_bounded_and_reach_back(window_s: int, step_s: int) -> None:
    kept, step = resolution_for(window_s, step_s)
    assert window_s <= kept.keep_s
    assert step % kept.step_s == 0
    assert window_s / step <= POINTS_MAX


def test_memory_keeps_an_hour_fine_and_the_week_coarse() -> None:
    async def run() -> None:
        history = MemoryHistory()
        for i in range(2 * 3600 // 10):
            await history.append([(KEY, Row(NOW + 10 * i, lookups=1, hits=1))])
        fine = await history.rows(KEY, FINE, 0)
        assert len(fine) == FINE.keep_s // FINE.step_s
        assert fine[-1].at == NOW + 2 * 3600 - 10
        coarse = await history.rows(KEY, COARSE, 0)
        assert sum(row.lookups for row in coarse) == 720
        assert [row.at % COARSE.step_s for row in coarse] == [0.0] * len(coarse)
        assert await history.rows(Key("other", "p"), FINE, 0) == []
        await history.forget(KEY)
        assert await history.rows(KEY, FINE, 0) == []

    asyncio.run(run())


def test_recorder_writes_a_row_an_interval_and_a_gap_when_news_is_old(clock: Clock) -> None:
    async def run() -> list[Row]:
        source, history = StillSource(pool()), MemoryHistory()
        recorder = Recorder(source.board, history, clock)
        await recorder.step()  # measured for the first time: no row
        for lookups, hits in ((150, 120), (150, 120), (10, 9), (30, 20)):
            clock.now += 10
            source.board.put(pool(lookups=lookups, hits=hits, observed_at=clock.now))
            await recorder.step()
        clock.now += 100  # nothing came for longer than the status may be old
        await recorder.step()
        return await history.rows(KEY, FINE, 0)

    rows = asyncio.run(run())
    assert [(row.at - NOW, row.lookups, row.hits) for row in rows] == [
        (0, 50, 40),
        (10, 0, 0),
        (20, 0, 0),
        (30, 20, 11),
    ]
    assert point(rows[1]).hit_rate is None


def test_recorder_pool_that_is_gone_for_long_is_forgotten(clock: Clock) -> None:
    async def run() -> Any:
        source, history = StillSource(pool()), MemoryHistory()
        recorder = Recorder(source.board, history, clock)
        for _ in range(2):
            await recorder.step()
            clock.now += 10
        source.board.remove(KEY)
        await recorder.step()
        kept = len(await history.rows(KEY, FINE, 0))
        clock.now += 1000
        await recorder.step()
        return kept, len(await history.rows(KEY, FINE, 0))

    assert asyncio.run(run()) == (1, 0)


def test_history_route_answers_points_with_window_and_step(serve: Ask, clock: Clock) -> None:
    history = MemoryHistory()
    rows = [(KEY, Row(NOW - 600 + 10 * i, lookups=10, hits=5)) for i in range(60)]
    asyncio.run(history.append(rows[:1]))
    for row in rows[1:]:
        asyncio.run(history.append([row]))
    client = serve(StillSource(pool()), history=history)
    answer = client.get("/v1/pools/team/p/history", params={"window": "5m", "step": "1m"}).json()
    assert (answer["windowSeconds"], answer["stepSeconds"], answer["store"]) == (300, 60, "memory")
    assert [(p["lookups"], p["hitRate"]) for p in answer["points"]] == [(60, 50.0)] * 5
    long = client.get("/v1/pools/team/p/history", params={"window": "30d", "step": "1s"}).json()
    assert (long["windowSeconds"], long["stepSeconds"]) == (7 * 86400, 900)
