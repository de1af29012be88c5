"""What is planned to be loaded and stored, and what happens when loads fail. The pool is a dict."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from dataclasses import replace

import pytest

from kvpool import KeyBatch, LookupResult, MissReason, Namespace, PrefillCurve
from kvpool_connector.guard import GuardedPool
from kvpool_connector.plan import StepPlan, Transfer, Work
from kvpool_connector.prefill import NoStopwatch
from kvpool_connector.session import LOOKUP_TTL_S, SchedulerSession, WorkerSession

BLOCK = 16  # tokens
NAMESPACE = Namespace("m", "w", "float32", "LBHNC", BLOCK, 4096, "sha256")


def hashes(count: int, salt: str = "") -> list[bytes]:
    return [hashlib.sha256(f"{salt}{i}".encode()).digest() for i in range(count)]


class DictPool:
    """The part of a pool that the sessions use; `blocks` maps a key to anything."""

    def __init__(self) -> None:
        self.blocks: dict[bytes, bytes] = {}
        self.damaged: set[bytes] = set()
        self.recorded: dict[MissReason, int] = {}
        self.recorded_of: dict[int, dict[MissReason, int]] = {}
        self.saved: list[tuple[float, int]] = []
        self.curve = PrefillCurve()
        self.lookup_count = 0
        self.broken = False

    def keys(self, keys: KeyBatch) -> list[bytes]:
        if self.broken:
            raise OSError("the medium is gone")
        return [keys.packed[i : i + 32] for i in range(0, len(keys.packed), 32)]

    def lookup(self, keys: KeyBatch) -> LookupResult:
        self.lookup_count += 1
        return LookupResult(bytes(0 if key in self.blocks else 2 for key in self.keys(keys)))

    def record_misses(self, reason: MissReason, count: int, namespace: Namespace) -> None:
        self.recorded[reason] = self.recorded.get(reason, 0) + count
        by_rank = self.recorded_of.setdefault(namespace.tp_rank, {})
        by_rank[reason] = by_rank.get(reason, 0) + count

    def record_saved(self, namespace: Namespace, seconds: float, blocks: int) -> None:
        self.saved.append((seconds, blocks))

    def record_curve(self, curve: PrefillCurve) -> None:
        self.curve = curve

    def put(self, namespace: Namespace, block_hashes: Sequence[bytes]) -> None:
        for key in self.keys(KeyBatch.from_hashes(namespace, b"".join(block_hashes))):
            self.blocks[key] = b""


class DictCache:
    """A paged cache that remembers which blocks were moved."""

    block_bytes = 4096

    def __init__(self) -> None:
        self.loaded: list[int] = []
        self.stored: list[int] = []
        self.may_load = threading.Event()
        self.may_load.set()

    def load(self, pool: DictPool, keys: KeyBatch, block_ids: Sequence[int]) -> bytes:
        assert self.may_load.wait(10)
        self.loaded += block_ids
        return bytes(
            2 if key not in pool.blocks else 7 if key in pool.damaged else 0 for key in pool.keys(keys)
        )

    def store(self, pool: DictPool, keys: KeyBatch, block_ids: Sequence[int]) -> bytes:
        self.stored += block_ids
        codes = bytearray()
        for key in pool.keys(keys):
            codes.append(1 if key in pool.blocks else 0)
            pool.blocks[key] = b""
        return bytes(codes)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def pool() -> DictPool:
    return DictPool()


def scheduler(pool: DictPool, **options: object) -> SchedulerSession:
    namespaces = options.pop("namespaces", [NAMESPACE])
    return SchedulerSession(GuardedPool(pool), namespaces, block_tokens=BLOCK, **options)  # type: ignore[arg-type]


def worker(pool: DictPool, cache: DictCache, **options: object) -> WorkerSession:
    return WorkerSession(GuardedPool(pool), NAMESPACE, cache, **options)  # type: ignore[arg-type]


# ---- what the pool can give ----


def test_match_counts_leading_blocks_only(pool: DictPool) -> None:
    h = hashes(6)
    pool.put(NAMESPACE, [h[0], h[1], h[3]])
    s = scheduler(pool)
    s.open_request("r", h, 6 * BLOCK + 1)
    assert s.match("r", 0, 6 * BLOCK + 1) == 2 * BLOCK


def test_match_of_a_whole_prompt_leaves_one_token_to_compute(pool: DictPool) -> None:
    h = hashes(4)
    pool.put(NAMESPACE, h)
    s = scheduler(pool)
    s.open_request("r", h, 4 * BLOCK)
    assert s.match("r", 0, 4 * BLOCK) == 3 * BLOCK
    s.open_request("longer", h, 4 * BLOCK + 1)
    assert s.match("longer", 0, 4 * BLOCK + 1) == 4 * BLOCK


def test_match_starts_behind_what_is_computed(pool: DictPool) -> None:
    h = hashes(5)
    pool.put(NAMESPACE, h[2:4])
    s = scheduler(pool)
    s.open_request("r", h, 5 * BLOCK + 1)
    assert s.match("r", 0, 5 * BLOCK + 1) == 0
    assert s.match("r", 2 * BLOCK, 5 * BLOCK + 1) == 2 * BLOCK


def test_match_in_the_middle_of_a_block_gives_nothing(pool: DictPool) -> None:
    h = hashes(5)
    pool.put(NAMESPACE, h)
    s = scheduler(pool)
    s.open_request("r", h, 5 * BLOCK + 1)
    assert s.match("r", BLOCK + 3, 5 * BLOCK + 1) == 0


def test_match_needs_the_block_of_every_rank(pool: DictPool) -> None:
    ranks = [replace(NAMESPACE, tp_rank=rank, tp_size=2) for rank in range(2)]
    h = hashes(4)
    pool.put(ranks[0], h)
    pool.put(ranks[1], h[:2])
    s = scheduler(pool, namespaces=ranks)
    s.open_request("r", h, 4 * BLOCK + 1)
    assert s.match("r", 0, 4 * BLOCK + 1) == 2 * BLOCK


def test_match_asks_the_pool_once_until_the_answer_is_old(pool: DictPool) -> None:
    clock = Clock()
    h = hashes(3)
    s = scheduler(pool, clock=clock)
    s.open_request("r", h, 3 * BLOCK + 1)
    for _ in range(100):
        assert s.match("r", 0, 3 * BLOCK + 1) == 0
    assert pool.lookup_count == 1
    pool.put(NAMESPACE, h)
    clock.now += LOOKUP_TTL_S
    assert s.match("r", 0, 3 * BLOCK + 1) == 3 * BLOCK
    assert pool.lookup_count == 2
    assert pool.recorded == {}  # asking has no side effects


def test_match_of_a_broken_pool_is_nothing(pool: DictPool) -> None:
    s = scheduler(pool)
    s.open_request("r", hashes(3), 3 * BLOCK + 1)
    pool.broken = True
    assert s.match("r", 0, 3 * BLOCK + 1) == 0
    s.admit("r", (), 0)
    data = s.tally.take()
    assert data is not None
    assert data["missed_blocks"] == {"tier-error": 3}


def test_match_below_the_minimum_is_declined_and_counted(pool: DictPool) -> None:
    h = hashes(4)
    pool.put(NAMESPACE, h[:2])
    s = scheduler(pool, min_tokens=2 * BLOCK + 1)
    s.open_request("r", h, 4 * BLOCK + 1)
    assert s.match("r", 0, 4 * BLOCK + 1) == 0
    s.admit("r", (), 0)
    assert pool.recorded == {MissReason.BELOW_MINIMUM: 2, MissReason.NEVER_STORED: 2}


def test_match_of_a_request_nobody_opened_is_nothing(pool: DictPool) -> None:
    assert scheduler(pool).match("stranger", 0, 100) == 0


def test_stopped_session_neither_loads_nor_stores(pool: DictPool) -> None:
    h = hashes(3)
    pool.put(NAMESPACE, h)
    s = scheduler(pool)
    s.open_request("r", h, 3 * BLOCK + 1)
    s.stop()
    assert s.match("r", 0, 3 * BLOCK + 1) == 0
    s.scheduled("r", [1, 2, 3, 4], replace=True, computed_tokens=0, step_tokens=3 * BLOCK + 1)
    assert s.take_plan() == StepPlan()


# ---- what is loaded, and where to ----


def test_admit_places_external_blocks_behind_the_computed_ones(pool: DictPool) -> None:
    h = hashes(5)
    pool.put(NAMESPACE, h[1:4])
    s = scheduler(pool)
    s.open_request("r", h, 5 * BLOCK + 1)
    assert s.match("r", BLOCK, 5 * BLOCK + 1) == 3 * BLOCK
    s.admit("r", [70, 71, 72, 73, 74, 75], 3 * BLOCK)
    (load,) = s.take_plan().loads
    assert load.block_ids == [71, 72, 73]
    assert load.hashes == b"".join(h[1:4])


def test_admit_of_fewer_tokens_than_offered_takes_the_first_of_them(pool: DictPool) -> None:
    h = hashes(4)
    pool.put(NAMESPACE, h)
    s = scheduler(pool)
    s.open_request("r", h, 4 * BLOCK + 1)
    s.match("r", 0, 4 * BLOCK + 1)
    s.admit("r", [9, 8, 7, 6, 5], 2 * BLOCK)
    (load,) = s.take_plan().loads
    assert load.block_ids == [9, 8]


def test_admit_of_what_was_never_offered_fails_all_blocks(pool: DictPool) -> None:
    s = scheduler(pool)
    s.open_request("r", hashes(4), 4 * BLOCK + 1)
    s.admit("r", [9, 8, 7], 2 * BLOCK)
    w = worker(pool, DictCache())
    w.start_loads(s.take_plan())
    assert w.take_failed() == {9, 8, 7}


def test_misses_are_counted_once_a_request(pool: DictPool) -> None:
    h = hashes(5)
    pool.put(NAMESPACE, h[:2])
    s = scheduler(pool)
    s.open_request("r", h, 5 * BLOCK + 1)
    s.match("r", 0, 5 * BLOCK + 1)
    s.admit("r", list(range(6)), 2 * BLOCK)
    s.admit("r", list(range(6)), 0)  # the second call, after a load in the background
    s.match("r", 0, 5 * BLOCK + 1)
    s.admit("r", list(range(6)), 2 * BLOCK)  # again after a preemption
    assert pool.recorded == {MissReason.NEVER_STORED: 3}


# ---- what is stored ----


def stored(plan: StepPlan) -> list[int]:
    return [block_id for transfer in plan.stores for block_id in transfer.block_ids]


def test_blocks_are_stored_in_the_step_that_fills_them(pool: DictPool) -> None:
    s = scheduler(pool)
    h = hashes(4)
    s.open_request("r", h, 4 * BLOCK + 3)
    s.scheduled("r", [10, 11, 12], replace=True, computed_tokens=0, step_tokens=2 * BLOCK + 5)
    plan = s.take_plan()
    assert stored(plan) == [10, 11]
    assert plan.stores[0].hashes == b"".join(h[:2])
    s.scheduled("r", [13, 14], replace=False, computed_tokens=2 * BLOCK + 5, step_tokens=2 * BLOCK - 2)
    assert stored(s.take_plan()) == [12, 13]
    s.scheduled("r", [], replace=False, computed_tokens=4 * BLOCK + 3, step_tokens=1)
    assert stored(s.take_plan()) == []


def test_blocks_from_the_pool_or_the_own_cache_are_not_stored_again(pool: DictPool) -> None:
    h = hashes(4)
    pool.put(NAMESPACE, h[1:3])
    s = scheduler(pool)
    s.open_request("r", h, 4 * BLOCK + 1)
    s.match("r", BLOCK, 4 * BLOCK + 1)
    s.admit("r", [1, 2, 3, 4, 5], 2 * BLOCK)
    s.scheduled("r", [1, 2, 3, 4, 5], replace=True, computed_tokens=3 * BLOCK, step_tokens=BLOCK + 1)
    assert stored(s.take_plan()) == [4]


@pytest.mark.parametrize(("all_tokens", "expected"), [(False, [1]), (True, [1, 2])])
def test_blocks_with_generated_tokens_are_stored_when_asked_for(
    pool: DictPool, all_tokens: bool, expected: list[int]
) -> None:
    s = scheduler(pool, store_generated=all_tokens)
    s.open_request("r", hashes(2), BLOCK + 4)
    s.scheduled("r", [1, 2], replace=True, computed_tokens=0, step_tokens=2 * BLOCK)
    assert stored(s.take_plan()) == expected


def test_blocks_without_a_hash_yet_are_stored_later(pool: DictPool) -> None:
    s = scheduler(pool, store_generated=True)
    known = hashes(1)
    s.open_request("r", known, BLOCK)
    s.scheduled("r", [1, 2], replace=True, computed_tokens=0, step_tokens=2 * BLOCK)
    assert stored(s.take_plan()) == [1]
    known += hashes(2)[1:]
    s.scheduled("r", [], replace=False, computed_tokens=2 * BLOCK, step_tokens=1)
    assert stored(s.take_plan()) == [2]


def test_resumed_request_has_a_new_table(pool: DictPool) -> None:
    s = scheduler(pool)
    s.open_request("r", hashes(4), 4 * BLOCK + 1)
    s.scheduled("r", [1, 2, 3, 4], replace=True, computed_tokens=0, step_tokens=3 * BLOCK)
    s.take_plan()
    s.scheduled("r", [21, 22, 23, 24, 25], replace=True, computed_tokens=2 * BLOCK, step_tokens=2 * BLOCK + 1)
    assert stored(s.take_plan()) == [23, 24]


def test_closed_request_is_forgotten(pool: DictPool) -> None:
    s = scheduler(pool)
    s.open_request("r", hashes(2), 2 * BLOCK)
    s.close_request("r")
    s.close_request("r")
    s.scheduled("r", [1, 2], replace=True, computed_tokens=0, step_tokens=2 * BLOCK)
    assert stored(s.take_plan()) == []
    assert s.request_count == 0


# ---- loads that fail ----


def test_damaged_block_is_a_failed_block(pool: DictPool) -> None:
    h = hashes(4)
    pool.put(NAMESPACE, h)
    pool.damaged = set(pool.keys(KeyBatch.from_hashes(NAMESPACE, h[1])))
    s, cache = scheduler(pool), DictCache()
    w = worker(pool, cache)
    s.open_request("r", h, 4 * BLOCK + 1)
    s.match("r", 0, 4 * BLOCK + 1)
    s.admit("r", [5, 6, 7, 8, 9], 4 * BLOCK)
    w.start_loads(s.take_plan())
    assert w.take_failed() == {6}
    assert w.take_failed() == set()
    data = w.tally.take()
    assert data is not None
    assert (data["hit_blocks"], data["failed_blocks"]) == (3, 1)
    assert data["missed_blocks"] == {"failed-checksum": 1}
    assert data["loaded_bytes"] == 3 * 4096


def test_failed_block_is_not_asked_for_again(pool: DictPool) -> None:
    h = hashes(4)
    pool.put(NAMESPACE, h)
    s = scheduler(pool)
    s.open_request("r", h, 4 * BLOCK + 1)
    s.match("r", 0, 4 * BLOCK + 1)
    s.admit("r", [5, 6, 7, 8, 9], 4 * BLOCK)
    s.take_plan()
    s.loads_failed({6})
    assert s.match("r", 0, 4 * BLOCK + 1) == BLOCK
    assert s.match("r", BLOCK, 4 * BLOCK + 1) == 0


def test_nothing_computed_on_a_failed_block_is_stored(pool: DictPool) -> None:
    """Also not of other requests: one may have taken the failed block out of the engine's own cache."""
    h, other, third = hashes(3), hashes(3, "other"), hashes(3, "third")
    other[0] = h[0]
    pool.put(NAMESPACE, h[:2])
    pool.damaged = set(pool.blocks)
    s, cache = scheduler(pool), DictCache()
    w = worker(pool, cache)
    s.open_request("r", h, 3 * BLOCK + 1)
    s.open_request("other", other, 3 * BLOCK + 1)
    s.open_request("third", third, 3 * BLOCK + 1)
    s.match("r", 0, 3 * BLOCK + 1)
    s.admit("r", [1, 2, 3, 4], 2 * BLOCK)
    s.scheduled("r", [1, 2, 3, 4], replace=True, computed_tokens=2 * BLOCK, step_tokens=BLOCK + 1)
    s.scheduled("other", [1, 12, 13, 14], replace=True, computed_tokens=BLOCK, step_tokens=BLOCK)
    s.scheduled("third", [21, 22, 23], replace=True, computed_tokens=0, step_tokens=BLOCK)
    first = s.take_plan()
    assert stored(first) == [3, 12, 21]
    w.start_loads(first)
    w.store(first)
    assert cache.stored == []

    # A step that was planned before the scheduler heard of it is wrong as well.
    s.scheduled("other", [], replace=False, computed_tokens=2 * BLOCK, step_tokens=BLOCK + 1)
    second = s.take_plan()
    w.start_loads(second)
    w.store(second)
    assert cache.stored == []

    # The engine computes from the failed block on, and stores all of it. What shared that block is not.
    s.loads_failed(w.take_failed())
    s.scheduled("r", [], replace=False, computed_tokens=0, step_tokens=3 * BLOCK + 1)
    s.scheduled("other", [], replace=False, computed_tokens=BLOCK, step_tokens=2 * BLOCK + 1)
    s.scheduled("third", [], replace=False, computed_tokens=BLOCK, step_tokens=2 * BLOCK)
    w.store(s.take_plan())
    assert cache.stored == [1, 2, 3, 21, 22, 23]


