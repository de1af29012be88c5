"""What is known of a pool at one moment: the daemon's report and `kvpool status` show the same."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Protocol

from pydantic import TypeAdapter

from kvpool.report import Counters, HostUsage, NamespaceUsage, ParticipantInfo, Usage
from kvpool.spec import TierSpec


class ReadableRegion(Protocol):
    """What a snapshot needs of a region."""

    @property
    def capacity_bytes(self) -> int: ...
    def usage(self) -> Usage: ...
    def counters(self) -> Counters: ...
    def participants(self) -> list[ParticipantInfo]: ...


@dataclass(frozen=True, slots=True)
class TierSnapshot:
    """One region of a tier. `host` is None for the region that all hosts share."""

    name: str
    medium: str
    path: str
    host: int | None
    coherence: str
    capacity_bytes: int  # as declared: of the whole region, its directory included
    usage: Usage
    counters: Counters
    participants: list[ParticipantInfo]

    def to_object(self) -> dict[str, Any]:
        usage = asdict(self.usage)
        namespaces, shards = usage.pop("namespaces"), usage.pop("hosts")
        usable_bytes = usage.pop("capacity_bytes")
        return {
            "name": self.name,
            "medium": self.medium,
            "path": self.path,
            "host": self.host,
            "coherence": self.coherence,
            "capacity_bytes": self.capacity_bytes,
            "usable_bytes": usable_bytes,
            **usage,
            "evictions": self.counters.evictions,
            "lookups": self.counters.lookups,
            "hits": self.counters.hits,
            "counters": asdict(self.counters),
            "shards": shards,
            "namespaces": namespaces,
        }

    @classmethod
    def from_object(cls, tier: dict[str, Any], participants: list[dict[str, Any]]) -> TierSnapshot:
        """The snapshot that `to_object` described; `participants` as in `pool_object`.

        Raises:  KeyError, TypeError or ValueError for what another version wrote.
        """
        own = {f.name for f in fields(Usage)} - {"capacity_bytes", "hosts", "namespaces"}
        taken = cls(
            **{
                name: tier[name] for name in ("name", "medium", "path", "host", "coherence", "capacity_bytes")
            },
            usage=Usage(
                capacity_bytes=tier["usable_bytes"],
                hosts=[HostUsage(**shard) for shard in tier["shards"]],
                namespaces=[NamespaceUsage(**namespace) for namespace in tier["namespaces"]],
                **{name: tier[name] for name in own},
            ),
            counters=Counters(**tier["counters"]),
            participants=[
                ParticipantInfo(**{name: value for name, value in p.items() if name != "tier"})
                for p in participants
            ],
        )
        return _AS_DECLARED.validate_python(asdict(taken))


# What was read from a file has the types that its fields say, or it is refused.
_AS_DECLARED = TypeAdapter(TierSnapshot)


def take(tier: TierSpec, path: Path, host: int, region: ReadableRegion) -> TierSnapshot:
    """A snapshot of the region of `tier` that `host` uses."""
    return TierSnapshot(
        name=tier.name,
        medium=tier.medium,
        path=str(path),
        host=None if tier.shared else host,
        coherence=tier.coherence_mode,
        capacity_bytes=region.capacity_bytes,
        usage=region.usage(),
        counters=region.counters(),
        participants=region.participants(),
    )


def totals(tiers: Iterable[TierSnapshot]) -> Counters:
    """The counters of all tiers together."""
    total = Counters()
    for tier in tiers:
        total += tier.counters
    return total


def pool_object(name: str, tiers: list[TierSnapshot]) -> dict[str, Any]:
    """The pool's numbers as `kvpool status --output json` prints them; keys are only ever added."""
    counters = totals(tiers)
    return {
        "name": name,
        "tiers": [tier.to_object() for tier in tiers],
        "lookups": counters.lookups,
        "hits": counters.hits,
        "hit_rate": round(counters.hit_rate, 6),
        "misses": counters.misses,
        "stored": counters.stored,
        "present": counters.present,
        "declined": counters.declined,
        "evictions": counters.evictions,
        "bytes_loaded": counters.bytes_loaded,
        "bytes_stored": counters.bytes_stored,
        "reaped": counters.reaped,
        "scrub_bad": counters.scrub_bad,
        "participants": [
            {"tier": tier.name, **asdict(participant)} for tier in tiers for participant in tier.participants
        ],
    }
