"""The application: routes, problems, guard, and the tasks that keep it fresh."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI

from kvpool.api import dashboard, events, health, model, pools, problem
from kvpool.api.guard import Guard, RateLimiter
from kvpool.api.recorder import Recorder
from kvpool.api.service import Service

log = logging.getLogger("kvpool.api")

AGAIN_S = 1.0

DESCRIPTION = """\
How kvpool's pools are doing: capacity, use, hit rate, and why it is what it is.

Names are those of the custom resources KVPool and KVPoolNode. Bytes are bytes, rates are percent with
one decimal, moments are RFC 3339. `age_s` says how old the news is that an answer was made from; `stale`
that it is too old. Errors are `application/problem+json`.

Answers carry an ETag that ignores ages; send it back as If-None-Match.
"""


def create_app(service: Service) -> FastAPI:
    """The API of one service. Its tasks run as long as the application does."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.streams.closing = False
        recorder = Recorder(service.board, service.history, service.clock)
        tasks = [
            asyncio.create_task(_for_ever("source", service.source.run)),
            asyncio.create_task(_for_ever("recorder", recorder.run)),
            asyncio.create_task(_for_ever("streams", service.streams.end_stuck)),
        ]
        try:
            yield
        finally:
            service.streams.close()
            for task in tasks:
                task.cancel()
            for task in tasks:
                with suppress(asyncio.CancelledError):
                    await task
            await service.history.close()

    app = FastAPI(
        title="kvpool status API",
        version=version("kvpool"),
        description=DESCRIPTION,
        license_info={"name": "Apache-2.0", "identifier": "Apache-2.0"},
        lifespan=lifespan,
        # FastAPI's pages of the description load scripts from elsewhere.
        docs_url=None,
        redoc_url=None,
        openapi_url="/v1/openapi.json",
        redirect_slashes=False,
    )
    app.state.service = service
    app.include_router(pools.router)
    app.include_router(events.router)
    app.include_router(health.router)
    app.include_router(dashboard.router)
    problem.install(app)
    app.add_middleware(
        Guard, metrics=service.metrics, limiter=RateLimiter(service.limit), hosts=service.hosts
    )
    _describe(app)
    return app


async def _for_ever(name: str, run: Any) -> None:
    """A task that failed begins again, and says so."""
    while True:
        try:
            task: Coroutine[Any, Any, None] = run()
            await task
        except asyncio.CancelledError:
            raise
        except Exception:
            log.exception("task_failed task=%s", name)
        await asyncio.sleep(AGAIN_S)


def _describe(app: FastAPI) -> None:
    """The OpenAPI document: what FastAPI finds, with the problem in place of its own form of errors."""
    made = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = made()
            schemas = document["components"]["schemas"]
            schemas.pop("HTTPValidationError", None)
            schemas.pop("ValidationError", None)
            schemas["Problem"] = model.Problem.model_json_schema()
            for path in document["paths"].values():
                for operation in path.values():
                    _problem_for_422(operation["responses"])
            document["components"]["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
            document["security"] = [{}, {"bearer": []}]
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _problem_for_422(responses: dict[str, Any]) -> None:
    said = responses.get("422")
    if said is not None and "application/json" in said.get("content", {}):
        responses["422"] = problem.documented(422)[422]