def test_failure_in_another_rank_spoils_the_step_here(pool: DictPool) -> None:
    h = hashes(2)
    pool.put(NAMESPACE, h[:1])
    s, cache = scheduler(pool), DictCache()
    w = worker(pool, cache, agree=lambda mine: True)
    s.open_request("r", h, 2 * BLOCK + 1)
    s.match("r", 0, 2 * BLOCK + 1)
    s.admit("r", [1, 2, 3], BLOCK)
    s.scheduled("r", [1, 2, 3], replace=True, computed_tokens=BLOCK, step_tokens=BLOCK + 1)
    plan = s.take_plan()
    w.start_loads(plan)
    w.store(plan)
    assert w.take_failed() == set()
    assert cache.stored == []


def test_ranks_vote_only_in_steps_that_load(pool: DictPool) -> None:
    votes: list[bool] = []
    w = worker(pool, DictCache(), agree=lambda mine: votes.append(mine) or mine)
    w.start_loads(StepPlan())
    assert votes == []


def test_broken_pool_fails_every_block_and_stores_nothing(pool: DictPool) -> None:
    h = hashes(3)
    pool.put(NAMESPACE, h)
    s = scheduler(pool)
    w = worker(pool, DictCache())
    s.open_request("r", h, 3 * BLOCK + 1)
    s.match("r", 0, 3 * BLOCK + 1)
    s.admit("r", [1, 2, 3, 4], 3 * BLOCK)
    pool.broken = True
    w.start_loads(s.take_plan())
    assert w.take_failed() == {1, 2, 3}
    s.loads_failed({1, 2, 3})
    s.scheduled("r", [1, 2, 3, 4], replace=True, computed_tokens=0, step_tokens=3 * BLOCK + 1)
    w.store(s.take_plan())
    data = w.tally.take()
    assert data is not None
    assert data["declined_blocks"] == {"tier-error": 3}


