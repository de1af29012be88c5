"""Requests to the API server, as plain dicts in and out."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

from kubernetes.aio import client, config
from kubernetes.aio.client.exceptions import ApiException

from kvpool_operator.kinds import Kind
from kvpool_operator.names import FIELD_MANAGER

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


class Cluster:
    """The API server of one cluster.

    Threads: one event loop only.
    Raises:  ApiError by every call; asyncio.TimeoutError and aiohttp's errors when no answer comes.
    """

    def __init__(self, api: client.ApiClient) -> None:
        self.api = api
        self.counted: Callable[[str, str], None] = lambda _method, _plural: None  # told of each request

    @classmethod
    async def connect(cls) -> Cluster:
        """As the pod's service account, else as KUBECONFIG says."""
        try:
            config.load_incluster_config()
        except config.ConfigException:
            await config.load_kube_config(os.environ.get("KUBECONFIG"))
        return cls(client.ApiClient())

    async def close(self) -> None:
        await self.api.close()

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

    async def apply(self, body: Object, kind: Kind, subresource: str = "") -> Object:
        """Server-side apply; fields that somebody else has changed are taken back."""
        metadata = body["metadata"]
        return await self._request(
            "PATCH",
            kind,
            kind.path(metadata.get("namespace"), metadata["name"], subresource),
            body,
            content_type=APPLY,
            query={"fieldManager": FIELD_MANAGER, "force": "true"},
        )

    async def replace(self, body: Object, kind: Kind) -> Object:
        """Put `body` in place of the object of the version that it names."""
        metadata = body["metadata"]
        path = kind.path(metadata.get("namespace"), metadata["name"])
        return await self._request("PUT", kind, path, body, query={"fieldManager": FIELD_MANAGER})

    async def merge(self, kind: Kind, namespace: str | None, name: str, patch: Object) -> Object:
        return await self._request(
            "PATCH",
            kind,
            kind.path(namespace, name),
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

    async def _request(
        self,
        method: str,
        kind: Kind,
        path: str,
        body: Object | None = None,
        *,
        content_type: str = JSON,
        query: dict[str, str] | None = None,
    ) -> Object:
        self.counted(method, kind.plural)
        request = await self.api.param_serialize(
            method,
            path,
            query_params=list((query or {}).items()),
            header_params={"Accept": JSON, "Content-Type": content_type},
            body=body,
            auth_settings=["BearerToken"],
        )
        try:
            answer = await self.api.call_api(*request, _request_timeout=REQUEST_S)
            data = await answer.read()
        except ApiException as error:
            raise _refused(method, path, int(error.status or 0), error.body or error.reason or "") from None
        if not 200 <= int(answer.status) <= 299:
            raise _refused(method, path, int(answer.status), data)
        return dict(json.loads(data)) if data else {}


def _refused(method: str, path: str, code: int, body: str | bytes) -> ApiError:
    try:
        message = str(json.loads(body).get("message", ""))
    except (ValueError, AttributeError):
        message = body.decode(errors="replace") if isinstance(body, bytes) else str(body)
    return ApiError(f"{method} {path}", code, message[:1000])
