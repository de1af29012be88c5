"""The life of a pool: every change that a person makes, with the blocks that must survive it."""

from __future__ import annotations

import time

import pytest

from cluster.cluster import Cluster
from kube import Kube, Object, wait_for
from pools import LABEL, SETTLE_S, START_S, Client, KVPool, cxl, dram, must_tell_the_truth
from release import SHARED, MakePool, Target

POOL = "life"
SERIES, BLOCKS = "life", 64


@pytest.fixture(autouse=True)
def stored(request: pytest.FixtureRequest) -> None:
    """Blocks of node A, before each test that uses the module's clients."""
    if "clients" in request.fixturenames:
        request.getfixturevalue("clients")[0].store(SERIES, BLOCKS)


def must_be_well(pool: KVPool, clients: list[Client]) -> None:
    """True status within 30 s, and every block right on both nodes."""
    pool.wait_settled(nodes=2)
    for client in clients:
        client.must_hit(SERIES, BLOCKS)
    must_tell_the_truth(pool, clients)


def remove(pool: KVPool, kind: str) -> str:
    """Delete a child of the pool; returns the uid that it had."""
    metadata = pool.child(kind)["metadata"]
    pool.kube.delete(kind, metadata["name"], metadata["namespace"])
    return str(metadata["uid"])


@pytest.mark.parametrize("kind", ["ds", "cm", "svc", "networkpolicy", "role", "rolebinding"])
def test_deleted_child_comes_back(main_pool: KVPool, kind: str) -> None:
    before = remove(main_pool, kind)
    wait_for(f"{kind} is made anew", SETTLE_S, lambda: main_pool.child(kind)["metadata"]["uid"] != before)
    main_pool.wait_settled(START_S if kind == "ds" else SETTLE_S, nodes=2)


def test_deleted_account_comes_back_and_daemons_report(main_pool: KVPool, clients: list[Client]) -> None:
    before = remove(main_pool, "sa")
    wait_for("sa is made anew", SETTLE_S, lambda: main_pool.child("sa")["metadata"]["uid"] != before)
    main_pool.wait_settled(START_S, nodes=2)  # tokens of the old account are worth nothing: daemons restart
    must_be_well(main_pool, clients)


def test_edited_child_is_put_right(main_pool: KVPool, clients: list[Client], kube: Kube) -> None:
    right = main_pool.child("cm")["data"]["pool.yaml"]

    def edit(kind: str, change: Object) -> None:
        metadata = main_pool.child(kind)["metadata"]
        kube.patch(kind, metadata["name"], metadata["namespace"], change)

    edit("cm", {"data": {"pool.yaml": "spoilt"}})
    edit("svc", {"spec": {"selector": {LABEL: "another"}}})
    wait_for(
        "the ConfigMap is put right", SETTLE_S, lambda: main_pool.child("cm")["data"]["pool.yaml"] == right
    )
    wait_for(
        "the Service is put right",
        SETTLE_S,
        lambda: main_pool.child("svc")["spec"]["selector"][LABEL] == POOL,
    )
    must_be_well(main_pool, clients)


def test_deleted_daemon_pods_come_back_with_all_blocks(main_pool: KVPool, clients: list[Client]) -> None:
    for pod in main_pool.daemons():
        main_pool.kube.delete("pod", pod["metadata"]["name"], pod["metadata"]["namespace"])
    for client in clients:
        client.must_hit(SERIES, BLOCKS)  # engines need no daemon
    must_be_well(main_pool, clients)


def test_policy_change_needs_no_restart(main_pool: KVPool, clients: list[Client]) -> None:
    before = {pod["metadata"]["uid"] for pod in main_pool.daemons()}
    main_pool.apply(eviction={"highWatermark": 80, "lowWatermark": 60})
    must_be_well(main_pool, clients)
    assert {pod["metadata"]["uid"] for pod in main_pool.daemons()} == before
    for node in main_pool.nodes():
        assert node["status"]["observedGeneration"] == node["metadata"]["generation"]
    main_pool.apply(eviction={"highWatermark": 95, "lowWatermark": 90})
    main_pool.wait_settled()


def test_local_tier_grows_online(main_pool: KVPool, clients: list[Client]) -> None:
    main_pool.set_tier("dram", capacity="96Mi")
    _wait_capacity(main_pool, "dram", 2 * (96 << 20))
    must_be_well(main_pool, clients)


