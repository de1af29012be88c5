"""The status API against a real Kubernetes API: real objects, real tokens, real rights."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the api extra is not installed")

from fastapi.testclient import TestClient
from kubernetes.aio import config
from kubernetes.aio.client import ApiClient, Configuration

from api.fake_cluster import kvpool, kvpoolnode
from kube.apiserver import ApiServer
from kvpool.api.app import create_app
from kvpool.api.service import Service
from kvpool_operator.access import KubernetesAccess
from kvpool_operator.client import Cluster
from kvpool_operator.source import ClusterSource

BASE = "/apis/kvpool.dev/v1alpha1/namespaces"


@pytest.fixture
def client(crds: ApiServer) -> Iterator[TestClient]:
    """The API with Kubernetes's rights, connected with full rights."""

    async def connect() -> Cluster:
        made = Configuration()
        await config.load_kube_config(str(crds.kubeconfig), client_configuration=made)
        return Cluster(ApiClient(made))

    source = ClusterSource(connect)
    service = Service(source, access=KubernetesAccess(lambda: source.cluster), open_metrics=False)
    with TestClient(create_app(service)) as client:
        until(lambda: client.get("/readyz").status_code == 200)
        yield client


def until(true: Callable[[], object], within_s: float = 20.0) -> None:
    deadline = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def put(apiserver: ApiServer, namespace: str, plural: str, body: dict[str, Any]) -> None:
    """Makes or changes an object, its status too."""
    metadata = {"namespace": namespace, "name": body["metadata"]["name"]}
    path = f"{BASE}/{namespace}/{plural}/{metadata['name']}"
    status = body["status"] | {"conditions": body["status"].get("conditions", [])}
    for where, part in ((path, {"spec": body["spec"]}), (path + "/status", {"status": status})):
        whole = {"apiVersion": body["apiVersion"], "kind": body["kind"], "metadata": metadata, **part}
        answer = apiserver.apply(where, whole, manager="test")
        assert answer.ok, answer.message


def pool_body(lookups: int = 1000, hits: int = 974) -> dict[str, Any]:
    body = kvpool("p", lookups=lookups, hits=hits)
    body["spec"]["tiers"][0]["source"] = {"path": "/dev/dax0.0"}
    return body


def node_body(index: int) -> dict[str, Any]:
    body = kvpoolnode("p", index)
    manifest = {"apiVersion": "kvpool.dev/v1alpha1", "kind": "KVPool", "metadata": {"name": "p"}}
    body["spec"]["manifest"] = manifest | {"spec": pool_body()["spec"]}
    return body


def token(apiserver: ApiServer, namespace: str, *, may: str = "") -> dict[str, str]:
    """The header of a new account; `may`: a namespace whose pools it may list."""
    name = f"reader-{time.monotonic_ns()}"
    apiserver.kubectl("create", "serviceaccount", name, "-n", namespace)
    if may:
        account = f"--serviceaccount={namespace}:{name}"
        apiserver.kubectl("create", "role", name, "-n", may, "--verb=list", "--resource=kvpools.kvpool.dev")
        apiserver.kubectl("create", "rolebinding", name, "-n", may, f"--role={name}", account)
    made = apiserver.kubectl("create", "token", name, "-n", namespace)
    return {"Authorization": f"Bearer {made.stdout.strip()}"}


def test_objects_are_shown_and_followed(crds: ApiServer, client: TestClient, namespace: str) -> None:
    put(crds, namespace, "kvpools", pool_body())
    for i in (0, 1):
        put(crds, namespace, "kvpoolnodes", node_body(i))
    me = token(crds, namespace, may=namespace)
    url = f"/v1/pools/{namespace}/p"
    until(lambda: client.get(url + "/nodes", headers=me).json().get("total") == 2)
    seen = client.get(url, headers=me).json()
    told = crds.get("kvpools", "p", "-n", namespace)["status"]
    assert (seen["lookups"], seen["hits"], seen["misses"]) == (told["lookups"], told["hits"], told["misses"])
    assert seen["hitRate"] == float(told["hitRate"]) == 97.4
    put(crds, namespace, "kvpools", pool_body(2000, 1000))
    until(lambda: client.get(url, headers=me).json()["hitRate"] == 50.0)
    crds.kubectl("delete", "kvpools", "p", "-n", namespace, "--wait=false")
    until(lambda: client.get(url, headers=me).status_code == 404)


def test_callers_see_what_they_may_list(crds: ApiServer, client: TestClient, namespace: str) -> None:
    put(crds, namespace, "kvpools", pool_body())
    allowed, stranger = token(crds, namespace, may=namespace), token(crds, namespace)
    url = f"/v1/pools/{namespace}/p"
    until(lambda: client.get(url, headers=allowed).status_code == 200)
    assert client.get(url, headers=stranger).status_code == 404
    assert client.get("/v1/pools", headers=stranger).json()["total"] == 0
    assert client.get("/v1/pools", headers=allowed).json()["total"] == 1
    assert client.get(url).status_code == 401
    assert client.get(url, headers={"Authorization": "Bearer nonsense"}).status_code == 401
    assert client.get("/metrics", headers=allowed).status_code == 404
