"""What the routes work with: the source, the history, who may read, and the clock."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field

from kvpool.api.access import Access, Caller, OpenAccess
from kvpool.api.guard import Limit
from kvpool.api.history import History, MemoryHistory
from kvpool.api.metrics import ApiMetrics
from kvpool.api.status import Board, StatusSource
from kvpool.api.streams import Streams

STREAMS_MAX = 1000  # event streams at the same time


@dataclass
class Service:
    """One API and what it is made of."""

    source: StatusSource
    history: History = field(default_factory=MemoryHistory)
    access: Access = field(default_factory=OpenAccess)
    metrics: ApiMetrics = field(default_factory=ApiMetrics)
    limit: Limit = field(default_factory=Limit)
    hosts: frozenset[str] | None = None  # names by which it may be asked; None for any
    open_metrics: bool = True  # /metrics without a token
    streams_max: int = STREAMS_MAX
    clock: Callable[[], float] = time.time
    # Revisions begin anew with each process: an ETag of another one means nothing here.
    nonce: str = field(default_factory=lambda: uuid.uuid4().hex[:8])
    streams: Streams = field(init=False)

    def __post_init__(self) -> None:
        self.streams = Streams(self.board, self.metrics, self.clock, self.streams_max)

    @property
    def board(self) -> Board:
        return self.source.board

    async def caller(self, authorization: str | None) -> Caller:
        return await self.access.who(authorization)
