"""Requests to the API server of one cluster, as plain dicts in and out."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

import aiohttp
from kubernetes.aio import config
from kubernetes.aio.client import ApiClient, Configuration

from kvpool_operator.kinds import Kind
from kvpool_operator.names import FIELD_MANAGER

BUSY_S = (0.5, 1.0, 2.0)  # between tries of what the API server was too busy for
REQUEST_S = 20.0
Object = dict[str, Any]

JSON = "application/json"
APPLY = "application/apply-patch+yaml"  # JSON is YAML
MERGE = "application/merge-patch+json"


class ApiError(Exception):
    """The API server refused a request. `code` is HTTP's, `message` the server's own sentence."""

    def __init__(self, what: str, code: int, message: str) -> None:
        super().__init__(f"{what}: {message or 'no answer'} ({code})")
        self.code = code
        self.message = message

    @property
    def answer(self) -> str:
        """Without what was asked, where that is known."""
        return f"{self.message or 'no answer'} ({self.code})"


class Expired(ApiError):
    """The version that was to be continued from is not kept any more: list again."""


# No answer, or none that can be read.
UNREACHABLE = (aiohttp.ClientError, OSError, asyncio.TimeoutError, ValueError, KeyError)


class Cluster:
    """The API server of one cluster.

    Threads: one event loop only.
    Raises:  ApiError by every call, and one of UNREACHABLE when no answer comes.
    """

    def __init__(self, api: ApiClient) -> None:
        self._api = api
        self.counted: Callable[[str, str], None] = lambda _method, _plural: None  # told of each request

    @classmethod
    async def connect(cls) -> Cluster:
        """As the pod's service account, else as KUBECONFIG says."""
        made = Configuration()
        if os.environ.get("KUBERNETES_SERVICE_HOST"):
            config.load_incluster_config(client_configuration=made)
        else:
            await config.load_kube_config(os.environ.get("KUBECONFIG"), client_configuration=made)
        return cls(ApiClient(made))

    async def close(self) -> None:
        await self._api.close()

    async def get(self, kind: Kind, namespace: str | None, name: str) -> Object | None:
        """The object, or None."""
        try:
            return await self._request("GET", kind, kind.path(namespace, name))
        except ApiError as error:
            if error.code == 404:
                return None
            raise

    async def list(self, kind: Kind, namespace: str | None = None, labels: str = "") -> list[Object]:
        found = await self._request(
            "GET", kind, kind.path(namespace), query={"labelSelector": labels} if labels else {}
        )
        return list(found.get("items") or [])

    async def create(self, body: Object, kind: Kind) -> Object:
        namespace = body["metadata"].get("namespace")
        return await self._request(
            "POST", kind, kind.path(namespace), body, query={"fieldManager": FIELD_MANAGER}
        )

    async def apply(
        self, body: Object, kind: Kind, subresource: str = "", manager: str = FIELD_MANAGER
    ) -> Object:
        """Server-side apply; fields that somebody else has changed are taken back."""
        metadata = body["metadata"]
        return await self._request(
            "PATCH",
            kind,
            kind.path(metadata.get("namespace"), metadata["name"], subresource),
            body,
            content_type=APPLY,
            query={"fieldManager": manager, "force": "true"},
        )

    async def replace(self, body: Object, kind: Kind) -> Object:
        """Put `body` in place of the object of the version that it names."""
        metadata = body["metadata"]
        path = kind.path(metadata.get("namespace"), metadata["name"])
        return await self._request("PUT", kind, path, body, query={"fieldManager": FIELD_MANAGER})

    async def merge(
        self, kind: Kind, namespace: str | None, name: str, patch: Object, subresource: str = ""
    ) -> Object:
        return await self._request(
            "PATCH",
            kind,
            kind.path(namespace, name, subresource),
            patch,
            content_type=MERGE,
            query={"fieldManager": FIELD_MANAGER},
        )

    async def delete(self, kind: Kind, namespace: str | None, name: str, uid: str = "") -> None:
        """Delete an object, only the one with that `uid` if given. One that is gone already is no error."""
        body: Object = {"propagationPolicy": "Background"}
        if uid:
            body["preconditions"] = {"uid": uid}
        try:
            await self._request("DELETE", kind, kind.path(namespace, name), body)
        except ApiError as error:
            if error.code not in (404, 409):
                raise

    async def read(self, path: str, query: Mapping[str, str]) -> Object:
        """What is at a path, for lists that are read page by page."""
        return await self._ended("GET", path, query=query)

    async def post(self, path: str, body: Object) -> Object:
        """Ask for a review: an object that is answered and not kept."""
        return await self._ended("POST", path, body)

    async def lines(
        self, path: str, query: Mapping[str, str], silence_s: float
    ) -> AsyncGenerator[bytes, None]:
        """The lines of an answer that goes on, until `silence_s` pass without one. The first is empty."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=REQUEST_S, sock_read=silence_s)
        response = await self._ask("GET", path, query=query, timeout=timeout)
        try:
            if response.status >= 400:
                raise _refused("GET", path, response.status, await response.read())
            yield b""  # answered: the watch stands
            rest = b""
            async for piece in response.content.iter_any():
                *whole, rest = (rest + piece).split(b"\n")
                for line in whole:
                    if line.strip():
                        yield line
        finally:
            response.close()

    async def _request(
        self,
        method: str,
        kind: Kind,
        path: str,
        body: Object | None = None,
        *,
        content_type: str = JSON,
        query: Mapping[str, str] | None = None,
    ) -> Object:
        self.counted(method, kind.plural)
        return await self._ended(method, path, body, content_type=content_type, query=query)

    async def _ended(
        self,
        method: str,
        path: str,
        body: Object | None = None,
        *,
        content_type: str = JSON,
        query: Mapping[str, str] | None = None,
    ) -> Object:
        timeout = aiohttp.ClientTimeout(total=REQUEST_S)
        for patience_s in (*BUSY_S, 0.0):
            response = await self._ask(
                method, path, body, content_type=content_type, query=query, timeout=timeout
            )
            data = await response.read()
            if response.status != 429 or not patience_s:  # 429: nothing was done; ask again
                break
            await asyncio.sleep(patience_s)
        if not 200 <= response.status <= 299:
            raise _refused(method, path, response.status, data)
        return dict(json.loads(data)) if data else {}

    async def _ask(
        self,
        method: str,
        path: str,
        body: Object | None = None,
        *,
        timeout: aiohttp.ClientTimeout,
        content_type: str = JSON,
        query: Mapping[str, str] | None = None,
    ) -> aiohttp.ClientResponse:
        request: Any = await self._api.param_serialize(
            method,
            path,
            query_params=list((query or {}).items()),
            header_params={"Accept": JSON, "Content-Type": content_type},
            body=body,
            auth_settings=["BearerToken"],
        )
        verb, url, headers, content = request[:4]
        # Below call_api, which knows no time-out of its own for the silence of a watch.
        ask: Callable[..., Any] = self._api.rest_client.request
        answer: Any = await ask(verb, url, headers=headers, body=content, _request_timeout=timeout)
        response: aiohttp.ClientResponse = answer.response
        return response


def _refused(method: str, path: str, code: int, body: bytes) -> ApiError:
    try:
        message = str(json.loads(body).get("message", ""))
    except (ValueError, AttributeError):
        message = body.decode(errors="replace")
    return (Expired if code == 410 else ApiError)(f"{method} {path}", code, message[:1000])
