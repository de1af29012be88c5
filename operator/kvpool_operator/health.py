"""The operator's /healthz, /readyz and /metrics."""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

Verdict = Callable[[], str]  # what is wrong; empty when nothing is


async def serve(
    health_port: int, metrics_port: int, *, alive: Verdict, ready: Verdict, metrics: CollectorRegistry
) -> list[web.AppRunner]:
    """Start both servers; the caller ends them by `cleanup()`."""

    def told(verdict: Verdict) -> Callable[[web.Request], object]:
        async def answer(_: web.Request) -> web.Response:
            wrong = verdict()
            return web.Response(text=f"{wrong or 'ok'}\n", status=503 if wrong else 200)

        return answer

    async def numbers(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(metrics), headers={"Content-Type": CONTENT_TYPE_LATEST})

    probes, figures = web.Application(), web.Application()
    probes.router.add_get("/healthz", told(alive))  # type: ignore[arg-type]
    probes.router.add_get("/readyz", told(ready))  # type: ignore[arg-type]
    figures.router.add_get("/metrics", numbers)
    runners = []
    for app, port in ((probes, health_port), (figures, metrics_port)):
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, None, port).start()
        runners.append(runner)
    return runners
