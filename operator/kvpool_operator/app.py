"""The running operator: watches fill the cache and the queue, the leader works the queue off."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvpool_operator import kinds
from kvpool_operator.assign import Node
from kvpool_operator.cache import Cache, PoolKey, pool_key
from kvpool_operator.client import Cluster
from kvpool_operator.events import Events
from kvpool_operator.handlers import slim, watched
from kvpool_operator.kinds import Kind
from kvpool_operator.manifest import Settings
from kvpool_operator.metrics import Metrics
from kvpool_operator.reconcile import Reconciler
from kvpool_operator.watches import Watches
from kvpool_operator.workqueue import Again, Queue

log = logging.getLogger("kvpool.operator")

WORKERS = 8
RESYNC_S = 300.0  # every pool is looked at this often, whether or not anything was heard

Object = dict[str, Any]


@dataclass
class Operator:
    """Threads: one event loop only."""

    cluster: Cluster
    settings: Settings
    namespaces: Sequence[str] = ()
    cache: Cache = field(default_factory=Cache)
    metrics: Metrics = field(default_factory=Metrics)
    leading: bool = False
    queue: Queue[PoolKey] = field(init=False)
    watches: Watches = field(init=False)
    reconciler: Reconciler = field(init=False)

    def __post_init__(self) -> None:
        self.reconciler = Reconciler(self.cluster, self.cache, Events(self.cluster), self.settings)
        self.queue = Queue(self._work)
        self.watches = Watches(
            self.cluster, self.cache, watched(self.settings.driver), self.changed, slim, self.namespaces
        )
        self.metrics.watch_age.set_function(lambda: self.watches.checked_at)
        self.cluster.counted = lambda method, plural: self.metrics.requests.labels(method, plural).inc()
        self._known_nodes: dict[str, object] = {}

    def changed(self, kind: Kind, body: Object) -> None:
        """Something came, changed or went: look at the pools that it concerns."""
        if kind is kinds.NODE:
            facts = (Node.from_object(body), body["metadata"].get("labels"))
            name = body["metadata"]["name"]
            there = self.cache.get(kinds.NODE, "", name) is not None
            if there and self._known_nodes.get(name) == facts:
                return  # a node's heartbeat
            if there:
                self._known_nodes[name] = facts
            else:
                self._known_nodes.pop(name, None)
            self._add_all()
            return
        key = pool_key(kind, body)
        if key is not None and self.leading:
            self.queue.add(key)

    def lead(self, leading: bool) -> None:
        """Told by the lease."""
        self.leading = leading
        self.metrics.leader.set(int(leading))
        self._add_all()

    async def run(self) -> None:
        """Work until cancelled."""
        await asyncio.gather(self.queue.run(WORKERS), self.watches.run(), self._resync())

    async def _resync(self) -> None:
        while True:
            await asyncio.sleep(RESYNC_S)
            self._add_all()

    def _add_all(self) -> None:
        if not self.leading:
            return
        # Of the children too: a pool may have gone while nobody looked.
        for kind in (kinds.POOL, *kinds.CHILDREN):
            for body in self.cache.all(kind):
                key = pool_key(kind, body)
                if key is not None:
                    self.queue.add(key)

    async def _work(self, key: PoolKey) -> None:
        if not self.leading:
            return
        began = time.monotonic()
        result = "failed"
        try:
            await self.reconciler.reconcile(key)
            result = "done"
        except Again:
            result = "again"
            raise
        finally:
            self.metrics.reconciles.labels(result).inc()
            self.metrics.duration.observe(time.monotonic() - began)
            self.metrics.queue.set(len(self.queue))
            self.metrics.pools.set(len(self.cache.all(kinds.POOL)))
            if result != "failed":
                self.metrics.last_success.set_to_current_time()
