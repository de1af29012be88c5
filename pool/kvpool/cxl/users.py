"""Who uses the bytes of a composed region: what lies in them, and which processes map them."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from uuid import UUID

from kvpool.cxl.backend import ComposeError, RegionInUse
from kvpool.errors import FormatVersionError, KvpoolError, MediumUnavailable, RegionBusyError, SuperblockError
from kvpool.paths import runtime_dir
from kvpool.quantity import format_quantity

_ALL = 1 << 62  # more than any device has


def kvpool_bytes(path: str) -> int:
    """How much of the device a kvpool region takes that lies in it; 0 when none does.

    Raises:  ComposeError when that cannot be told.
    """
    from kvpool.region import Region

    try:
        return Region.inspect(path).capacity_bytes
    except FormatVersionError:
        return os.stat(path).st_size or _ALL  # somebody's blocks all the same; all of it, as far as we know
    except SuperblockError:
        return 0
    except MediumUnavailable as error:
        raise ComposeError(f"whether {path} holds a kvpool region cannot be told: {error}") from None
    except KvpoolError:
        return _ALL  # a superblock that does not fit its device is one still


def refuse_mapped(path: str) -> None:
    """Raises: RegionInUse when a process of this machine maps the device or uses its kvpool region."""
    pids = mapping_pids(path)
    if pids:
        listed = ", ".join(map(str, pids))
        raise RegionInUse(
            f"{path} is mapped by process {listed}. Nothing was changed. Stop what uses it first: "
            "'kvpool down NAME', and the engines of the pool."
        )
    refuse_participants(path)


def refuse_participants(path: str) -> None:
    """Raises: RegionInUse when a process of this machine is attached to the kvpool region in the device.

    The locks of processes are seen from any container; their mappings are not.
    """
    from kvpool.region import default_lock_path, ensure_unused

    try:
        lock = Path(default_lock_path(path))
        # Processes in pods have the lock of a device in their pool's own folder.
        of_pools = runtime_dir().glob(f"*/locks/{lock.name}") if lock.parent.name == "locks" else ()
        for used in {lock, *of_pools}:
            ensure_unused(path, lock_path=used)
    except RegionBusyError as error:
        raise RegionInUse(str(error)) from None
    except MediumUnavailable as error:
        raise ComposeError(f"whether somebody uses {path} cannot be told: {error}") from None


def refuse_blocks(uuid: UUID, path: str) -> None:
    """Raises: RegionInUse when a kvpool region lies in the device."""
    if kvpool_bytes(path):
        raise RegionInUse(
            f"region {uuid}: {path} holds a kvpool region, maybe with blocks. Nothing was changed. "
            "Add --with-blocks to give them up."
        )


def refuse_cut(uuid: UUID, path: str, size_bytes: int) -> None:
    """Raises: RegionInUse when a kvpool region in the device reaches beyond `size_bytes`."""
    taken = kvpool_bytes(path)
    if taken > size_bytes:
        raise RegionInUse(
            f"region {uuid}: the kvpool region in {path} reaches beyond {format_quantity(size_bytes)}. "
            "Nothing was changed. Destroy it, or keep at least its size."
        )


def mapping_pids(path: str) -> list[int]:
    """The processes, as far as this one may look, that map the file or device at `path`."""
    try:
        wanted = os.stat(path)
    except OSError:
        return []
    device = wanted.st_rdev if stat.S_ISCHR(wanted.st_mode) else None
    found = []
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            lines = maps.read_text(errors="replace").splitlines()
        except OSError:
            continue  # ended, or not ours to look at
        if any(_is_mapping(line, wanted, device) for line in lines):
            found.append(int(maps.parent.name))
    return sorted(found)


def _is_mapping(line: str, wanted: os.stat_result, device: int | None) -> bool:
    fields = line.split(maxsplit=5)
    if len(fields) < 6 or fields[4] != str(wanted.st_ino):
        return False
    if device is not None:  # a device's node may have other names; its inode's number is compared above
        return fields[5].startswith("/dev/")
    major, _, minor = fields[3].partition(":")
    return os.makedev(int(major, 16), int(minor, 16)) == wanted.st_dev
