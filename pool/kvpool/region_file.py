"""The file or device below a region: its space, and the locks of those who use it."""

from __future__ import annotations

import errno
import os
import resource
import stat
from collections.abc import Callable, Sequence
from pathlib import Path

from kvpool.errors import MediumUnavailable
from kvpool.paths import POOL_ENV, RUNTIME_ENV

Progress = Callable[[int, int], None]

# Small enough that progress is seen, large enough that the calls do not count.
_ALLOCATE_STEP_BYTES = 64 << 20


def default_lock_path(path: str | Path) -> str:
    """The node-local file whose locks say which participants live: its own; for a device, another."""
    path = os.path.realpath(path)
    try:
        device = os.stat(path)  # once: the file may be renamed at any moment
    except (OSError, ValueError):
        return path
    if not stat.S_ISCHR(device.st_mode):
        return path
    # The same for all users of the machine, or they would take each other for dead.
    given = os.environ.get(RUNTIME_ENV)
    folder = Path(given or "/run/kvpool")
    # In pods the pool's own folder is all that the daemon and its engines share of it.
    of_pool = folder / os.environ.get(POOL_ENV, "")
    lock = (of_pool if of_pool.is_dir() else folder) / "locks" / path.strip("/").replace("/", "-")
    if not lock.exists():
        try:
            lock.parent.mkdir(parents=True, exist_ok=True)
            lock.touch()
            os.chown(lock, -1, device.st_gid)  # who may use the device may lock
            os.chmod(lock, stat.S_IMODE(device.st_mode) & 0o666)
        except OSError as e:
            raise MediumUnavailable(
                f"region {path}: its lock file {lock} cannot be made: {e.strerror}. Start the pool's daemon "
                f"first, as a user who may write there, or set {RUNTIME_ENV} to one directory for all users."
            ) from None
    return str(lock)


def os_error(path: str, e: OSError, doing: str) -> MediumUnavailable:
    hints = {
        errno.ENOSPC: "Free space there, or lower the tier's capacity.",
        errno.EACCES: "Give this user permission to write there, or choose another path.",
        errno.EPERM: "Give this user permission to write there, or choose another path.",
        errno.EROFS: "The filesystem is read-only; mount it writable or choose another path.",
        errno.ENOENT: "Create the folder first, or correct the path.",
        errno.EFBIG: "The filesystem or a limit (ulimit -f) does not allow files of this size.",
    }
    return MediumUnavailable(
        f"region {path}: cannot {doing}: {e.strerror}. Nothing was changed. "
        f"{hints.get(e.errno or 0, 'Check the medium.')}"
    )


def allocate(
    path: str, size_bytes: int, filled: Sequence[tuple[int, int]], progress: Progress | None
) -> None:
    """Makes a new file of zeros with memory behind the ranges `filled` (first byte, length).

    Leaves no file behind when it fails.
    """
    total_bytes = sum(length for _, length in filled)
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o660)
    except OSError as e:
        raise os_error(path, e, "be created") from e
    try:
        os.ftruncate(fd, size_bytes)
        done = 0
        for first, length in filled:
            for at in range(first, first + length, _ALLOCATE_STEP_BYTES):
                step = min(_ALLOCATE_STEP_BYTES, first + length - at)
                os.posix_fallocate(fd, at, step)
                done += step
                if progress is not None:
                    progress(done, total_bytes)
    except OSError as e:
        os.unlink(path)
        raise os_error(path, e, f"get {total_bytes} bytes") from e
    except BaseException:
        os.unlink(path)
        raise
    finally:
        os.close(fd)


def require_space(path: str, capacity_bytes: int, preallocate: bool, reuse: int) -> None:
    need_bytes = capacity_bytes if preallocate else 0
    parent = os.path.dirname(path) or "."
    try:
        fs = os.statvfs(parent)
    except OSError as e:
        raise os_error(path, e, "be created") from e
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Found out now, and not when an old file is gone.
    if limit != resource.RLIM_INFINITY and capacity_bytes > limit:
        raise os_error(path, OSError(errno.EFBIG, os.strerror(errno.EFBIG)), f"get {capacity_bytes} bytes")
    if fs.f_blocks == 0:
        return  # hugetlbfs without a limit of its own says 0; allocating finds out
    free = fs.f_bavail * fs.f_frsize + reuse
    if need_bytes > free:
        raise MediumUnavailable(
            f"region {path}: no space left: {need_bytes} bytes are needed and {free} are free in "
            f"{parent}. Nothing was changed. Free space there, or lower the tier's capacity."
        )
