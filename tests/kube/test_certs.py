"""The webhook's certificate in a real Secret: made once, shared by replicas, replaced when it is no good."""

from __future__ import annotations

import asyncio
import base64
import datetime
from typing import Any

import pytest

from kube.apiserver import ApiServer
from kvpool_operator import certs
from kvpool_operator.client import ApiError, Cluster

Object = dict[str, Any]
HOST = "kvpool-webhook.kvpool-system.svc"


@pytest.fixture
def secret(apiserver: ApiServer, namespace: str, monkeypatch: pytest.MonkeyPatch) -> str:
    body = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "hook", "namespace": namespace}}
    assert apiserver.create(f"/api/v1/namespaces/{namespace}/secrets", body).ok
    monkeypatch.setenv("KUBECONFIG", str(apiserver.kubeconfig))
    return "hook"


async def ensured(namespace: str, secret: str, many: int = 1) -> list[certs.Certificate]:
    cluster = await Cluster.connect()
    try:
        return list(
            await asyncio.gather(*(certs.ensure(cluster, namespace, secret, HOST) for _ in range(many)))
        )
    finally:
        await cluster.close()


def test_replicas_that_start_together_serve_the_same_certificate(namespace: str, secret: str) -> None:
    made = asyncio.run(ensured(namespace, secret, many=3))
    assert len(set(made)) == 1
    assert asyncio.run(ensured(namespace, secret)) == made[:1], "a restart keeps it"


def test_a_certificate_that_is_broken_foreign_or_old_is_replaced(
    apiserver: ApiServer, namespace: str, secret: str
) -> None:
    first = asyncio.run(ensured(namespace, secret))[0]
    now = datetime.datetime.now(datetime.timezone.utc)
    old = certs.make(HOST, now - certs.VALID + datetime.timedelta(days=30))
    foreign = certs.make("another.svc", now)
    mixed = certs.Certificate(first.ca, foreign.cert, foreign.key)
    for bad in (old, foreign, mixed, certs.Certificate(b"", b"x", b"y")):
        assert not bad.is_good(HOST, now)
        data = {"ca.crt": bad.ca, "tls.crt": bad.cert, "tls.key": bad.key}
        patch = {"data": {name: base64.b64encode(text).decode() for name, text in data.items()}}
        path = f"/api/v1/namespaces/{namespace}/secrets/{secret}"
        answer = apiserver.request("PATCH", path, patch, content_type="application/merge-patch+json")
        assert answer.ok, answer.message
        assert asyncio.run(ensured(namespace, secret))[0].is_good(HOST, now)


def test_a_secret_that_is_not_there_is_an_error_that_says_who_makes_it(
    apiserver: ApiServer, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(apiserver.kubeconfig))
    with pytest.raises(ApiError, match="the chart makes it"):
        asyncio.run(ensured(namespace, "none"))
