"""Memory below a tier that is bad: taken out of use before anybody meets it, and told to people."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from kvpool import medium
from kvpool.daemon.chores import DaemonRegion
from kvpool.daemon.events import EventLog
from kvpool.medium import Ranges
from kvpool.report import PoisonReport

log = logging.getLogger("kvpool.daemon")

ADVICE = (
    "Clear or replace the memory when it suits ('ndctl clear-errors', or a new device), then run "
    "'kvpool fsck --repair' to use it again."
)


@dataclass
class PoisonWatch:
    """Asks the kernel what memory is bad, and gives up what of it lies in this host's shards."""

    tier: str
    path: Path
    region: DaemonRegion
    events: EventLog
    read: Callable[[str], Ranges] = medium.poison
    last: PoisonReport | None = None
    told: set[tuple[int, int]] = field(default_factory=set)  # by the kernel, beside its list

    def run(self) -> PoisonReport | None:
        """One look; None when the list is empty."""
        self.told.update(self.region.told_bad())
        ranges = (*self.read(str(self.path)), *sorted(self.told))
        before, self.last = self.last, self.region.give_up(ranges) if ranges else None
        now = self.last
        if now is None:
            return None
        news = before is None or now.extents > before.extents or now.directory_bytes > before.directory_bytes
        if now.slots or news:
            bad_bytes = sum(length for _, length in ranges)
            log.warning(
                "poison tier=%s bytes=%d slots=%d blocks=%d", self.tier, bad_bytes, now.slots, now.blocks
            )
            message = (
                f"the kernel says that {bad_bytes} bytes of {self.path} are poisoned: {now.slots} slots are "
                f"not used any more, {now.blocks} blocks in them are misses. {self.trouble(0) or ADVICE}"
            )
            self.events.add("MediumError", self.tier, message)
        return now

    def trouble(self, slots_retired: int) -> str:
        """What is wrong with the tier's memory, and what to do; empty when nothing is.

        `slots_retired` is what is retired in this host's shard, by whomever.
        """
        last = self.last
        if last is not None and last.directory_bytes:
            return (
                f"{last.directory_bytes} bytes of the shard's directory lie in poisoned memory: blocks that "
                "need them are misses, and stores are declined. Nothing can take their place: clear or "
                "replace the memory, then format the tier anew ('kvpool down --delete', 'kvpool up')."
            )
        parts = []
        if slots_retired:
            parts.append(f"{slots_retired} slots lie in memory that cannot be read, and are not used")
        if last is not None and last.extents:
            parts.append(f"{last.extents} extents are not used: their slot headers cannot be read")
        return f"{'; '.join(parts)}. {ADVICE}" if parts else ""
