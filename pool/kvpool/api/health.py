"""The routes for what watches the API itself: /healthz, /readyz, /metrics."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Header, Response
from fastapi.responses import PlainTextResponse

from kvpool.api import model
from kvpool.api.metrics import CONTENT_TYPE, pool_metrics
from kvpool.api.pools import ServiceOf
from kvpool.api.problem import ApiError, documented
from kvpool.api.service import Service

router = APIRouter(tags=["health"])


@router.get("/healthz", response_model=model.Health, summary="Whether the process lives")
async def healthz(service: ServiceOf) -> Response:
    return Response(_health(service).model_dump_json(), media_type="application/json")


@router.get(
    "/readyz",
    response_model=model.Health,
    summary="Whether answers are up to date",
    description="503 as long as the source has not answered yet, and when the cluster's watch is dead.",
    responses={503: {"model": model.Health, "description": "not up to date; message says why"}},
)
async def readyz(service: ServiceOf) -> Response:
    health = _health(service)
    return Response(health.model_dump_json(), 200 if health.ready else 503, media_type="application/json")


@router.get(
    "/metrics",
    response_class=PlainTextResponse,
    summary="Prometheus metrics of all pools and of the API",
    responses=documented(401, 404, 429, 503),
)
async def metrics(
    service: ServiceOf, authorization: Annotated[str | None, Header(include_in_schema=False)] = None
) -> Response:
    if not service.open_metrics:
        caller = await service.caller(authorization)
        if not await service.access.may_read(caller, None):
            raise ApiError(404, "metrics are for who may read the pools of all namespaces")
    text = await pool_metrics(service.board, service.clock())
    own = service.metrics.text(service.source, shared=service.history.store == "redis")
    return Response(text + own, headers={"Content-Type": CONTENT_TYPE})


def _health(service: Service) -> model.Health:
    readiness = service.source.readiness()
    return model.Health(
        ready=readiness.ready,
        message=readiness.message,
        source=service.source.kind,
        pools=len(service.board),
        history=service.history.store,
        notice=service.history.notice,
    )
