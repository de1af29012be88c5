"""Keys that want attention: each one once, never two at a time, failures ever more rarely."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

log = logging.getLogger("kvpool.operator")

BACKOFF_S_MAX = 60.0

K = TypeVar("K", bound=Hashable)


class Again(Exception):
    """Raised by the work itself: nothing is wrong, but look again after `after_s`."""

    def __init__(self, after_s: float) -> None:
        super().__init__(f"again after {after_s:g} s")
        self.after_s = after_s


class Queue(Generic[K]):
    """Runs `work(key)` for every key that was added. Level-triggered: ten adds are one run.

    Threads: one event loop only.
    """

    def __init__(
        self, work: Callable[[K], Awaitable[None]], failed: Callable[[K, Exception], None] = lambda *_: None
    ) -> None:
        self._work = work
        self._failed = failed
        self._ready: asyncio.Queue[K] = asyncio.Queue()
        self._dirty: set[K] = set()
        self._running: set[K] = set()
        self._failures: dict[K, int] = {}
        self._timers: dict[K, asyncio.TimerHandle] = {}

    def __len__(self) -> int:
        return len(self._dirty)

    def add(self, key: K, after_s: float = 0.0) -> None:
        """Look at `key` soon, or after `after_s` unless something else asks for it earlier."""
        if after_s > 0:
            loop = asyncio.get_running_loop()
            timer = self._timers.get(key)
            if timer is None or timer.cancelled() or timer.when() > loop.time() + after_s:
                if timer is not None:
                    timer.cancel()
                self._timers[key] = loop.call_later(after_s, self._due, key)
            return
        if key in self._dirty:
            return
        self._dirty.add(key)
        if key not in self._running:
            self._ready.put_nowait(key)

    def _due(self, key: K) -> None:
        self._timers.pop(key, None)
        self.add(key)

    async def run(self, workers: int) -> None:
        """Work until cancelled."""
        await asyncio.gather(*(self._worker() for _ in range(workers)))

    async def _worker(self) -> None:
        while True:
            key = await self._ready.get()
            self._dirty.discard(key)
            self._running.add(key)
            try:
                await self._work(key)
                self._failures.pop(key, None)
            except Again as again:
                self._failures.pop(key, None)
                self.add(key, again.after_s)
            except Exception as error:  # one pool's trouble must not stop the others
                count = self._failures[key] = self._failures.get(key, 0) + 1
                wait_s = min(BACKOFF_S_MAX, 0.5 * 2.0 ** min(count, 10))
                log.warning("reconcile_failed key=%s failures=%d error=%r", key, count, str(error))
                self._failed(key, error)
                self.add(key, wait_s)
            finally:
                self._running.discard(key)
                if key in self._dirty:
                    self._ready.put_nowait(key)
