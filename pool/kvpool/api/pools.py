"""The routes below /v1/pools: what is known of pools."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Path, Query, Request, Response

from kvpool.api import engines, model, pages, tags, times
from kvpool.api import history as past
from kvpool.api.access import Caller, readable
from kvpool.api.problem import ApiError, documented
from kvpool.api.service import Service
from kvpool.api.status import Key, PoolStatus
from kvpool.explain import Explanation, Reason, explain

NAME = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
DURATION = r"^[1-9][0-9]{0,5}[smhd]$"
ENGINE = r"^[A-Za-z0-9]([-A-Za-z0-9./]*[A-Za-z0-9])?$"
ENGINES_SHOWN = 500
WINDOW_S_MAX = past.COARSE.keep_s

router = APIRouter(prefix="/v1/pools", tags=["pools"])

NamespaceName = Annotated[
    str,
    Path(pattern=NAME, max_length=63, description='namespace; "local" for this machine', examples=["local"]),
]
PoolName = Annotated[
    str, Path(pattern=NAME, max_length=63, description="the pool's name", examples=["prefix-pool"])
]
Limit = Annotated[int, Query(ge=1, le=pages.LIMIT_MAX, description="entries on a page")]
Continue = Annotated[
    str | None, Query(alias="continue", max_length=pages.TOKEN_MAX, description="`next` of the page before")
]
IfNoneMatch = Annotated[
    str | None, Header(description="ETag of an answer that you have: 304 when nothing but ages changed since")
]
UNCHANGED: dict[int | str, dict[str, Any]] = {
    304: {"description": "nothing but ages has changed since the answer with this ETag"}
}
ERRORS = documented(401, 404, 422, 429, 503)


async def service_of(request: Request) -> Service:  # async: else it gets a thread for each request
    service: Service = request.app.state.service
    return service


async def caller_of(
    request: Request, authorization: Annotated[str | None, Header(include_in_schema=False)] = None
) -> Caller:
    return await (await service_of(request)).caller(authorization)


ServiceOf = Annotated[Service, Depends(service_of)]
CallerOf = Annotated[Caller, Depends(caller_of)]


async def status_of(
    service: ServiceOf, caller: CallerOf, namespace: NamespaceName, name: PoolName
) -> PoolStatus:
    """The pool of the path. What a caller may not see is not there for them."""
    may = await service.access.may_read(caller, None) or await service.access.may_read(caller, namespace)
    status = service.board.get(Key(namespace, name)) if may else None
    if status is None:
        detail = (
            f'no pool "{name}" in namespace "{namespace}", or none that you may see; GET /v1/pools lists them'
        )
        raise ApiError(404, detail)
    return status


StatusOf = Annotated[PoolStatus, Depends(status_of)]


@router.get(
    "",
    response_model=model.PoolList,
    summary="All pools that you may see",
    responses={**UNCHANGED, **documented(400, 401, 422, 429, 503)},
)
async def list_pools(
    request: Request,
    service: ServiceOf,
    caller: CallerOf,
    limit: Limit = pages.LIMIT,
    start: Continue = None,
    namespace: Annotated[
        str | None, Query(pattern=NAME, max_length=63, description="only pools of this namespace")
    ] = None,
    if_none_match: IfNoneMatch = None,
) -> Response:
    keys = service.board.known()
    if namespace is not None:
        keys = [key for key in keys if key.namespace == namespace]
    allowed = await readable(service.access, caller, (key.namespace for key in keys))
    if allowed is not None:
        keys = [key for key in keys if key.namespace in allowed]
    shown, following = pages.page(keys, pages.after(start, 2), limit)
    statuses = [status for key in keys[shown] if (status := service.board.get(key)) is not None]
    now = service.clock()
    says = [(status.key, status.revision, status.stale(now)) for status in statuses]
    tag = tags.etag(service.nonce, says, len(keys), following)
    if tags.matches(request, tag):
        return tags.unchanged(tag)
    items = b",".join([status.aged_body(now) for status in statuses])
    ending = b"null" if following is None else b'"%b"' % following.encode()
    return tags.fresh(b'{"items":[%b],"total":%d,"next":%b}' % (items, len(keys), ending), tag)


@router.get(
    "/{namespace}/{name}",
    response_model=model.Pool,
    summary="One pool",
    responses={**UNCHANGED, **ERRORS},
)
async def get_pool(
    request: Request, service: ServiceOf, status: StatusOf, if_none_match: IfNoneMatch = None
) -> Response:
    now = service.clock()
    tag = _tag(service, status, now)
    return tags.unchanged(tag) if tags.matches(request, tag) else tags.fresh(status.aged_body(now), tag)


@router.get(
    "/{namespace}/{name}/nodes",
    response_model=model.NodeList,
    summary="The nodes that run the pool",
    responses={**UNCHANGED, **documented(400), **ERRORS},
)
async def get_nodes(
    request: Request,
    service: ServiceOf,
    status: StatusOf,
    limit: Limit = pages.LIMIT,
    start: Continue = None,
    if_none_match: IfNoneMatch = None,
) -> Response:
    now = service.clock()
    keys = [(node.name,) for node in status.nodes]
    shown, following = pages.page(keys, pages.after(start, 1), limit)
    items = [aged_node(status, node, now) for node in status.nodes[shown]]
    tag = _tag(service, status, now, "nodes", [node.stale for node in items], start, limit)
    if tags.matches(request, tag):
        return tags.unchanged(tag)
    body = model.NodeList(**_of_pool(status, now), items=items, total=len(keys), next=following)
    return tags.fresh(body.model_dump_json(), tag)


def aged_node(status: PoolStatus, node: model.Node, now: float) -> model.Node:
    """The node with the age of its own last news."""
    at = status.nodes_at.get(node.name, status.observed_at)
    age_s = max(0.0, now - at)
    update = {"age_s": round(age_s, 1), "stale": age_s > status.stale_after_s, "updated_at": times.text(at)}
    return node.model_copy(update=update)


@router.get(
    "/{namespace}/{name}/tiers",
    response_model=model.TierList,
    summary="The pool's tiers",
    responses={**UNCHANGED, **ERRORS},
)
async def get_tiers(
    request: Request, service: ServiceOf, status: StatusOf, if_none_match: IfNoneMatch = None
) -> Response:
    now = service.clock()
    body = model.TierList(**_of_pool(status, now), items=status.pool.tiers)
    return _answer(request, service, status, now, "tiers", body)


@router.get(
    "/{namespace}/{name}/namespaces",
    response_model=model.NamespaceList,
    summary="What is stored, by engine settings",
    responses={**UNCHANGED, **ERRORS},
)
async def get_namespaces(
    request: Request, service: ServiceOf, status: StatusOf, if_none_match: IfNoneMatch = None
) -> Response:
    now = service.clock()
    items = engines.namespaces(status.namespaces or (), status.reports)
    body = model.NamespaceList(**_of_pool(status, now), known=status.namespaces is not None, items=items)
    return _answer(request, service, status, now, "namespaces", body)


@router.get(
    "/{namespace}/{name}/misses",
    response_model=model.Misses,
    summary="Why blocks were not served",
    responses={**UNCHANGED, **ERRORS},
)
async def get_misses(
    request: Request, service: ServiceOf, status: StatusOf, if_none_match: IfNoneMatch = None
) -> Response:
    now = service.clock()
    explained = explain(status.counters, ())
    body = model.Misses(
        **_of_pool(status, now),
        lookups=status.pool.lookups,
        hits=status.pool.hits,
        hit_rate=status.pool.hit_rate,
        misses=_reasons(explained.misses),
        declined=_reasons(explained.declined),
        engines=list(status.engines[:ENGINES_SHOWN]),
        engines_total=len(status.engines),
    )
    return _answer(request, service, status, now, "misses", body)


@router.get(
    "/{namespace}/{name}/explain",
    response_model=model.Explanation,
    summary="Why the hit rate is what it is",
    description="The reasons in order of their weight, in which settings engines differ, and what to do.",
    responses={**UNCHANGED, **ERRORS},
)
async def get_explanation(
    request: Request,
    service: ServiceOf,
    status: StatusOf,
    engine: Annotated[
        str | None,
        Query(
            pattern=ENGINE,
            max_length=320,
            description="only what concerns this engine: its name as `misses` lists it, or the first hex "
            "digits of its namespace's digest, as `namespaces` lists them and the connector logs them",
        ),
    ] = None,
    if_none_match: IfNoneMatch = None,
) -> Response:
    now = service.clock()
    try:
        counters, of = engines.whose(status, engine)
    except engines.UnknownEngine as error:
        raise ApiError(404, str(error)) from None
    explained = explain(status.counters if counters is None else counters, status.namespaces or (), of=of)
    body = _explanation(status, explained, now, engine, own=counters is not None)
    return _answer(request, service, status, now, f"explain {engine}", body)


@router.get(
    "/{namespace}/{name}/history",
    response_model=model.History,
    summary="The pool's past",
    description="Hit rate, bytes, evictions and latencies by interval: ten seconds long for the last hour, "
    "a quarter of an hour for the last week.",
    responses=ERRORS,
)
async def get_history(
    service: ServiceOf,
    status: StatusOf,
    window: Annotated[
        str,
        Query(
            pattern=DURATION, description="how far back, such as 15m, 1h or 7d; at most 7d", examples=["1h"]
        ),
    ] = "1h",
    step: Annotated[
        str, Query(pattern=DURATION, description="length of an interval, such as 10s or 1h", examples=["10s"])
    ] = "10s",
) -> Response:
    now = service.clock()
    window_s = min(seconds(window), WINDOW_S_MAX)
    kept, step_s = past.resolution_for(window_s, min(seconds(step), window_s))
    since = (now - window_s) // kept.step_s * kept.step_s
    rows = past.regrouped(await service.history.rows(status.key, kept, since), step_s)
    body = model.History(
        **_of_pool(status, now),
        window_seconds=window_s,
        step_seconds=step_s,
        store=service.history.store,
        notice=service.history.notice,
        points=[past.point(row) for row in rows],
    )
    return Response(body.model_dump_json(), media_type=tags.JSON)


def seconds(duration: str) -> int:
    """What a text such as 15m means."""
    assert re.match(DURATION, duration)
    return int(duration[:-1]) * UNITS_S[duration[-1]]


def _tag(service: Service, status: PoolStatus, now: float, *parts: object) -> str:
    return tags.etag(service.nonce, status.key, status.revision, status.stale(now), *parts)


def _answer(
    request: Request, service: Service, status: PoolStatus, now: float, what: str, body: model.OfPool
) -> Response:
    tag = _tag(service, status, now, what)
    if tags.matches(request, tag):
        return tags.unchanged(tag)
    return tags.fresh(body.model_dump_json(), tag)


def _of_pool(status: PoolStatus, now: float) -> dict[str, object]:
    return {
        "namespace": status.key.namespace,
        "name": status.key.name,
        "age_s": status.age_s(now),
        "stale": status.stale(now),
    }


def _reasons(reasons: Iterable[Reason]) -> list[model.MissReason]:
    return [
        model.MissReason(
            reason=r.reason, count=r.count, share=min(r.share, 1.0), meaning=r.meaning, advice=r.advice
        )
        for r in reasons
    ]


def _explanation(
    status: PoolStatus, explained: Explanation, now: float, engine: str | None, *, own: bool
) -> model.Explanation:
    differences = [
        model.NamespaceDifference(
            namespace=d.namespace,
            blocks=d.blocks,
            nearest=d.nearest,
            nearest_blocks=d.nearest_blocks,
            differences=[
                model.FieldDifference(field=f.field, here=f.here, there=f.there, advice=f.advice)
                for f in d.differences
            ],
        )
        for d in explained.namespaces
    ]
    return model.Explanation(
        **_of_pool(status, now),
        headline=explained.headline,
        advice=explained.advice,
        engine=engine,
        own_counters=own,
        hit_rate=model.percent(explained.hits, explained.lookups) if own else status.pool.hit_rate,
        lookups=explained.lookups if own else status.pool.lookups,
        hits=explained.hits if own else status.pool.hits,
        misses=_reasons(explained.misses),
        declined=_reasons(explained.declined),
        namespaces=differences,
        namespaces_known=status.namespaces is not None,
        problems=status.pool.problems,
    )
