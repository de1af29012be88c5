"""Times forward passes on a device that computes while the host goes on."""

from __future__ import annotations

from collections import deque

import torch

from .plan import Work
from .prefill import TOKENS_MIN

WAITING_MAX = 64  # passes whose end is not known yet; a device that hangs must not fill the memory


class DeviceStopwatch:
    """Marks in the stream, read when the device has passed them: nothing waits."""

    def __init__(self) -> None:
        self._started: torch.cuda.Event | None = None
        self._waiting: deque[tuple[Work, torch.cuda.Event, torch.cuda.Event]] = deque(maxlen=WAITING_MAX)

    def start(self) -> None:
        self._started = _mark()

    def stop(self, work: Work) -> None:
        started, self._started = self._started, None
        if started is not None and work.tokens >= TOKENS_MIN:
            self._waiting.append((work, started, _mark()))

    def take(self) -> list[tuple[Work, float]]:
        over = []
        while self._waiting and self._waiting[0][2].query():
            work, started, ended = self._waiting.popleft()
            over.append((work, started.elapsed_time(ended) / 1e3))
        return over


def _mark() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
