"""The daemon's part in the litmus test: it answers other hosts, tests who answers, and has a verdict."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from kvpool.daemon.events import EventLog
from kvpool.litmus import CONDITION, Litmus, Verdict, combined

log = logging.getLogger("kvpool.daemon")

STEP_S = 0.1  # a look at the lines of the other hosts: microseconds
START_S = 3.0  # before Ready, for a host that has answered once and may live
RETRY_S = 5.0  # after a failure of the medium


@dataclass
class CoherenceWatch:
    """The litmus tests of all tiers that several hosts share, and the condition that follows.

    Threads: any; `remove` waits for a test that is running, some seconds at most.
    """

    tests: dict[str, Litmus]  # by tier
    events: EventLog = field(default_factory=EventLog)
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], object] = time.sleep
    verdict: Verdict = field(init=False)
    changed_at: float = field(init=False)
    _ours: set[str] = field(default_factory=set)  # tiers whose turn we have
    _stepping: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.verdict = combined({tier: test.verdict() for tier, test in self.tests.items()})
        self.changed_at = time.time()

    def start(self) -> None:
        """Before Ready: test who is there. Waits only for a host that may answer."""
        deadline = self.clock() + START_S
        while True:
            self.step()
            waiting = [
                self.tests[tier]
                for tier in self._ours
                if self.tests[tier].verdict().status == "Unknown" and self.tests[tier].may_answer()
            ]
            if not waiting or self.clock() >= deadline:
                return
            self.sleep(STEP_S / 2)

    def add(self, tier: str, test: Litmus) -> None:
        """Test one tier more, from the next step on."""
        with self._stepping:
            self.tests[tier] = test

    def remove(self, tier: str) -> None:
        """Leave a tier alone; its region may be closed then."""
        with self._stepping:
            test = self.tests.pop(tier, None)
            if test is not None and tier in self._ours:
                self._ours.discard(tier)
                test.end()

    def step(self) -> None:
        """Answer, and test one host that was not tested yet."""
        with self._stepping:
            self._step()

    def _step(self) -> None:
        for tier, test in self.tests.items():
            # The turn may be with 'kvpool litmus' for a while.
            if tier not in self._ours and test.begin():
                self._ours.add(tier)
            if tier in self._ours:
                test.step()
        self._judge({tier: test.verdict() for tier, test in self.tests.items()})

    def end(self) -> None:
        for tier in list(self._ours):
            self.tests[tier].end()
        self._ours.clear()

    def _judge(self, verdicts: dict[str, Verdict]) -> None:
        now = combined(verdicts)
        before, self.verdict = self.verdict, now
        if (now.status, now.reason) == (before.status, before.reason):
            return
        self.changed_at = time.time()
        level = logging.ERROR if now.status == "False" else logging.INFO
        log.log(level, "coherence status=%s reason=%s message=%r", now.status, now.reason, now.message)
        for tier, verdict in verdicts.items():
            if verdict.status == "False":
                self.events.add("CoherenceFailed", tier, verdict.message)

    def to_object(self) -> dict[str, Any]:
        """As a condition of Kubernetes."""
        return {
            "type": CONDITION,
            "status": self.verdict.status,
            "reason": self.verdict.reason,
            "message": self.verdict.message,
            "since": round(self.changed_at, 3),
        }


def watch_in_background(watch: CoherenceWatch, closing: ExitStack) -> None:
    """Steps in a thread of its own, so that a test of seconds delays no heartbeat, until `closing` closes."""
    ending = threading.Event()

    def run() -> None:
        wait_s = STEP_S
        while not ending.wait(wait_s):
            wait_s = STEP_S if watch.tests else RETRY_S
            try:
                watch.step()
            except Exception as error:  # the daemon outlives whatever a medium does
                log.warning("litmus_failed error=%r", f"{type(error).__name__}: {error}")
                watch.events.add("MediumError", ", ".join(watch.tests), str(error))
                wait_s = RETRY_S

    thread = threading.Thread(target=run, name="kvpool-litmus", daemon=True)
    thread.start()

    def end() -> None:
        ending.set()
        thread.join()
        watch.end()

    closing.callback(end)
