"""Giving a pool's blocks up: its region files are deleted, its devices wiped."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable
from pathlib import Path

from kvpool.errors import MediumUnavailable, RegionError
from kvpool.paths import is_device_path, region_path
from kvpool.provision.apply import unfinished
from kvpool.provision.observe import BLANK_BYTES, Inspect, look_at
from kvpool.provision.plan import in_this_version
from kvpool.spec import PoolSpec


def region_paths(spec: PoolSpec, hosts: Iterable[int]) -> list[Path]:
    """The paths of all regions that `hosts` use, each once."""
    usable = [tier for tier in spec.tiers if in_this_version(tier) is None]
    return list(dict.fromkeys(region_path(spec, tier, host) for tier in usable for host in hosts))


def remove(paths: Iterable[Path], inspect: Inspect) -> list[Path]:
    """Remove the regions at `paths` with all their blocks; what is missing already is passed over.

    Raises:  RegionError for other data than a region, MediumUnavailable when it cannot be removed. Everything
             is looked at before the first one is removed.
    """
    present = [path for path in paths if _is_ours(path, inspect)]
    for path in present:
        unfinished(path).unlink(missing_ok=True)
    for path in present:
        try:
            if path.is_file() and not is_device_path(path):
                path.unlink()
            else:
                _wipe(path)
        except OSError as error:
            raise MediumUnavailable(f"{path}: cannot be removed: {error.strerror}.") from None
    return present


def _is_ours(path: Path, inspect: Inspect) -> bool:
    """Whether there is a region at `path`, or an empty file that was to become one."""
    found = look_at(path, inspect)
    if found.kind not in ("file", "device"):
        return False
    if not found.readable or not found.writable:
        raise MediumUnavailable(f"{path}: no permission to remove it. Nothing was removed.")
    if found.region is None and not found.blank and not found.looks_like_region:
        raise RegionError(
            f"{path} holds data that is not a kvpool region. Nothing was removed. "
            "Delete it by hand if nobody needs it."
        )
    return found.kind == "file" or not found.blank


def _wipe(device: Path) -> None:
    """Zero the head of a device: both superblocks go, and the device is blank for the next pool."""
    fd = os.open(device, os.O_RDWR | os.O_CLOEXEC)
    try:
        with mmap.mmap(fd, BLANK_BYTES, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE) as mapped:
            mapped[:] = bytes(BLANK_BYTES)
    finally:
        os.close(fd)
