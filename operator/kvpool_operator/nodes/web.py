"""What a pod has to answer: /healthz, /readyz and /metrics."""

from __future__ import annotations

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from kvpool_operator.nodes.board import Board

# A chore may take seconds, making a region minutes (it beats meanwhile); nothing takes longer.
SERVED_MAX_S = 300.0


def health(board: Board) -> str:
    """Why this process has to be started anew; empty when it need not be."""
    served, _ = board.silent_s()
    if served > SERVED_MAX_S:
        return f"the thread that serves the pool has not been heard of for {served:.0f} s"
    return ""


def application(board: Board, registry: CollectorRegistry) -> web.Application:
    async def healthz(_: web.Request) -> web.Response:
        problem = health(board)
        return web.Response(text=problem or "ok", status=503 if problem else 200)

    async def readyz(_: web.Request) -> web.Response:
        truth = board.truth()
        return web.Response(text="ok" if truth.ready else truth.message, status=200 if truth.ready else 503)

    async def metrics(_: web.Request) -> web.Response:
        body = generate_latest(registry)
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})

    app = web.Application()
    app.add_routes(
        [web.get("/healthz", healthz), web.get("/readyz", readyz), web.get("/metrics", metrics)],
    )
    return app
