"""One machine's pool, told by its regions and told by its KVPoolNode: the API says the same of both."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("kvpool._native", reason="the compiled part of kvpool is not built")
pytest.importorskip("kubernetes", reason="the operator extra is not installed")

from api.conftest import Ask
from api.statuses import NOW, StillSource
from children import children
from kvpool import Namespace, Pool, PrefillCurve
from kvpool.api import local
from kvpool.api.status import PoolStatus
from kvpool.daemon.loop import Daemon
from kvpool.outcomes import MissReason
from kvpool.provision import provision
from kvpool.region import Region
from kvpool.spec import PoolSpec
from kvpool.view import look
from kvpool_operator import readout
from kvpool_operator.nodes.board import Truth
from kvpool_operator.nodes.status import NAMESPACES_MAX, REFRESH_S, node_status
from strategies import buffers, contents, keys_of, namespace

UNIT = 4096
WRITER = namespace(UNIT, model="org/m")
READER = namespace(UNIT, model="org/m", block_tokens=32)
TENANT = namespace(UNIT, model="org/m", tenant="somebody")
OBJECT = {
    "apiVersion": "kvpool.dev/v1alpha1",
    "kind": "KVPool",
    "metadata": {"name": "p", "namespace": "team"},
}


@pytest.fixture
def spec(folder: Path, monkeypatch: pytest.MonkeyPatch) -> PoolSpec:
    monkeypatch.setenv("KVPOOL_RUNTIME_DIR", str(folder / "run"))
    monkeypatch.delenv("KVPOOL_HOST", raising=False)
    tiers = [
        {
            "name": name,
            "medium": "DRAM",
            "capacity": "8Mi",
            "minBlockSize": "4Ki",
            "source": {"path": str(folder / name)},
        }
        for name in ("upper", "lower")
    ]
    made = PoolSpec.from_object({**OBJECT, "spec": {"tiers": tiers}})
    provision(made, 0, timeout_s=5, progress=lambda *_: None, waiting=lambda _: None)
    return made


def use(ns: Namespace, first: int, count: int, stores: bool = True) -> None:
    """`count` blocks stored and loaded, and half as many asked for in vain."""
    with Pool.open("p") as pool:
        keys = keys_of(ns, range(first, first + count))
        if stores:
            pool.store(keys, contents(keys))
        pool.load(keys, buffers(keys))
        absent = keys_of(ns, range(first + 5000, first + 5000 + count // 2))
        pool.load(absent, buffers(absent))
        pool.record_misses(MissReason.BELOW_MINIMUM, 3, ns)
        if stores:
            pool.record_curve(PrefillCurve(10.0, 1.0, 20, True))
            pool.record_saved(ns, 0.25, count // 2)


def told(spec: PoolSpec) -> Truth:
    """What the node's daemon would say."""
    daemon = Daemon(spec, 0, [])
    for tier in spec.tiers:
        daemon.open(tier)
    try:
        daemon.fold()
        daemon.report()
        own = {t.tier.name: asdict(t.region.counters_of(t.shard)) for t in daemon.tiers}
        return Truth(ready=True, report=daemon.last_report, own=own)
    finally:
        daemon.close_all()


def written(truth: Truth, before: dict[str, Any] | None = None, now: float = NOW) -> dict[str, Any]:
    return node_status(truth, version="1", pod="daemon", started_at=NOW, before=before, now=now)


def cluster(spec: PoolSpec, *statuses: dict[str, Any]) -> PoolStatus:
    manifest = spec.model_dump(mode="json", by_alias=True)
    nodes = [
        readout.node_of(
            {
                "metadata": {"namespace": "team", "name": f"p-{i}"},
                "spec": {"pool": "p", "nodeName": f"worker-{i}", "host": i, "manifest": manifest},
                "status": status,
            }
        )
        for i, status in enumerate(statuses)
    ]
    return readout.status_of(readout.pool_of({**OBJECT, "spec": manifest["spec"]}), nodes, NOW)


