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
        self._marks: list[torch.cuda.Event] = []  # begins and ends, in turn
        self._waiting: deque[tuple[Work, list[torch.cuda.Event]]] = deque(maxlen=WAITING_MAX)

    def start(self) -> None:
        self._marks = [_mark()]

    def pause(self) -> None:
        if self._marks:
            self._marks.append(_mark())

    def resume(self) -> None:
        self.pause()

    def stop(self, work: Work) -> None:
        self.pause()
        marks, self._marks = self._marks, []
        if marks and work.tokens >= TOKENS_MIN:
            self._waiting.append((work, marks))

    def take(self) -> list[tuple[Work, float]]:
        over = []
        while self._waiting and self._waiting[0][1][-1].query():
            work, marks = self._waiting.popleft()
            pieces = zip(marks[::2], marks[1::2], strict=True)
            over.append((work, sum(began.elapsed_time(ended) for began, ended in pieces) / 1e3))
        return over


def _mark() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
