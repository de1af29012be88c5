"""The node's talk with the apiserver: follow the KVPoolNode, write its status."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import aiohttp
from kubernetes.aio import config
from kubernetes.aio.client import ApiClient, Configuration, CustomObjectsApi
from kubernetes.aio.client.exceptions import ApiException

from kvpool.errors import ManifestError
from kvpool_operator.nodes.assignment import Assignment, forget, recall, remember
from kvpool_operator.nodes.board import Board

log = logging.getLogger("kvpool.node")

GROUP, VERSION, PLURAL, KIND = "kvpool.dev", "v1alpha1", "kvpoolnodes", "KVPoolNode"
FIELD_MANAGER = "kvpool-node"
POOL_LABEL, NODE_LABEL = "kvpool.dev/pool", "kvpool.dev/node"
LABEL_MAX = 63

WATCH_S = 60  # the server ends a watch after that, so that a silent one is a dead one
SILENCE_S = 15.0  # ... when it has not ended this much later
REQUEST_S = 10.0
PAUSE_FIRST_S, PAUSE_MAX_S = 0.5, 30.0
PUBLISH_STEP_S = 0.5
PUBLISH_S = 4.0  # between two writes of numbers that move all the time
PUBLISH_URGENT_S = 1.0  # ... when somebody waits for what has changed

UNREACHABLE = (aiohttp.ClientError, OSError, asyncio.TimeoutError, ApiException, ValueError)


class _Gone(Exception):
    """The version that a watch was to go on from is not kept any more: list again."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Which daemon this is."""

    namespace: str
    pool: str
    node: str
    pod: str

    @property
    def selector(self) -> str:
        """A node's name that is too long for a label is looked for among all nodes of the pool."""
        pool = f"{POOL_LABEL}={self.pool}"
        return f"{pool},{NODE_LABEL}={self.node}" if len(self.node) <= LABEL_MAX else pool


async def configuration() -> Configuration:
    """How the apiserver is reached: as a pod; else as KUBECONFIG says."""
    made = Configuration()
    if os.environ.get("KUBERNETES_SERVICE_HOST"):
        config.load_incluster_config(client_configuration=made)
    else:
        await config.load_kube_config(client_configuration=made)
    return made


class Follower:
    """Keeps `board` told of this node's KVPoolNode, whatever happens to the connection.

    Threads: one loop.
    """

    def __init__(self, api: CustomObjectsApi, identity: Identity, board: Board) -> None:
        self._api = api
        self._identity = identity
        self._board = board
        self._nodes: dict[str, dict[str, Any]] = {}
        self._kept: object = None
        self._failure = ""
        self.found: dict[str, Any] | None = None

    def begin(self) -> None:
        """Start with what was kept on disk: the pool is served also while nobody can be asked."""
        node = recall(self._identity.pool)
        if node is not None:
            self._tell(node)
            log.info("assignment_recalled pool=%s node=%s", self._identity.pool, self._identity.node)

    async def run(self) -> None:
        pause = PAUSE_FIRST_S
        while True:
            try:
                version = await self._list()
                pause = PAUSE_FIRST_S
                while True:
                    version = await self._watch(version)
            except _Gone:
                continue
            except UNREACHABLE as error:
                self._failed(error)
            await asyncio.sleep(pause * random.uniform(0.7, 1.3))
            pause = min(pause * 2, PAUSE_MAX_S)

    def _failed(self, error: BaseException) -> None:
        told = _said(error)
        if told != self._failure:
            log.warning(
                "cluster_failed pool=%s error=%r; the pool goes on as it is", self._identity.pool, told
            )
        self._failure = told

    def _answered(self) -> None:
        if self._failure:
            log.info("cluster_recovered pool=%s", self._identity.pool)
        self._failure = ""
        self._board.watched()

    def _query(self) -> dict[str, Any]:
        return {
            "group": GROUP,
            "version": VERSION,
            "namespace": self._identity.namespace,
            "plural": PLURAL,
            "label_selector": self._identity.selector,
        }

    async def _list(self) -> str:
        listed: Any = await self._api.list_namespaced_custom_object(
            **self._query(), _request_timeout=REQUEST_S
        )
        self._nodes = {node["metadata"]["name"]: node for node in listed["items"]}
        self._answered()
        self._choose()
        return str(listed["metadata"]["resourceVersion"])

    async def _watch(self, version: str) -> str:
        """Follow until the server ends it; returns the version to go on from."""
        response: Any = await self._api.list_namespaced_custom_object_without_preload_content(
            **self._query(),
            watch=True,
            allow_watch_bookmarks=True,
            resource_version=version,
            timeout_seconds=WATCH_S,
            _request_timeout=WATCH_S + SILENCE_S,
        )
        async with contextlib.aclosing(_lines(response)) as lines:
            self._answered()
            async for line in lines:
                event = json.loads(line)
                node = event.get("object") or {}
                if event.get("type") == "ERROR":
                    raise (
                        _Gone if node.get("code") == 410 else ValueError(node.get("message", "watch failed"))
                    )
                version = str(node["metadata"]["resourceVersion"])
                self._board.watched()
                if event["type"] == "BOOKMARK":
                    continue
                self._nodes.pop(node["metadata"]["name"], None)
                if event["type"] != "DELETED":
                    self._nodes[node["metadata"]["name"]] = node
                self._choose()
        self._board.watched()
        return version

    def _choose(self) -> None:
        ours = [
            n for n in self._nodes.values() if (n.get("spec") or {}).get("nodeName") == self._identity.node
        ]
        ours.sort(key=lambda node: str(node["metadata"]["name"]))
        self.found = ours[0] if ours else None
        if self.found is None:
            forget(self._identity.pool)
            self._kept = None
            self._board.assign(None)
            return
        kept = (self.found["metadata"].get("generation"), self.found.get("spec"))
        if kept != self._kept:
            self._tell(self.found)
            try:
                remember(self._identity.pool, self.found)
            except OSError as error:
                log.warning("assignment_not_kept pool=%s error=%r", self._identity.pool, str(error))
            self._kept = kept

    def _tell(self, node: dict[str, Any]) -> None:
        try:
            self._board.assign(Assignment.from_object(node, self._identity.pool))
        except (ManifestError, AttributeError, TypeError, ValueError) as error:
            log.error("assignment_unreadable pool=%s error=%r", self._identity.pool, str(error))
            self._board.assign(None, unreadable=str(error))


