"""What the threads of a node's daemon know of each other: what is wanted, and what is."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvpool_operator.nodes.assignment import Assignment


@dataclass(frozen=True, slots=True)
class Truth:
    """What the thread that serves the pool last said about it."""

    ready: bool = False
    message: str = ""  # why it is not ready, and what to do
    host: int = 0
    generation: int = 0  # of the KVPoolNode that is being served
    report: dict[str, Any] = field(default_factory=dict)  # of the pool's daemon; empty while none runs
    own: dict[str, dict[str, Any]] = field(default_factory=dict)  # tier -> counters of this host alone
    owners: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # shared tier -> its shards
    problems: tuple[str, ...] = ()
    drained: tuple[str, str, str] | None = None  # status, reason, message of the condition; None: Active
    removed: bool = False


class Board:
    """Threads: any. Nothing here waits for I/O."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._wanted: Assignment | None = None
        self._unreadable = ""
        self._truth = Truth()
        self._served_at = clock()
        self._watched_at: float | None = None
        self.changed = threading.Event()  # another assignment came

    # -- the cluster's side ------------------------------------------------------------------------------

    def assign(self, wanted: Assignment | None, unreadable: str = "") -> None:
        """Say what is wanted. With `unreadable`, why it could not be read: what was wanted before stays."""
        with self._lock:
            self._unreadable = unreadable
            if not unreadable and wanted != self._wanted:
                self._wanted = wanted
                self.changed.set()

    def watched(self) -> None:
        """The cluster has answered just now."""
        with self._lock:
            self._watched_at = self._clock()

    # -- the pool's side ---------------------------------------------------------------------------------

    def wanted(self) -> tuple[Assignment | None, str]:
        """What is wanted, and why the newest wish could not be read."""
        with self._lock:
            return self._wanted, self._unreadable

    def tell(self, truth: Truth) -> None:
        with self._lock:
            self._truth, self._served_at = truth, self._clock()

    def beat(self) -> None:
        """The thread that serves the pool lives, and has nothing new to say."""
        with self._lock:
            self._served_at = self._clock()

    # -- whoever asks ------------------------------------------------------------------------------------

    def truth(self) -> Truth:
        with self._lock:
            return self._truth

    def silent_s(self) -> tuple[float, float | None]:
        """Seconds since the pool's thread was heard of, and since the cluster was (None: never yet)."""
        with self._lock:
            now = self._clock()
            return now - self._served_at, None if self._watched_at is None else now - self._watched_at
