"""What has happened lately, for people: a short list in the daemon's report and in `kvpool status`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

EVENTS_MAX = 50  # kinds times tiers are few, so the list seldom comes near it

Kind = Literal[
    "DamageFound",
    "MediumError",
    "ParticipantReaped",
    "ShardAdopted",
    "ShardLost",
    "ShardReleased",
    "ShardAudited",
    "CoherenceFailed",
]


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened `count` times; the message is that of the last time, and says what to do."""

    kind: Kind
    subject: str  # the tier
    message: str
    count: int
    first_at: float  # Unix time in s
    last_at: float


class EventLog:
    """The latest events, the newest last. What happens again is counted and not listed again.

    Threads: any.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._events: dict[tuple[str, str], Event] = {}
        self._lock = threading.Lock()

    def add(self, kind: Kind, subject: str, message: str) -> None:
        now = round(self._clock(), 3)
        with self._lock:
            before = self._events.pop((kind, subject), None)
            count, first_at = (before.count + 1, before.first_at) if before else (1, now)
            self._events[kind, subject] = Event(kind, subject, message, count, first_at, now)
            while len(self._events) > EVENTS_MAX:
                del self._events[next(iter(self._events))]

    def to_object(self) -> list[dict[str, Any]]:
        with self._lock:
            return [asdict(event) for event in self._events.values()]
