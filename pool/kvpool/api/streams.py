"""What the readers of a pool's events have still to get. A slow reader misses updates and delays nobody."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from kvpool.api import times
from kvpool.api.meter import Amount, Meter
from kvpool.api.metrics import ApiMetrics
from kvpool.api.model import percent
from kvpool.api.pace import REST_S
from kvpool.api.problem import ApiError
from kvpool.api.status import Board, Key, PoolStatus

CHANGES_MAX = 64  # kept for a reader that is slow
SEND_S = 30.0  # a reader that takes nothing for so long is gone
WAKE_AT_ONCE = 10


def message(event: str, data: bytes, number: int | None = None) -> bytes:
    """One event as it goes over the line."""
    head = b"" if number is None else b"id: %d\n" % number
    return head + b"event: %b\ndata: %b\n\n" % (event.encode(), data)


@dataclass(eq=False)
class Reader:
    """What one stream has still to send: the newest status, and the latest changes of state."""

    waiter: asyncio.Future[None] | None = None
    sending_since: float | None = None  # monotonic; while it is not taken
    task: asyncio.Task[None] | None = None
    status: bytes | None = None
    changes: deque[bytes] = field(default_factory=lambda: deque(maxlen=CHANGES_MAX))
    gone: bool = False
    skipped: int = 0

    def take(self) -> list[bytes]:
        """Everything that waits, in order."""
        waiting = [*self.changes, *([self.status] if self.status is not None else [])]
        self.changes.clear()
        self.status = None
        return waiting

    def wake(self) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    async def wait(self, timeout_s: float) -> None:
        """Until something waits, or the time is up. One future and one timer: there are many readers."""
        if self.changes or self.status is not None or self.gone:
            return
        loop = asyncio.get_running_loop()
        self.waiter = loop.create_future()
        timer = loop.call_later(timeout_s, self.wake)
        try:
            await self.waiter
        finally:
            timer.cancel()


@dataclass
class Channel:
    """The readers of one pool. Each news is made into bytes once, for all of them."""

    meter: Meter
    at: float
    readers: set[Reader] = field(default_factory=set)


class Streams:
    """All event streams of an API. It follows the board, and keeps for each reader only what is newest.

    Threads: one, that of the event loop.
    """

    def __init__(
        self, board: Board, metrics: ApiMetrics, clock: Callable[[], float], streams_max: int
    ) -> None:
        self._metrics, self._clock, self._max = metrics, clock, streams_max
        self._channels: dict[Key, Channel] = {}
        self._open = 0
        self._due: dict[Reader, None] = {}
        self._waking: asyncio.Task[None] | None = None
        self.closing = False
        board.listen(self._news)  # both live as long as the service

    def close(self) -> None:
        """End all streams."""
        self.closing = True
        for channel in self._channels.values():
            for reader in channel.readers:
                reader.wake()

    def __len__(self) -> int:
        return self._open

    def add(self, status: PoolStatus) -> Reader:
        """A new reader, who begins with what is known now. Raises: ApiError when there are too many."""
        if self._open >= self._max:
            raise ApiError(
                503, "as many event streams are open as this API serves; ask again", {"Retry-After": "5"}
            )
        channel = self._channels.get(status.key)
        if channel is None:
            channel = self._channels[status.key] = Channel(Meter(), status.observed_at)
            channel.meter.step(status.series)
        reader = Reader(status=self._status_message(status, Amount(), 0.0))
        reader.changes.extend(message("event", event.model_dump_json().encode()) for event in status.events)
        channel.readers.add(reader)
        self._open += 1
        self._metrics.streams.set(self._open)
        return reader

    def remove(self, key: Key, reader: Reader) -> None:
        channel = self._channels.get(key)
        if channel is None or reader not in channel.readers:
            return
        channel.readers.discard(reader)
        self._open -= 1
        self._metrics.streams.set(self._open)
        if not channel.readers:
            del self._channels[key]

    def _news(self, key: Key, before: PoolStatus | None, after: PoolStatus | None) -> None:
        channel = self._channels.get(key)
        if channel is None:
            return
        changes = list(_changes(before, after))
        newest = None
        if after is not None:
            amount = channel.meter.step(after.series)
            newest = self._status_message(after, amount, max(0.0, after.observed_at - channel.at))
            channel.at = after.observed_at
        for reader in channel.readers:
            if reader.status is not None and newest is not None:
                self._metrics.skipped.inc()
            reader.status = newest
            reader.changes.extend(changes)
            reader.gone = after is None
            if reader.waiter is not None and not reader.waiter.done():
                self._due[reader] = None
        if self._due and self._waking is None:
            self._waking = asyncio.ensure_future(self._wake())

    async def _wake(self) -> None:
        """Wake readers some at a time: many at once would keep requests waiting."""
        try:
            while self._due:
                for reader in list(itertools.islice(self._due, WAKE_AT_ONCE)):
                    del self._due[reader]
                    reader.wake()
                await asyncio.sleep(0)  # they send
                await asyncio.sleep(REST_S)
        finally:
            self._waking = None

    async def end_stuck(self) -> None:
        """Ends for ever the streams whose readers take nothing."""
        while True:
            await asyncio.sleep(SEND_S / 4)
            late = time.monotonic() - SEND_S
            for channel in list(self._channels.values()):
                for reader in channel.readers:
                    if reader.task and reader.sending_since is not None and reader.sending_since < late:
                        reader.task.cancel()

    def _status_message(self, status: PoolStatus, amount: Amount, interval_s: float) -> bytes:
        interval = {
            "seconds": round(interval_s, 3),
            "lookups": amount.lookups,
            "hits": amount.hits,
            "hitRate": percent(amount.hits, amount.lookups),
            "evictions": amount.evictions,
            "bytesLoaded": amount.bytes_loaded,
            "bytesStored": amount.bytes_stored,
        }
        body = b'{"pool":%b,"interval":%b}' % (
            status.aged_body(self._clock()),
            json.dumps(interval).encode(),
        )
        return message("status", body, status.revision)


def _changes(before: PoolStatus | None, after: PoolStatus | None) -> Iterator[bytes]:
    """The changes of state between two statuses of a pool."""
    if after is None:
        yield message("gone", b"{}")
        return
    was = {c.type: c for c in before.pool.conditions} if before else {}
    for condition in after.pool.conditions:
        old = was.get(condition.type)
        if old is not None and (old.status, old.reason) == (condition.status, condition.reason):
            continue
        change: dict[str, Any] = {
            "type": condition.type,
            "from": old.status if old else None,
            "to": condition.status,
            "reason": condition.reason,
            "message": condition.message,
            "at": condition.last_transition_time or times.text(after.observed_at),
        }
        yield message("condition", json.dumps(change).encode())
    known = {(e.reason, e.tier, e.node, e.at, e.count) for e in before.events} if before else set()
    for event in after.events:
        if (event.reason, event.tier, event.node, event.at, event.count) not in known:
            yield message("event", event.model_dump_json().encode())
