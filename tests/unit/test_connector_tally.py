"""The connector's numbers add up, over threads and over processes."""

from __future__ import annotations

import json
import threading

from kvpool_connector import tally


def test_nothing_happened_is_nothing() -> None:
    assert tally.Tally().take() is None
    assert tally.is_empty(tally.empty())


def test_take_starts_again() -> None:
    t = tally.Tally()
    t.count("hit_blocks", 3)
    t.count_reason("missed_blocks", "evicted", 2)
    t.count_reason("missed_blocks", "evicted", 0)
    t.took("load_seconds", 0.5)
    data = t.take()
    assert data is not None
    assert (data["hit_blocks"], data["missed_blocks"], data["load_seconds"]) == (3, {"evicted": 2}, [0.5])
    assert json.loads(json.dumps(data)) == data
    assert t.take() is None


def test_add_sums_every_kind() -> None:
    a = tally.add(
        tally.empty(), {"stored_blocks": 1, "declined_blocks": {"quota": 1}, "store_seconds": [1.0]}
    )
    b = {"stored_blocks": 2, "declined_blocks": {"quota": 2, "fenced": 1}, "store_seconds": [2.0]}
    assert tally.add(a, b)["stored_blocks"] == 3
    assert a["declined_blocks"] == {"quota": 3, "fenced": 1}
    assert a["store_seconds"] == [1.0, 2.0]


def test_durations_that_nobody_collects_are_bounded() -> None:
    t = tally.Tally()
    for i in range(3 * tally.DURATIONS_MAX):
        t.took("lookup_seconds", float(i))
    data = t.take()
    assert data is not None
    assert len(data["lookup_seconds"]) == tally.DURATIONS_MAX
    assert data["lookup_seconds"][-1] == 3 * tally.DURATIONS_MAX - 1


def test_counts_of_many_threads_are_all_there() -> None:
    t = tally.Tally()
    threads = [
        threading.Thread(target=lambda: [t.count("hit_blocks", 1) for _ in range(1000)]) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    data = t.take()
    assert data is not None
    assert data["hit_blocks"] == 8000
