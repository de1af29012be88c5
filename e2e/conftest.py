"""The cluster, the image, the release: made once for all tests, taken down at the end."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster import images, programs
from cluster.cluster import Cluster
from cluster.places import Places
from kube import Kube, Object, ready
from pools import START_S, Client, KVPool, cxl, dram
from release import NAMESPACE, RELEASE, SHARED, SYSTEM, Facts, MakePool, Target, install, restarts


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        here = Path(__file__).parent
        if here in item.path.parents and here / "guest" not in item.path.parents:
            item.add_marker(pytest.mark.e2e)


@pytest.fixture(scope="session")
def target() -> Iterator[Target]:
    given = os.environ.get("KUBECONFIG")
    if given:
        image = os.environ.get("KVPOOL_E2E_IMAGE")
        if not image:
            pytest.fail("KUBECONFIG is set: KVPOOL_E2E_IMAGE must name the image of kvpool for that cluster")
        kube = Kube(Path(given))
        yield Target(kube, image, None, _nodes(kube))
        return
    places = Places()
    programs.build(places)
    archive = images.make_kvpool(places)
    cluster = Cluster(places)
    if not (os.environ.get("KVPOOL_E2E_KEEP") and cluster.is_up()):
        cluster.down()
        cluster.up(images.make_base(places))
    try:
        cluster.load([archive])
        kube = Kube(places.kubeconfig, places.inside(), places.programs)
        yield Target(kube, images.reference(), cluster, _nodes(kube))
    finally:
        if not os.environ.get("KVPOOL_E2E_KEEP"):
            cluster.down()


def _nodes(kube: Kube) -> list[str]:
    names = sorted(node["metadata"]["name"] for node in kube.all("nodes") if ready(node))
    if len(names) < 2:
        pytest.fail(f"the cluster has {len(names)} Ready nodes; this suite needs 2")
    return names[:2]


@pytest.fixture(scope="session")
def kube(target: Target) -> Kube:
    return target.kube


@pytest.fixture(scope="session")
def nodes(target: Target) -> list[str]:
    return target.nodes


@pytest.fixture(scope="session")
def own(target: Target) -> Cluster:
    """The cluster of e2e/cluster, for tests that switch parts of it off."""
    if target.own is None:
        pytest.skip(
            "this test switches nodes off and on; it needs the cluster of e2e/cluster (unset KUBECONFIG)"
        )
    return target.own


@pytest.fixture(scope="session")
def facts() -> Facts:
    return Facts()


@pytest.fixture(scope="session")
def release(target: Target, facts: Facts) -> str:
    """The chart, installed; the namespace of pools and engines lets in only what is `restricted`."""
    started = time.monotonic()
    install(target)
    facts.tell(helm_install_s=round(time.monotonic() - started, 1), image=target.image)
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    target.kube.apply(
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE, "labels": labels}}
    )
    return RELEASE


@pytest.fixture
def make_pool(kube: Kube, release: str) -> Iterator[MakePool]:
    """Pools that a test declares; they are gone when it ends, with their clients."""
    made: list[KVPool] = []

    def make(name: str, *tiers: Object, wait: bool = True, **spec: Any) -> KVPool:
        pool = KVPool(kube, NAMESPACE, name, {"tiers": list(tiers), "deletionPolicy": "Delete", **spec})
        made.append(pool)
        pool.apply()
        if wait:
            pool.wait_settled(START_S)
        return pool

    yield make
    for pool in made:
        _remove(kube, pool)


def _remove(kube: Kube, pool: KVPool) -> None:
    for pod in kube.all("pods", NAMESPACE, f"e2e=client,kvpool.dev/pool={pool.name}"):
        kube.delete("pod", pod["metadata"]["name"], NAMESPACE, wait_s=0)
    pool.delete()
    pool.wait_gone()


@pytest.fixture(scope="module")
def main_pool(kube: Kube, target: Target, release: str, request: pytest.FixtureRequest) -> Iterator[KVPool]:
    """One pool for a whole module: DRAM on each node, and a CXL tier that both map."""
    name = request.module.POOL
    tiers = [dram(), cxl(f"{SHARED}/{name}.region")]
    pool = KVPool(kube, NAMESPACE, name, {"hosts": 2, "tiers": tiers, "deletionPolicy": "Delete"})
    pool.apply()
    pool.wait_settled(START_S, nodes=2)
    yield pool
    _remove(kube, pool)


@pytest.fixture(scope="module")
def clients(main_pool: KVPool, target: Target) -> list[Client]:
    """A client on each node."""
    made = [Client(main_pool, node, target.image).start(wait=False) for node in target.nodes]
    for client in made:
        client.wait_ready()
    return made


@pytest.fixture(autouse=True)
def nothingrestarts(request: pytest.FixtureRequest) -> Iterator[None]:
    """The operator does not crash while a test runs, unless the test says that it kills it."""
    if "target" not in request.fixturenames or request.node.get_closest_marker("kills_operator"):
        yield
        return
    kube: Kube = request.getfixturevalue("target").kube
    before = restarts(kube)
    yield
    after = restarts(kube)
    grown = {name: count for name, count in after.items() if count > before.get(name, count)}
    assert not grown, f"containers of {SYSTEM} crashed during the test: {grown}"
