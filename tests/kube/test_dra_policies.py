"""The DRA driver's policies, and the operator beside it, against a real Kubernetes API."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("grpc", reason="no grpcio in this environment: pip install '.[operator]'")

from kube.apiserver import ApiServer, free_ports
from kube.charts import Helm, running
from kube.kubelets import SLICES, driver_release, of_tier
from kube.nodes import until
from kube.operators import release
from kvpool_operator.dra.parameters import API_VERSION

Object = dict[str, Any]
SYSTEM = "dra-policies"


@pytest.fixture(scope="module")
def helm(apiserver: ApiServer) -> Iterator[Helm]:
    with driver_release(apiserver, SYSTEM) as made:
        yield made


# --- what the API lets through ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"apiVersion": "x/v1", "kind": "PoolParameters"}, "kind: PoolParameters or RegionParameters"),
        ({"kind": "PoolParameters"}, "kind: PoolParameters or RegionParameters"),
        ({"apiVersion": API_VERSION, "kind": "PoolParameters", "role": "root"}, "engine or reader"),
        ({"apiVersion": API_VERSION, "kind": "PoolParameters", "path": "/etc"}, "and no other"),
        ({"apiVersion": API_VERSION, "kind": "RegionParameters", "hostPath": "/"}, "and no other"),
        ({"apiVersion": API_VERSION, "kind": "RegionParameters", "size": "64GB"}, "like 64Gi"),
        ({"apiVersion": API_VERSION, "kind": "RegionParameters", "size": ["1Gi"]}, "like 64Gi"),
        ({"apiVersion": API_VERSION, "kind": "RegionParameters", "align": "3Mi"}, "4Ki, 2Mi or 1Gi"),
        ({"apiVersion": API_VERSION, "kind": "RegionParameters", "granularity": 3}, "256, 512"),
        ({"apiVersion": API_VERSION, "kind": "RegionParameters", "deletionPolicy": 1}, "Retain or Delete"),
        (of_tier(), "in its own namespace"),
    ],
)
def test_policy_refuses_wrong_parameters(helm: Helm, namespace: str, parameters: Object, said: str) -> None:
    config = [{"opaque": {"driver": "dra.kvpool.dev", "parameters": parameters}}]
    request = {"name": "r", "exactly": {"deviceClassName": "kvpool"}}
    spec: Object = {"devices": {"requests": [request], "config": config}}
    for plural, kind, inside in (
        ("resourceclaims", "ResourceClaim", spec),
        ("resourceclaimtemplates", "ResourceClaimTemplate", {"spec": spec}),
    ):
        body = {
            "apiVersion": "resource.k8s.io/v1",
            "kind": kind,
            "metadata": {"name": "bad", "namespace": namespace},
            "spec": inside,
        }
        path = f"/apis/resource.k8s.io/v1/namespaces/{namespace}/{plural}"

        def refused() -> Any:
            answer = helm.api.create(path, body, dry_run=True)  # noqa: B023
            return answer if not answer.ok else None

        answer = until(refused, what="the policy is in force")
        assert answer.code == 422, answer.message
        assert said in answer.message


def test_policy_refuses_a_path_as_the_name_of_a_pool(helm: Helm) -> None:
    for tier in ({"namespace": "a", "name": "../../etc", "tier": "c"}, {"namespace": "a"}, "prefix", ["a"]):
        parameters = {"apiVersion": API_VERSION, "kind": "RegionParameters", "pool": tier}
        config = [{"opaque": {"driver": "dra.kvpool.dev", "parameters": parameters}}]
        request = {"name": "r", "exactly": {"deviceClassName": "cxl-dax"}}
        body = {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceClaim",
            "metadata": {"name": "bad", "namespace": SYSTEM},
            "spec": {"devices": {"requests": [request], "config": config}},
        }
        path = f"/apis/resource.k8s.io/v1/namespaces/{SYSTEM}/resourceclaims"
        answer = helm.api.create(path, body, dry_run=True)
        assert not answer.ok, tier
        assert "namespace, name and tier" in answer.message


def test_policy_leaves_other_drivers_alone(helm: Helm, namespace: str) -> None:
    config = [{"opaque": {"driver": "gpu.example.com", "parameters": {"anything": 1}}}]
    request = {"name": "r", "exactly": {"deviceClassName": "gpu"}}
    for devices in ({"requests": [request], "config": config}, {"requests": [request]}, {}):
        body = {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceClaim",
            "metadata": {"name": "fine", "namespace": namespace},
            "spec": {"devices": devices},
        }
        path = f"/apis/resource.k8s.io/v1/namespaces/{namespace}/resourceclaims"
        answer = helm.api.create(path, body, dry_run=True)
        assert answer.ok, answer.message


@pytest.mark.parametrize(
    ("driver_name", "pool_name", "fine"),
    [
        ("dra.kvpool.dev", "memory/0x9", True),
        ("gpu.example.com", "memory/0x9", False),
        ("dra.kvpool.dev", "pool/a/b/c", False),
    ],
)
def test_policy_keeps_the_driver_to_its_own_slices(
    helm: Helm, folder: Path, driver_name: str, pool_name: str, fine: bool
) -> None:
    config = helm.kubeconfig_of("kvpool-dra", folder)
    body = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"name": "try"},
        "spec": {
            "driver": driver_name,
            "pool": {"name": pool_name, "generation": 1, "resourceSliceCount": 1},
            "allNodes": True,
            "devices": [{"name": "d"}],
        },
    }

    def tried() -> Any:
        done = helm.api.kubectl(
            "create",
            f"--kubeconfig={config}",
            "--dry-run=server",
            "-f",
            "-",
            stdin=json.dumps(body),
            check=False,
        )
        return done if (done.returncode == 0) == fine else None

    done = until(tried, timeout_s=20, what="the policy's answer")
    if not fine:
        assert "kvpool publishes devices of dra.kvpool.dev only" in done.stderr


# --- the operator -------------------------------------------------------------------------------------------


def test_operator_offers_pools_and_asks_for_memory_with_the_charts_rights(
    helm: Helm, folder: Path, namespace: str
) -> None:
    api, where = helm.api, f"/apis/resource.k8s.io/v1/namespaces/{SYSTEM}/resourceclaims"
    labels = f"kvpool.dev/pool=p,kvpool.dev/namespace={namespace}"
    path = f"/apis/kvpool.dev/v1alpha1/namespaces/{namespace}/kvpools"
    tiers: list[Object] = [
        {"name": "dram", "medium": "DRAM", "capacity": "64Mi"},
        {
            "name": "cxl",
            "medium": "CXL",
            "capacity": "64Mi",
            "shared": True,
            "source": {"deviceClass": "cxl-dax"},
        },
    ]
    spec = {"hosts": 2, "nodeSelector": {"member": "dra"}, "tiers": tiers}
    body = {
        "apiVersion": "kvpool.dev/v1alpha1",
        "kind": "KVPool",
        "metadata": {"name": "p", "namespace": namespace},
        "spec": spec,
    }

    def found(target: str) -> list[Object]:
        items: list[Object] = api.request("GET", target, query={"labelSelector": labels}).body["items"]
        return [item for item in items if "deletionTimestamp" not in item["metadata"]]

    def merged(change: Object) -> None:
        answer = api.request("PATCH", f"{path}/p", change, content_type="application/merge-patch+json")
        assert answer.ok, answer.message

    ports = dict(zip(("--health-port", "--metrics-port", "--webhook-port"), free_ports(3), strict=True))
    templates = f"/apis/resource.k8s.io/v1/namespaces/{namespace}/resourceclaimtemplates"
    try:
        with running(helm, folder, "kvpool-operator", ports) as log:
            assert api.create(path, body).ok
            (claim,) = until(lambda: found(where), what="the claim for memory")
            (offered,) = until(lambda: found(SLICES), what="the pool's seats")
            (template,) = until(lambda: found(templates), what="the template")
            assert template["metadata"]["name"] == "kvpool-p"
            assert len(offered["spec"]["devices"]) == 128
            assert claim["metadata"]["annotations"]["kvpool.dev/deletion-policy"] == "Retain"
            (daemons,) = until(
                lambda: api.get("daemonset", "-n", SYSTEM, "-l", labels)["items"], what="the daemons"
            )
            (pod_claim,) = daemons["spec"]["template"]["spec"]["resourceClaims"]
            assert pod_claim["resourceClaimName"] == claim["metadata"]["name"]
            # A claim's spec never changes; the pool's may.
            tiers[1]["capacity"] = "80Mi"
            merged({"spec": {"tiers": tiers, "deletionPolicy": "Delete"}})
            until(
                lambda: found(where)[0]["metadata"]["annotations"]["kvpool.dev/deletion-policy"] == "Delete",
                what="the policy on the claim",
            )
            generation = api.request("GET", f"{path}/p").body["metadata"]["generation"]
            until(
                lambda: found(SLICES)[0]["spec"]["pool"]["generation"] == generation,
                what="the slice's generation",
            )
            assert found(where)[0]["spec"] == claim["spec"]
            conditions = api.request("GET", f"{path}/p").body["status"]["conditions"]
            assert "ApplyFailed" not in {c["reason"] for c in conditions}
            merged({"spec": {"deletionPolicy": "Retain"}})
            api.kubectl("delete", "kvp", "p", "-n", namespace, "--wait=false")
            until(lambda: not found(SLICES) and not found(where), what="slice and claim are gone")
            until(lambda: api.request("GET", f"{path}/p").code == 404, what="the pool is gone")
            assert "orbidden" not in log.read_text()
    finally:
        merge = {"metadata": {"finalizers": None}}
        api.request("PATCH", f"{path}/p", merge, content_type="application/merge-patch+json")


def test_uninstall_takes_pools_out_of_what_is_handed_out(helm: Helm) -> None:
    body = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"name": "of-a-pool", "labels": {"kvpool.dev/pool": "p"}},
        "spec": {
            "driver": "dra.kvpool.dev",
            "pool": {"name": "pool/a/p/u", "generation": 1, "resourceSliceCount": 1},
            "allNodes": True,
            "devices": [{"name": "seat-000"}],
        },
    }
    assert helm.api.create(SLICES, body).ok
    release(helm.api, "--dra", namespace=SYSTEM)
    assert helm.api.request("GET", f"{SLICES}/of-a-pool").code == 404
