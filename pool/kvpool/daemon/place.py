"""Whether what lies at a tier's path is still what the daemon has mapped."""

from __future__ import annotations

import logging
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path

from kvpool.daemon.events import EventLog

log = logging.getLogger("kvpool.daemon")


@dataclass
class Place:
    """The path of one tier. Made right after its region was attached."""

    pool: str
    tier: str
    path: Path
    events: EventLog
    problem: str = ""
    mapped: tuple[int, int] | None = field(init=False)  # None: cannot be told, and is not looked at

    def __post_init__(self) -> None:
        self.mapped = _identity(self.path)

    def look(self) -> str:
        """What is wrong now; empty when the region is in its place."""
        there = _identity(self.path)
        before, self.problem = self.problem, ""
        if self.mapped is not None and there != self.mapped:
            what = "removed" if there is None else "replaced"
            self.problem = (
                f"{self.path} was {what} while it was in use: this daemon, and the engines that have it "
                "open, go on with bytes that nobody else finds, and that are gone when they end. Run "
                f"'kvpool up {self.pool}': it starts the daemon anew, on what is there, or a new one."
            )
        if self.problem and self.problem != before:
            log.error("region_lost tier=%s path=%s", self.tier, self.path)
            self.events.add("MediumError", self.tier, self.problem)
        return self.problem


def _identity(path: Path) -> tuple[int, int] | None:
    """What tells a file or device from another that takes its name; None when nothing is there."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    # A device keeps its number when its node is made anew.
    return (0, found.st_rdev) if stat.S_ISCHR(found.st_mode) else (found.st_dev, found.st_ino)
