"""Are the watches alive? A list now and then tells, and repairs what a watch has missed.

A watch may end, stall, or be refused for good while everything else looks healthy (kopf issues 1077 and
1145). So all objects are listed every `PERIOD_S`. What one list shows and the watch has not told by the next
list is the proof that the watch is dead; the process then says so on /healthz, and is started anew.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from kvpool_operator.cache import Cache, Object, version
from kvpool_operator.client import UNREACHABLE, ApiError, Cluster
from kvpool_operator.kinds import Kind

log = logging.getLogger("kvpool.operator")

PERIOD_S = 60.0


class Watches:
    """Compares what is there with what the watches have told."""

    def __init__(
        self,
        cluster: Cluster,
        cache: Cache,
        watched: Sequence[tuple[Kind, str]],
        changed: Callable[[Kind, Object], None],
        slim: Callable[[Kind, Object], Object],
        namespaces: Sequence[str] = (),
    ) -> None:
        self._cluster = cluster
        self._cache = cache
        self._watched = watched
        self._changed = changed
        self._slim = slim
        self._namespaces = namespaces
        self._expected: dict[tuple[str, str, str], tuple[int, Kind, Object]] = {}
        self.dead = ""  # what is wrong; empty when all watches are alive
        self.checked_at = time.time()

    async def run(self, period_s: float = PERIOD_S) -> None:
        """Check until cancelled."""
        while True:
            await asyncio.sleep(period_s)
            try:
                await self.check()
            except (*UNREACHABLE, ApiError) as error:
                # The API server may be away: that is no reason to start anew, and this alone no proof.
                log.warning("list_failed error=%r", str(error))

    async def check(self) -> None:
        late = [
            f"{kind.name} {body['metadata']['name']}"
            for told, kind, body in self._expected.values()
            if self._cache.watched(kind, body) < told and self._still_there(kind, body)
        ]
        self._expected.clear()
        for kind, labels in self._watched:
            for body in await self._list(kind, labels):
                if self._cache.watched(kind, body) < version(body):
                    metadata = body["metadata"]
                    key = (kind.name, metadata.get("namespace", ""), metadata["name"])
                    self._expected[key] = (version(body), kind, body)
        self.dead = f"the watch has not told of {late[0]} and {len(late) - 1} more" if late else ""
        if late:
            log.error("watch_dead %s", self.dead)
        else:
            self.checked_at = time.time()

    def _still_there(self, kind: Kind, body: Object) -> bool:
        metadata = body["metadata"]
        live = self._cache.get(kind, metadata.get("namespace") or "", metadata["name"])
        return live is not None and live["metadata"].get("uid") == metadata.get("uid")

    async def _list(self, kind: Kind, labels: str) -> list[Object]:
        namespaces = self._namespaces if kind.namespaced and self._namespaces else (None,)
        listed: list[Object] = []
        before = self._cache.all(kind)
        for namespace in namespaces:
            for body in await self._cluster.list(kind, namespace, labels):
                listed.append(self._slim(kind, body))
        for body in self._cache.replace(kind, before, listed):
            self._changed(kind, body)
        return listed
