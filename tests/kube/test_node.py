"""A node's daemon against a real Kubernetes API."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kube.apiserver import ApiServer
from kube.nodes import MINIMAL_CRD, ROOT, Node, dram, until
from kube.relay import Relay
from kvpool import KeyBatch, Pool
from strategies import namespace as block_namespace
from strategies import region_folder

UNIT = 4096


@pytest.fixture(scope="session")
def api(apiserver: ApiServer) -> ApiServer:
    """The API, serving KVPoolNodes."""
    folder = ROOT / "crds"
    if folder.is_dir():
        apiserver.kubectl("apply", "--server-side", "-f", str(folder))
    else:
        apiserver.kubectl("apply", "--server-side", "-f", "-", stdin=json.dumps(MINIMAL_CRD))
    apiserver.kubectl("wait", "--for=condition=Established", "--timeout=30s", "crd/kvpoolnodes.kvpool.dev")
    return apiserver


@pytest.fixture
def memory() -> Iterator[Path]:
    with region_folder() as folder:
        yield folder


@pytest.fixture
def make_node(api: ApiServer, namespace: str, memory: Path) -> Iterator[Callable[..., Node]]:
    nodes: list[Node] = []

    def make(name: str = "node-a", host: int = 0, pool: str = "prefix-pool") -> Node:
        runtime = memory / name
        runtime.mkdir()
        node = Node(api, namespace, pool, runtime, name, host)
        nodes.append(node)
        return node

    yield make
    for node in nodes:
        node.end()


@pytest.fixture
def node(make_node: Callable[..., Node]) -> Node:
    return make_node()


def keys(first: int, count: int) -> KeyBatch:
    hashes = [number.to_bytes(32, "big") for number in range(first, first + count)]
    return KeyBatch.from_hashes(block_namespace(UNIT), hashes)


def content(first: int, count: int) -> list[bytes]:
    return [number.to_bytes(8, "little") * (UNIT // 8) for number in range(first, first + count)]


def open_pool(node: Node, monkeypatch: pytest.MonkeyPatch) -> Pool:
    monkeypatch.setenv("KVPOOL_RUNTIME_DIR", str(node.runtime))
    monkeypatch.delenv("KVPOOL_HOST", raising=False)
    return Pool.open(node.pool)


def hits(pool: Pool, first: int, count: int) -> int:
    """Blocks that are served; each one is looked at."""
    out = [bytearray(UNIT) for _ in range(count)]
    result = pool.load(keys(first, count), out)
    for reason, got, expected in zip(result.reasons, out, content(first, count), strict=True):
        assert reason is not None or got == expected
    return result.hit_count


def test_node_without_assignment_waits_and_says_so(node: Node) -> None:
    node.start()
    code, text = until(lambda: node.http("/readyz") if node.http("/readyz")[0] else None)
    assert code == 503
    assert "no KVPoolNode is assigned" in text
    assert node.http("/healthz") == (200, "ok")
    assert node.stop() == 0
    assert "not_ready pool=prefix-pool" in node.log.read_text()


def test_node_serves_and_reports_what_engines_did(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.start()
    until(lambda: node.http("/healthz")[0] == 200)
    node.folder.mkdir(parents=True, exist_ok=True)
    node.assign([dram("dram", node.folder)])
    status = node.ready()
    assert (status["host"], status["podName"], status["message"]) == (0, "pod-on-node-a", "")
    assert node.http("/readyz") == (200, "ok")
    region = node.folder / "dram.region"
    assert oct(region.stat().st_mode & 0o777) == "0o660"
    assert (node.folder / "host").read_text() == "0\n"
    with open_pool(node, monkeypatch) as pool:
        pool.store(keys(0, 100), content(0, 100))
        assert hits(pool, 0, 150) == 100
    status = until(
        lambda: s if (s := node.status()).get("lookups") == 150 else None, what="lookups in status"
    )
    assert (status["hits"], status["misses"]) == (100, {"never-stored": 50})
    (tier,) = status["tiers"]
    assert (tier["blocks"], tier["storedBlocks"], tier["usedBytes"]) == (100, 100, 100 * UNIT)
    assert {c["type"]: c["status"] for c in status["conditions"]} == {
        "Ready": "True",
        "CoherenceVerified": "True",
    }
    _, text = node.http("/metrics")
    assert 'kvpool_tier_hits_total{medium="DRAM",pool="prefix-pool",tier="dram"} 100.0' in text
    # One load call, and its histogram has the bounds that the status API's has.
    assert 'kvpool_tier_load_duration_seconds_count{medium="DRAM",pool="prefix-pool",tier="dram"} 1.0' in text
    assert (
        sum(line.startswith("kvpool_tier_load_duration_seconds_bucket{") for line in text.splitlines()) == 26
    )
    assert (status["bytesLoaded"], status["bytesStored"]) == (100 * UNIT, 100 * UNIT)
    assert sum(status["loadLatency"]) == sum(status["storeLatency"]) == 1
    (space,) = status["namespaces"]
    assert (space["lookups"], space["hits"], space["blocks"]) == (150, 100, 100)
    (engine,) = status["engines"]
    assert (engine["lookups"], engine["hits"], engine["misses"]) == (150, 100, {"never-stored": 50})
    assert (
        'kvpool_tier_misses_total{medium="DRAM",pool="prefix-pool",reason="never-stored",tier="dram"} 50.0'
        in text
    )
    assert node.stop() == 0
    status = node.status()
    assert not status["ready"]
    assert "blocks stay" in status["message"]


def test_node_idle_writes_nothing(node: Node) -> None:
    node.folder.mkdir(parents=True)
    node.assign([dram("dram", node.folder)])
    node.start()
    node.ready()
    time.sleep(5)
    before = node.object()["metadata"]["resourceVersion"]
    time.sleep(12)
    assert node.object()["metadata"]["resourceVersion"] == before


def test_node_killed_and_restarted_without_the_api_serves_the_same_blocks(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.folder.mkdir(parents=True)
    node.assign([dram("dram", node.folder)])
    node.start()
    node.ready()
    with open_pool(node, monkeypatch) as pool:
        pool.store(keys(0, 100), content(0, 100))
        assert node.stop(signal.SIGKILL) == -signal.SIGKILL
        assert hits(pool, 0, 100) == 100  # engines go on without it
        node.environment = {"KUBECONFIG": str(nowhere(node))}
        node.start()
        until(lambda: node.http("/readyz")[0] == 200, what="ready without the API")
        assert hits(pool, 0, 100) == 100
    node.stop()


def test_node_serves_on_while_the_api_is_away_then_catches_up(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.folder.mkdir(parents=True)
    node.assign([dram("dram", node.folder)])
    with Relay(node.api.port) as relay:
        kubeconfig = node.runtime / "relay.kubeconfig"
        kubeconfig.write_text(node.api.kubeconfig.read_text().replace(f":{node.api.port}", f":{relay.port}"))
        node.environment = {"KUBECONFIG": str(kubeconfig)}
        node.start()
        node.ready()
        relay.cut()
        with open_pool(node, monkeypatch) as pool:
            pool.store(keys(0, 64), content(0, 64))
            node.assign([dram("dram", node.folder), dram("more", node.folder)])
            until(lambda: "cluster_failed" in node.log.read_text(), what="noticed")
            assert node.http("/readyz")[0] == 200
            assert node.http("/healthz")[0] == 200
            assert hits(pool, 0, 64) == 64
        assert node.observed() == {}
        relay.connect()
        status = node.ready()
    assert [tier["name"] for tier in status["tiers"]] == ["dram", "more"]
    until(lambda: node.status()["hits"] == 64, what="the counters")


def nowhere(node: Node) -> Path:
    """A kubeconfig of an API that nobody answers at."""
    path = node.runtime / "nowhere.kubeconfig"
    path.write_text(node.api.kubeconfig.read_text().replace(f":{node.api.port}", ":1"))
    return path


def test_node_policy_changes_without_a_restart(node: Node) -> None:
    node.folder.mkdir(parents=True)
    node.assign([dram("dram", node.folder)])
    node.start()
    started = node.ready()["startedAt"]
    node.assign([dram("dram", node.folder)], eviction={"highWatermark": 50, "lowWatermark": 40})
    status = node.ready()
    assert status["startedAt"] == started
    assert "changed pool=prefix-pool" in node.log.read_text()


def test_node_tiers_come_and_go_without_a_restart(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.folder.mkdir(parents=True)
    first, second = dram("first", node.folder), dram("second", node.folder)
    node.assign([first])
    node.start()
    node.ready()
    with open_pool(node, monkeypatch) as pool:
        pool.store(keys(0, 50), content(0, 50))
    node.assign([first, second])
    assert [tier["name"] for tier in node.ready()["tiers"]] == ["first", "second"]
    with open_pool(node, monkeypatch) as pool:
        assert len(pool.tiers) == 2
        assert hits(pool, 0, 50) == 50
    node.assign([second])
    assert [tier["name"] for tier in node.ready()["tiers"]] == ["second"]
    assert not (node.folder / "first.region").exists()
    assert node.process is not None
    assert node.process.poll() is None
    with open_pool(node, monkeypatch) as pool:
        assert len(pool.tiers) == 1


def test_node_tier_grows_and_shrinks_under_an_engine(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.folder.mkdir(parents=True)
    node.assign([dram("dram", node.folder, "16Mi")])
    node.start()
    node.ready()
    region = node.folder / "dram.region"
    with open_pool(node, monkeypatch) as pool:
        pool.store(keys(0, 1000), content(0, 1000))
        node.assign([dram("dram", node.folder, "32Mi")])
        until(lambda: capacity(node) == 32 << 20, what="grown")
        assert hits(pool, 0, 1000) == 1000
        pool.store(keys(1000, 5000), content(1000, 5000))
        assert hits(pool, 1000, 5000) == 5000
        node.assign([dram("dram", node.folder, "16Mi")])
        until(lambda: capacity(node) == 16 << 20 and region.stat().st_blocks * 512 < 18 << 20, what="shrunk")
        assert 0 < hits(pool, 0, 6000) < 4096
        assert pool.store(keys(10000, 500), content(10000, 500)).stored_count == 500
    node.assign([dram("dram", node.folder, "1Ti")])
    until(lambda: any("room for" in problem for problem in node.status()["problems"]), what="refused")
    assert node.http("/readyz")[0] == 503
    node.assign([dram("dram", node.folder, "16Mi")])
    node.ready()


def capacity(node: Node) -> int:
    (tier,) = node.status()["tiers"]
    return int(tier["capacityBytes"])


def test_node_removing_leaves_nothing_and_says_so(node: Node) -> None:
    node.folder.mkdir(parents=True)
    node.assign([dram("dram", node.folder)])
    node.start()
    node.ready()
    node.assign([dram("dram", node.folder)], state="Removing")
    until(lambda: node.status().get("removed"), what="removed")
    assert list(node.folder.iterdir()) == []
    assert node.stop() == 0


def test_node_unassigned_closes_and_keeps_its_blocks(node: Node) -> None:
    node.folder.mkdir(parents=True)
    node.assign([dram("dram", node.folder)])
    node.start()
    node.ready()
    node.unassign()
    until(lambda: node.http("/readyz")[0] == 503)
    assert (node.folder / "dram.region").exists()
    node.assign([dram("dram", node.folder)])
    node.ready()


def shared(folder: Path, **more: Any) -> dict[str, Any]:
    return {
        "name": "cxl",
        "medium": "CXL",
        "capacity": "32Mi",
        "minBlockSize": "4Ki",
        "shared": True,
        "source": {"path": str(folder / "cxl")},
        **more,
    }


def test_nodes_share_a_tier_and_one_takes_over_what_a_drained_one_had(
    make_node: Callable[..., Node], memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = make_node("node-a", 0), make_node("node-b", 1)
    tiers = [shared(memory)]
    b.assign(tiers, hosts=2)
    b.start()
    until(lambda: "host 0" in b.http("/readyz")[1], what="host 1 waits for host 0")
    a.assign(tiers, hosts=2)
    a.start()
    assert a.ready()["host"] == 0
    assert b.ready()["host"] == 1
    with open_pool(b, monkeypatch) as engine_b:
        engine_b.store(keys(0, 64), content(0, 64))
        with open_pool(a, monkeypatch) as engine_a:
            assert hits(engine_a, 0, 64) == 64
    until(
        lambda: (
            a.status()["hits"] == 64
            and b.status()["hits"] == 0
            and b.status()["tiers"][0]["storedBlocks"] == 64
        )
    )
    b.assign(tiers, hosts=2, state="Draining")
    drained = until(lambda: condition(b, "Drained"), what="Drained is told")
    assert (drained["status"], drained["reason"]) == ("False", "WaitingForAdoption")
    with open_pool(b, monkeypatch) as engine_b:
        assert engine_b.store(keys(500, 8), content(500, 8)).stored_count == 0
        assert hits(engine_b, 0, 64) == 64
    a.assign(tiers, hosts=2, adopt=[{"shard": 1, "epoch": 7}])
    until(lambda: (condition(b, "Drained") or {}).get("status") == "True", what="drained")
    until(lambda: owners(a) == [(0, 0, 0, True), (1, 0, 7, True)], what="adopted")
    assert [e["reason"] for e in a.status()["events"]].count("ShardAdopted") == 1
    with open_pool(a, monkeypatch) as engine_a:
        assert hits(engine_a, 0, 64) == 64
    # Both leave: the last one removes the file.
    b.assign(tiers, hosts=2, state="Removing")
    until(lambda: b.status().get("removed"))
    assert (memory / "cxl").exists()
    a.assign(tiers, hosts=2, state="Removing")
    until(lambda: a.status().get("removed"))
    assert not (memory / "cxl").exists()


def owners(node: Node) -> list[tuple[int, int, int, bool]]:
    (tier,) = node.status()["tiers"]
    return [(s["shard"], s["owner"], s["epoch"], s["settled"]) for s in tier["shards"]]


def condition(node: Node, kind: str) -> dict[str, Any] | None:
    return next((c for c in node.status().get("conditions", ()) if c["type"] == kind), None)
