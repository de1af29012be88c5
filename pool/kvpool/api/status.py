"""What a source knows of each pool, and the board on which it is kept for all who ask."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, NamedTuple, Protocol

from kvpool.api import model
from kvpool.report import Counters, NamespaceReport, NamespaceUsage


class Key(NamedTuple):
    """A pool's namespace and name."""

    namespace: str
    name: str


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether a source is up to date; `message` says why not, and what to do."""

    ready: bool
    message: str = ""


@dataclass(frozen=True)
class PoolStatus:
    """What is known of a pool at one moment. Never changed: news is a new object."""

    key: Key
    pool: model.Pool  # its age is that of `observed_at`
    observed_at: float  # Unix time in s
    stale_after_s: float
    counters: Counters
    nodes: Sequence[model.Node] = ()  # sorted by name
    nodes_at: Mapping[str, float] = field(default_factory=dict)  # name -> Unix time of its last news
    namespaces: Sequence[NamespaceUsage] | None = None  # None: the source cannot know
    reports: Mapping[str, NamespaceReport] = field(default_factory=dict)  # by digest: what engines counted
    engines: Sequence[model.EngineMisses] = ()
    events: Sequence[model.Event] = ()  # the newest last
    # Counters by what counts them (a region, a node): these may start anew, or come and go.
    series: Mapping[str, Counters] = field(default_factory=dict)
    revision: int = 0  # of the board, when it was put there

    def age_s(self, now: float) -> float:
        return round(max(0.0, now - self.observed_at), 1)

    def stale(self, now: float) -> bool:
        return now - self.observed_at > self.stale_after_s

    @cached_property
    def body(self) -> bytes:
        """The pool as JSON without its age, which is different for every answer."""
        return self.pool.model_dump_json(exclude={"age_s", "stale"}).encode()

    def aged_body(self, now: float) -> bytes:
        stale = b"true" if self.stale(now) else b"false"
        return b'{"age_s":%.1f,"stale":%b,%b' % (self.age_s(now), stale, self.body[1:])


class StatusSource(Protocol):
    """Where statuses come from. `run` keeps the board fresh until it is cancelled; it never returns."""

    @property
    def kind(self) -> Literal["local", "cluster"]: ...
    @property
    def board(self) -> Board: ...
    def readiness(self) -> Readiness: ...
    async def run(self) -> None: ...


Listener = Callable[[Key, "PoolStatus | None", "PoolStatus | None"], None]  # key, before, after


class Board:
    """The last known status of every pool.

    Threads: one, that of the event loop.
    """

    def __init__(self) -> None:
        self.revision = 1  # grows with every change of what an answer says, ages aside
        self._statuses: dict[Key, PoolStatus] = {}
        self._keys: list[Key] = []
        self._listeners: list[Listener] = []

    def __len__(self) -> int:
        return len(self._keys)

    def get(self, key: Key) -> PoolStatus | None:
        return self._statuses.get(key)

    def known(self) -> Sequence[Key]:
        """All pools, sorted."""
        return self._keys

    def put(self, status: PoolStatus) -> None:
        """Replace what is known of a pool. What says the same as before only becomes younger."""
        before = self._statuses.get(status.key)
        if before is not None and _says_the_same(before, status):
            status = replace(status, revision=before.revision)
            if "body" in before.__dict__:
                status.__dict__["body"] = before.__dict__["body"]
            self._statuses[status.key] = status
            return
        self.revision += 1
        status = replace(status, revision=self.revision)
        self._statuses[status.key] = status
        if before is None:
            bisect.insort(self._keys, status.key)
        for listener in self._listeners:
            listener(status.key, before, status)

    def remove(self, key: Key) -> None:
        before = self._statuses.pop(key, None)
        if before is None:
            return
        self.revision += 1
        del self._keys[bisect.bisect_left(self._keys, key)]
        for listener in self._listeners:
            listener(key, before, None)

    def listen(self, listener: Listener) -> None:
        """Tell `listener` of every change, from now on."""
        self._listeners.append(listener)


def _says_the_same(before: PoolStatus, after: PoolStatus) -> bool:
    return (
        before.pool == after.pool
        and before.nodes == after.nodes
        and before.counters == after.counters
        and before.namespaces == after.namespaces
        and before.reports == after.reports
        and before.engines == after.engines
        and before.events == after.events
    )
