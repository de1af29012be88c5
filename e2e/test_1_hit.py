"""From `helm install` to a hit on another node, and the same numbers wherever one looks."""

from __future__ import annotations

import json
import re
import time

import pytest

from kube import Kube, wait_for
from pools import CHILDREN, START_S, Client, KVPool, cxl, dram, wait_stable_counts
from release import NAMESPACE, RELEASE, SHARED, SYSTEM, Facts, Target

POOL = "hit"
BLOCKS = 64


@pytest.fixture(scope="module")
def first(target: Target, release: str, facts: Facts) -> tuple[KVPool, list[Client]]:
    """The first pool after the install; its time to Ready is measured."""
    tiers = [dram(), cxl(f"{SHARED}/{POOL}.region")]
    pool = KVPool(target.kube, NAMESPACE, POOL, {"hosts": 2, "tiers": tiers, "deletionPolicy": "Delete"})
    begun = time.monotonic()
    pool.apply()
    pool.wait_settled(START_S, nodes=2)
    facts.tell(time_to_ready_s=round(time.monotonic() - begun, 1))
    clients = [Client(pool, node, target.image).start() for node in target.nodes]
    return pool, clients


def test_helm_test_after_install_succeeds(kube: Kube, release: str) -> None:
    kube.helm("test", RELEASE, "--namespace", SYSTEM, "--timeout=60s")


