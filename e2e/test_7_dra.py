"""Resource claims in a real cluster: a pool's CXL tier from a DeviceClass, engines' pods by claims.

The memory is the file backend's, in the folder that all nodes share.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import pytest

from claims import COMPONENT, CXL_FOLDER, DRIVER, Node, claimed, pod_claim, tier_claim, wait_running
from cluster.cluster import Cluster
from kube import Kube, KubeError, Object, ready, wait_for
from pools import LABEL, RESTRICTED, SETTLE_S, START_S, Client, KVPool, dram, must_tell_the_truth
from release import NAMESPACE, SYSTEM, Facts, Target, install

POOL = "dra"
SERIES, BLOCKS = "dra", 64
CLAIM_S = 10.0  # from the claim to the running pod
THIEF = "e2e-thief"
STORM, KILLS = 16, 2  # after a kill the kubelet tries again only in 60 to 90 s
SETTINGS = f"--set=dra.enabled=true,dra.backend=file:{CXL_FOLDER}?memories=4x192Mi"


@pytest.fixture(scope="module")
def driver(target: Target, release: str, own: Cluster) -> Iterator[str]:
    """The release with the driver; as it was before when the module ends."""
    install(target, SETTINGS)
    yield COMPONENT
    install(target)


@pytest.fixture(scope="module")
def pool(driver: str, target: Target, facts: Facts) -> Iterator[KVPool]:
    made = KVPool(
        target.kube, NAMESPACE, POOL, {"hosts": 2, "tiers": [dram(), claimed()], "deletionPolicy": "Delete"}
    )
    begun = time.monotonic()
    made.apply()
    made.wait_settled(START_S, nodes=2)
    facts.tell(dra_pool_ready_s=round(time.monotonic() - begun, 1))
    yield made
    for pod in target.kube.all("pods", NAMESPACE, f"{LABEL}={POOL}"):
        target.kube.delete("pod", pod["metadata"]["name"], NAMESPACE)
    made.delete()
    made.wait_gone()


@pytest.fixture(scope="module")
def engines(pool: KVPool, target: Target, facts: Facts) -> list[Client]:
    """A client on each node, that got the pool by a claim."""
    made = [Client(pool, node, target.image) for node in target.nodes]
    seconds = [round(wait_running(client), 2) for client in made]
    for client in made:
        client.wait_ready()
    facts.tell(dra_claim_to_running_s=seconds)
    return made


@pytest.fixture(scope="module")
def places(own: Cluster, target: Target) -> list[Node]:
    return [Node(own, name) for name in target.nodes]


@pytest.fixture(autouse=True)
def stored(request: pytest.FixtureRequest) -> None:
    if "engines" in request.fixturenames:
        request.getfixturevalue("engines")[0].store(SERIES, BLOCKS)


def must_be_well(pool: KVPool, engines: list[Client], seconds: float = SETTLE_S) -> None:
    pool.wait_settled(seconds, nodes=2)
    for client in engines:
        client.must_hit(SERIES, BLOCKS)
    must_tell_the_truth(pool, engines)


def driver_pods(kube: Kube) -> list[Object]:
    return kube.all("pods", SYSTEM, COMPONENT)


def wait_driver(kube: Kube) -> None:
    def look() -> bool:
        pods = driver_pods(kube)
        assert len(pods) == 2, [pod["metadata"]["name"] for pod in pods]
        assert all(ready(pod) for pod in pods), [pod["status"] for pod in pods]
        return True

    wait_for("the driver is Ready on both nodes", 60, look)


# --- claims -------------------------------------------------------------------------------------------------


def test_claim_to_running_pod_takes_less_than_ten_seconds(engines: list[Client], facts: Facts) -> None:
    assert max(facts.known["dra_claim_to_running_s"]) < CLAIM_S


def test_block_stored_on_one_node_hits_on_the_other_in_claimed_memory(
    pool: KVPool, engines: list[Client], facts: Facts
) -> None:
    a, b = engines
    a.store("first", BLOCKS)
    b.must_hit("first", BLOCKS)
    assert pool.tier("cxl")["blocks"] >= BLOCKS
    facts.tell(dra_cross_node={"stored": BLOCKS, "hits": BLOCKS, "wrong_blocks": 0})


def test_engines_pod_is_restricted_and_has_one_claim_and_no_volume_of_the_pool(
    engines: list[Client], kube: Kube
) -> None:
    """The namespace enforces `restricted`, so that the pod is there says that it is."""
    for client in engines:
        spec = kube.get("pod", client.name, NAMESPACE)["spec"]
        assert [claim["resourceClaimTemplateName"] for claim in spec["resourceClaims"]] == [f"kvpool-{POOL}"]
        names = [volume["name"] for volume in spec["volumes"]]
        assert names == ["script"], names
        assert not spec.get("hostIPC")


def test_daemons_share_one_claim_and_have_no_privilege(pool: KVPool) -> None:
    claim = tier_claim(pool)
    assert len(claim["status"]["reservedFor"]) == 2
    for pod in pool.daemons():
        (container,) = pod["spec"]["containers"]
        assert not container["securityContext"].get("privileged")
        assert pod["spec"]["resourceClaims"] == [
            {"name": "cxl", "resourceClaimName": claim["metadata"]["name"]}
        ]
    (device, *_) = claim["status"]["devices"]
    (said,) = device["conditions"]
    assert (said["type"], said["status"]) == ("Ready", "True"), said


def test_cdi_name_is_the_same_on_both_nodes_and_so_is_what_it_gives(
    pool: KVPool, engines: list[Client], places: list[Node], facts: Facts
) -> None:
    name = f"{DRIVER}/claim={tier_claim(pool)['metadata']['uid']}"
    given = [node.cdi()[name] for node in places]
    assert given[0] == given[1], given
    (mount,) = given[0]["mounts"]
    assert mount["containerPath"] == f"/dev/kvpool/{POOL}/cxl"
    facts.tell(dra_cdi_name_on_both_nodes=name)
    own = [
        node.cdi()[f"{DRIVER}/claim={pod_claim(client)['metadata']['uid']}"]
        for node, client in zip(places, engines, strict=True)
    ]
    assert own[0] == own[1], "two claims of one pool give the same"


# --- faults -------------------------------------------------------------------------------------------------


def test_kubelet_and_driver_restarted(
    pool: KVPool, engines: list[Client], own: Cluster, kube: Kube, target: Target
) -> None:
    node = target.nodes[1]
    own.restart_service(node, "kubelet")
    for pod in driver_pods(kube):
        name = pod["metadata"]["name"]
        kube.kubectl("delete", "pod", name, "-n", SYSTEM, "--grace-period=0", "--force", "--wait=false")
    wait_driver(kube)
    wait_for("the node is Ready", 60, lambda: ready(kube.get("node", node)))
    must_be_well(pool, engines)
    engines[1].restart()
    engines[1].must_hit(SERIES, BLOCKS)


def test_driver_is_updated_while_pods_start(pool: KVPool, engines: list[Client], kube: Kube) -> None:
    (found,) = kube.all("daemonset", SYSTEM, COMPONENT)
    name = found["metadata"]["name"]
    kube.kubectl("rollout", "restart", f"daemonset/{name}", "-n", SYSTEM)
    for _ in range(3):
        engines[1].restart()
        engines[1].must_hit(SERIES, BLOCKS)
    kube.kubectl("rollout", "status", f"daemonset/{name}", "-n", SYSTEM, "--timeout=90s", seconds=100)
    wait_driver(kube)
    must_be_well(pool, engines)


def test_claim_deleted_while_its_pod_runs(engines: list[Client], kube: Kube, places: list[Node]) -> None:
    client = engines[0]
    claim = pod_claim(client)
    name, uid = claim["metadata"]["name"], claim["metadata"]["uid"]
    kube.delete("resourceclaim", name, NAMESPACE, wait_s=0)
    time.sleep(3)
    client.must_hit(SERIES, BLOCKS)
    client.stop()
    wait_for("the claim is gone", 30, lambda: kube.find("resourceclaim", name, NAMESPACE) is None)
    # A pod without a grace period is gone from the API before its kubelet has ended it.
    wait_for("its CDI file is gone", 30, lambda: f"{DRIVER}/claim={uid}" not in places[0].cdi())
    client.start()
    client.must_hit(SERIES, BLOCKS)


def test_node_is_drained_and_comes_back(
    pool: KVPool, engines: list[Client], kube: Kube, target: Target, places: list[Node]
) -> None:
    node, client = target.nodes[1], engines[1]
    uid = pod_claim(client)["metadata"]["uid"]
    try:
        kube.kubectl("drain", node, "--ignore-daemonsets", "--force", "--delete-emptydir-data", seconds=120)
        wait_for("its CDI file is gone", 30, lambda: f"{DRIVER}/claim={uid}" not in places[1].cdi())
        engines[0].must_hit(SERIES, BLOCKS)
    finally:
        kube.kubectl("uncordon", node)
    pool.wait_condition("Draining", "False")
    client.start()
    must_be_well(pool, engines, START_S)


# --- who may not --------------------------------------------------------------------------------------------


def hostile(name: str, namespace: str, image: str, request: Object) -> tuple[Object, Object]:
    """A pod and its claim."""
    metadata = {"name": name, "namespace": namespace}
    claim = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": metadata,
        "spec": {"devices": {"requests": [{"name": "r", "exactly": request}]}},
    }
    container = {
        "name": "c",
        "image": image,
        "command": ["sleep", "infinity"],
        "securityContext": RESTRICTED,
        "resources": {"claims": [{"name": "kv"}]},
    }
    spec = {
        "containers": [container],
        "resourceClaims": [{"name": "kv", "resourceClaimName": name}],
        "terminationGracePeriodSeconds": 0,
    }
    return claim, {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def test_hostile_claims_are_refused_with_a_message(
    pool: KVPool, kube: Kube, target: Target, facts: Facts
) -> None:
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    kube.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": THIEF, "labels": labels}})
    ours = f'device.attributes["{DRIVER}"]'
    stolen = f'device.driver == "{DRIVER}" && {ours}.namespace == "{NAMESPACE}" && {ours}.pool == "{POOL}"'
    cases = {
        "stolen": (
            {"deviceClassName": "kvpool", "selectors": [{"cel": {"expression": stolen}}]},
            "a claim gets pools of its own namespace only",
        ),
        "raw": ({"deviceClassName": "cxl-dax"}, "get no CXL memory by itself"),
    }
    said = {}
    for name, (request, wanted) in cases.items():
        kube.apply(*hostile(name, THIEF, target.image, request))

        def refused(name: str = name, wanted: str = wanted) -> str:
            devices = kube.get("resourceclaim", name, THIEF)["status"].get("devices") or []
            assert devices, kube.explain(THIEF)
            (condition,) = devices[0]["conditions"]
            assert condition["status"] == "False", condition
            assert wanted in condition["message"], condition
            return str(condition["message"])

        said[name] = wait_for(f"claim {name} is refused", 60, refused)
        wait_for(
            f"events of pod {name}",
            30,
            lambda wanted=wanted: wanted in kube.kubectl("get", "events", "-n", THIEF, "-o", "yaml"),
        )
        assert kube.get("pod", name, THIEF)["status"]["phase"] == "Pending"
    tricked, _ = hostile("tricked", THIEF, target.image, {"deviceClassName": "kvpool"})
    parameters = {
        "apiVersion": f"{DRIVER}/v1alpha1",
        "kind": "RegionParameters",
        "pool": {"namespace": NAMESPACE, "name": "../../etc", "tier": "cxl"},
    }
    tricked["spec"]["devices"]["config"] = [{"opaque": {"driver": DRIVER, "parameters": parameters}}]
    with pytest.raises(KubeError, match="RegionParameters"):
        kube.apply(tricked)
    kube.delete("namespace", THIEF)
    facts.tell(dra_refused=said)


# --- what is left -------------------------------------------------------------------------------------------


def test_pods_come_and_go_with_random_kills_of_the_driver_and_leave_nothing(
    pool: KVPool, engines: list[Client], kube: Kube, places: list[Node], facts: Facts
) -> None:
    before = [
        (sorted(node.cdi()), node.records(), node.regions(), node.mounts_of_regions()) for node in places
    ]
    dice = random.Random(7)
    kills = set(dice.sample(range(STORM), KILLS))
    slowest = 0.0
    for turn in range(STORM):
        if turn in kills:
            victim = dice.choice(driver_pods(kube))["metadata"]["name"]
            kube.kubectl("delete", "pod", victim, "-n", SYSTEM, "--grace-period=0", "--force", "--wait=false")
        client = engines[turn % 2]
        client.stop()
        seconds = wait_running(client, 120)
        slowest = max(slowest, seconds)
    wait_driver(kube)
    for client in engines:
        client.wait_ready()

    def same() -> bool:
        now = [
            (sorted(node.cdi()), node.records(), node.regions(), node.mounts_of_regions()) for node in places
        ]
        for old, new in zip(before, now, strict=True):
            assert len(old[0]) == len(new[0]), (old, new)
            assert len(old[1]) == len(new[1]), (old, new)
            assert old[2:] == new[2:], (old, new)
        return True

    wait_for("nothing is left of the pods that went", 60, same)
    must_be_well(pool, engines)
    facts.tell(dra_storm={"pods": STORM, "kills": KILLS, "slowest_s": round(slowest, 2)})


def test_deleted_pool_gives_its_memory_back(
    pool: KVPool, engines: list[Client], kube: Kube, places: list[Node]
) -> None:
    for client in engines:
        client.stop()
    assert places[0].regions()
    pool.delete()
    pool.wait_gone()

    def nothing() -> bool:
        for node in places:
            assert not node.cdi(), node.cdi()
            assert not node.records(), node.records()
            assert not node.regions(), node.regions()
        slices = kube.all("resourceslices")
        assert {s["spec"]["pool"]["name"].partition("/")[0] for s in slices} == {"memory"}, slices
        regions = {s["spec"]["devices"][0]["attributes"]["region"]["string"] for s in slices}
        assert regions == {"none"}, regions
        return True

    wait_for("nothing is left of the pool", 60, nothing)


def test_driver_that_is_switched_off_leaves_nothing(driver: str, kube: Kube, target: Target) -> None:
    install(target)

    def nothing() -> bool:
        left = [s["metadata"]["name"] for s in kube.all("resourceslices") if s["spec"]["driver"] == DRIVER]
        assert not left, left
        assert not driver_pods(kube)
        assert not [c for c in kube.all("deviceclasses") if c["metadata"]["name"] in ("kvpool", "cxl-dax")]
        return True

    wait_for("no slice, class or pod is left", 60, nothing)
