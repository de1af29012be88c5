"""The cluster itself: what the other tests take for granted."""

from __future__ import annotations

import json

import pytest

from kube import Kube, KubeError, Object, ready, wait_for
from pools import HOSTNAME, RESTRICTED
from release import SHARED, Target

NAMESPACE = "e2e-cluster"


def pod(name: str, node: str, image: str, **spec: object) -> Object:
    container = {
        "name": "c",
        "image": image,
        "command": ["sleep", "infinity"],
        "volumeMounts": [{"name": "shared", "mountPath": "/shared"}],
    }
    body = {
        "nodeSelector": {HOSTNAME: node},
        "terminationGracePeriodSeconds": 0,
        "containers": [container],
        "volumes": [{"name": "shared", "hostPath": {"path": SHARED, "type": "Directory"}}],
        **spec,
    }
    metadata = {"name": name, "namespace": NAMESPACE}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": body}


@pytest.fixture(scope="module")
def pods(kube: Kube, target: Target, own: object) -> list[str]:
    """One pod on each node."""
    kube.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
    names = [f"on-{node}" for node in target.nodes]
    kube.apply(*(pod(name, node, target.image) for name, node in zip(names, target.nodes, strict=True)))
    for name in names:
        wait_for(f"pod {name} runs", 60, lambda name=name: ready(kube.get("pod", name, NAMESPACE)))
    return names


def python(kube: Kube, name: str, program: str) -> str:
    return kube.exec(NAMESPACE, name, "python", "-c", program).strip()


def test_image_has_all_parts_and_is_no_root(kube: Kube, pods: list[str]) -> None:
    program = "import fastapi, kopf, kubernetes, kvpool._native, os; print(os.getuid(), kvpool.__version__)"
    uid, version = python(kube, pods[0], program).split()
    assert uid == "65532"
    assert version


def test_pods_find_the_apiserver_by_name(kube: Kube, pods: list[str]) -> None:
    program = """
import ssl, urllib.request
known = ssl.create_default_context(cafile='/var/run/secrets/kubernetes.io/serviceaccount/ca.crt')
print(urllib.request.urlopen('https://kubernetes.default.svc/version', context=known, timeout=5).status)"""
    for name in pods:
        wait_for("the apiserver answers", 20, lambda name=name: python(kube, name, program) == "200")


def test_two_nodes_map_one_memory(kube: Kube, pods: list[str]) -> None:
    program = """
import mmap, os
file = os.open('/shared/e2e-cluster', os.O_RDWR | os.O_CREAT, 0o666)
os.ftruncate(file, 4096)
memory = mmap.mmap(file, 4096)
memory[0] += 1
print(memory[0])"""
    assert [python(kube, name, program) for name in pods] == ["1", "2"]


def test_pods_of_two_nodes_reach_each_other(kube: Kube, pods: list[str]) -> None:
    address = kube.get("pod", pods[1], NAMESPACE)["status"]["podIP"]
    serve = "import socket as s; c = s.create_server(('', 8000)).accept()[0]; c.sendall(b'here'); c.close()"
    kube.exec(NAMESPACE, pods[1], "sh", "-c", f'python -c "{serve}" >/dev/null 2>&1 &')
    ask = f"import socket; print(socket.create_connection(('{address}', 8000), 2).recv(9).decode())"
    assert wait_for("an answer from the other node", 20, lambda: python(kube, pods[0], ask)) == "here"


def test_restricted_level_is_enforced(kube: Kube, target: Target, pods: list[str]) -> None:
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    name = f"{NAMESPACE}-restricted"
    kube.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}})
    body = pod("root", target.nodes[0], target.image)
    body["metadata"]["namespace"] = name
    with pytest.raises(KubeError, match="violates PodSecurity"):
        kube.apply(body)
    body["spec"]["containers"][0] |= {"securityContext": RESTRICTED, "volumeMounts": []}
    del body["spec"]["volumes"]
    kube.apply(body)
    wait_for("a restricted pod runs", 60, lambda: ready(kube.get("pod", "root", name)))
    kube.delete("namespace", name, wait_s=0)


def test_server_has_the_version_that_was_built(kube: Kube, own: object) -> None:
    assert json.loads(kube.raw("/version"))["gitVersion"].startswith("v1.34.")


def test_namespace_goes(kube: Kube, pods: list[str]) -> None:
    kube.delete("namespace", NAMESPACE, wait_s=60)
