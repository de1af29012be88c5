"""The dashboard at `/`: a few files that are served as they are."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.resources import files
from typing import NamedTuple

from fastapi import APIRouter, Request, Response

from kvpool.api import tags
from kvpool.api.problem import ApiError

# Everything that is served, with its type: nothing else in the folder is.
TYPES = {
    "index.html": "text/html; charset=utf-8",
    "dashboard.css": "text/css; charset=utf-8",
    "dashboard.js": "text/javascript; charset=utf-8",
    "draw.js": "text/javascript; charset=utf-8",
    "theme.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
    "vendor/uPlot.min.css": "text/css; charset=utf-8",
    "vendor/uPlot.min.js": "text/javascript; charset=utf-8",
    "vendor/uPlot.LICENSE": "text/plain; charset=utf-8",
}

router = APIRouter(include_in_schema=False)


class Page(NamedTuple):
    """A file and its ETag."""

    body: bytes
    tag: str


@cache
def _page(name: str) -> Page:
    body = (files("kvpool.api") / "static" / name).read_bytes()
    return Page(body, f'"{hashlib.blake2b(body, digest_size=10).hexdigest()}"')


@router.get("/")
async def index(request: Request) -> Response:
    return _answer(request, "index.html")


@router.get("/static/{name:path}")
async def static(request: Request, name: str) -> Response:
    if name not in TYPES:
        raise ApiError(404, "there is no such part of the dashboard")
    return _answer(request, name)


def _answer(request: Request, name: str) -> Response:
    page = _page(name)
    headers = {"ETag": page.tag, "Cache-Control": "no-cache"}
    if tags.matches(request, page.tag):
        return Response(status_code=304, headers=headers)
    return Response(page.body, headers=headers, media_type=TYPES[name])
