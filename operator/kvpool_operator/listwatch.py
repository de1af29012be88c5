"""All objects of one kind, kept up to date: a list, then a watch from there, for ever."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
import time
from collections.abc import Callable, Sequence

from kvpool_operator.client import UNREACHABLE, ApiError, Cluster, Expired, Object

log = logging.getLogger("kvpool.watch")

GROUP_VERSION = "kvpool.dev/v1alpha1"
PAGE = 500  # objects in one answer of a list
WATCH_S = 240  # the server ends a watch after that
SILENCE_S = 75.0  # a watch that says nothing for so long, not even a bookmark, is asked anew
PAUSE_FIRST_S, PAUSE_MAX_S = 0.5, 30.0


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
        *,
        labels: str = "",
        heard: Callable[[], None] = lambda: None,
    ) -> None:
        where = f"/namespaces/{namespace}" if namespace else ""
        self.path = f"/apis/{GROUP_VERSION}{where}/{plural}"
        self._cluster, self._replace, self._change, self._clock = cluster, replace, change, clock
        self._silence_s = silence_s
        self._selector = {"labelSelector": labels} if labels else {}
        self._told = heard
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
            except (*UNREACHABLE, ApiError) as error:
                self._failed(error)
                if isinstance(error, (ApiError, ValueError, KeyError)):
                    version = None
            await asyncio.sleep(pause * random.uniform(0.7, 1.3))
            pause = min(pause * 2, PAUSE_MAX_S)

    def _heard(self) -> None:
        if self.problem:
            log.info("cluster_recovered path=%s", self.path)
        self.problem, self.heard_at = "", self._clock()
        self._told()

    def _failed(self, error: BaseException) -> None:
        said = error.answer if isinstance(error, ApiError) else str(error) or type(error).__name__
        if said != self.problem:
            log.warning("cluster_failed path=%s error=%r", self.path, said)
        self.problem = said

    async def _list(self) -> str:
        """All objects, page by page; returns the version to watch from."""
        found: list[Object] = []
        query = {**self._selector, "limit": str(PAGE)}
        while True:
            page = await self._cluster.read(self.path, query)
            found += page["items"]
            following = page["metadata"].get("continue")
            if not following:
                break
            query = {**query, "continue": following}
        self._replace(found)
        self._heard()
        return str(page["metadata"]["resourceVersion"])

    async def _watch(self, version: str) -> str:
        """Follow from a version until the server ends it, or is silent; returns the version to go on from."""
        query = {
            **self._selector,
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
            code, said = int(body.get("code") or 500), str(body.get("message") or "the watch failed")
            raise (Expired if code == 410 else ApiError)(f"watch {self.path}", code, said)
        version = str(body["metadata"]["resourceVersion"])
        if kind != "BOOKMARK":
            self._change(kind, body)
        return version