def test_block_stored_on_one_node_hits_on_the_other(first: tuple[KVPool, list[Client]], facts: Facts) -> None:
    pool, (a, b) = first
    a.store("first", BLOCKS)
    b.must_hit("first", BLOCKS)
    a.must_hit("first", BLOCKS)
    assert b.load("never", BLOCKS // 2)["not"] == {"never-stored": BLOCKS // 2}

    def look() -> bool:
        status = pool.status()
        assert (status["lookups"], status["hits"]) == (BLOCKS * 5 // 2, BLOCKS * 2), status
        return True

    wait_for("status counts all of it", 30, look)
    facts.tell(client={"lookups": BLOCKS * 5 // 2, "hits": BLOCKS * 2, "wrong_blocks": 0})


def test_hit_rate_is_equal_in_kubectl_and_status(
    first: tuple[KVPool, list[Client]], kube: Kube, facts: Facts
) -> None:
    pool, _ = first
    status = wait_stable_counts(pool)
    assert status["hitRate"] == "80.0"
    head, row = kube.kubectl("get", "kvp", pool.name, "-n", NAMESPACE).splitlines()
    columns = [match.span() for match in re.finditer(r"\S+(?: \S+)*\s*", head)]
    table = {head[a:b].strip(): row[a:b].strip() for a, b in columns}
    assert table["HIT %"] == status["hitRate"], table
    assert (table["READY"], table["NODES"]) == ("True", "2/2"), table
    assert (table["CAPACITY"], table["USED"]) == (status["capacity"], status["used"]), table
    facts.tell(hit_rate={"status": status["hitRate"], "kubectl": table["HIT %"]})


def test_misses_are_counted_by_reason(first: tuple[KVPool, list[Client]]) -> None:
    pool, _ = first
    assert pool.status()["misses"] == {"never-stored": BLOCKS // 2}


def test_tiers_of_status_are_those_of_spec(first: tuple[KVPool, list[Client]]) -> None:
    pool, _ = first
    status = pool.status()
    assert [(t["name"], t["medium"]) for t in status["tiers"]] == [("dram", "DRAM"), ("cxl", "CXL")]
    assert pool.tier("cxl")["blocks"] == BLOCKS
    assert sum(t["hits"] for t in status["tiers"]) == status["hits"]


def test_conditions_of_shared_pool_are_all_there(first: tuple[KVPool, list[Client]]) -> None:
    pool, _ = first
    wait = {"Ready": "True", "Progressing": "False", "Degraded": "False", "Draining": "False"}
    for kind, status in {**wait, "CoherenceVerified": "True"}.items():
        said = pool.wait_condition(kind, status)
        assert said["message"], said
        assert said["reason"], said


def test_labelled_pod_is_restricted_and_has_pool_and_configuration(
    first: tuple[KVPool, list[Client]], kube: Kube
) -> None:
    """The namespace enforces `restricted`, so that the pod is there says that it is."""
    pool, (a, _) = first
    body = kube.get("pod", a.name, NAMESPACE)
    assert body["metadata"]["annotations"]["kvpool.dev/injected"] == pool.name
    environment = {e["name"]: e.get("value") for e in body["spec"]["containers"][0]["env"]}
    assert environment["KVPOOL_POOL"] == pool.name
    assert environment["PYTHONHASHSEED"] == "0"
    transfer = json.loads(environment["KVPOOL_KV_TRANSFER_CONFIG"] or "{}")
    assert transfer["kv_connector"] == "KVPoolConnector"
    assert not [v for v in body["spec"]["volumes"] if "hostPath" in v]
    uid = kube.exec(NAMESPACE, a.name, "id", "-u").strip()
    assert uid != "0"


def test_pod_with_label_of_unknown_pool_starts_and_says_why(kube: Kube, target: Target, release: str) -> None:
    nobody = Client(KVPool(kube, NAMESPACE, "no-such-pool"), target.nodes[0], target.image)
    nobody.start()
    annotations = kube.get("pod", nobody.name, NAMESPACE)["metadata"].get("annotations") or {}
    nobody.stop()
    assert "no-such-pool" in annotations["kvpool.dev/injection-skipped"]


def test_configuration_for_hand_made_pods_is_in_the_config_map(
    first: tuple[KVPool, list[Client]], kube: Kube
) -> None:
    pool, _ = first
    data = kube.get("configmap", f"kvpool-{pool.name}", NAMESPACE)["data"]
    assert json.loads(data["vllm.json"])["kv_connector_extra_config"]["pool"] == pool.name
    assert "kind: KVPool" in data["pool.yaml"]


def test_daemons_limit_covers_its_dram_tier(first: tuple[KVPool, list[Client]]) -> None:
    pool, _ = first
    for pod in pool.daemons():
        (container,) = pod["spec"]["containers"]
        for kind in ("requests", "limits"):
            assert _mebibytes(container["resources"][kind]["memory"]) >= 64 + 32, container["resources"]


@pytest.fixture(scope="module")
def reader(kube: Kube, release: str) -> str:
    """The token of an account that may read pools, and nothing else."""
    metadata = {"name": "e2e-reader", "namespace": NAMESPACE}
    rights = {"apiGroups": ["kvpool.dev"], "resources": ["kvpools"], "verbs": ["get", "list"]}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": metadata["name"]}
    kube.apply(
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata},
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "Role",
            "metadata": metadata,
            "rules": [rights],
        },
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "RoleBinding",
            "metadata": metadata,
            "roleRef": role,
            "subjects": [{"kind": "ServiceAccount", **metadata}],
        },
    )
    return kube.kubectl("create", "token", metadata["name"], "-n", NAMESPACE).strip()


def test_hit_rate_is_equal_in_api(
    first: tuple[KVPool, list[Client]], kube: Kube, reader: str, facts: Facts
) -> None:
    pool, (a, _) = first
    (service,) = kube.all("service", SYSTEM, "app.kubernetes.io/component=api")
    host, port = service["metadata"]["name"], service["spec"]["ports"][0]["port"]
    url = f"http://{host}.{SYSTEM}:{port}/v1/pools/{NAMESPACE}/{pool.name}"
    ask = (
        "import sys, urllib.request as u; "
        "r = u.Request(sys.argv[1], headers={'Authorization': 'Bearer ' + sys.argv[2]}); "
        "print(u.urlopen(r, timeout=5).read().decode())"
    )
    seen = json.loads(kube.exec(NAMESPACE, a.name, "python", "-c", ask, url, reader))
    status = pool.status()
    assert f"{seen['hitRate']:.1f}" == status["hitRate"]
    assert (seen["lookups"], seen["hits"]) == (status["lookups"], status["hits"])
    facts.tell(hit_rate={**facts.known["hit_rate"], "api": f"{seen['hitRate']:.1f}"})


def test_steady_pool_is_not_written(first: tuple[KVPool, list[Client]], kube: Kube) -> None:
    """No write of the status, and none of a child, while nothing happens."""
    pool, _ = first
    wait_stable_counts(pool)

    def versions() -> dict[str, str]:
        found = [*pool.children(CHILDREN), pool.get()]
        return {f"{b['kind']}/{b['metadata']['name']}": b["metadata"]["resourceVersion"] for b in found}

    before = versions()
    time.sleep(10)
    assert versions() == before


def test_deleted_pool_leaves_nothing(first: tuple[KVPool, list[Client]]) -> None:
    pool, clients = first
    for client in clients:
        client.stop()
    pool.delete()
    pool.wait_gone()


def _mebibytes(text: str) -> float:
    units = {"Ki": 2**-10, "Mi": 1.0, "Gi": 2.0**10}
    return float(text[:-2]) * units[text[-2:]] if text[-2:] in units else float(text) / 2**20
