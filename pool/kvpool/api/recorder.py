"""Puts what the board says into the history, one row a pool every ten seconds."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from kvpool.api.history import FINE, History, Row, row_of
from kvpool.api.meter import Meter
from kvpool.api.status import Board, Key, PoolStatus

log = logging.getLogger("kvpool.api")

BATCH = 50  # pools between two turns of the event loop
FORGET_S = 600.0  # a pool that went away may come back: its past is kept this long


class Recorder:
    """Measures every pool of a board, at the same times on every replica."""

    def __init__(self, board: Board, history: History, clock: Callable[[], float] = time.time) -> None:
        self._board, self._history, self._clock = board, history, clock
        self._meters: dict[Key, Meter] = {}
        self._gone: dict[Key, float] = {}

    async def run(self) -> None:
        while True:
            now = self._clock()
            await asyncio.sleep(FINE.step_s - now % FINE.step_s)
            try:
                await self.step()
            except Exception as error:
                log.warning("history_failed error=%r", f"{type(error).__name__}: {error}")

    async def step(self) -> None:
        """A row for the interval that has just ended, of every pool that was measured before."""
        ended = (self._clock() + 0.5) // FINE.step_s * FINE.step_s
        rows: list[tuple[Key, Row]] = []
        for i, key in enumerate(list(self._board.known())):
            if i % BATCH == BATCH - 1:
                await asyncio.sleep(0)
            status = self._board.get(key)
            if status is not None:
                row = self._measure(key, status, ended - FINE.step_s)
                rows += [(key, row)] if row is not None else []
        await self._history.append(rows)
        await self._forget()

    def _measure(self, key: Key, status: PoolStatus, began: float) -> Row | None:
        meter = self._meters.get(key)
        if meter is None:
            self._meters[key] = meter = Meter()
            meter.step(status.series)
            return None
        amount = meter.step(status.series)
        if status.stale(self._clock()):
            return None  # what is not known is a gap, and no zero
        return row_of(began, amount, status, sees_bytes=status.namespaces is not None)

    async def _forget(self) -> None:
        now = self._clock()
        for key in self._meters.keys() - set(self._board.known()):
            self._gone.setdefault(key, now)
        for key, since in list(self._gone.items()):
            if self._board.get(key) is not None:
                del self._gone[key]
            elif now - since > FORGET_S:
                del self._gone[key], self._meters[key]
                await self._history.forget(key)
