"""The node's talk with the apiserver: follow the KVPoolNode, write its status."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvpool.errors import ManifestError
from kvpool_operator import kinds
from kvpool_operator.client import UNREACHABLE, ApiError, Cluster, Object
from kvpool_operator.listwatch import ListWatch
from kvpool_operator.names import API_VERSION, LABEL_MAX, NODE_FIELD_MANAGER, NODE_LABEL, POOL_LABEL
from kvpool_operator.nodes.assignment import Assignment, forget, recall, remember
from kvpool_operator.nodes.board import Board

log = logging.getLogger("kvpool.node")

PAUSE_FIRST_S, PAUSE_MAX_S = 0.5, 30.0
PUBLISH_STEP_S = 0.5
PUBLISH_S = 4.0  # between two writes of numbers that move all the time
PUBLISH_URGENT_S = 1.0  # ... when somebody waits for what has changed


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


class Follower:
    """Keeps `board` told of this node's KVPoolNode, whatever happens to the connection.

    Threads: one loop.
    """

    def __init__(self, cluster: Cluster, identity: Identity, board: Board) -> None:
        self._identity = identity
        self._board = board
        self._nodes: dict[str, Object] = {}
        self._kept: object = None
        self._watch = ListWatch(
            cluster,
            kinds.POOL_NODE.plural,
            identity.namespace,
            self._replace,
            self._change,
            labels=identity.selector,
            heard=board.watched,
        )
        self.found: Object | None = None

    def begin(self) -> None:
        """Start with what was kept on disk: the pool is served also while nobody can be asked."""
        node = recall(self._identity.pool)
        if node is not None:
            self._tell(node)
            log.info("assignment_recalled pool=%s node=%s", self._identity.pool, self._identity.node)

    async def run(self) -> None:
        """Follow until cancelled."""
        await self._watch.run()

    def _replace(self, nodes: Sequence[Object]) -> None:
        self._nodes = {node["metadata"]["name"]: node for node in nodes}
        self._choose()

    def _change(self, change: str, node: Object) -> None:
        self._nodes.pop(node["metadata"]["name"], None)
        if change != "DELETED":
            self._nodes[node["metadata"]["name"]] = node
        self._choose()

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


class Publisher:
    """Writes the status of the KVPoolNode, when it has changed and not too often.

    Threads: one loop.
    """

    def __init__(
        self,
        cluster: Cluster,
        identity: Identity,
        follower: Follower,
        status: Callable[[dict[str, Any] | None], dict[str, Any]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cluster = cluster
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
            except (*UNREACHABLE, ApiError) as error:
                told = f"{type(error).__name__}: {error}"
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
        metadata = {"name": str(node["metadata"]["name"]), "namespace": self._identity.namespace}
        await self._cluster.apply(
            {"apiVersion": API_VERSION, "kind": kinds.POOL_NODE.name, "metadata": metadata, "status": status},
            kinds.POOL_NODE,
            "status",
            manager=NODE_FIELD_MANAGER,
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
