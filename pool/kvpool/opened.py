"""How a process has opened a pool's tiers, and how they follow the manifest of the pool that runs."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from kvpool.errors import KvpoolError, MediumUnavailable
from kvpool.paths import default_host, host_path, manifest_path, pool_names, region_path
from kvpool.region import Region, Role
from kvpool.spec import PoolSpec, TierSpec
from kvpool.tiers.base import Tier
from kvpool.tiers.mapped import MappedTier

log = logging.getLogger("kvpool.pool")

_MAPPED = ("DRAM", "CXL")
_LOOK_S = 1.0
_RETRY_S = 5.0  # after a manifest that could not be followed

# What tells one version of a file from another.
_Stamp = tuple[int, int, int] | None


def spec_of(target: str | Path) -> PoolSpec:
    """The manifest at a path, or of a pool that runs on this machine.

    Raises: ManifestError, MediumUnavailable for a pool that is not here.
    """
    path = Path(target)
    if path.suffix in (".yaml", ".yml", ".json") or path.is_file():
        return PoolSpec.from_file(path)
    kept = manifest_path(str(target))
    if not kept.is_file():
        running = ", ".join(pool_names()) or "none"
        raise MediumUnavailable(
            f"pool {target}: no pool of this name on this machine (there are: {running}). "
            "Start it with 'kvpool up -f pool.yaml', or give the path of its manifest."
        )
    return PoolSpec.from_file(kept)


class Opened:
    """The role and the host number as which a process uses a pool.

    Threads: any; one at a time looks, and nobody waits for it.
    """

    def __init__(
        self, pool: str, role: Role, host: int | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._pool = pool
        self._role = role
        self._given_host = host
        self._host = -1  # as which the tiers are open
        self._clock = clock
        self._looking = threading.Lock()
        self._stamps = self._look()
        self._due = clock() + _LOOK_S

    def open(self, spec: PoolSpec) -> list[Tier]:
        """Attach to all tiers of `spec`; optional ones that cannot be had are left out.

        Raises: MediumUnavailable (a tier that is not optional cannot be opened), RegionError.
        """
        self._host = self._host_of(spec)
        tiers: list[Tier] = []
        try:
            for tier in spec.tiers:
                tiers += self._open_tier(spec, tier)
        except BaseException:
            for opened in tiers:
                opened.close()
            raise
        return tiers

    @property
    def host(self) -> int:
        """As which the tiers are open; -1 before they are."""
        return self._host

    def follow(self, tiers: tuple[Tier, ...]) -> tuple[Tier, ...]:
        """The tiers to use from now on: `tiers`, or others when the manifest has changed.

        Whoever holds the old ones may use them to the end; the last one who lets go of a tier leaves it.
        """
        if self._clock() < self._due or not self._looking.acquire(blocking=False):
            return tiers
        try:
            self._due = self._clock() + _LOOK_S
            stamps = self._look()
            if stamps == self._stamps or stamps[0] is None:  # a pool that is down keeps its blocks
                return tiers
            try:
                after = self._changed(PoolSpec.from_file(manifest_path(self._pool)), tiers)
            except KvpoolError as error:
                log.warning("manifest_not_followed pool=%s error=%r", self._pool, str(error))
                self._due = self._clock() + _RETRY_S
                return tiers
            self._stamps = stamps
            return after
        finally:
            self._looking.release()

    def _changed(self, spec: PoolSpec, before: tuple[Tier, ...]) -> tuple[Tier, ...]:
        host = self._host_of(spec)
        kept = {tier.name: tier for tier in before} if host == self._host else {}
        self._host = host
        after: list[Tier] = []
        for tier in spec.tiers:
            old = kept.get(tier.name)
            if old is not None and self._is_same(spec, tier, old):
                after.append(old)
            else:
                after += self._open_tier(spec, tier)
        if not after:
            raise KvpoolError(f"pool {self._pool}: no tier of its manifest can be opened here")
        names = ",".join(tier.name for tier in after)
        if [*before] != after:
            log.info("manifest_followed pool=%s host=%d tiers=%s", self._pool, host, names)
        return tuple(after)

    def _is_same(self, spec: PoolSpec, tier: TierSpec, old: Tier) -> bool:
        """Whether the region is still the one that is open, and was not removed and made again."""
        path = region_path(spec, tier, self._host)
        if str(path) != old.path or not isinstance(old, MappedTier):
            return False
        try:
            return Region.inspect(path).uuid == old.region.info.uuid
        except KvpoolError:
            return False

    def _open_tier(self, spec: PoolSpec, tier: TierSpec) -> Sequence[Tier]:
        try:
            if tier.medium not in _MAPPED:
                raise MediumUnavailable(f"tier {tier.name}: medium {tier.medium} is not in this version")
            path = region_path(spec, tier, self._host)
            region = Region.attach(path, host=spec.shard_of(tier, self._host), role=self._role)
        except KvpoolError as error:
            if not tier.optional:
                raise
            log.warning("tier_skipped pool=%s tier=%s reason=%s", spec.name, tier.name, error)
            return []
        return [MappedTier(tier.name, tier.medium, tier.shared, region)]

    def _host_of(self, spec: PoolSpec) -> int:
        host = default_host(spec.name) if self._given_host is None else self._given_host
        if not 0 <= host < spec.hosts:
            raise KvpoolError(
                f"pool {spec.name}: host {host} does not exist; the manifest has spec.hosts: {spec.hosts}. "
                f"Set KVPOOL_HOST to 0..{spec.hosts - 1}."
            )
        return host

    def _look(self) -> tuple[_Stamp, _Stamp]:
        return _stamp(manifest_path(self._pool)), _stamp(host_path(self._pool))


def _stamp(path: Path) -> _Stamp:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size
