"""The thread in which a node's daemon talks with the cluster, and answers over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from aiohttp import web

from kvpool_operator.client import UNREACHABLE, ApiError, Cluster
from kvpool_operator.nodes.board import Board
from kvpool_operator.nodes.cluster import Follower, Identity, Publisher
from kvpool_operator.nodes.metrics import registry
from kvpool_operator.nodes.status import node_status
from kvpool_operator.nodes.web import application

log = logging.getLogger("kvpool.node")

STOPPED = "the daemon on this node was stopped; its blocks stay, and engines go on without it"


class Talk:
    """An asyncio loop in a thread of its own.

    Threads: all methods in the thread that made it. `failed` is called in the talking one, when that ends
    without having been stopped: a daemon that nobody can reach has to be started anew.
    """

    def __init__(
        self,
        board: Board,
        identity: Identity,
        *,
        version: str,
        started_at: float,
        address: str,
        port: int,
        failed: Callable[[], None],
    ) -> None:
        self._board = board
        self._identity = identity
        self._version = version
        self._started_at = started_at
        self._address, self._port = address, port
        self._failed = failed
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ending: asyncio.Event | None = None
        self._running = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvpool-talk", daemon=True)
        self.failure = ""

    def start(self) -> None:
        self._thread.start()
        self._running.wait()

    def stop(self, timeout_s: float) -> None:
        """Say goodbye to the cluster, and end. What takes longer than `timeout_s` is left undone."""
        if self._loop is not None and self._ending is not None:
            with contextlib.suppress(RuntimeError):  # it has ended by itself
                self._loop.call_soon_threadsafe(self._ending.set)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except BaseException as error:
            self.failure = f"{type(error).__name__}: {error}"
            log.critical("talk_failed pool=%s error=%r", self._identity.pool, self.failure, exc_info=True)
            self._failed()
        finally:
            self._running.set()

    async def _main(self) -> None:
        self._loop, self._ending = asyncio.get_running_loop(), asyncio.Event()
        metrics = registry(self._board, self._identity.pool, self._version)
        runner = web.AppRunner(application(self._board, metrics), access_log=None)
        await runner.setup()
        try:
            await web.TCPSite(runner, self._address or None, self._port).start()
            cluster = await Cluster.connect()
            try:
                follower = Follower(cluster, self._identity, self._board)
                follower.begin()
                self._running.set()
                publisher = Publisher(cluster, self._identity, follower, self._status)
                await self._until_ending(follower.run(), publisher.run())
                await self._goodbye(publisher)
            finally:
                await cluster.close()
        finally:
            await runner.cleanup()

    async def _until_ending(self, *work: Any) -> None:
        """Until somebody says so. The work never ends by itself; when it does, that is a failure."""
        assert self._ending is not None
        ending = asyncio.ensure_future(self._ending.wait())
        tasks = [asyncio.ensure_future(each) for each in work]
        try:
            await asyncio.wait([ending, *tasks], return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()
                    raise RuntimeError("a task that has no end has ended")
        finally:
            for task in (ending, *tasks):
                task.cancel()
            await asyncio.gather(ending, *tasks, return_exceptions=True)

    async def _goodbye(self, publisher: Publisher) -> None:
        truth = self._board.truth()
        self._board.tell(replace(truth, ready=False, message=truth.message or STOPPED))
        with contextlib.suppress(*UNREACHABLE, ApiError):
            await asyncio.wait_for(publisher.step(now=True), 3.0)

    def _status(self, before: dict[str, Any] | None) -> dict[str, Any]:
        return node_status(
            self._board.truth(),
            version=self._version,
            pod=self._identity.pod,
            started_at=self._started_at,
            before=before,
            now=time.time(),
        )
