"""The operator against a real Kubernetes API, as a process. There are no kubelets here: no pod ever runs."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from kube.apiserver import ApiServer
from kube.nodes import GROUP, until
from kube.operators import SYSTEM, OperatorProcess, release, waited
from pool_objects import CXL, DRAM, node_status
from strategies import region_folder

Object = dict[str, Any]
numbers = count()


@pytest.fixture(scope="module")
def cluster(crds: ApiServer) -> ApiServer:
    crds.kubectl("create", "namespace", SYSTEM, check=False)  # other tests of the same API have it too
    return crds


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with region_folder() as made:
        yield made


@pytest.fixture
def members(cluster: ApiServer) -> Iterator[list[str]]:
    """Two nodes of the cluster that carry a label of this test's own."""
    label = f"pool-{next(numbers)}"
    names = [f"{label}-a", f"{label}-b"]
    for name in names:
        add_node(cluster, name, label)
    yield names
    for name in names:
        cluster.request("DELETE", f"/api/v1/nodes/{name}")


@pytest.fixture
def operator(cluster: ApiServer, folder: Path) -> Iterator[OperatorProcess]:
    made = OperatorProcess(cluster, folder, f"operator-{next(numbers)}").start()
    until(lambda: made.leads, what="it leads")
    try:
        yield made
    finally:
        made.stop()


def add_node(cluster: ApiServer, name: str, label: str) -> None:
    body = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": {"member": label}}}
    assert cluster.create("/api/v1/nodes", body).ok
    ready = {"status": {"conditions": [{"type": "Ready", "status": "True"}]}}  # as its kubelet would say
    patched = cluster.request(
        "PATCH", f"/api/v1/nodes/{name}/status", ready, content_type="application/merge-patch+json"
    )
    assert patched.ok, patched.message


def pool_of(members: list[str], namespace: str, **spec: Any) -> Object:
    label = members[0].rpartition("-")[0]
    return {
        "apiVersion": "kvpool.dev/v1alpha1",
        "kind": "KVPool",
        "metadata": {"name": "prefix", "namespace": namespace},
        "spec": {"hosts": 2, "nodeSelector": {"member": label}, "tiers": [DRAM, CXL], **spec},
    }


class Pools:
    """What a test does with one pool."""

    def __init__(self, cluster: ApiServer, namespace: str) -> None:
        self.cluster = cluster
        self.namespace = namespace
        self.path = f"{GROUP}/namespaces/{namespace}/kvpools"

    def create(self, body: Object) -> None:
        answer = self.cluster.create(self.path, body)
        assert answer.ok, answer.message

    def patch(self, patch: Object) -> None:
        self.kubectl("patch", "kvp", "prefix", "--type=merge", "-p", json.dumps(patch))

    def kubectl(self, *arguments: str) -> Object:
        made = self.cluster.kubectl("-n", self.namespace, *arguments, "-o", "json")
        return dict(json.loads(made.stdout))

    def get(self, kind: str = "kvp", name: str = "prefix") -> Object | None:
        made = self.cluster.kubectl(
            "-n", self.namespace, "get", kind, name, "-o", "json", "--ignore-not-found"
        )
        return dict(json.loads(made.stdout)) if made.stdout.strip() else None

    def items(self, kind: str, namespace: str | None = None) -> list[Object]:
        """The objects of this pool."""
        where = ["-n", namespace or self.namespace]
        labels = f"kvpool.dev/pool=prefix,kvpool.dev/namespace={self.namespace}"
        made = self.cluster.kubectl(*where, "get", kind, "-l", labels, "-o", "json")
        return list(json.loads(made.stdout)["items"])

    def condition(self, name: str) -> tuple[str, str, str]:
        status = (self.get() or {}).get("status") or {}
        for condition in status.get("conditions") or []:
            if condition["type"] == name:
                return condition["status"], condition["reason"], condition["message"]
        return "", "", ""

    def tell(self, index: int, **more: Any) -> None:
        """Report as the daemon of a node would."""
        node = self.get("kvpn", f"prefix-{index}")
        assert node is not None
        told = node_status(observedGeneration=node["metadata"]["generation"], **more)
        told["host"] = index
        told["tiers"] = [
            {"name": name, "medium": medium, "capacityBytes": 64 << 20, "usedBytes": 0, "blocks": 0}
            | ({"shards": more.get("shards", [])} if name == "cxl" else {})
            for name, medium in (("dram", "DRAM"), ("cxl", "CXL"))
        ]
        told.pop("shards", None)
        body = {
            "apiVersion": "kvpool.dev/v1alpha1",
            "kind": "KVPoolNode",
            "metadata": {"name": f"prefix-{index}", "namespace": self.namespace},
            "status": told,
        }
        path = f"{GROUP}/namespaces/{self.namespace}/kvpoolnodes/prefix-{index}/status"
        answer = self.cluster.apply(path, body, manager="kvpool-node")
        assert answer.ok, answer.message


