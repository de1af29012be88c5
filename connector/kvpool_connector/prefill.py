"""How long this engine computes a prompt, measured from its own steps, and so what a hit has saved it.

A step takes  o + a*t + b*t*(c + t/2)  seconds: o for itself, a for each of the t tokens that it computes,
and b for each pair of a token with one that stands before it, c of them before the first. A hit of n tokens
saves  a*n + b*n*(c + n/2); o is spent anyway.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Protocol

from kvpool import PrefillCurve

from .plan import Work

TOKENS_MIN = 16  # a step that computes fewer says nothing about prompts
SAMPLES_MIN = 8
DECAY = 0.98  # a weight halves in 34 steps: an engine that became slower is believed soon
SCATTER_MAX = 1.0  # above it, measured steps lie as far from the curve as it is from nothing
DOUBT_MAX = 0.5  # the share by which an answer may be wrong (one standard deviation)
OUTLIER = 3.0  # what took so many times longer or shorter than expected counts as so many times
RIDGE = 1e-9
SHORTEST_S = 1e-6

_Vector = tuple[float, float, float]


class Curve:
    """Least squares over the steps of late, of relative errors: a long step counts no more than a short one.

    Errors are relative to what was expected, and not to what came: else the fastest steps decided.
    Threads: one.
    """

    def __init__(self) -> None:
        self._moments = [[0.0] * 3 for _ in range(3)]
        self._right = [0.0] * 3
        self._squares = 0.0
        self._weight = 0.0
        self._solved: tuple[_Vector, tuple[int, ...]] | None = None
        self.samples = 0

    def add(self, work: Work, seconds: float) -> None:
        """A step that computed `work` took so long. What computes next to nothing is passed over."""
        if work.tokens < TOKENS_MIN or not SHORTEST_S <= seconds < math.inf:
            return
        expected = self._expected(work) or seconds
        took = min(max(seconds / expected, 1 / OUTLIER), OUTLIER)
        x = (1.0 / expected, work.tokens / expected, work.pairs / expected)
        for i in range(3):
            self._right[i] = DECAY * self._right[i] + x[i] * took
            for j in range(3):
                self._moments[i][j] = DECAY * self._moments[i][j] + x[i] * x[j]
        self._squares = DECAY * self._squares + took * took
        self._weight = DECAY * self._weight + 1.0
        self._solved = None
        self.samples += 1

    def _expected(self, work: Work) -> float:
        """How long a step would take by what is known; 0 as long as that is too little."""
        if self.samples < SAMPLES_MIN:
            return 0.0
        (o, a, b), _ = self._solve()
        return o + a * work.tokens + b * work.pairs

    def seconds(self, work: Work) -> float | None:
        """How long computing `work` would take, as a part of a larger step; None when that is not known yet:
        too few steps, or steps that scatter, or that are too much alike to tell a, b and o apart."""
        if self.samples < SAMPLES_MIN or not work.tokens:
            return None
        (o, a, b), active = self._solve()
        if self._scatter((o, a, b)) > SCATTER_MAX:
            return None
        x = (0.0, float(work.tokens), float(work.pairs))
        answer = a * x[1] + b * x[2]
        solved = _solved([[self._moments[i][j] for j in active] for i in active], [x[i] for i in active])
        if answer <= 0 or solved is None:
            return None
        spread = sum(x[i] * part for i, part in zip(active, solved, strict=True))
        doubt = self._scatter((o, a, b)) * math.sqrt(max(0.0, spread))
        return answer if doubt <= DOUBT_MAX * answer else None

    def report(self) -> PrefillCurve:
        """For people: trusted when a prompt of some thousand tokens could be told."""
        _, a, b = self._solve()[0] if self.samples >= SAMPLES_MIN else (0.0, 0.0, 0.0)
        trusted = self.seconds(Work(1024, 1024 * 512.0)) is not None
        return PrefillCurve(a_us=a * 1e6, b_ns=b * 1e9, samples=self.samples, trusted=trusted)

    def _solve(self) -> tuple[_Vector, tuple[int, ...]]:
        """The best o, a and b that are not negative, and which of them are not 0."""
        if self._solved is None:
            best = math.inf
            found: tuple[_Vector, tuple[int, ...]] = ((0.0, 0.0, 0.0), (0,))
            for size in (1, 2, 3):
                for active in combinations(range(3), size):
                    part = [[self._moments[i][j] for j in active] for i in active]
                    solved = _solved(part, [self._right[i] for i in active])
                    if solved is None or min(solved) < 0:
                        continue
                    full = [0.0, 0.0, 0.0]
                    for i, value in zip(active, solved, strict=True):
                        full[i] = value
                    error = self._error((full[0], full[1], full[2]))
                    if error < best * (1 - 1e-6):
                        best, found = error, ((full[0], full[1], full[2]), active)
            self._solved = found
        return self._solved

    def _error(self, curve: _Vector) -> float:
        """The sum of squared relative errors."""
        quadratic = sum(curve[i] * self._moments[i][j] * curve[j] for i in range(3) for j in range(3))
        return max(
            0.0, self._squares - 2 * sum(c * r for c, r in zip(curve, self._right, strict=True)) + quadratic
        )

    def _scatter(self, curve: _Vector) -> float:
        return math.sqrt(self._error(curve) / self._weight)


def _solved(matrix: Sequence[Sequence[float]], right: Sequence[float]) -> list[float] | None:
    """Of a symmetric system of up to three equations, scaled first; None when it has no one answer."""
    size = len(right)
    scale = [math.sqrt(matrix[i][i]) for i in range(size)]
    if min(scale) <= 0:
        return None
    rows = [
        [matrix[i][j] / (scale[i] * scale[j]) + (RIDGE if i == j else 0.0) for j in range(size)]
        + [right[i] / scale[i]]
        for i in range(size)
    ]
    for i in range(size):
        pivot = max(range(i, size), key=lambda row: abs(rows[row][i]))
        rows[i], rows[pivot] = rows[pivot], rows[i]
        if abs(rows[i][i]) < RIDGE / 10:
            return None
        for row in range(size):
            if row != i:
                factor = rows[row][i] / rows[i][i]
                rows[row] = [a - factor * b for a, b in zip(rows[row], rows[i], strict=True)]
    return [rows[i][size] / rows[i][i] / scale[i] for i in range(size)]


class Stopwatch(Protocol):
    """Times the forward passes of one engine, without what lies between `pause` and `resume`.

    `take` gives those that are over, which may be later.
    """

    def start(self) -> None: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def stop(self, work: Work) -> None: ...
    def take(self) -> list[tuple[Work, float]]: ...


class HostStopwatch:
    """For an engine that computes where it runs: when the call is over, so is the work."""

    def __init__(self) -> None:
        self._running_since: float | None = None
        self._seconds = 0.0
        self._over: list[tuple[Work, float]] = []

    def start(self) -> None:
        self._running_since, self._seconds = time.perf_counter(), 0.0

    def pause(self) -> None:
        if self._running_since is not None:
            self._seconds += time.perf_counter() - self._running_since

    def resume(self) -> None:
        if self._running_since is not None:
            self._running_since = time.perf_counter()

    def stop(self, work: Work) -> None:
        running = self._running_since is not None
        self.pause()
        self._running_since = None
        if running and work.tokens >= TOKENS_MIN:
            self._over.append((work, self._seconds))

    def take(self) -> list[tuple[Work, float]]:
        over, self._over = self._over, []
        return over


class NoStopwatch:
    """For an engine that cannot be timed: its hits save tokens, and nobody knows how many seconds."""

    def start(self) -> None: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def stop(self, work: Work) -> None: ...

    def take(self) -> list[tuple[Work, float]]:
        return []


@dataclass(slots=True)
class Savings:
    """Hits whose saving is not known yet: they wait, as sums, until the curve can tell."""

    tokens: int = 0
    pairs: float = 0.0
    blocks: int = 0

    def add(self, context: int, tokens: int, blocks: int) -> None:
        self.tokens += tokens
        self.pairs += tokens * (context + tokens / 2)
        self.blocks += blocks
