"""The daemon's chores, one function each: they do a bounded piece of work and return what they did."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kvpool.report import Counters, ParticipantInfo, ReapReport, ScrubReport, Usage
from kvpool.spec import Eviction

EVICT_BLOCKS = 256  # in one call: some milliseconds, so that a stop is never far away
EVICT_S_MAX = 0.2  # in one run of the chore; the next run goes on
SCRUB_BYTES_PER_S = (
    32 << 20
)  # of a region's bandwidth of some GB/s: a block of a 512 GiB region is read every 5 hours
SCRUB_SLOTS_MAX = 4096  # empty slots cost only their header; still bounded
EMPTY_SLOT_BYTES = 4096  # what a slot counts for in the budget when blocks are small or there are none


class DaemonRegion(Protocol):
    """What the chores need of a region."""

    def heartbeat(self) -> None: ...
    def reap(self) -> ReapReport: ...
    def evict(self, used_fraction: float, blocks_max: int) -> int: ...
    def scrub(self, *, start: int, limit: int | None) -> ScrubReport: ...
    @property
    def capacity_bytes(self) -> int: ...
    def usage(self) -> Usage: ...
    def counters(self) -> Counters: ...
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
    block_bytes: int = EMPTY_SLOT_BYTES

    def run(self) -> ScrubReport:
        """One step, as much as the bandwidth of one period allows."""
        budget = SCRUB_BYTES_PER_S * self.period_s
        limit = max(1, min(SCRUB_SLOTS_MAX, int(budget / max(self.block_bytes, EMPTY_SLOT_BYTES))))
        report = self.region.scrub(start=self.next_slot, limit=limit)
        self.next_slot = report.next_slot
        self.checked += report.checked
        self.bad += report.bad
        self.rounds += report.next_slot == 0
        return report