# ---- loads in the background ----


def test_background_load_is_reported_when_it_is_over(pool: DictPool) -> None:
    h = hashes(3)
    pool.put(NAMESPACE, h)
    pool.damaged = set(pool.keys(KeyBatch.from_hashes(NAMESPACE, h[2])))
    cache = DictCache()
    cache.may_load.clear()
    s = scheduler(pool, in_background=True)
    w = worker(pool, cache)
    s.open_request("r", h, 3 * BLOCK + 1)
    s.match("r", 0, 3 * BLOCK + 1)
    s.admit("r", [1, 2, 3, 4], 3 * BLOCK)
    w.start_loads(s.take_plan())
    assert w.take_loaded() == set()
    assert w.take_failed() == set()
    cache.may_load.set()
    deadline = threading.Event()
    for _ in range(1000):
        loaded = w.take_loaded()
        if loaded:
            break
        deadline.wait(0.005)
    assert loaded == {"r"}
    assert w.take_failed() == {3}
    w.close()


def test_background_failure_does_not_keep_other_blocks_from_being_stored(pool: DictPool) -> None:
    h = hashes(2)
    pool.put(NAMESPACE, h)
    pool.damaged = set(pool.blocks)
    cache = DictCache()
    s, w = scheduler(pool, in_background=True), worker(pool, cache)
    s.open_request("r", h, 2 * BLOCK + 1)
    s.open_request("other", hashes(2, "other"), 2 * BLOCK)
    s.match("r", 0, 2 * BLOCK + 1)
    s.admit("r", [1, 2, 3], 2 * BLOCK)
    s.scheduled("other", [11, 12], replace=True, computed_tokens=0, step_tokens=2 * BLOCK)
    plan = s.take_plan()
    w.start_loads(plan)
    w.store(plan)
    assert cache.stored == [11, 12]
    w.close()