def test_cluster_says_what_the_machine_says(spec: PoolSpec, serve: Ask) -> None:
    with children() as start:
        start(use, WRITER, 0, 40).result()
        start(use, TENANT, 100, 20).result()
        start(use, READER, 0, 10, False).result()
    here = local.status_of(look(spec), NOW)
    there = cluster(spec, written(told(spec)))
    assert here.namespaces == local.status_of(look(spec), NOW).namespaces
    client = serve(StillSource(here, there))
    for what in ("misses", "namespaces", "explain", f"explain?engine={READER.digest.hex()[:12]}"):
        one, other = (client.get(f"/v1/pools/{space}/p/{what}").json() for space in ("local", "team"))
        for answer in (one, other):
            for field in ("namespace", "age_s", "stale", "problems"):
                answer.pop(field, None)
            for engine in answer.get("engines", []):
                for field in ("node", "startedAt", "endedAt"):  # to the second, and of the node
                    engine.pop(field)
            for space in answer.get("items", []):
                space["description"] = dict(sorted(space.get("description", {}).items()))
        if "engines" in one:
            for answer in (one, other):
                answer["engines"].sort(key=lambda engine: engine["lookups"])
            assert len(one["engines"]) == 3
        assert one == other, what
    saved = there.pool.saved
    assert saved is not None
    assert (saved.tokens, saved.exact, saved.prefill_seconds) == (60 * 16, True, 0.5)
    assert saved == here.pool.saved
    assert (there.counters.bytes_loaded, there.counters.bytes_stored) == (60 * UNIT, 2 * 60 * UNIT)
    assert there.counters.load_latency == here.counters.load_latency[: len(there.counters.load_latency)]
    assert sum(there.counters.load_latency) > 0
    assert [t.hit_rate for t in there.nodes[0].tiers] == [t.hit_rate for t in here.pool.tiers]
    metrics = client.get("/metrics").text
    assert 'kvpool_pool_saved_prefill_seconds_total{namespace="team",pool="p"} 0.5' in metrics
    for name in ("load", "store"):
        counts = [
            line.rsplit(" ", 1)[1]
            for line in metrics.splitlines()
            if line.startswith(f"kvpool_pool_{name}_duration_seconds_count")
        ]
        assert len(counts) == 2
        assert counts[0] == counts[1] != "0"
    assert b"somebody" not in str(client.get("/v1/pools/team/p/namespaces").json()).encode()


def test_rates_of_tiers_add_up_to_the_pools(spec: PoolSpec) -> None:
    """Blocks that the upper one has evicted are served by the lower one; misses are counted once."""
    use(WRITER, 0, 20)
    with Region.attach(spec.tiers[0].source.path, role="daemon") as upper:  # type: ignore[union-attr, arg-type]
        upper.evict(0.0, 10)
    with Pool.open("p") as pool:
        keys = keys_of(WRITER, range(20))
        assert pool.load(keys, buffers(keys)).hit_count == 20
    shown = local.status_of(look(spec), NOW).pool
    upper_rate, lower_rate = (tier.hit_rate for tier in shown.tiers)
    assert lower_rate is not None
    assert upper_rate is not None
    assert shown.hit_rate is not None
    assert 0 < lower_rate < upper_rate < 100
    assert upper_rate + lower_rate == pytest.approx(shown.hit_rate, abs=0.11)


def test_at_rest_the_status_stays_the_same(spec: PoolSpec) -> None:
    use(WRITER, 0, 10)
    with Pool.open("p"):  # an engine that does nothing
        before = written(told(spec))
        for seconds in (2.0, REFRESH_S - 1):
            assert written(told(spec), before, NOW + seconds) == before


def test_shared_blocks_are_counted_once_and_own_ones_added(spec: PoolSpec) -> None:
    def of(held: dict[str, int], lookups: int, hits: int) -> dict[str, Any]:
        described = {"block_tokens": "16", "tp_size": "1"}
        space = {"digest": "ab" * 32, "description": described, "lookups": lookups, "hits": hits, **held}
        return {"lookups": lookups, "hits": hits, "namespaces": [space]}

    status = cluster(
        spec,
        of({"blocks": 5, "bytes": 50, "sharedBlocks": 100, "sharedBytes": 1000}, 10, 5),
        of({"blocks": 7, "bytes": 70, "sharedBlocks": 101, "sharedBytes": 1010}, 30, 20),
    )
    assert status.namespaces is not None
    (space,) = status.namespaces
    assert (space.blocks, space.bytes) == (5 + 7 + 101, 50 + 70 + 1010)
    assert status.reports["ab" * 32].counts.hits == 25
    assert status.pool.saved is not None
    assert (status.pool.saved.tokens, status.pool.saved.exact) == (25 * 16, True)


def test_more_engines_and_namespaces_than_fit_are_left_out_the_least_first(spec: PoolSpec) -> None:
    for i in range(NAMESPACES_MAX + 3):
        with Pool.open("p") as pool:
            pool.record_misses(MissReason.EVICTED, i + 1, namespace(UNIT, model=f"m{i:02}"))
    status = written(told(spec))
    assert len(status["namespaces"]) == NAMESPACES_MAX
    assert {"m00", "m01", "m02"}.isdisjoint(space["model"] for space in status["namespaces"])
    names = [engine["name"] for engine in status["engines"]]
    # This process has opened the pool again and again: each time is an entry, with a name of its own.
    assert len(names) == len(set(names)) == NAMESPACES_MAX + 3
    digests = [space["digest"] for space in status["namespaces"]]
    assert digests == sorted(set(digests))
