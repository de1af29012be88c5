"""A pool that never takes its engine down: its answer to a failure is None, and the engine computes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from threading import Lock
from typing import ParamSpec, TypeVar

from kvpool import KeyBatch, LookupResult, MissReason, Namespace, Pool

# Below vLLM's logger, so that its handlers and level apply; everywhere else an ordinary logger.
logger = logging.getLogger("vllm.kvpool")

# A pool that fails and recovers again and again must not fill the log.
LOG_INTERVAL_S = 60.0

_P = ParamSpec("_P")
_T = TypeVar("_T")


class GuardedPool:
    """Calls into a `Pool` that cannot raise.

    Result:  what the pool answered, or None when it failed; the first failure is logged, and the recovery.
    Threads: any.
    """

    def __init__(self, pool: Pool, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.pool = pool
        self._clock = clock
        self._lock = Lock()
        self._failing = False
        self._silent_until = float("-inf")

    def attempt(self, call: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T | None:
        """`call(...)`, or None when it raised. Everything is caught: a bug here must be a miss, too."""
        try:
            answer = call(*args, **kwargs)
        except Exception as error:
            self._failed(error)
            return None
        if self._failing:
            self._recovered()
        return answer

    def lookup(self, keys: KeyBatch) -> LookupResult | None:
        return self.attempt(self.pool.lookup, keys)

    def record_misses(self, reason: MissReason, count: int, namespace: Namespace | None = None) -> None:
        if count:
            self.attempt(self.pool.record_misses, reason, count, namespace)

    def close(self) -> None:
        self.attempt(self.pool.close)

    def _failed(self, error: Exception) -> None:
        with self._lock:
            news = not self._failing and self._clock() >= self._silent_until
            self._failing = True
            if news:
                self._silent_until = self._clock() + LOG_INTERVAL_S
        if news:
            logger.error(
                "kvpool_failed error=%r: its blocks are misses until it answers again",
                error,
                exc_info=error,
            )

    def _recovered(self) -> None:
        with self._lock:
            self._failing = False
        logger.info("kvpool_recovered: the pool answers again")
