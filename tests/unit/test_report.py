"""Counters and reports: sums are sums, rates are computed once."""

from __future__ import annotations

from kvpool.report import Counters, FsckReport


def test_counters_sum_field_by_field_maps_and_histograms_included() -> None:
    a = Counters(lookups=4, hits=3, misses={"evicted": 1}, load_latency=[1, 2], stored=5, evictions=1)
    b = Counters(
        lookups=2, misses={"evicted": 1, "never-stored": 1}, load_latency=[1, 1, 7], declined={"no-space": 2}
    )
    total = a + b
    assert (total.lookups, total.hits, total.stored, total.evictions) == (6, 3, 5, 1)
    assert total.misses == {"evicted": 2, "never-stored": 1}
    assert total.declined == {"no-space": 2}
    assert total.load_latency == [2, 3, 7]
    assert total.lookups == total.hits + sum(total.misses.values())
    assert a.load_latency == [1, 2], "the summands stay as they are"
    assert b + a == total


def test_counters_plus_nothing_is_the_same() -> None:
    a = Counters(lookups=1, hits=1, misses={}, lookup_latency=[0, 1], store_latency=[3])
    assert a + Counters() == a


def test_hit_rate_before_the_first_lookup_is_zero() -> None:
    assert Counters().hit_rate == 0.0
    assert Counters(lookups=4, hits=1).hit_rate == 0.25


def test_fsck_report_is_ok_without_problems_only() -> None:
    assert FsckReport([], {}).ok
    assert not FsckReport(["a slot"], {}).ok
