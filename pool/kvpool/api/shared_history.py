"""The past in Redis, which several replicas of the API share and which outlives them.

A pool's rows lie in hashes, one a stretch of time: field is the row's beginning, value its columns. The
first replica that writes a row wins, so that replicas need no leader: they measure the same intervals. Hashes
expire by themselves.

Every row goes into memory too: without Redis the API works on with that, says so, and hands the rows over
when Redis is back.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import struct
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal
from urllib.parse import urlsplit

import redis.asyncio
from redis.exceptions import RedisError

from kvpool.api.history import COARSE, FINE, WIDTH, MemoryHistory, Resolution, Row, joined
from kvpool.api.status import Key

log = logging.getLogger("kvpool.api")

PREFIX = "kvpool:history:1"  # the number goes up with a change of what a row is
ANSWER_S = 2.0
AGAIN_S = 5.0  # between two tries while Redis is gone
BATCH = 200  # commands in one go
# A replica may be late with its row: a coarse one is made from the fine ones when they are all there.
SETTLE_S = 30.0

_ROW = struct.Struct(f"<{WIDTH}d")
GONE = (RedisError, OSError, asyncio.TimeoutError)


class RedisHistory:
    """Rows in Redis, with memory behind it.

    `url`: redis://[:password@]host[:port][/db], rediss:// with TLS, or unix://path. Threads: one event loop.
    """

    def __init__(self, url: str, clock: Callable[[], float] = time.time) -> None:
        self._client: Any = redis.asyncio.from_url(
            url, socket_timeout=ANSWER_S, socket_connect_timeout=ANSWER_S, decode_responses=False
        )
        self._where = _without_password(url)
        self._memory = MemoryHistory()
        self._clock = clock
        self._gone_since: float | None = None
        self._tried_at = 0.0
        self._missed: list[tuple[Key, Row]] = []
        self._coarse_done: float | None = None
        self._keys: set[Key] = set()

    @property
    def store(self) -> Literal["memory", "redis"]:
        return "redis" if self._gone_since is None else "memory"

    @property
    def notice(self) -> str:
        if self._gone_since is None:
            return ""
        away_s = max(0.0, self._clock() - self._gone_since)
        return (
            f"Redis at {self._where} does not answer for {away_s:.0f} s: the history is this replica's own, "
            "since it started. Look whether Redis runs, and whether this API may reach it."
        )

    async def append(self, rows: Sequence[tuple[Key, Row]]) -> None:
        await self._memory.append(rows)
        self._keys.update(key for key, _ in rows)
        # What Redis does not get now it gets later; older than the fine rows' time it would expire at once.
        oldest = self._clock() - FINE.keep_s
        self._missed = [entry for entry in self._missed if entry[1].at >= oldest] + list(rows)
        if not self._may_try():
            return
        try:
            await self._write(FINE, self._missed)
            self._missed = []
            await self._write_coarse()
            self._is_back()
        except GONE as error:
            self._is_gone(error)

    async def rows(self, key: Key, kept: Resolution, since: float) -> list[Row]:
        if self._may_try():
            try:
                found = await self._read(key, kept, since)
                if kept == COARSE:
                    begun = (found[-1].at + COARSE.step_s) if found else since
                    fine = await self._read(key, FINE, max(begun, self._clock() - FINE.keep_s))
                    found += [_coarse(fine)] if fine else []
                self._is_back()
                return found
            except GONE as error:
                self._is_gone(error)
        return await self._memory.rows(key, kept, since)

    async def forget(self, key: Key) -> None:
        """Only here: other replicas may still know the pool, and hashes expire by themselves."""
        self._keys.discard(key)
        await self._memory.forget(key)

    async def close(self) -> None:
        with contextlib.suppress(*GONE):
            await self._client.aclose()
        await self._memory.close()

    # --- Redis ----------------------------------------------------------------------------------------------

    async def _write(self, kept: Resolution, rows: Sequence[tuple[Key, Row]]) -> None:
        for first in range(0, len(rows), BATCH):
            pipeline = self._client.pipeline(transaction=False)
            for key, row in rows[first : first + BATCH]:
                name = _hash(key, kept, row.at)
                pipeline.hsetnx(name, str(int(row.at)), _ROW.pack(*row.values()))
                pipeline.expire(name, kept.keep_s + _stretch_s(kept))
            await pipeline.execute()

    async def _write_coarse(self) -> None:
        """The coarse rows that have ended, from the fine ones that all replicas wrote."""
        ended = (self._clock() - SETTLE_S) // COARSE.step_s * COARSE.step_s
        if self._coarse_done is None or self._coarse_done >= ended:
            self._coarse_done = max(ended, self._coarse_done or ended)
            return
        began = max(self._coarse_done, ended - FINE.keep_s + COARSE.step_s)
        rows: list[tuple[Key, Row]] = []
        for key in sorted(self._keys):
            by_step: dict[float, list[Row]] = {}
            for row in await self._read(key, FINE, began):
                if row.at < ended:
                    by_step.setdefault(row.at // COARSE.step_s, []).append(row)
            rows += [(key, _coarse(group)) for group in by_step.values()]
        await self._write(COARSE, rows)
        self._coarse_done = ended

    async def _read(self, key: Key, kept: Resolution, since: float) -> list[Row]:
        pipeline = self._client.pipeline(transaction=False)
        for name in _hashes(key, kept, max(since, self._clock() - kept.keep_s), self._clock()):
            pipeline.hgetall(name)
        found: list[Row] = []
        for answer in await pipeline.execute():
            # A value of another length is another version's: it is not read.
            found += [Row(*_ROW.unpack(value)) for value in answer.values() if len(value) == _ROW.size]
        return sorted((row for row in found if row.at >= since), key=lambda row: row.at)

    # --- whether it is there --------------------------------------------------------------------------------

    def _may_try(self) -> bool:
        now = self._clock()
        if self._gone_since is not None and now - self._tried_at < AGAIN_S:
            return False
        self._tried_at = now
        return True

    def _is_gone(self, error: BaseException) -> None:
        if self._gone_since is None:
            self._gone_since = self._clock()
            log.warning("redis_gone url=%s error=%r", self._where, type(error).__name__)

    def _is_back(self) -> None:
        if self._gone_since is not None:
            log.info("redis_back url=%s", self._where)
            self._gone_since = None


def _coarse(rows: Sequence[Row]) -> Row:
    return joined(rows[0].at // COARSE.step_s * COARSE.step_s, rows)


def _stretch_s(kept: Resolution) -> int:
    """How much time one hash covers: a few of them make up all that is kept."""
    return max(kept.step_s, kept.keep_s // 4)


def _hash(key: Key, kept: Resolution, at: float) -> str:
    return f"{PREFIX}:{key.namespace}/{key.name}:{kept.step_s}:{int(at // _stretch_s(kept))}"


def _hashes(key: Key, kept: Resolution, since: float, until: float) -> Iterable[str]:
    stretch_s = _stretch_s(kept)
    for number in range(int(since // stretch_s), int(until // stretch_s) + 1):
        yield f"{PREFIX}:{key.namespace}/{key.name}:{kept.step_s}:{number}"


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    where = parts.hostname or parts.path
    return f"{parts.scheme}://{where}" + (f":{parts.port}" if parts.port else "")