def test_local_tier_shrinks_online_by_eviction(main_pool: KVPool, clients: list[Client]) -> None:
    clients[0].store("filler", 900)  # 56 MiB of 64 KiB blocks
    main_pool.set_tier("dram", capacity="32Mi")
    _wait_capacity(main_pool, "dram", 2 * (32 << 20))
    main_pool.wait_settled(nodes=2)
    assert main_pool.tier("dram")["usedBytes"] <= 2 * (32 << 20)
    assert clients[0].load("filler", 900)["ok"] > 0
    clients[0].store(SERIES, BLOCKS)
    main_pool.set_tier("dram", capacity="64Mi")
    _wait_capacity(main_pool, "dram", 2 * (64 << 20))
    must_be_well(main_pool, clients)


def test_shared_tier_grows_and_shrinks_online(main_pool: KVPool, clients: list[Client]) -> None:
    main_pool.set_tier("cxl", capacity="192Mi")
    _wait_capacity(main_pool, "cxl", 192 << 20)
    must_be_well(main_pool, clients)
    main_pool.set_tier("cxl", capacity="128Mi")
    _wait_capacity(main_pool, "cxl", 128 << 20)
    clients[0].store(SERIES, BLOCKS)
    must_be_well(main_pool, clients)


def _wait_capacity(pool: KVPool, tier: str, wanted: int) -> None:
    def look() -> bool:
        told = pool.tier(tier)["capacityBytes"]
        # A region rounds to its extents, and keeps what it cannot give back yet.
        assert abs(told - wanted) <= wanted // 8, f"status says {told}, wanted {wanted}"
        return True

    wait_for(f"tier {tier} has {wanted} bytes", SETTLE_S, look)


def test_tier_is_added_and_removed(main_pool: KVPool, clients: list[Client], target: Target) -> None:
    first, last = tiers = main_pool.spec["tiers"]
    main_pool.apply(tiers=[first, dram("second", "32Mi"), last])
    main_pool.wait_settled(START_S, nodes=2)
    assert main_pool.tier("second")["capacityBytes"] > 0
    for client in clients:
        client.must_hit(SERIES, BLOCKS)
    main_pool.apply(tiers=tiers)
    main_pool.wait_settled(START_S, nodes=2)
    assert [tier["name"] for tier in main_pool.status()["tiers"]] == [tier["name"] for tier in tiers]
    must_be_well(main_pool, clients)


def test_paused_pool_is_left_alone_and_catches_up(main_pool: KVPool, clients: list[Client]) -> None:
    main_pool.apply(paused=True)
    main_pool.wait_condition("Progressing", "False", "Paused")
    remove(main_pool, "svc")
    time.sleep(8)
    assert not main_pool.children("svc")
    for client in clients:
        client.must_hit(SERIES, BLOCKS)
    main_pool.apply(paused=False)
    wait_for("the Service is back", SETTLE_S, lambda: main_pool.children("svc"))
    must_be_well(main_pool, clients)


def test_image_upgrade_goes_node_by_node_and_stays_warm(
    main_pool: KVPool, clients: list[Client], target: Target, own: Cluster
) -> None:
    newer = f"{target.image}-next"
    for node in target.nodes:
        own.machines[node].run(
            "/opt/cluster/ctr", "-n", "k8s.io", "images", "tag", "--force", target.image, newer
        )
    main_pool.apply(daemon={"image": newer})
    worst = 2

    def rolled_out() -> bool:
        nonlocal worst
        for client in clients:
            client.must_hit(SERIES, BLOCKS)
        pods = main_pool.daemons()
        serving = [
            p
            for p in pods
            if p["status"].get("phase") == "Running" and "deletionTimestamp" not in p["metadata"]
        ]
        worst = min(worst, len(serving))
        return len(serving) == 2 and all(p["spec"]["containers"][0]["image"] == newer for p in serving)

    wait_for("both daemons run the new image", START_S, rolled_out, every=1)
    assert worst >= 1, "both daemons were away at the same time"
    must_be_well(main_pool, clients)
    main_pool.apply(daemon={"image": target.image})
    main_pool.wait_settled(START_S, nodes=2)


