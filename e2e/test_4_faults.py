"""Faults: whatever dies, the status is true again within 30 s, and a block is right or a miss."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from cluster.cluster import Cluster
from kube import Kube, ready, wait_for
from pools import SETTLE_S, START_S, Client, KVPool, dram, must_tell_the_truth
from release import NAMESPACE, OPERATOR, SYSTEM, MakePool, Target, wait_operator

POOL = "faults"
SERIES, BLOCKS = "faults", 64
NOTICED_S = 60  # this cluster says that a dead node is NotReady after 16 to 20 s


@pytest.fixture(autouse=True)
def stored(clients: list[Client]) -> None:
    clients[0].store(SERIES, BLOCKS)


def must_be_well(pool: KVPool, clients: list[Client], seconds: float = SETTLE_S) -> None:
    pool.wait_settled(seconds, nodes=2)
    for client in clients:
        client.must_hit(SERIES, BLOCKS)
    must_tell_the_truth(pool, clients)


def kill_operator(kube: Kube) -> None:
    for pod in kube.all("pods", SYSTEM, OPERATOR):
        name = pod["metadata"]["name"]
        kube.kubectl("delete", "pod", name, "-n", SYSTEM, "--grace-period=0", "--force", "--wait=false")


def grow(pool: KVPool) -> None:
    pool.set_tier("dram", capacity="96Mi")


def shrink(pool: KVPool) -> None:
    pool.set_tier("dram", capacity="64Mi")


def change_policy(pool: KVPool) -> None:
    pool.apply(eviction={"highWatermark": 90, "lowWatermark": 70})


def roll_out(pool: KVPool) -> None:
    pool.apply(daemon={"resources": {"requests": {"cpu": "50m"}}})


@pytest.mark.kills_operator
@pytest.mark.parametrize("change", [grow, shrink, change_policy, roll_out])
def test_operator_killed_in_the_middle_of_a_change_finishes_it(
    main_pool: KVPool, clients: list[Client], kube: Kube, change: Callable[[KVPool], None]
) -> None:
    change(main_pool)
    time.sleep(0.5)
    kill_operator(kube)
    main_pool.wait_settled(START_S, nodes=2)
    must_be_well(main_pool, clients)


@pytest.mark.kills_operator
def test_operator_killed_while_pools_come_and_go(make_pool: MakePool, kube: Kube) -> None:
    coming = make_pool("coming", dram(capacity="32Mi"), wait=False)
    time.sleep(0.5)
    kill_operator(kube)
    coming.wait_settled(START_S, nodes=2)
    kube.delete("kvpools.kvpool.dev", coming.name, NAMESPACE, wait_s=0)
    time.sleep(0.5)
    kill_operator(kube)
    coming.wait_gone()


@pytest.mark.kills_operator
def test_operator_away_then_catches_up(main_pool: KVPool, clients: list[Client], kube: Kube) -> None:
    kube.kubectl("scale", "deploy", "-n", SYSTEM, "-l", OPERATOR, "--replicas=0")
    wait_for("no operator", 60, lambda: not kube.all("pods", SYSTEM, OPERATOR))
    clients[0].store("meanwhile", 8)
    clients[1].must_hit("meanwhile", 8)
    main_pool.apply(eviction={"highWatermark": 95, "lowWatermark": 85})
    new = KVPool(kube, NAMESPACE, "meanwhile", {"tiers": [dram(capacity="32Mi")], "deletionPolicy": "Delete"})
    new.apply()
    kube.kubectl("scale", "deploy", "-n", SYSTEM, "-l", OPERATOR, "--replicas=2")
    wait_operator(kube)
    must_be_well(main_pool, clients)
    new.wait_settled(START_S, nodes=2)
    new.delete()
    new.wait_gone()


@pytest.mark.kills_operator
def test_apiserver_restarted(main_pool: KVPool, clients: list[Client], own: Cluster, kube: Kube) -> None:
    own.restart_service("cp", "apiserver")
    wait_for("the apiserver answers", 60, lambda: kube.raw("/readyz") == "ok")
    must_be_well(main_pool, clients)
    change_policy(main_pool)
    must_be_well(main_pool, clients)
    wait_operator(kube)


@pytest.fixture
def reachable_node(own: Cluster, kube: Kube, target: Target, clients: list[Client]) -> Iterator[str]:
    """Node B; on, connected, and a member again when the test ends."""
    node = target.nodes[1]
    yield node
    was_off = not own.machines[node].is_on()
    if was_off:
        own.power_on(node)
    own.join_network(node)
    own.start(node, "kubelet")
    kube.kubectl("uncordon", node)
    wait_for(f"node {node} is Ready", NOTICED_S, lambda: ready(kube.get("node", node)))
    if was_off:  # a test failed half way: its containers are gone
        clients[1].restart()


def wait_not_ready(kube: Kube, node: str) -> None:
    wait_for(f"node {node} is not Ready", NOTICED_S, lambda: not ready(kube.get("node", node)))


@pytest.mark.kills_operator
def test_kubelet_stopped_and_started(
    main_pool: KVPool, clients: list[Client], own: Cluster, kube: Kube, reachable_node: str
) -> None:
    own.stop_service(reachable_node, "kubelet", "KILL")
    wait_not_ready(kube, reachable_node)
    clients[0].must_hit(SERIES, BLOCKS)
    own.start(reachable_node, "kubelet")
    wait_for("the node is Ready", NOTICED_S, lambda: ready(kube.get("node", reachable_node)))
    must_be_well(main_pool, clients)


@pytest.mark.kills_operator
def test_node_cut_off_and_joined(
    main_pool: KVPool, clients: list[Client], own: Cluster, kube: Kube, reachable_node: str
) -> None:
    own.cut_network(reachable_node)
    wait_not_ready(kube, reachable_node)
    main_pool.wait_condition("Ready", "False", seconds=NOTICED_S)
    clients[0].must_hit(SERIES, BLOCKS)
    own.join_network(reachable_node)
    wait_for("the node is Ready", NOTICED_S, lambda: ready(kube.get("node", reachable_node)))
    main_pool.wait_settled(nodes=2)
    wait_operator(kube)
    must_be_well(main_pool, clients)


@pytest.mark.kills_operator
def test_node_loses_power_and_comes_back(
    main_pool: KVPool, clients: list[Client], own: Cluster, kube: Kube, reachable_node: str
) -> None:
    """Its own memory is gone; what lies in the shared tier is still served, there and here."""
    clients[1].store("of-the-dead", 16)
    own.power_off(reachable_node)
    wait_not_ready(kube, reachable_node)
    main_pool.wait_condition("Ready", "False", seconds=NOTICED_S)
    clients[0].must_hit(SERIES, BLOCKS)
    clients[0].must_hit("of-the-dead", 16)
    own.power_on(reachable_node)
    wait_for("the node is Ready", NOTICED_S, lambda: ready(kube.get("node", reachable_node)))
    main_pool.wait_settled(START_S, nodes=2)
    wait_operator(kube, NOTICED_S)
    clients[1].restart()
    must_be_well(main_pool, clients)
    clients[1].must_hit("of-the-dead", 16)


@pytest.mark.kills_operator
def test_shard_of_a_deleted_node_is_adopted(
    main_pool: KVPool, clients: list[Client], own: Cluster, kube: Kube, target: Target, reachable_node: str
) -> None:
    clients[1].store("orphans", 16)
    shard = main_pool.node_on(reachable_node)["spec"]["host"]
    adopter = main_pool.node_on(target.nodes[0])["spec"]["host"]
    own.power_off(reachable_node)
    kube.kubectl("delete", "node", reachable_node)

    def adopted() -> bool:
        shards = [
            s for t in main_pool.node_on(target.nodes[0])["status"]["tiers"] for s in t.get("shards") or []
        ]
        (seen,) = [s for s in shards if s["shard"] == shard]
        assert seen["owner"] == adopter, seen
        return bool(seen["settled"])

    wait_for("the shard is adopted", SETTLE_S, adopted)
    clients[0].must_hit("orphans", 16)
    main_pool.wait_settled(nodes=1)
    own.power_on(reachable_node)
    wait_for("the node is Ready", NOTICED_S, lambda: ready(kube.get("node", reachable_node)))
    main_pool.wait_settled(START_S, nodes=2)
    wait_operator(kube, NOTICED_S)
    clients[1].restart()
    clients[1].must_hit("orphans", 16)
    clients[1].store("as-before", 8)
    clients[0].must_hit("as-before", 8)
    must_be_well(main_pool, clients)