def test_close_waits_for_the_load_that_runs(pool: DictPool) -> None:
    h = hashes(1)
    pool.put(NAMESPACE, h)
    cache = DictCache()
    s, w = scheduler(pool, in_background=True), worker(pool, cache)
    s.open_request("r", h, BLOCK + 1)
    s.match("r", 0, BLOCK + 1)
    s.admit("r", [1, 2], BLOCK)
    w.start_loads(s.take_plan())
    w.close()
    assert cache.loaded in ([1], [])
    assert not any(thread.name == "kvpool-load" for thread in threading.enumerate())


# ---- what is counted by namespace, and what hits save ----


def test_misses_are_counted_in_the_namespace_of_each_rank(pool: DictPool) -> None:
    ranks = [replace(NAMESPACE, tp_rank=rank, tp_size=2) for rank in range(2)]
    h = hashes(3)
    pool.put(ranks[0], h[:2])
    pool.put(ranks[1], h[:1])
    s = scheduler(pool, namespaces=ranks)
    s.open_request("r", h, 3 * BLOCK + 1)
    s.match("r", 0, 3 * BLOCK + 1)
    s.admit("r", [0, 1, 2], BLOCK)
    assert pool.recorded_of == {
        0: {MissReason.NEVER_STORED: 2},
        1: {MissReason.NEVER_STORED: 2},
    }


