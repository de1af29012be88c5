"""From a manifest to regions that exist: look, plan, then carry the plan out."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvpool.errors import MediumUnavailable
from kvpool.paths import ensure_pool_dir, manifest_path, provision_lock_path
from kvpool.provision.apply import Progress, Regions, apply, await_host_zero
from kvpool.provision.observe import observe, room_bytes
from kvpool.provision.plan import Action, Await, ExistingRegion, Keep, Shape, plan, refusals
from kvpool.spec import PoolSpec

if TYPE_CHECKING:
    from kvpool.region import Geometry

__all__ = ["Action", "Regions", "plan", "provision", "real_regions"]


class _RealRegions:
    """Regions as kvpool.region makes them. Imported late: a plan and its tests need no compiled part."""

    def inspect(self, path: Path) -> ExistingRegion:
        from kvpool.region import Region

        info = Region.inspect(path)
        shape = Shape(
            capacity_bytes=info.capacity_bytes,
            hosts=info.hosts,
            coherence="software" if info.coherence == "software" else "hardware",
            min_block_bytes=info.min_block_bytes,
            # As it was asked for: the payload of an extent is rounded up to whole pages.
            extent_bytes=info.slots_per_extent * info.min_block_bytes,
        )
        with Region.open_read_only(path) as region:
            used = region.capacity_bytes
        return ExistingRegion(info.uuid, shape, info.smallest_bytes, used)

    def check(self, path: Path, shape: Shape) -> None:
        self._geometry(path, shape).plan(path)

    def ensure_unused(self, path: Path) -> None:
        from kvpool.region import ensure_unused

        ensure_unused(path)

    def format(self, path: Path, shape: Shape, *, force: bool, progress: Callable[[int, int], None]) -> None:
        from kvpool.region import Region

        Region.format(path, self._geometry(path, shape), force=force, progress=progress)

    def _geometry(self, path: Path, shape: Shape) -> Geometry:
        from kvpool.region import Geometry

        geometry = Geometry(
            capacity_bytes=shape.capacity_bytes,
            hosts=shape.hosts,
            extent_bytes=shape.extent_bytes,
            coherence=shape.coherence,
        )
        if shape.min_block_bytes is not None:
            geometry = replace(geometry, min_block_bytes=shape.min_block_bytes)
        return geometry.with_room(path, room_bytes(path, shape.capacity_bytes))


def real_regions() -> Regions:
    return _RealRegions()


def provision(
    spec: PoolSpec,
    host: int,
    *,
    timeout_s: float,
    progress: Progress,
    waiting: Callable[[str], None],
    regions: Regions | None = None,
    grow_later: bool = False,
) -> list[Action]:
    """Make the regions of `spec` that are missing, keep those that fit; returns what was done with each tier.

    The manifest is kept in the pool's folder, where engines that name the pool find it. With `grow_later` a
    region that lacks the memory to grow is kept as it is: the daemon lets it grow once there is some.

    Raises:  KvpoolError when a tier cannot be had as declared; then nothing on any medium has changed.
    """
    used = regions or real_regions()
    deadline = time.monotonic() + timeout_s

    def planned() -> list[Action]:
        actions = plan(spec, host, observe(spec, host, used.inspect))
        return [_without_shortage(action) if grow_later else action for action in actions]

    actions = planned()
    refused = refusals(actions)
    if refused is not None:
        raise refused
    ensure_pool_dir(spec.name)
    with _only_one(provision_lock_path(spec.name)):
        # Looked at again: another start may have made the regions while this one waited for the lock.
        actions = planned()
        apply(actions, used, progress)
    if any(isinstance(action, Await) for action in actions):
        await_host_zero(actions, used, waiting, deadline)
        refused = refusals(planned())
        if refused is not None:
            raise refused
    keep_manifest(spec)
    return actions


def _without_shortage(action: Action) -> Action:
    return replace(action, shortage=None) if isinstance(action, Keep) else action


def keep_manifest(spec: PoolSpec) -> None:
    """Write the manifest into the pool's folder, completely or not at all."""
    path = manifest_path(spec.name)
    making = path.with_suffix(f".{os.getpid()}.making")
    making.write_text(spec.to_yaml())
    os.replace(making, path)


@contextmanager
def _only_one(path: Path) -> Iterator[None]:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise MediumUnavailable(
            f"{path}: {error.strerror}. Another user may have started this pool."
        ) from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
