"""All objects of one kind, kept up to date: a list, then a watch from there, for ever."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import random
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any

import aiohttp
from kubernetes.aio import config
from kubernetes.aio.client import ApiClient, Configuration
from kubernetes.aio.client.exceptions import ApiException

log = logging.getLogger("kvpool.api")

GROUP_VERSION = "kvpool.dev/v1alpha1"
PAGE = 500  # objects in one answer of a list
WATCH_S = 240  # the server ends a watch after that
SILENCE_S = 75.0  # a watch that says nothing for so long, not even a bookmark, is asked anew
REQUEST_S = 20.0
PAUSE_FIRST_S, PAUSE_MAX_S = 0.5, 30.0

Object = dict[str, Any]
UNREACHABLE = (aiohttp.ClientError, OSError, asyncio.TimeoutError, ApiException, ValueError, KeyError)


class Refused(Exception):
    """The API server's answer was an error."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(f"{message} ({code})")
        self.code = code


class Expired(Exception):
    """The version that was to be continued from is not kept any more: list again."""


class Cluster:
    """Requests to the API server of one cluster.

    Threads: one event loop.
    """

    def __init__(self, api: ApiClient) -> None:
        self._api = api

    @classmethod
    async def connect(cls) -> Cluster:
        """As the pod's service account, else as KUBECONFIG says."""
        made = Configuration()
        if os.environ.get("KUBERNETES_SERVICE_HOST"):
            config.load_incluster_config(client_configuration=made)
        else:
            await config.load_kube_config(client_configuration=made)
        return cls(ApiClient(made))

    async def close(self) -> None:
        await self._api.close()

    async def get(self, path: str, query: Mapping[str, str]) -> Object:
        """The answer's object. Raises: Refused, Expired, and what the connection raises."""
        return await self._read(
            await self._ask("GET", path, query, None, aiohttp.ClientTimeout(total=REQUEST_S))
        )

    async def post(self, path: str, body: Object) -> Object:
        return await self._read(
            await self._ask("POST", path, {}, body, aiohttp.ClientTimeout(total=REQUEST_S))
        )

    async def lines(
        self, path: str, query: Mapping[str, str], silence_s: float
    ) -> AsyncGenerator[bytes, None]:
        """The lines of an answer that goes on, until `silence_s` pass without one."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=REQUEST_S, sock_read=silence_s)
        response = await self._ask("GET", path, query, None, timeout)
        try:
            if response.status >= 400:
                await self._read(response)
            yield b""  # answered: the watch stands
            rest = b""
            async for piece in response.content.iter_any():
                *whole, rest = (rest + piece).split(b"\n")
                for line in whole:
                    if line.strip():
                        yield line
        finally:
            response.close()

    async def _ask(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        body: Object | None,
        timeout: aiohttp.ClientTimeout,
    ) -> aiohttp.ClientResponse:
        headers = {"Accept": "application/json", "Content-Type": "application/json"}
        request: Any = await self._api.param_serialize(
            method,
            path,
            query_params=list(query.items()),
            header_params=headers,
            body=body,
            auth_settings=["BearerToken"],
        )
        verb, url, sent, content = request[:4]
        request_: Callable[..., Any] = self._api.rest_client.request
        answer: Any = await request_(verb, url, headers=sent, body=content, _request_timeout=timeout)
        response: aiohttp.ClientResponse = answer.response
        return response

    async def _read(self, response: aiohttp.ClientResponse) -> Object:
        data = await response.read()
        try:
            body = json.loads(data)
        except ValueError:
            body = None
        said: Object = body if isinstance(body, dict) else {}
        if response.status == 410:
            raise Expired
        if response.status >= 400:
            raise Refused(response.status, str(said.get("message") or response.reason or "no answer"))
        return said


class ListWatch:
    """Tells of every object of a kind: `replace` with all of them, then `change` with each that changes.

    Threads: one event loop.
    """

    def __init__(
        self,
        cluster: Cluster,
        plural: str,
        namespace: str | None,
        replace: Callable[[Sequence[Object]], None],
        change: Callable[[str, Object], None],
        clock: Callable[[], float] = time.time,
        silence_s: float = SILENCE_S,
    ) -> None:
        where = f"/namespaces/{namespace}" if namespace else ""
        self.path = f"/apis/{GROUP_VERSION}{where}/{plural}"
        self._cluster, self._replace, self._change, self._clock = cluster, replace, change, clock
        self._silence_s = silence_s
        self.heard_at: float | None = None  # when the server last answered
        self.problem = ""

    async def run(self) -> None:
        """Follow until cancelled."""
        pause = PAUSE_FIRST_S
        version: str | None = None
        while True:
            try:
                if version is None:
                    version = await self._list()
                    pause = PAUSE_FIRST_S
                version = await self._watch(version)
                pause = PAUSE_FIRST_S
                continue
            except Expired:
                log.info("watch_expired path=%s", self.path)
                version = None
            except (*UNREACHABLE, Refused) as error:
                self._failed(error)
                if isinstance(error, (Refused, ValueError, KeyError)):
                    version = None
            await asyncio.sleep(pause * random.uniform(0.7, 1.3))
            pause = min(pause * 2, PAUSE_MAX_S)

    def _heard(self) -> None:
        if self.problem:
            log.info("cluster_recovered path=%s", self.path)
        self.problem, self.heard_at = "", self._clock()

    def _failed(self, error: BaseException) -> None:
        said = str(error) or type(error).__name__
        if said != self.problem:
            log.warning("cluster_failed path=%s error=%r", self.path, said)
        self.problem = said

    async def _list(self) -> str:
        """All objects, page by page; returns the version to watch from."""
        found: list[Object] = []
        query = {"limit": str(PAGE)}
        while True:
            page = await self._cluster.get(self.path, query)
            found += page["items"]
            following = page["metadata"].get("continue")
            if not following:
                break
            query = {"limit": str(PAGE), "continue": following}
        self._replace(found)
        self._heard()
        return str(page["metadata"]["resourceVersion"])

    async def _watch(self, version: str) -> str:
        """Follow from a version until the server ends it, or is silent; returns the version to go on from."""
        query = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(WATCH_S),
        }
        stands = False
        try:
            async with contextlib.aclosing(self._cluster.lines(self.path, query, self._silence_s)) as lines:
                async for line in lines:
                    stands = True
                    self._heard()
                    if line:
                        version = self._event(json.loads(line))
        except asyncio.TimeoutError:
            # Silence after it stood: nothing may have happened, or the line is dead. The next watch tells.
            if not stands:
                raise
        return version

    def _event(self, event: Object) -> str:
        kind, body = event["type"], event["object"]
        if kind == "ERROR":
            if body.get("code") == 410:
                raise Expired
            raise Refused(int(body.get("code") or 500), str(body.get("message") or "the watch failed"))
        version = str(body["metadata"]["resourceVersion"])
        if kind != "BOOKMARK":
            self._change(kind, body)
        return version
