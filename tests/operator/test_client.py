"""The client of the Kubernetes API: what the server was too busy for is asked again, and nothing else is."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from kubernetes.aio.client import ApiClient, Configuration

from kvpool_operator import client, kinds
from kvpool_operator.client import ApiError, Cluster


async def _listed(answers: list[int], monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """(asked, code of the error or 200), from a server that gives these answers and then lists nothing."""
    monkeypatch.setattr(client, "BUSY_S", (0.01, 0.01, 0.01))
    asked = 0

    async def answer(_: web.Request) -> web.Response:
        nonlocal asked
        asked += 1
        code = answers.pop(0) if answers else 200
        said = {"message": "storage is (re)initializing"} if code != 200 else {"items": []}
        return web.json_response(said, status=code)

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    async with TestServer(app) as server:
        cluster = Cluster(ApiClient(Configuration(host=str(server.make_url("")).rstrip("/"))))
        try:
            await cluster.list(kinds.POOL)
        except ApiError as error:
            return asked, error.code
        finally:
            await cluster.close()
    return asked, 200


@pytest.mark.parametrize(
    ("answers", "asked", "code"),
    [([], 1, 200), ([429, 429], 3, 200), ([429] * 9, 4, 429), ([503], 1, 503), ([403], 1, 403)],
)
def test_busy_server_is_asked_again(
    answers: list[int], asked: int, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert asyncio.run(_listed(answers, monkeypatch)) == (asked, code)
