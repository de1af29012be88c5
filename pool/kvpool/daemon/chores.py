"""The daemon's chores, one function each: they do a bounded piece of work and return what they did."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from kvpool.errors import MediumUnavailable
from kvpool.quantity import human_bytes
from kvpool.report import (
    AdoptReport,
    Counters,
    HeartbeatReport,
    ParticipantInfo,
    PeerLitmus,
    PoisonReport,
    ReapReport,
    ResizeReport,
    ScrubReport,
    Usage,
)
from kvpool.spec import Eviction

EVICT_BLOCKS = 256  # in one call: some milliseconds, so that a stop is never far away
EVICT_S_MAX = 0.2  # in one run of the chore; the next run goes on
SCRUB_BYTES_PER_S = (
    32 << 20
)  # of a region's bandwidth of some GB/s: a block of a 512 GiB region is read every 5 hours
RESIZE_S_MAX = 0.1  # in one run
RESIZE_LOOK_S = 5.0  # a process that saw the old capacity may have stored beyond the new one
SCRUB_SLOTS_MAX = 4096  # in one run, so that small blocks do not take long


class DaemonRegion(Protocol):
    """What the chores need of a region."""

    def heartbeat(self) -> HeartbeatReport: ...
    def reap(self) -> ReapReport: ...
    def evict(self, used_fraction: float, blocks_max: int) -> int: ...
    def resize(self, capacity_bytes: int, *, budget_s: float) -> ResizeReport: ...
    def give_up(self, ranges: Iterable[tuple[int, int]]) -> PoisonReport: ...
    def told_bad(self) -> list[tuple[int, int]]: ...
    def set_closed(self, closed: bool) -> None: ...
    def acknowledged_epoch(self, shard: int) -> int: ...
    def scrub(self, *, start: int, limit: int | None, bytes_max: int | None) -> ScrubReport: ...
    def litmus_begin(self) -> bool: ...
    def litmus_end(self) -> None: ...
    def litmus_serve(self, budget_s: float) -> bool: ...
    def litmus_beats(self) -> list[int]: ...
    def litmus_measure(self, peer: int, rounds: int) -> PeerLitmus: ...
    @property
    def capacity_bytes(self) -> int: ...
    def usage(self) -> Usage: ...
    def counters(self) -> Counters: ...
    def counters_of(self, host: int) -> Counters: ...
    def adopt(self, host: int, epoch: int) -> AdoptReport: ...
    def participants(self) -> list[ParticipantInfo]: ...
    def close(self) -> None: ...


@dataclass
class KeepFree:
    """Keeps the filling between the watermarks, so that writers find free slots and need not evict inline."""

    region: DaemonRegion
    eviction: Eviction
    clock: Callable[[], float] = time.monotonic
    emptying: bool = False

    def run(self) -> int:
        """Blocks evicted: none below the high watermark; above it, down to the low one, over several runs."""
        until = self.clock() + EVICT_S_MAX
        evicted = 0
        if not self.emptying:
            evicted = self.region.evict(self.eviction.high_watermark / 100, EVICT_BLOCKS)
            self.emptying = evicted > 0
        while self.emptying:
            count = self.region.evict(self.eviction.low_watermark / 100, EVICT_BLOCKS)
            evicted += count
            self.emptying = count >= EVICT_BLOCKS
            if self.clock() >= until:
                break
        return evicted


@dataclass
class Scrub:
    """Reads the region slowly from end to end, for ever: flipped bits are found before an engine asks."""

    region: DaemonRegion
    period_s: float
    next_slot: int = 0
    checked: int = 0
    bad: int = 0
    rounds: int = 0
    bytes: int = 0
    over: int = 0  # what the last runs read beyond their budget: a block is read whole

    def run(self) -> ScrubReport:
        """One step, as much as the bandwidth of one period allows: headers, empty slots too, and payloads."""
        budget = int(SCRUB_BYTES_PER_S * self.period_s)
        if self.over >= budget:
            self.over -= budget
            return ScrubReport(0, 0, self.next_slot)
        report = self.region.scrub(start=self.next_slot, limit=SCRUB_SLOTS_MAX, bytes_max=budget - self.over)
        self.over = max(0, self.over + report.bytes - budget)
        self.rounds += report.next_slot == 0 and (self.next_slot != 0 or report.bytes != 0)
        self.next_slot = report.next_slot
        self.checked += report.checked
        self.bad += report.bad
        self.bytes += report.bytes
        return report


@dataclass
class Resize:
    """Goes step by step towards the capacity that the manifest says, and looks now and then that it stays."""

    region: DaemonRegion
    free_bytes: Callable[[], int]  # what the medium can still give
    clock: Callable[[], float] = time.monotonic
    settled: int = 0  # the capacity that was reached last
    look_again: float = 0.0

    def run(self, capacity_bytes: int) -> bool:
        """One step, some tenths of a second at most. True when it has just got there.

        Raises:  MediumUnavailable when there is no memory to grow: asked for before it is taken, because a
                 control group without memory kills instead of refusing.
        """
        if self.settled == capacity_bytes and self.clock() < self.look_again:
            return False
        missing = capacity_bytes - self.region.capacity_bytes
        free = self.free_bytes() if missing > 0 else missing
        if missing > free:
            has, wanted = human_bytes(self.region.capacity_bytes), human_bytes(capacity_bytes)
            raise MediumUnavailable(
                f"it has {has} and should have {wanted}, but only {human_bytes(free)} are free. "
                "Free some space, or lower the capacity."
            )
        if not self.region.resize(capacity_bytes, budget_s=RESIZE_S_MAX).done:
            return False
        reached, self.settled = self.settled != capacity_bytes, capacity_bytes
        self.look_again = self.clock() + RESIZE_LOOK_S
        return reached
