"""Fixtures of the tests against a real Kubernetes API."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from kube.apiserver import SERVER_PROGRAMS, ApiServer, missing_programs
from strategies import region_folder

ROOT = Path(__file__).resolve().parents[2]
_numbers = count()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder is marked `kube`."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.kube)


@pytest.fixture(scope="session")
def apiserver() -> Iterator[ApiServer]:
    """A bare Kubernetes API, empty but for what it makes itself; one for all tests of the session."""
    missing = missing_programs(SERVER_PROGRAMS)
    if missing is None and shutil.which("openssl") is None:
        missing = "no openssl, which makes the certificates"
    if missing:
        pytest.skip(missing)
    with region_folder() as folder:  # in memory: etcd writes a lot
        server = ApiServer(folder)
        try:
            server.start()
            yield server
        finally:
            server.stop()


@pytest.fixture(scope="session")
def crds(apiserver: ApiServer) -> ApiServer:
    """The API, with the CRDs of crds/ served."""
    apiserver.kubectl("apply", "--server-side", "-f", str(ROOT / "crds"))
    names = ("kvpools.kvpool.dev", "kvpoolnodes.kvpool.dev")
    apiserver.kubectl("wait", "--for=condition=Established", "--timeout=30s", *(f"crd/{n}" for n in names))
    return apiserver


@pytest.fixture
def namespace(apiserver: ApiServer) -> str:
    """A new namespace for one test. Nothing removes it: no controller empties one here."""
    name = f"test-{next(_numbers)}"
    body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
    answer = apiserver.create("/api/v1/namespaces", body)
    assert answer.ok, answer.message
    return name


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder in memory for what one test writes."""
    with region_folder() as made:
        yield made
