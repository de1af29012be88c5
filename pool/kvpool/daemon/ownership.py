"""Shards that change hands, as the daemon of one host sees it."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvpool.daemon.events import EventLog
from kvpool.report import HeartbeatReport, ShardOwner


@dataclass
class Ownership:
    """Whose the shards of one tier's region are; tells what changed between two heartbeats."""

    pool: str
    tier: str
    shard: int  # of this host
    events: EventLog
    known: list[ShardOwner] = field(default_factory=list)

    def look(self, report: HeartbeatReport) -> None:
        before = self.known or [ShardOwner(shard, 0, True) for shard in range(len(report.owners))]
        for shard, (was, now) in enumerate(zip(before, report.owners, strict=True)):
            if was.host != now.host and now.host == self.shard:
                self._got(shard, was, now)
            elif was.host != now.host and was.host == self.shard:
                self._lost(shard, now)
        self.known = list(report.owners)
        for shard in report.acknowledged:
            message = (
                f"No process of this host writes to shard {shard} any more, what they had written is in the "
                "medium, and the new owner was told."
            )
            self.events.add("ShardReleased", self.tier, message)
        for shard in report.audited:
            message = (
                f"Shard {shard}: its last owner has stopped, and what it wrote late was looked through: "
                "damaged blocks are gone, right ones can be found."
            )
            self.events.add("ShardAudited", self.tier, message)

    def _got(self, shard: int, was: ShardOwner, now: ShardOwner) -> None:
        what = (
            "This host has its own shard back" if shard == self.shard else f"This host adopted shard {shard}"
        )
        message = f"{what} from host {was.host}, with epoch {now.epoch}. Nothing is to be done."
        self.events.add("ShardAdopted", self.tier, message)

    def _lost(self, shard: int, now: ShardOwner) -> None:
        self.events.add("ShardLost", self.tier, self._said(shard, now))

    def _said(self, shard: int, now: ShardOwner) -> str:
        return (
            f"host {now.host} owns shard {shard} since epoch {now.epoch}: engines of this host go on "
            "reading, and store nothing there (fenced). If this host is to write again, run here: "
            f"kvpool adopt {self.pool} --shard {shard} --host {self.shard} --epoch {now.epoch + 1}"
        )

    @property
    def problem(self) -> str:
        """As long as somebody else has this host's shard."""
        if not self.known or self.known[self.shard].host == self.shard:
            return ""
        return self._said(self.shard, self.known[self.shard])