@pytest.fixture
def pools(cluster: ApiServer, namespace: str) -> Iterator[Pools]:
    made = Pools(cluster, namespace)
    yield made
    # Nobody else takes the finalizer off when the operator of the test is gone.
    if made.get() is not None:
        made.patch({"metadata": {"finalizers": []}})
        cluster.request("DELETE", f"{made.path}/prefix")
    # Nor what a pool had beside the operator, when it went while none acted: the next one would try to.
    labels = f"kvpool.dev/pool=prefix,kvpool.dev/namespace={namespace}"
    for kind in ("daemonsets", "serviceaccounts", "services", "networkpolicies"):
        cluster.kubectl("-n", SYSTEM, "delete", kind, "-l", labels, "--wait=false")


def test_a_pool_gets_all_its_objects_and_a_status_that_says_what_is_missing(
    operator: OperatorProcess, pools: Pools, members: list[str]
) -> None:
    pools.create(pool_of(members, pools.namespace))
    until(lambda: pools.condition("Ready")[1] == "NodesNotReady", what="a status")
    assert [n["spec"]["nodeName"] for n in pools.items("kvpn")] == members
    assert len(pools.items("daemonsets", SYSTEM)) == 1
    for kind, many in (("configmaps", 1), ("pvc", 2), ("roles", 1), ("rolebindings", 1)):
        assert len(pools.items(kind)) == many, kind
    for kind, many in (("pv", 2), ("serviceaccounts", 1), ("services", 1), ("networkpolicies", 1)):
        assert len(pools.items(kind, SYSTEM)) == many, kind
    for index in (0, 1):
        pools.tell(index, lookups=10, hits=9 + index)
    until(lambda: pools.condition("Ready")[0] == "True", what="it is ready")
    until(lambda: (pools.get() or {})["status"].get("hitRate") == "95.0", what="the hit rate")
    columns = (
        pools.cluster.kubectl("-n", pools.namespace, "get", "kvp", "prefix").stdout.split("\n")[1].split()
    )
    assert columns[:6] == ["prefix", "True", "2/2", "192Mi", "0", "95.0"]


def test_nothing_is_written_when_nothing_changes(
    operator: OperatorProcess, pools: Pools, members: list[str]
) -> None:
    pools.create(pool_of(members, pools.namespace, daemon={"resources": {"requests": {"cpu": "0.25"}}}))
    until(lambda: pools.condition("Ready")[0] == "False", what="a status")
    time.sleep(1)
    before = operator.writes()
    for _ in range(5):  # each is an event, and a reconcile
        pools.kubectl("annotate", "kvp", "prefix", "--overwrite", f"touched={time.monotonic()}")
        time.sleep(0.3)
    assert operator.writes() == before


def test_what_somebody_changes_or_deletes_is_put_back(
    operator: OperatorProcess, pools: Pools, members: list[str]
) -> None:
    pools.create(pool_of(members, pools.namespace))
    until(lambda: pools.items("daemonsets", SYSTEM), what="the daemons")
    daemons = pools.items("daemonsets", SYSTEM)[0]["metadata"]["name"]
    pools.cluster.kubectl("-n", SYSTEM, "set", "image", f"ds/{daemons}", "daemon=evil:1")
    pools.cluster.kubectl("-n", pools.namespace, "delete", "cm", "kvpool-prefix")
    pools.cluster.kubectl("-n", pools.namespace, "delete", "kvpn", "prefix-1", "--wait=false")

    def image() -> str:
        template = pools.items("daemonsets", SYSTEM)[0]["spec"]["template"]
        return str(template["spec"]["containers"][0]["image"])

    until(lambda: image() == "localhost/kvpool:test", what="the image is back")
    until(lambda: pools.get("cm", "kvpool-prefix"), what="the ConfigMap is back")
    until(lambda: pools.get("kvpn", "prefix-1"), what="the KVPoolNode is back")
    account = pools.items("sa", SYSTEM)[0]["metadata"]

    def pods_account() -> str:
        template = pools.items("daemonsets", SYSTEM)[0]["spec"]["template"]
        return str(template["metadata"]["annotations"]["kvpool.dev/account"])

    assert pods_account() == account["uid"]
    pools.cluster.kubectl("-n", SYSTEM, "delete", "sa", account["name"])
    until(lambda: pods_account() != account["uid"], what="pods with tokens of the new account")


