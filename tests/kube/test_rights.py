"""Operator and API with the rights that the chart gives them: they are enough for the life of a pool."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from kube.apiserver import ApiServer, free_ports, missing_programs
from kube.charts import Helm, Object, running
from kube.nodes import until

pytest.importorskip("kvpool_operator", reason="no operator in this environment")

NODE = "rights-node"


@pytest.fixture(scope="module")
def cluster(apiserver: ApiServer) -> ApiServer:
    missing = missing_programs(["helm"])
    if missing:
        pytest.skip(missing)
    labels = {"member": "rights"}
    node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE, "labels": labels}}
    assert apiserver.create("/api/v1/nodes", node).ok
    return apiserver


@pytest.mark.parametrize("mode", ["cluster", "namespaced"])
def test_operator_with_the_rights_of_the_chart_carries_a_pool_through_its_life(
    cluster: ApiServer, namespace: str, folder: Path, mode: str
) -> None:
    system = f"rights-{mode}"
    cluster.kubectl("create", "namespace", system)
    helm = Helm(cluster, system)
    helm.install(*(["--set", f"operator.namespaces={{{namespace}}}"] if mode == "namespaced" else []))
    cluster.kubectl("wait", "--for=condition=Established", "crd/kvpools.kvpool.dev", "--timeout=30s")
    labels = f"kvpool.dev/pool=p,kvpool.dev/namespace={namespace}"

    def found(kind: str, where: str) -> list[Object]:
        # No controller takes the protection off a deleted claim here.
        items: list[Object] = cluster.get(kind, "-n", where, "-l", labels)["items"]
        return [item for item in items if "deletionTimestamp" not in item["metadata"]]

    def pool() -> Object:
        kept: Object = cluster.get("kvp", "p", "-n", namespace)
        return kept

    try:
        ports = dict(zip(("--health-port", "--metrics-port", "--webhook-port"), free_ports(3), strict=True))
        with running(helm, folder, "kvpool-operator", ports) as log:
            body: dict[str, Any] = {
                "apiVersion": "kvpool.dev/v1alpha1",
                "kind": "KVPool",
                "metadata": {"name": "p", "namespace": namespace},
                "spec": {
                    "nodeSelector": {"member": "rights"},
                    "tiers": [
                        {"name": "dram", "medium": "DRAM", "capacity": "64Mi"},
                        {"name": "cxl", "medium": "CXL", "capacity": "64Mi", "source": {"path": "/mnt/x/r"}},
                    ],
                },
            }
            assert cluster.create(f"/apis/kvpool.dev/v1alpha1/namespaces/{namespace}/kvpools", body).ok
            until(lambda: pool().get("status"), what="a status")
            for kind in ("daemonset", "service", "networkpolicy", "serviceaccount"):
                assert len(found(kind, system)) == 1, kind
            for kind in ("configmap", "role", "rolebinding", "kvpn"):
                assert len(found(kind, namespace)) == 1, kind
            assert len(found("pvc", namespace)) == 2
            assert len(found("pv", namespace)) == 2
            # Something of each kind of work: it is repaired, changed, taken away.
            cluster.kubectl("delete", "configmap", "-n", namespace, "-l", labels)
            until(lambda: found("configmap", namespace), what="the repair")
            patch = json.dumps({"spec": {"tiers": body["spec"]["tiers"][:1]}})
            cluster.kubectl("patch", "kvp", "p", "-n", namespace, "--type=merge", "-p", patch)
            until(lambda: len(found("pvc", namespace)) == 1, what="the second claim is gone")
            webhook = cluster.get("mutatingwebhookconfiguration", f"kvpool-{system}")["webhooks"][0]
            assert webhook["clientConfig"]["caBundle"]
            assert cluster.get("secret", "kvpool-webhook", "-n", system)["data"]["tls.key"]
            lease = cluster.get("lease", "kvpool-operator", "-n", system)
            assert lease["spec"]["holderIdentity"].startswith("operator-")
            cluster.kubectl("delete", "kvp", "p", "-n", namespace, "--wait=false")
            until(lambda: not found("daemonset", system), what="the daemons are gone")
            gone = f"/apis/kvpool.dev/v1alpha1/namespaces/{namespace}/kvpools/p"
            until(lambda: cluster.request("GET", gone).code == 404, what="the pool is gone")
            refused = re.findall(r".*[Ff]orbidden.*", log.read_text())
            assert not refused
    finally:
        cluster.kubectl("patch", "kvp", "p", "-n", namespace, "--type=merge", "-p", FREE, check=False)
        helm.uninstall()


@pytest.mark.parametrize("mode", ["cluster", "namespaced"])
def test_api_with_the_rights_of_the_chart_shows_pools_to_who_may_see_them(
    cluster: ApiServer, namespace: str, folder: Path, mode: str
) -> None:
    system = f"api-{mode}"
    cluster.kubectl("create", "namespace", system)
    helm = Helm(cluster, system)
    helm.install(*(["--set", f"operator.namespaces={{{namespace}}}"] if mode == "namespaced" else []))
    cluster.kubectl("wait", "--for=condition=Established", "crd/kvpools.kvpool.dev", "--timeout=30s")
    tiers = [{"name": "dram", "medium": "DRAM", "capacity": "64Mi"}]
    body = {
        "apiVersion": "kvpool.dev/v1alpha1",
        "kind": "KVPool",
        "metadata": {"name": "p", "namespace": namespace},
        "spec": {"tiers": tiers},
    }
    assert cluster.create(f"/apis/kvpool.dev/v1alpha1/namespaces/{namespace}/kvpools", body).ok
    for account in ("reader", "stranger"):
        cluster.kubectl("create", "serviceaccount", account, "-n", namespace)
    role = f"--clusterrole=kvpool-{system}-view"
    cluster.kubectl(
        "create", "rolebinding", "r", role, f"--serviceaccount={namespace}:reader", "-n", namespace
    )
    (port,) = free_ports(1)

    def ask(path: str, account: str = "") -> tuple[int, str]:
        request = urllib.request.Request(f"http://127.0.0.1:{port}{path}")
        if account:
            token = cluster.kubectl("create", "token", account, "-n", namespace).stdout.strip()
            request.add_header("Authorization", f"Bearer {token}")
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, ""
        except OSError:
            return 0, ""

    try:
        with running(helm, folder, "kvpool-api", {"--port": port, "--listen": "127.0.0.1"}) as log:
            until(lambda: ask("/readyz")[0] == 200, what="the API is ready")
            seen = until(
                lambda: json.loads(ask("/v1/pools", "reader")[1] or "{}").get("items"), what="the pool"
            )
            assert [(p["namespace"], p["name"]) for p in seen] == [(namespace, "p")]
            assert json.loads(ask("/v1/pools", "stranger")[1])["items"] == []
            assert ask("/v1/pools")[0] == 401
            assert not re.findall(r".*[Ff]orbidden.*", log.read_text())
    finally:
        cluster.kubectl("delete", "kvp", "p", "-n", namespace)
        helm.uninstall()


FREE = '{"metadata":{"finalizers":null}}'
