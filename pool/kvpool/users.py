"""Who uses the regions of a pool on this machine: pools by their kept manifests, processes by their locks."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from kvpool import paths
from kvpool.daemon.last_report import last_report
from kvpool.daemon.lock import holder
from kvpool.errors import KvpoolError, RegionBusyError
from kvpool.provision.plan import in_this_version
from kvpool.regions_here import hosts_here, regions_of
from kvpool.report import ParticipantInfo
from kvpool.spec import PoolSpec


@dataclass(frozen=True, slots=True)
class User:
    """A process that is attached to regions of a pool."""

    pid: int
    role: str
    tiers: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.role} process {self.pid} (tiers {', '.join(self.tiers)})"


def users_of(spec: PoolSpec) -> list[User]:
    """The processes of this machine that are attached to the pool's regions, without the pool's daemons."""
    daemons = _daemons(spec)
    users: dict[tuple[int, str], User] = {}
    for region in regions_of(spec):
        for process in _attached(region.path):
            user = users.setdefault((process.pid, process.role), User(process.pid, process.role))
            if region.tier is not None and region.tier not in user.tiers:
                user.tiers.append(region.tier)
    daemons |= _daemons(spec)  # one may have started, or ended, while we looked
    return [user for user in users.values() if user.role != "daemon" or not _is_one_of(user.pid, daemons)]


def refuse_strangers(spec: PoolSpec, host: int) -> None:
    """Refuse regions that another pool has, by its manifest or by its processes.

    Raises:  RegionBusyError, about the first such region that `host` is to use. Shards of other hosts do
             not count: their daemons may keep their locks in other runtime directories.
    """
    known = paths.manifest_path(spec.name).exists()
    for index, tier in enumerate(spec.tiers):
        if in_this_version(tier) is not None:
            continue
        path, way_out = paths.region_path(spec, tier, host), f"write another spec.tiers[{index}].source.path"
        name = f'tier "{tier.name}": region {path}'
        other = _owner(spec, path)
        if other is not None:
            pool, its_tier = other
            raise RegionBusyError(
                f'{name} is pool {pool}\'s (tier "{its_tier}"). Nothing was changed. {way_out.capitalize()}, '
                f"or give up that pool's blocks first with 'kvpool down {pool} --delete'."
            )
        daemons = _daemons(spec)
        attached = [p for p in _attached(path) if p.host == spec.shard_of(tier, host)]
        daemons |= _daemons(spec)
        strangers = [
            f"{p.role} process {p.pid}"
            for p in attached
            # Engines of a pool that was up here before may have stayed.
            if (p.role == "daemon" and not _is_one_of(p.pid, daemons)) or (p.role == "engine" and not known)
        ]
        if strangers:
            raise RegionBusyError(
                f"{name} is in use by {', '.join(strangers)}, which is not of this pool (as "
                f"{paths.runtime_dir()} knows it). Nothing was changed. Stop it first, or {way_out}."
            )


def serves_another(spec: PoolSpec, host: int, pid: int, skipped: Collection[str]) -> bool:
    """Whether the daemon `pid` of `host` is not attached to the regions that are there now.

    Their files were removed or replaced under it. A daemon that still starts does not count.
    """
    if pid == 0 or not _has_reported(spec.name, host, pid):
        return False
    tiers = [tier for tier in spec.tiers if in_this_version(tier) is None and tier.name not in skipped]
    regions = [paths.region_path(spec, tier, host) for tier in tiers]
    return any(pid not in [process.pid for process in _attached(path)] for path in regions)


def _has_reported(name: str, host: int, pid: int) -> bool:
    report = last_report(name, host)
    return report is not None and report.get("pid") == pid


def _owner(spec: PoolSpec, path: Path) -> tuple[str, str] | None:
    """Another pool whose manifest is kept here, and its tier, that has its blocks at `path`."""
    for name in paths.pool_names():
        if name == spec.name:
            continue
        try:
            other = PoolSpec.from_file(paths.manifest_path(name))
            # Hosts that are not here have no files here.
            regions = {
                paths.region_path(other, tier, host): tier.name
                for tier in other.tiers
                if in_this_version(tier) is None
                for host in range(other.hosts)
            }
        except KvpoolError:
            continue  # of another version, or another user's: its daemon's locks are looked at all the same
        for theirs, tier_name in regions.items():
            try:
                if os.path.samefile(theirs, path):
                    return name, tier_name
            except OSError:
                if os.path.realpath(theirs) == os.path.realpath(path) and _daemons(other) - {
                    None,
                    os.getpid(),
                }:
                    return name, tier_name  # the file was removed under a daemon that runs
    return None


def _daemons(spec: PoolSpec) -> set[int | None]:
    """The pool's daemons on this machine; 0: one of another container. And this process may be one."""
    return {holder(paths.daemon_lock_path(spec.name, host)) for host in hosts_here(spec)} | {os.getpid()}


def _is_one_of(pid: int, daemons: set[int | None]) -> bool:
    return pid in daemons or 0 in daemons  # what a process of another container calls itself is not known


def _attached(path: Path) -> list[ParticipantInfo]:
    """The living processes that are attached to the region at `path`."""
    from kvpool.region import Region

    if not path.exists():
        return []
    try:
        with Region.open_read_only(path) as region:
            return [process for process in region.participants() if process.alive]
    except KvpoolError:
        return []  # damaged, or of another version: whoever makes or removes a file looks at its locks