def test_a_cordoned_node_drains_and_a_gone_one_is_let_go_when_its_shard_is_adopted(
    operator: OperatorProcess, pools: Pools, members: list[str]
) -> None:
    pools.create(pool_of(members, pools.namespace))
    until(lambda: len(pools.items("kvpn")) == 2, what="two KVPoolNodes")
    for index in (0, 1):
        pools.tell(index)
    until(lambda: pools.condition("Ready")[0] == "True", what="it is ready")
    pools.cluster.kubectl("cordon", members[1])
    until(lambda: pools.condition("Draining")[:2] == ("True", "NodeCordoned"), what="it drains")
    adopter = pools.get("kvpn", "prefix-0")
    assert adopter is not None
    assert adopter["spec"]["adopt"] == [{"shard": 1, "epoch": 1}]
    pools.cluster.kubectl("delete", "node", members[1], "--wait=false")
    until(lambda: pools.condition("Draining")[1] == "NodeGone", what="it is gone")
    assert pools.get("kvpn", "prefix-1") is not None, "its shard has no owner that looks after it yet"
    pools.tell(0, shards=[{"shard": 1, "owner": 0, "epoch": 1, "settled": True, "usedBytes": 0, "blocks": 0}])
    until(lambda: pools.get("kvpn", "prefix-1") is None, what="its KVPoolNode goes")
    until(lambda: pools.condition("Draining")[0] == "False", what="no draining any more")
    add_node(pools.cluster, members[1], members[0].rpartition("-")[0])
    until(lambda: pools.get("kvpn", "prefix-1"), what="it comes back")
    pools.tell(1)
    until(lambda: (pools.get("kvpn", "prefix-1") or {})["spec"]["adopt"] == [{"shard": 1, "epoch": 2}])
    until(lambda: not (pools.get("kvpn", "prefix-0") or {})["spec"].get("adopt"))


def test_a_deleted_pool_leaves_nothing_outside_of_its_namespace(
    operator: OperatorProcess, pools: Pools, members: list[str]
) -> None:
    pools.create(pool_of(members, pools.namespace))
    until(lambda: pools.items("daemonsets", SYSTEM), what="the daemons")
    pools.cluster.kubectl("-n", pools.namespace, "delete", "kvp", "prefix", "--timeout=30s")
    for kind in ("daemonsets", "serviceaccounts", "services", "networkpolicies"):
        until(lambda kind=kind: not pools.items(kind, SYSTEM), what=f"no {kind}")
    # The volumes wait for a controller that is not here to let go of them.
    assert all(v["metadata"].get("deletionTimestamp") for v in pools.items("pv"))


def test_delete_waits_for_the_nodes_to_remove_their_files(
    operator: OperatorProcess, pools: Pools, members: list[str]
) -> None:
    pools.create(pool_of(members, pools.namespace, deletionPolicy="Delete"))
    until(lambda: len(pools.items("kvpn")) == 2, what="two KVPoolNodes")
    pools.cluster.kubectl("-n", pools.namespace, "delete", "kvp", "prefix", "--wait=false")
    until(lambda: [n["spec"]["state"] for n in pools.items("kvpn")] == ["Removing"] * 2, what="Removing")
    assert pools.condition("Ready")[1] == "Deleting"
    pools.tell(0, removed=True)
    time.sleep(1)
    assert pools.get() is not None
    pools.tell(1, removed=True)
    until(lambda: pools.get() is None, what="it is gone")


def test_what_a_daemon_reports_becomes_an_event_once(
    operator: OperatorProcess, pools: Pools, members: list[str]
) -> None:
    pools.create(pool_of(members, pools.namespace))
    until(lambda: len(pools.items("kvpn")) == 2, what="two KVPoolNodes")
    told = {"type": "Warning", "reason": "DamageFound", "tier": "cxl", "message": "3 blocks were damaged"}
    for second in (1, 2, 3):
        pools.tell(1, lookups=second, events=[{**told, "at": f"2026-01-01T00:00:0{second}Z"}])
        until(lambda want=second: (pools.get() or {})["status"]["lookups"] == want, what="the report is seen")
    listed = json.loads(pools.cluster.kubectl("-n", pools.namespace, "get", "events", "-o", "json").stdout)
    found = [event for event in listed["items"] if event["reason"] == "DamageFound"]
    assert [(e["type"], e["message"]) for e in found] == [
        ("Warning", f"{members[1]} tier cxl: 3 blocks were damaged")
    ]