async def _lines(response: Any) -> AsyncGenerator[bytes, None]:
    """The lines of a watch. Lines of any length: a status has no fixed size."""
    try:
        if response.status == 410:
            raise _Gone
        if response.status >= 400:
            raise ValueError(f"watch: HTTP {response.status} {response.reason}")
        rest = b""
        async for piece in response.content.iter_any():
            *whole, rest = (rest + piece).split(b"\n")
            for line in whole:
                if line.strip():
                    yield line
    finally:
        response.close()


class Publisher:
    """Writes the status of the KVPoolNode, when it has changed and not too often.

    Threads: one loop.
    """

    def __init__(
        self,
        api: CustomObjectsApi,
        identity: Identity,
        follower: Follower,
        status: Callable[[dict[str, Any] | None], dict[str, Any]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._api = api
        self._identity = identity
        self._follower = follower
        self._status = status
        self._clock = clock
        self._uid: object = None
        self._written: dict[str, Any] | None = None
        self._due = 0.0
        self._failure = ""
        self.writes = 0

    async def run(self) -> None:
        pause = PAUSE_FIRST_S
        while True:
            await asyncio.sleep(PUBLISH_STEP_S)
            try:
                await self.step()
                pause = PAUSE_FIRST_S
            except UNREACHABLE as error:
                told = _said(error)
                if told != self._failure:
                    log.warning("status_not_written pool=%s error=%r", self._identity.pool, told)
                self._failure = told
                await asyncio.sleep(pause * random.uniform(0.7, 1.3))
                pause = min(pause * 2, PAUSE_MAX_S)

    async def step(self, *, now: bool = False) -> None:
        """Write the status if that is due; with `now`, if it differs at all."""
        node = self._follower.found
        if node is None:
            return
        if node["metadata"].get("uid") != self._uid:  # another object of the same name knows nothing yet
            self._uid, self._written, self._due = node["metadata"].get("uid"), node.get("status"), 0.0
        status = self._status(self._written)
        if status == self._written:
            return
        waits = _urgent(status) != _urgent(self._written or {})
        if not now and self._clock() < self._due - (PUBLISH_S - PUBLISH_URGENT_S if waits else 0.0):
            return
        self._due = self._clock() + PUBLISH_S
        await self._write(node, status)
        self._written, self._failure = status, ""
        self.writes += 1

    async def _write(self, node: dict[str, Any], status: dict[str, Any]) -> None:
        name = str(node["metadata"]["name"])
        await self._api.patch_namespaced_custom_object_status(
            GROUP,
            VERSION,
            self._identity.namespace,
            PLURAL,
            name,
            {
                "apiVersion": f"{GROUP}/{VERSION}",
                "kind": KIND,
                "metadata": {"name": name, "namespace": self._identity.namespace},
                "status": status,
            },
            field_manager=FIELD_MANAGER,
            force=True,
            _content_type="application/apply-patch+yaml",
            _request_timeout=REQUEST_S,
        )


def _urgent(status: dict[str, Any]) -> list[Any]:
    """What somebody may wait for: all but the numbers."""
    conditions = [(c.get("type"), c.get("status"), c.get("reason")) for c in status.get("conditions", ())]
    owners = [
        [(s.get("owner"), s.get("epoch"), s.get("settled")) for s in tier.get("shards", ())]
        for tier in status.get("tiers", ())
    ]
    named = ("observedGeneration", "ready", "removed", "podName", "host", "problems", "skippedTiers")
    return [conditions, owners, [(t["name"], t["capacityBytes"]) for t in status.get("tiers", ())]] + [
        status.get(name) for name in named
    ]


def _said(error: BaseException) -> str:
    if isinstance(error, ApiException):
        return f"HTTP {error.status} {error.reason}: {_reason(error.body)}"
    return f"{type(error).__name__}: {error}"


def _reason(body: object) -> str:
    """The sentence in an answer of the apiserver."""
    with contextlib.suppress(ValueError, TypeError, AttributeError):
        return str(json.loads(str(body))["message"])
    return str(body)[:200]


@contextlib.asynccontextmanager
async def connected() -> AsyncIterator[CustomObjectsApi]:
    """The API, for as long as the block runs."""
    async with ApiClient(await configuration()) as client:
        yield CustomObjectsApi(client)