def test_node_leaves_and_joins_by_its_label(make_pool: MakePool, target: Target, kube: Kube) -> None:
    a, b = target.nodes
    label = "e2e.kvpool.dev/member"
    kube.kubectl("label", "node", a, f"{label}=yes", "--overwrite")
    try:
        pool = make_pool("members", dram(capacity="32Mi"), nodeSelector={label: "yes"})
        assert pool.status()["nodesReady"] == "1/1"
        kube.kubectl("label", "node", b, f"{label}=yes", "--overwrite")
        pool.wait_settled(nodes=2)
        kube.kubectl("label", "node", b, f"{label}-")
        pool.wait_settled(nodes=1)
        assert [node["spec"]["nodeName"] for node in pool.nodes()] == [a]
    finally:
        for node in (a, b):
            kube.kubectl("label", "node", node, f"{label}-")


def test_cordoned_node_drains_and_its_blocks_are_served(
    main_pool: KVPool, clients: list[Client], target: Target, kube: Kube
) -> None:
    a, b = target.nodes
    kube.kubectl("cordon", a)
    try:
        main_pool.wait_condition("Draining", "True", "NodeCordoned")

        def handed_over() -> bool:
            shard = main_pool.node_on(a)["spec"]["host"]
            shards = [s for t in main_pool.node_on(b)["status"]["tiers"] for s in t.get("shards") or []]
            (seen,) = [s for s in shards if s["shard"] == shard]
            assert seen["owner"] == main_pool.node_on(b)["spec"]["host"], seen
            return bool(seen["settled"])

        wait_for("node B looks after the shard of A", SETTLE_S, handed_over)
        clients[1].must_hit(SERIES, BLOCKS)
        clients[1].store("while-drained", 8)
        clients[1].must_hit("while-drained", 8)
        # A node that drains takes no new blocks into the shared tier.
        before = main_pool.tier("cxl")["blocks"]
        clients[0].load(SERIES, 8)
        assert main_pool.tier("cxl")["blocks"] <= before + 8
    finally:
        kube.kubectl("uncordon", a)
    main_pool.wait_condition("Draining", "False")
    clients[0].store("after-drain", 8)
    clients[1].must_hit("after-drain", 8)
    must_be_well(main_pool, clients)


def test_retained_pool_has_its_blocks_when_it_is_made_again(
    kube: Kube, release: str, target: Target, make_pool: MakePool
) -> None:
    tiers = [dram(capacity="32Mi"), cxl(f"{SHARED}/retained.region", capacity="64Mi")]
    pool = make_pool("retained", *tiers, hosts=2, deletionPolicy="Retain")
    client = Client(pool, target.nodes[0], target.image).start()
    client.store("kept", 32)
    client.stop()
    pool.delete()
    pool.wait_gone()
    pool.apply()
    pool.wait_settled(START_S, nodes=2)
    again = [Client(pool, node, target.image).start() for node in target.nodes]
    for client in again:
        client.must_hit("kept", 32)
    pool.apply(deletionPolicy="Delete")
    pool.wait_settled()


def test_deleted_pool_removes_its_files(make_pool: MakePool, target: Target, own: Cluster) -> None:
    tiers = [dram(capacity="32Mi"), cxl(f"{SHARED}/removed.region", capacity="64Mi")]
    pool = make_pool("removed", *tiers, hosts=2)
    shared = own.places.shared / "removed.region"
    assert shared.exists()
    pool.delete()
    pool.wait_gone()
    assert not shared.exists()
    for node in target.nodes:
        left = own.machines[node].run("find", "/dev/shm/kvpool", "-path", "*/removed/*.region")
        assert not left.strip()


def test_pool_name_that_was_deleted_starts_empty(make_pool: MakePool, target: Target) -> None:
    pool = make_pool("again", dram(capacity="32Mi"))
    client = Client(pool, target.nodes[0], target.image).start()
    client.store("old", 8)
    client.stop()
    pool.delete()
    pool.wait_gone()
    pool.apply()
    pool.wait_settled(START_S, nodes=2)
    fresh = Client(pool, target.nodes[0], target.image).start()
    assert fresh.load("old", 8)["ok"] == 0
    status: Object = wait_for(
        "lookups are counted", SETTLE_S, lambda: pool.status() if pool.status().get("lookups") else {}
    )
    assert (status["lookups"], status["hits"]) == (8, 0)
