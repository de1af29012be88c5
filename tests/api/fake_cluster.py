"""A small API server for the cluster source's tests: lists in pages, watches, expiry, silence, reviews."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from kubernetes.aio.client import ApiClient, Configuration

from kvpool_operator.client import Cluster

Object = dict[str, Any]
BASE = "/apis/kvpool.dev/v1alpha1"


class FakeCluster:
    """Objects by kind and name; each change gets the next version and goes to the watches that are open."""

    def __init__(self) -> None:
        self.objects: dict[str, dict[tuple[str, str], Object]] = {"kvpools": {}, "kvpoolnodes": {}}
        self.version = 100
        self.lists = 0
        self.watches = 0
        self.refuse: int | None = None  # the code that all requests get
        self.expired = ""  # the next watch of this kind gets 410
        self.page_max = 500
        self.tokens: dict[str, Object] = {}
        self.rights: set[tuple[str, str]] = set()  # user, namespace ("" for all)
        self.reviews = 0
        self._told: list[tuple[int, str, Object]] = []
        self._streams: set[tuple[str, asyncio.Queue[Object | None]]] = set()
        self.port = 0

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[FakeCluster]:
        app = web.Application()
        app.router.add_get(BASE + "/{plural}", self._get)
        app.router.add_get(BASE + "/namespaces/{namespace}/{plural}", self._get)
        app.router.add_post("/apis/authentication.k8s.io/v1/tokenreviews", self._token)
        app.router.add_post("/apis/authorization.k8s.io/v1/subjectaccessreviews", self._access)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", self.port)
        await site.start()
        assert site._server is not None
        self.port = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
        try:
            yield self
        finally:
            self.end_watches()
            await runner.cleanup()

    async def connect(self) -> Cluster:
        return Cluster(ApiClient(Configuration(host=f"http://127.0.0.1:{self.port}")))

    def put(self, plural: str, body: Object) -> None:
        self.version += 1
        key = body["metadata"]["namespace"], body["metadata"]["name"]
        kind = "MODIFIED" if key in self.objects[plural] else "ADDED"
        body = {**body, "metadata": {**body["metadata"], "resourceVersion": str(self.version)}}
        self.objects[plural][key] = body
        self._tell(plural, {"type": kind, "object": body})

    def delete(self, plural: str, namespace: str, name: str, *, silently: bool = False) -> None:
        self.version += 1
        body = self.objects[plural].pop((namespace, name))
        body = {**body, "metadata": {**body["metadata"], "resourceVersion": str(self.version)}}
        if not silently:
            self._tell(plural, {"type": "DELETED", "object": body})

    def error(self, plural: str, code: int) -> None:
        """An error in the middle of the watches."""
        self._tell(
            plural, {"type": "ERROR", "object": {"kind": "Status", "code": code, "message": "expired"}}
        )

    def end_watches(self) -> None:
        for _, queue in self._streams:
            queue.put_nowait(None)

    def _tell(self, plural: str, event: Object) -> None:
        if event["type"] != "ERROR":
            self._told.append((self.version, plural, event))
        for kind, queue in self._streams:
            if kind == plural:
                queue.put_nowait(event)

    async def _get(self, request: web.Request) -> web.StreamResponse:
        if self.refuse is not None:
            body = {"kind": "Status", "code": self.refuse, "message": "refused for the test"}
            return web.json_response(body, status=self.refuse)
        plural, namespace = request.match_info["plural"], request.match_info.get("namespace")
        if request.query.get("watch") == "true":
            return await self._watch(request, plural)
        self.lists += 1
        found = [
            body for (space, _), body in sorted(self.objects[plural].items()) if namespace in (None, space)
        ]
        start = int(request.query.get("continue", "0"))
        size = min(int(request.query["limit"]), self.page_max)
        following = str(start + size) if start + size < len(found) else ""
        metadata = {"resourceVersion": str(self.version), "continue": following}
        return web.json_response({"items": found[start : start + size], "metadata": metadata})

    async def _watch(self, request: web.Request, plural: str) -> web.StreamResponse:
        self.watches += 1
        if self.expired == plural:
            self.expired = ""
            return web.json_response({"kind": "Status", "code": 410, "message": "too old"}, status=410)
        response = web.StreamResponse()
        await response.prepare(request)
        queue: asyncio.Queue[Object | None] = asyncio.Queue()
        entry = plural, queue
        since = int(request.query["resourceVersion"])
        for version, kind, event in self._told:  # what happened after the list, deletions too
            if kind == plural and version > since:
                queue.put_nowait(event)
        self._streams.add(entry)
        try:
            while (event := await queue.get()) is not None:
                await response.write(json.dumps(event).encode() + b"\n")
        except ConnectionError:
            pass
        finally:
            self._streams.discard(entry)
        return response

    async def _token(self, request: web.Request) -> web.Response:
        self.reviews += 1
        user = self.tokens.get((await request.json())["spec"]["token"])
        return web.json_response(
            {"status": {"authenticated": user is not None, "user": user or {}}}, status=201
        )

    async def _access(self, request: web.Request) -> web.Response:
        self.reviews += 1
        if self.refuse is not None:
            return web.json_response({"message": "no"}, status=self.refuse)
        spec = (await request.json())["spec"]
        asked = spec["resourceAttributes"]
        assert (asked["group"], asked["resource"], asked["verb"]) == ("kvpool.dev", "kvpools", "list")
        allowed = (spec["user"], asked["namespace"]) in self.rights or (spec["user"], "") in self.rights
        return web.json_response({"status": {"allowed": allowed}}, status=201)


def kvpool(name: str, space: str = "team", lookups: int = 100, hits: int = 80) -> Object:
    rate = f"{100 * hits / lookups:.1f}" if lookups else None
    return {
        "apiVersion": "kvpool.dev/v1alpha1",
        "kind": "KVPool",
        "metadata": {"namespace": space, "name": name, "generation": 3},
        "spec": {"hosts": 2, "tiers": [{"name": "cxl", "medium": "CXL", "capacity": "1Gi", "shared": True}]},
        "status": {
            "observedGeneration": 3,
            "conditions": [
                {
                    "type": "Ready",
                    "status": "True",
                    "reason": "AllNodesReady",
                    "message": "2 of 2 nodes serve the pool.",
                    "lastTransitionTime": "2026-11-30T02:00:00Z",
                    "observedGeneration": 3,
                }
            ],
            "nodes": {"desired": 2, "ready": 2, "outOfDate": 0},
            "tiers": [
                {
                    "name": "cxl",
                    "medium": "CXL",
                    "capacityBytes": 1 << 30,
                    "usedBytes": 1 << 20,
                    "blocks": 5,
                    "evictions": 7,
                    "lookups": lookups,
                    "hits": hits,
                    **({"hitRate": rate} if rate else {}),
                }
            ],
            "lookups": lookups,
            "hits": hits,
            **({"hitRate": rate} if rate else {}),
            "misses": {"evicted": lookups - hits},
            "blocks": 5,
        },
    }


def kvpoolnode(
    pool: str,
    index: int,
    space: str = "team",
    lookups: int = 50,
    hits: int = 40,
    at: str = "2027-01-15T08:00:00Z",
    *,
    counted: bool = False,
) -> Object:
    """`counted`: with what engines count themselves, as daemons of today write it."""
    return {
        "apiVersion": "kvpool.dev/v1alpha1",
        "kind": "KVPoolNode",
        "metadata": {"namespace": space, "name": f"{pool}-{index}"},
        "spec": {"pool": pool, "nodeName": f"worker-{index}", "host": index, "state": "Active"},
        "status": {
            "ready": True,
            "version": "0.1.0",
            "podName": f"kvpool-{pool}-{index}",
            "startedAt": "2026-11-30T02:00:00Z",
            "updatedAt": at,
            "lookups": lookups,
            "hits": hits,
            "misses": {"evicted": lookups - hits},
            "tiers": [
                {
                    "name": "cxl",
                    "medium": "CXL",
                    "capacityBytes": 1 << 30,
                    "usedBytes": 1 << 20,
                    "lookups": lookups,
                    "hits": hits,
                    "shards": [{"shard": index, "owner": index, "epoch": 1, "settled": True}],
                }
            ],
            "events": [
                {"type": "Warning", "reason": "DamageFound", "tier": "cxl", "message": "1 block", "at": at}
            ],
            "problems": ["the disk is on fire"] if index else [],
            **(_counted(pool, index, lookups, hits) if counted else {}),
        },
    }


def _counted(pool: str, index: int, lookups: int, hits: int) -> Object:
    """Two engines with different block sizes; all blocks of the second one are misses."""
    spaces, engines = [], []
    for number, tokens in enumerate((16, 32)):
        digest = hashlib.sha256(f"{pool} {tokens}".encode()).hexdigest()
        served, missed = (hits, lookups - hits) if number == 0 else (0, 0)
        spaces.append(
            {
                "digest": digest,
                "model": "org/some-model-8b-instruct",
                "blockTokens": tokens,
                "blockBytes": 2097152,
                "blocks": 0,
                "bytes": 0,
                "sharedBlocks": 5 if number == 0 else 0,
                "sharedBytes": 5 * 2097152 if number == 0 else 0,
                "lookups": served + missed,
                "hits": served,
                **({"misses": {"evicted": missed}} if missed else {}),
                "savedTokens": served * tokens,
                "savedPrefillMilliseconds": served * 10,
                "timedHits": served,
                "tenant": False,
                "description": {
                    "model": "org/some-model-8b-instruct",
                    "weights": "5f2a" * 16,
                    "dtype": "bfloat16/auto",
                    "kv_layout": "LBHNC/32x" + "ab" * 8,
                    "block_tokens": str(tokens),
                    "block_bytes": "2097152",
                    "hash_scheme": "vllm/sha256_cbor/16/0123456789ab",
                    "tp_rank": "0",
                    "tp_size": "1",
                    "pp_rank": "0",
                    "pp_size": "1",
                    "cache_group": "0",
                    "engine": "vllm-0.32",
                    "attention": "FLASH_ATTN",
                    "quantization": "none",
                },
            }
        )
        engines.append(
            {
                "name": f"vllm-{index}-{number}/1",
                "podName": f"vllm-{index}-{number}",
                "live": True,
                "startedAt": "2026-11-30T02:00:00Z",
                "tiers": ["cxl"],
                "namespaces": [digest[:12]],
                "lookups": served + missed,
                "hits": served,
                **({"misses": {"evicted": missed}} if missed else {}),
            }
        )
    return {
        "bytesLoaded": hits * 2097152,
        "bytesStored": 5 * 2097152,
        "damagedBlocks": 0,
        "reapedSlots": 0,
        **{
            name: [0] * 17 + [lookups, 1000 + lookups, hits]
            for name in ("loadLatency", "lookupLatency", "storeLatency")
        },
        "namespaces": spaces,
        "engines": engines,
    }
