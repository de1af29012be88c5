"""The status API's source for a cluster: KVPool and KVPoolNode objects, followed by watches."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Literal

from kvpool.api.pace import Pace
from kvpool.api.status import Board, Key, Readiness
from kvpool_operator import readout
from kvpool_operator.client import Cluster, Object
from kvpool_operator.listwatch import SILENCE_S, ListWatch
from kvpool_operator.readout import NodeObject, PoolObject

log = logging.getLogger("kvpool.api")

GATHER_S = 0.25  # what changes together is told together
# Heard nothing for so long, the answers are not up to date any more: after a failure, and without one.
FAILED_S, DEAD_S = 30.0, 2 * SILENCE_S
CONNECT_S = 5.0  # between two tries to find out where the cluster is


class ClusterSource:
    """Keeps the board as the cluster's objects say.

    `namespaces`: only these; none for all. Threads: one event loop.
    """

    kind: Literal["local", "cluster"] = "cluster"

    def __init__(
        self,
        connect: Callable[[], Awaitable[Cluster]] | None = None,
        namespaces: Sequence[str] = (),
        clock: Callable[[], float] = time.time,
        silence_s: float = SILENCE_S,
    ) -> None:
        self._connect = connect or Cluster.connect
        self.cluster: Cluster | None = None
        self._namespaces: list[str | None] = [*namespaces] or [None]
        self._clock, self._silence_s = clock, silence_s
        self._board = Board()
        self._pools: dict[Key, PoolObject] = {}
        self._nodes: dict[Key, dict[str, NodeObject]] = {}  # by pool
        self._pool_of: dict[Key, Key] = {}  # node -> pool
        self._changed: set[Key] = set()
        self._wake = asyncio.Event()
        self._watches: list[ListWatch] = []
        self._problem = "the cluster has not answered yet"

    @property
    def board(self) -> Board:
        return self._board

    def readiness(self) -> Readiness:
        """Not ready when a watch is dead: answers would be old, and say so only by their age."""
        if not self._watches:
            return Readiness(False, f"no connection to the cluster: {self._problem}")
        now = self._clock()
        for watch in self._watches:
            if watch.heard_at is None:
                return Readiness(False, f"{watch.path} was not listed yet: {watch.problem or self._problem}")
            silent_s = now - watch.heard_at
            if silent_s > (FAILED_S if watch.problem else DEAD_S):
                why = watch.problem or "no answer"
                return Readiness(
                    False,
                    f"the watch of {watch.path} is dead for {silent_s:.0f} s: {why}. Look at the API server "
                    "and at this pod's rights; the values shown are the last known ones.",
                )
        return Readiness(True)

    async def run(self) -> None:
        cluster = self.cluster = await self._connected()
        self._watches = [
            watch for namespace in self._namespaces for watch in self._watches_of(cluster, namespace)
        ]
        tasks = [asyncio.create_task(watch.run()) for watch in self._watches]
        tasks.append(asyncio.create_task(self._tell()))
        try:
            # None of them ends by itself: one that does takes the others along, and all begin again.
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.cluster = None
            await cluster.close()

    async def _connected(self) -> Cluster:
        """A connection, however long it takes: it needs a kubeconfig, or a pod's token."""
        while True:
            try:
                return await self._connect()
            except Exception as error:
                said = str(error) or type(error).__name__
                if said != self._problem:
                    log.warning("cluster_failed error=%r", said)
                self._problem = said
                await asyncio.sleep(CONNECT_S)

    def _watches_of(self, cluster: Cluster, namespace: str | None) -> list[ListWatch]:
        def pools(bodies: Sequence[Object]) -> None:
            here = {readout.key_of(body) for body in bodies}
            for key in [k for k in self._pools if namespace in (None, k.namespace) and k not in here]:
                self._forget_pool(key)
            for body in bodies:
                self._pool("MODIFIED", body)

        def nodes(bodies: Sequence[Object]) -> None:
            here = {readout.key_of(body) for body in bodies}
            for key in [k for k in self._pool_of if namespace in (None, k.namespace) and k not in here]:
                self._forget_node(key)
            for body in bodies:
                self._node("MODIFIED", body)

        rest = (self._clock, self._silence_s)
        return [
            ListWatch(cluster, "kvpools", namespace, pools, self._pool, *rest),
            ListWatch(cluster, "kvpoolnodes", namespace, nodes, self._node, *rest),
        ]

    def _pool(self, change: str, body: Object) -> None:
        key = readout.key_of(body)
        if change == "DELETED":
            self._forget_pool(key)
            return
        self._pools[key] = readout.pool_of(body)
        self._mark(key)

    def _forget_pool(self, key: Key) -> None:
        self._pools.pop(key, None)
        self._mark(key)

    def _node(self, change: str, body: Object) -> None:
        key = readout.key_of(body)
        self._forget_node(key)
        if change == "DELETED":
            return
        node = readout.node_of(body)
        self._pool_of[key] = node.pool
        self._nodes.setdefault(node.pool, {})[key.name] = node
        self._mark(node.pool)

    def _forget_node(self, key: Key) -> None:
        pool = self._pool_of.pop(key, None)
        if pool is None:
            return
        siblings = self._nodes.get(pool, {})
        siblings.pop(key.name, None)
        if not siblings:
            self._nodes.pop(pool, None)
        self._mark(pool)

    def _mark(self, pool: Key) -> None:
        self._changed.add(pool)
        self._wake.set()

    async def _tell(self) -> None:
        """Put what has changed on the board, several changes of a pool as one."""
        while True:
            await self._wake.wait()
            await asyncio.sleep(GATHER_S)
            self._wake.clear()
            changed, self._changed = self._changed, set()
            pace = Pace()
            for key in sorted(changed):
                self._put(key)
                await pace.turn()

    def _put(self, key: Key) -> None:
        pool = self._pools.get(key)
        if pool is None:
            self._board.remove(key)
            return
        self._board.put(readout.status_of(pool, self._nodes.get(key, {}).values(), self._clock()))