def test_a_paused_pool_is_left_as_it_is(operator: OperatorProcess, pools: Pools, members: list[str]) -> None:
    pools.create(pool_of(members, pools.namespace))
    until(lambda: pools.items("daemonsets", SYSTEM), what="the daemons")
    pools.patch({"spec": {"paused": True, "eviction": {"lowWatermark": 70}}})
    until(lambda: pools.condition("Progressing")[1] == "Paused", what="it is paused")
    assert pools.items("kvpn")[0]["spec"]["manifest"]["spec"]["eviction"]["lowWatermark"] == 90
    pools.patch({"spec": {"paused": False}})
    until(lambda: pools.items("kvpn")[0]["spec"]["manifest"]["spec"]["eviction"]["lowWatermark"] == 70)


def test_a_second_replica_takes_over_and_only_one_acts(
    cluster: ApiServer, folder: Path, pools: Pools, members: list[str]
) -> None:
    first = OperatorProcess(cluster, folder, f"operator-{next(numbers)}").start()
    second = OperatorProcess(cluster, folder, f"operator-{next(numbers)}")
    try:
        until(lambda: first.leads, what="the first leads")
        second.start()
        assert not second.leads
        first.stop(signal.SIGKILL)
        began = time.monotonic()
        pools.create(pool_of(members, pools.namespace))
        until(lambda: pools.condition("Ready")[0], 30, what="the second acts")
        assert second.leads
        print(f"fail-over after kill -9: {waited(began)} s")
        first.start()
        assert not first.leads
        began = time.monotonic()
        assert second.stop() == 0
        until(lambda: first.leads, 10, what="the lease was given up")
    finally:
        first.stop()
        second.stop()


def test_what_happened_while_no_operator_ran_is_caught_up(
    cluster: ApiServer, folder: Path, pools: Pools, members: list[str]
) -> None:
    operator = OperatorProcess(cluster, folder, f"operator-{next(numbers)}").start()
    try:
        pools.create(pool_of(members, pools.namespace))
        until(lambda: pools.items("daemonsets", SYSTEM), what="the daemons")
        operator.stop()
        pools.patch({"metadata": {"finalizers": []}})
        pools.cluster.kubectl("-n", pools.namespace, "delete", "kvp", "prefix")
        assert pools.items("daemonsets", SYSTEM)
        operator.start()
        until(lambda: not pools.items("daemonsets", SYSTEM), what="nothing is left of it")
    finally:
        operator.stop()


def test_uninstalling_leaves_no_finalizer_behind(
    operator: OperatorProcess, pools: Pools, members: list[str]
) -> None:
    pools.create(pool_of(members, pools.namespace))
    until(lambda: (pools.get() or {})["metadata"].get("finalizers"), what="its finalizer")
    release(pools.cluster)
    until(lambda: not operator.leads, what="the operator acts no more")
    assert not (pools.get() or {})["metadata"].get("finalizers")
    pools.cluster.kubectl("-n", pools.namespace, "delete", "kvp", "prefix", "--timeout=10s")
    pools.cluster.kubectl("-n", SYSTEM, "delete", "lease", "kvpool-operator")


@pytest.mark.slow
def test_a_hundred_pools_on_a_fresh_operator(cluster: ApiServer, folder: Path, members: list[str]) -> None:
    """The issue's bounds: 30 s, 150 MiB, and no writes afterwards."""
    spaces = []
    for i in range(100):
        name = f"many-{i}"
        body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
        assert cluster.create("/api/v1/namespaces", body).ok
        assert cluster.create(f"{GROUP}/namespaces/{name}/kvpools", pool_of(members, name)).ok
        spaces.append(name)

    def many() -> list[Object]:
        """Those of this test: other tests leave some that nobody deletes."""
        listed = json.loads(cluster.kubectl("get", "kvp", "-A", "-o", "json").stdout)["items"]
        return [pool for pool in listed if pool["metadata"]["namespace"] in spaces]

    operator = OperatorProcess(cluster, folder, f"operator-{next(numbers)}")
    began = time.monotonic()
    try:
        operator.start()

        def told() -> bool:
            return sum(1 for pool in many() if pool.get("status")) == 100

        until(told, 120, what="a status for each")
        took_s = waited(began)
        time.sleep(5)
        before = operator.writes()
        time.sleep(10)
        print(f"100 pools: {took_s} s, {operator.rss_bytes() >> 20} MiB, {before} writes, then none")
        assert operator.writes() == before
        assert operator.rss_bytes() < 150 << 20
    finally:
        try:
            for name in spaces:
                cluster.request("DELETE", f"{GROUP}/namespaces/{name}/kvpools/prefix")
            deadline = time.monotonic() + 60
            while many():
                assert time.monotonic() < deadline, "pools are stuck"
                time.sleep(1)
        finally:
            operator.stop()  # or it would look after the pools of every later test
