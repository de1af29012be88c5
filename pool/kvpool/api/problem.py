"""Errors as RFC 9457 says: application/problem+json, with a sentence that helps."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from kvpool.api.model import Problem

MEDIA_TYPE = "application/problem+json"

# For the OpenAPI document: the errors that any request may get, by status.
DETAILS: Mapping[int, str] = {
    400: "the request cannot be understood",
    401: "no token, or one that is not known",
    404: "no such pool, or none that you may see",
    422: "a parameter is wrong",
    429: "too many requests; Retry-After says when to come back",
    503: "the API is not ready, or serves as many event streams as it can",
}


class ApiError(Exception):
    """Ends a request with a problem."""

    def __init__(self, status: int, detail: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(detail)
        self.status, self.detail, self.headers = status, detail, dict(headers or {})


def documented(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The `responses` of a route that may end so."""
    return {
        status: {
            "description": DETAILS[status],
            "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
        }
        for status in sorted(statuses)
    }


def response(status: int, detail: str, path: str, headers: Mapping[str, str] | None = None) -> Response:
    problem = Problem(title=HTTPStatus(status).phrase, status=status, detail=detail, instance=path)
    return Response(problem.model_dump_json(), status, dict(headers or {}), MEDIA_TYPE)


def install(app: FastAPI) -> None:
    """Make every error of `app` a problem."""

    async def api_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return response(error.status, error.detail, request.url.path, error.headers)

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        detail = {
            404: "there is nothing at this path; /v1/openapi.json lists what there is",
            405: "this path is read with GET only",
        }.get(error.status_code, str(error.detail))
        return response(error.status_code, detail, request.url.path, error.headers)

    async def wrong_parameter(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        # The values themselves stay out of it: they may be anything.
        found = [f"{'.'.join(str(part) for part in e['loc'][1:])}: {e['msg']}" for e in error.errors()]
        return response(422, "; ".join(found), request.url.path)

    async def unexpected(request: Request, _: Exception) -> Response:
        return response(500, "the API made a mistake; its log has the cause", request.url.path)

    app.add_exception_handler(ApiError, api_error)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(RequestValidationError, wrong_parameter)
    app.add_exception_handler(Exception, unexpected)
