"""The cluster's source: what objects say, and that watches go on whatever happens to them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("kubernetes", reason="the operator extra is not installed")

from api.fake_cluster import FakeCluster, kvpool, kvpoolnode
from api.statuses import NOW, Clock
from kvpool.api.access import Caller
from kvpool.api.problem import ApiError
from kvpool.api.status import Key, PoolStatus
from kvpool_operator import listwatch, readout
from kvpool_operator.access import KubernetesAccess
from kvpool_operator.source import ClusterSource

KEY = Key("team", "p")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listwatch, "PAUSE_FIRST_S", 0.01)
    monkeypatch.setattr(listwatch, "PAUSE_MAX_S", 0.05)
    monkeypatch.setattr("kvpool_operator.source.GATHER_S", 0.01)


def following(test: Callable[[FakeCluster, ClusterSource], Awaitable[None]], **source: Any) -> None:
    """Runs a test beside a source that follows a fake cluster with one pool on two nodes."""

    async def run() -> None:
        fake = FakeCluster()
        fake.put("kvpools", kvpool("p"))
        fake.put("kvpoolnodes", kvpoolnode("p", 0))
        fake.put("kvpoolnodes", kvpoolnode("p", 1))
        async with fake.serve():
            made = ClusterSource(fake.connect, **source)
            task = asyncio.create_task(made.run())
            try:
                await test(fake, made)
            finally:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task

    asyncio.run(run())


async def until(true: Callable[[], object], within_s: float = 10.0) -> None:
    deadline = asyncio.get_running_loop().time() + within_s
    while not true():
        assert asyncio.get_running_loop().time() < deadline, "it did not happen in time"
        await asyncio.sleep(0.005)


def shown(source: ClusterSource, key: Key = KEY) -> PoolStatus:
    status = source.board.get(key)
    assert status is not None
    return status


def test_objects_are_shown_as_kubectl_shows_them() -> None:
    nodes = [readout.node_of(kvpoolnode("p", i)) for i in (1, 0)]
    status = readout.status_of(readout.pool_of(kvpool("p", lookups=1000, hits=974)), nodes, NOW + 1e6)
    pool = status.pool
    assert (pool.lookups, pool.hits, pool.hit_rate, pool.misses) == (1000, 974, 97.4, {"evicted": 26})
    assert (pool.nodes.desired, pool.nodes.ready, pool.observed_generation) == (2, 2, 3)
    assert (pool.capacity_bytes, pool.evictions, pool.tiers[0].shared) == (1 << 30, 7, True)
    assert [node.node_name for node in status.nodes] == ["worker-0", "worker-1"]
    assert status.nodes[0].tiers[0].shards[0].epoch == 1
    assert pool.problems == ["node worker-1: the disk is on fire"]
    assert status.observed_at == NOW  # the youngest report of a node
    assert {event.node for event in status.events} == {"worker-0", "worker-1"}
    assert (status.namespaces, set(status.series)) == (None, {"p-0", "p-1"})


def test_pool_without_status_shows_the_sum_of_its_nodes() -> None:
    bare = {**kvpool("p"), "status": {}}
    status = readout.status_of(
        readout.pool_of(bare), [readout.node_of(kvpoolnode("p", i)) for i in (0, 1)], NOW
    )
    assert (status.pool.lookups, status.pool.hits, status.pool.hit_rate) == (100, 80, 80.0)
    assert (status.pool.nodes.desired, status.pool.nodes.ready) == (2, 2)


def test_node_that_never_reported_says_where_to_look() -> None:
    silent = {**kvpoolnode("p", 0), "status": None}
    node = readout.node_of(silent)
    assert (node.node.ready, node.updated_at) == (False, None)
    assert "DaemonSet" in node.node.message


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.floats(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["status", "spec", "metadata", "tiers", "conditions", "events", "lookups", "hits"]
            )
            | st.sampled_from(
                ["hitRate", "nodes", "misses", "name", "namespace", "updatedAt", "shards", "problems"]
            )
            | st.sampled_from(
                ["namespaces", "engines", "digest", "description", "block_tokens", "blocks", "loadLatency"]
            ),
            inner,
            max_size=6,
        )
    ),
    max_leaves=20,
)


@given(st.dictionaries(st.sampled_from(["metadata", "spec", "status"]), anything))
def test_readout_whatever_an_object_holds_is_no_error(body: dict[str, Any]) -> None:
    status = readout.status_of(readout.pool_of(body), [readout.node_of(body)], NOW)
    assert b'"stale"' in status.aged_body(NOW)
    rate = status.pool.hit_rate
    assert rate is None or 0 <= rate <= 100


def test_watch_changes_arrive_and_deletions_remove() -> None:
    async def test(fake: FakeCluster, source: ClusterSource) -> None:
        await until(lambda: source.board.get(KEY) and len(shown(source).nodes) == 2)
        assert source.readiness().ready
        fake.put("kvpools", kvpool("p", lookups=200, hits=190))
        fake.delete("kvpoolnodes", "team", "p-1")
        await until(lambda: shown(source).pool.lookups == 200 and len(shown(source).nodes) == 1)
        fake.put("kvpools", kvpool("q", "other"))
        await until(lambda: len(source.board) == 2)
        fake.delete("kvpools", "team", "p")
        await until(lambda: source.board.known() == [Key("other", "q")])
        assert fake.lists == 2  # everything else came by the watches

    following(test)


def test_list_of_many_pages_is_whole() -> None:
    async def test(fake: FakeCluster, source: ClusterSource) -> None:
        fake.page_max = 7
        for i in range(40):
            fake.put("kvpools", kvpool(f"many-{i:02}"))
        fake.error("kvpools", 410)
        await until(lambda: len(source.board) == 41)

    following(test)


@pytest.mark.parametrize("how", ["in the stream", "as the answer"])
def test_watch_version_too_old_lists_again_and_misses_nothing(how: str) -> None:
    async def test(fake: FakeCluster, source: ClusterSource) -> None:
        await until(lambda: source.board.get(KEY))
        fake.put("kvpools", kvpool("q"))
        await until(lambda: len(source.board) == 2)
        fake.delete("kvpools", "team", "q", silently=True)  # what the watch never tells
        if how == "in the stream":
            fake.error("kvpools", 410)
        else:
            fake.expired = "kvpools"
            fake.end_watches()
        await until(lambda: source.board.known() == [KEY])

    following(test)


def test_watch_that_is_silent_is_asked_anew_from_where_it_was() -> None:
    async def test(fake: FakeCluster, source: ClusterSource) -> None:
        await until(lambda: source.board.get(KEY))
        before = fake.watches
        await until(lambda: fake.watches >= before + 4)
        assert fake.lists == 2
        assert source.readiness().ready
        fake.put("kvpools", kvpool("p", lookups=300))
        await until(lambda: shown(source).pool.lookups == 300)

    following(test, silence_s=0.05)


def test_cluster_that_is_away_values_stay_and_readiness_says_so(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    clock = Clock()

    async def test(fake: FakeCluster, source: ClusterSource) -> None:
        await until(lambda: source.board.get(KEY) and source.readiness().ready)
        fake.refuse = 403
        fake.end_watches()
        await until(lambda: any(watch.problem for watch in source._watches))
        assert source.readiness().ready  # a moment without the API server is nothing
        clock.now += 31
        said = source.readiness()
        assert not said.ready
        assert "dead for 31 s: refused for the test (403)" in said.message
        assert shown(source).pool.lookups == 100
        fake.refuse = None
        fake.put("kvpools", kvpool("p", lookups=400))
        await until(lambda: source.readiness().ready and shown(source).pool.lookups == 400)

    following(test, clock=clock)
    assert (
        len([r for r in caplog.records if "cluster_failed" in r.message]) <= 2
    )  # once a watch, not each time


def test_watch_that_died_without_a_word_is_found() -> None:
    clock = Clock()

    async def test(fake: FakeCluster, source: ClusterSource) -> None:
        await until(lambda: source.board.get(KEY) and source.readiness().ready)
        clock.now += 151
        assert "dead for 151 s" in source.readiness().message

    following(test, clock=clock)


def test_namespaces_given_only_these_are_asked_for() -> None:
    async def test(fake: FakeCluster, source: ClusterSource) -> None:
        fake.put("kvpools", kvpool("q", "other"))
        fake.put("kvpools", kvpool("r", "third"))
        await until(lambda: len(source.board) == 2)
        assert source.board.known() == [Key("other", "q"), KEY]

    following(test, namespaces=["team", "other"])


def test_kubernetes_access_asks_once_and_remembers_for_a_while() -> None:
    async def run() -> None:
        fake, clock = FakeCluster(), Clock()
        fake.tokens["good"] = {"username": "ann", "groups": ["team"], "uid": "1", "extra": {"k": ["v"]}}
        fake.rights = {("ann", "team")}
        async with fake.serve():
            cluster = await fake.connect()
            access = KubernetesAccess(lambda: cluster, clock)
            caller = await access.who("Bearer good")
            assert caller == Caller("ann", ("team",), "1", (("k", ("v",)),))
            assert [await access.may_read(caller, n) for n in ("team", "other", None)] == [True, False, False]
            asked = fake.reviews
            for _ in range(5):
                await access.who("Bearer good")
                await access.may_read(caller, "team")
            assert fake.reviews == asked
            fake.rights = set()
            clock.now += 61
            assert not await access.may_read(caller, "team")
            with pytest.raises(ApiError) as wrong:
                await access.who("Bearer bad")
            assert wrong.value.status == 401
            assert "bad" not in wrong.value.detail
            await cluster.close()

    asyncio.run(run())


def test_kubernetes_access_cluster_away_is_503_and_many_wrong_tokens_are_few_reviews() -> None:
    async def run() -> None:
        fake, clock = FakeCluster(), Clock()
        async with fake.serve():
            cluster = await fake.connect()
            access = KubernetesAccess(lambda: cluster, clock)
            codes = []
            for i in range(300):
                with pytest.raises(ApiError) as error:
                    await access.who(f"Bearer wrong-{i}")
                codes.append(error.value.status)
            assert (codes[0], codes[-1]) == (401, 503)
            assert fake.reviews == 100
            clock.now += 10
        with pytest.raises(ApiError) as away:
            await access.who("Bearer other")
        assert away.value.status == 503
        await cluster.close()
        with pytest.raises(ApiError):
            await KubernetesAccess(lambda: None, clock).who("Bearer other")

    asyncio.run(run())


def test_kubernetes_access_limits_each_caller_wherever_they_ask_from() -> None:
    async def run() -> None:
        fake, clock = FakeCluster(), Clock()
        fake.tokens = {name: {"username": name, "groups": ["team"]} for name in ("busy", "calm")}
        async with fake.serve():
            cluster = await fake.connect()
            access = KubernetesAccess(lambda: cluster, clock)

            async def ask_often() -> None:
                for _ in range(2000):
                    await access.who("Bearer busy")

            with pytest.raises(ApiError) as refused:
                await ask_often()
            assert refused.value.status == 429
            assert (await access.who("Bearer calm")).name == "calm"
            clock.now += 1
            assert (await access.who("Bearer busy")).name == "busy"
            await cluster.close()

    asyncio.run(run())