def test_plan_says_what_the_step_computes(pool: DictPool) -> None:
    s = scheduler(pool)
    s.open_request("r", hashes(4), 4 * BLOCK)
    s.scheduled("r", [0, 1], replace=True, computed_tokens=BLOCK, step_tokens=BLOCK)
    s.scheduled("unknown", [7], replace=True, computed_tokens=100, step_tokens=1)
    plan = s.take_plan()
    assert (plan.work.tokens, plan.work.pairs) == (BLOCK + 1, BLOCK * 1.5 * BLOCK + 100.5)
    assert s.take_plan().work.tokens == 0


def test_hits_are_told_as_seconds_once_the_engine_is_measured(pool: DictPool) -> None:
    """Hits that came before wait for it, up to the first block that failed."""

    class Watch:
        def __init__(self) -> None:
            self.waiting: list[tuple[Work, float]] = []

        def start(self) -> None: ...

        def pause(self) -> None: ...

        def resume(self) -> None: ...

        def stop(self, work: Work) -> None: ...

        def take(self) -> list[tuple[Work, float]]:
            over, self.waiting = self.waiting, []
            return over

    watch, h = Watch(), hashes(4)
    pool.put(NAMESPACE, [h[0], h[1], h[3]])
    w = worker(pool, DictCache(), stopwatch=watch)
    plan = StepPlan(loads=[Transfer("r", b"".join(h), [0, 1, 2, 3], context_tokens=BLOCK)])
    w.start_loads(plan)
    w.store(plan)
    assert pool.saved == []
    for tokens in range(20, 600, 20):
        step = Work()
        step.add(0, tokens)
        watch.waiting.append((step, 1e-3 + tokens * 1e-4))
    w.store(StepPlan())
    ((seconds, blocks),) = pool.saved
    assert blocks == 2
    assert seconds == pytest.approx(2 * BLOCK * 1e-4, rel=0.1)
    w.store(StepPlan())
    assert len(pool.saved) == 1


def test_stopwatch_that_fails_costs_the_seconds_and_no_step(
    pool: DictPool, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(NoStopwatch):
        def stop(self, work: Work) -> None:
            raise RuntimeError("the device is busy")

    cache, h = DictCache(), hashes(2)
    pool.put(NAMESPACE, h)
    w = worker(pool, cache, stopwatch=Broken())
    for _ in range(3):
        w.begin_step()
        w.start_loads(StepPlan(loads=[Transfer("r", b"".join(h), [0, 1])]))
        w.store(StepPlan())
    assert cache.loaded == [0, 1] * 3
    assert sum("kvpool_not_timed" in message for message in caplog.messages) == 1
