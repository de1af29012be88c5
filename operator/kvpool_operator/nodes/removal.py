"""Removing regions from a node: its own at once, those that several nodes share by the last of them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

from kvpool.errors import KvpoolError, MediumUnavailable
from kvpool.paths import region_path
from kvpool.provision import real_regions
from kvpool.provision.plan import in_this_version
from kvpool.provision.remove import remove
from kvpool.region import Region
from kvpool.spec import PoolSpec, TierSpec
from kvpool_operator.nodes import folder

log = logging.getLogger("kvpool.node")

LOOK_S = 0.5
# A host that beats once a second and has not for so long is gone; what it left attached does not count.
GONE_S = 10.0


def remove_tier(before: PoolSpec, tier: TierSpec, host: int, after: PoolSpec) -> None:
    """Remove the region of a tier that the manifest has no more, unless other nodes use it.

    Raises:  KvpoolError when it cannot be removed.
    """
    if in_this_version(tier) is not None:
        return
    path = region_path(before, tier, host)
    if path in [region_path(after, t, host) for t in after.tiers if in_this_version(t) is None]:
        return  # another name for the same region
    if tier.shared and other_hosts(path, host):
        log.info(
            "region_kept tier=%s path=%s; other nodes use it, and the last of them removes it",
            tier.name,
            path,
        )
        return
    for gone in remove([path], real_regions().inspect):
        log.info("removed tier=%s path=%s", tier.name, gone)


def remove_pool(pool: str, spec: PoolSpec, host: int, patient: Callable[[float], bool]) -> list[Path]:
    """Remove this node's regions and all of the pool's folder; returns the regions.

    A shared region goes with the last node that leaves it: each looks after it has left, so the last one
    sees nobody. Hosts that are silent are waited for, then they count as gone. `patient` waits a moment, and
    is False when there is something else to do.

    Raises:  KvpoolError when something cannot be removed.
    """
    own: list[Path] = []
    shared: list[Path] = []
    for tier in spec.tiers:
        if in_this_version(tier) is None:
            (shared if spec.shards(tier) > 1 else own).append(region_path(spec, tier, host))
    removed = remove(own, real_regions().inspect)
    for path in shared:
        if not _others_stay(path, host, patient):
            removed += remove([path], real_regions().inspect)
    folder.empty(pool)
    return removed


def _others_stay(path: Path, host: int, patient: Callable[[float], bool]) -> bool:
    """Whether a host that lives uses the region; it will be the one that removes it."""
    beats: dict[int, int] = {}
    deadline = time.monotonic() + GONE_S
    while True:
        others = other_hosts(path, host)
        if not others:
            return False
        if any(other in beats and beats[other] != beat for other, beat in others.items()):
            return True
        beats |= others
        if time.monotonic() >= deadline:
            log.warning("hosts_gone path=%s hosts=%s; they count no more", path, sorted(others))
            return False
        if not patient(LOOK_S):
            raise MediumUnavailable(f"{path}: whether other nodes use it is not known yet.")


def other_hosts(path: Path, host: int) -> dict[int, int]:
    """The heartbeat of each other host with a process that is attached, or died without a goodbye."""
    try:
        with Region.open_read_only(path) as region:
            hosts = {p.host for p in region.participants() if p.host != host}
            return {other: region.heartbeat_of(other) for other in hosts}
    except KvpoolError:
        return {}  # no region any more
