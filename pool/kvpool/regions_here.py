"""The regions of a pool that lie on this machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvpool import paths
from kvpool.provision.plan import in_this_version
from kvpool.spec import PoolSpec


def hosts_here(spec: PoolSpec) -> list[int]:
    """The hosts of a pool that run, or ran, on this machine."""
    found = set()
    for lock in paths.pool_dir(spec.name).glob("daemon.h*.lock"):
        number = lock.name.removeprefix("daemon.h").removesuffix(".lock")
        if number.isdecimal():
            found.add(int(number))
    return sorted(found) or [paths.default_host(spec.name)]


@dataclass(frozen=True, slots=True)
class RegionTarget:
    """One region that a command is about. `shards`: those that this machine's hosts own."""

    label: str  # for people: the tier, or the path
    tier: str | None
    path: Path
    host: int
    shards: tuple[int, ...]


def regions_of(spec: PoolSpec, host: int | None = None) -> list[RegionTarget]:
    """All regions of a pool that hosts of this machine use, or `host` does, whether they exist or not."""
    hosts = hosts_here(spec) if host is None else [host]
    found: dict[Path, RegionTarget] = {}
    for tier in spec.tiers:
        if in_this_version(tier) is not None:
            continue
        for number in hosts:
            path, shard = paths.region_path(spec, tier, number), spec.shard_of(tier, number)
            label = tier.name if tier.shared or number == 0 else f"{tier.name} (host {number})"
            before = found.get(path)
            shards = (*before.shards, shard) if before else (shard,)
            first = before.host if before else number
            found[path] = RegionTarget(label, tier.name, path, first, shards)
    return list(found.values())
