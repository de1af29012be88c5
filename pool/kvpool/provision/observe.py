"""What is at a path, for `plan`: reads only, changes nothing."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import re
import resource
import stat
from collections.abc import Callable
from pathlib import Path

from kvpool.errors import KvpoolError, MediumUnavailable
from kvpool.medium import device_align
from kvpool.paths import is_device_path, region_path
from kvpool.provision.plan import ExistingRegion, Found, in_this_version
from kvpool.spec import PoolSpec

BLANK_BYTES = 4 << 20  # both superblock copies lie in here, and the magic of whatever else it could be
MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs", "devtmpfs")
HUGE_PAGES = "hugetlbfs"
FILE_BYTES_MAX = 15 << 40  # every file system in use takes files of this size
ROOM_TIMES = 4  # how much a tier may grow without losing its blocks
MAPPABLE_BYTES = 2 << 20  # of a DAX device that does not say its alignment

Inspect = Callable[[Path], ExistingRegion]


def observe(spec: PoolSpec, host: int, inspect: Inspect) -> dict[str, Found]:
    """What is at the path of each tier that is in this version. `inspect` reads a region's superblock."""
    return {
        tier.name: look_at(region_path(spec, tier, host), inspect)
        for tier in spec.tiers
        if in_this_version(tier) is None
    }


def look_at(path: Path, inspect: Inspect) -> Found:
    """What is at `path`."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return _missing(path)
    except PermissionError:
        return Found("missing", writable=False)
    except NotADirectoryError:
        return Found("no-folder")
    except OSError:
        return Found("other")
    if stat.S_ISDIR(status.st_mode):
        return Found("folder")
    if stat.S_ISREG(status.st_mode):
        # What a cluster's driver hands out at a device's place is used as it is, whatever it is made of.
        kind, size = "device" if is_device_path(path) else "file", status.st_size
    elif stat.S_ISCHR(status.st_mode) and (device_bytes := _device_bytes(status.st_rdev)):
        kind, size = "device", device_bytes
    else:
        return Found("other")
    medium = _medium(path)
    readable, writable = (os.access(path, mode, effective_ids=True) for mode in (os.R_OK, os.W_OK))
    first, region = b"", None
    problem: KvpoolError | None = None
    if readable:
        try:
            first = _first_bytes(path, size)
        except OSError as error:
            problem = MediumUnavailable(f"{path}: cannot be read: {error.strerror}. Nothing was changed.")
    blank = problem is None and not first.strip(b"\0")
    if readable and not blank and problem is None:
        region, problem = _region(path, inspect)
    return Found(
        "file" if kind == "file" else "device",
        size_bytes=size,
        allocated_bytes=min(status.st_blocks * 512, size) if kind == "file" else 0,
        free_bytes=medium.free_bytes,
        medium_bytes=medium.bytes,
        medium_name=medium.name if kind == "file" else "device",
        medium_id=medium.id,
        readable=readable,
        writable=writable,
        read_only=medium.read_only and kind == "file",
        huge_page_bytes=medium.huge_page_bytes,
        blank=blank,
        first_bytes=first[:16],
        region=region,
        problem=problem,
    )


def room_bytes(path: Path, capacity_bytes: int) -> int:
    """What a region made at `path` should be laid out for, so that it can grow later.

    A file may have holes and costs nothing for it, a device has its size; huge pages are promised to a
    mapping as a whole.
    """
    wanted = capacity_bytes * ROOM_TIMES
    try:
        status = path.stat()
    except OSError:
        status = None
    if status is not None and (stat.S_ISCHR(status.st_mode) or is_device_path(path)):
        whole = status.st_size if stat.S_ISREG(status.st_mode) else _device_bytes(status.st_rdev)
        return max(capacity_bytes, min(wanted, whole))
    folder = path if status is not None else path.parent
    if not folder.exists() or _medium(folder).huge_page_bytes:
        return capacity_bytes
    soft, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    most = FILE_BYTES_MAX if soft == resource.RLIM_INFINITY else min(soft, FILE_BYTES_MAX)
    return max(capacity_bytes, min(wanted, most))


def free_bytes(path: Path) -> int:
    """What the medium of the file at `path` can still give."""
    return _medium(path).free_bytes


def _missing(path: Path) -> Found:
    if not path.parent.is_dir():
        return Found("no-folder")
    medium = _medium(path.parent)
    return Found(
        "missing",
        free_bytes=medium.free_bytes,
        medium_bytes=medium.bytes,
        medium_name=medium.name,
        medium_id=medium.id,
        writable=os.access(path.parent, os.W_OK | os.X_OK, effective_ids=True),
        read_only=medium.read_only,
        huge_page_bytes=medium.huge_page_bytes,
    )


def _region(path: Path, inspect: Inspect) -> tuple[ExistingRegion | None, KvpoolError | None]:
    try:
        return inspect(path), None
    except KvpoolError as error:
        return None, error


def _first_bytes(path: Path, size: int) -> bytes:
    """What the file or device begins with. Raises: OSError when it cannot be read."""
    length = min(BLANK_BYTES, size)
    if length == 0:
        return b""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        page = mmap.PAGESIZE
        if stat.S_ISCHR(os.fstat(fd).st_mode):  # a DAX device can only be mapped, in whole pages of its own
            page = device_align(str(path)) or MAPPABLE_BYTES
        else:
            with contextlib.suppress(OSError):  # perhaps it can be mapped all the same
                return os.pread(fd, length, 0)
        whole = -(-length // page) * page
        if whole > size:
            raise OSError(errno.EIO, "cannot be mapped: it is smaller than one of its pages")
        with mmap.mmap(fd, whole, mmap.MAP_SHARED, mmap.PROT_READ) as mapped:
            return mapped[:length]
    finally:
        os.close(fd)


def _device_bytes(device: int) -> int:
    """The size of a DAX device, 0 for any other character device."""
    try:
        return int(Path(f"/sys/dev/char/{os.major(device)}:{os.minor(device)}/size").read_text())
    except (OSError, ValueError):
        return 0


class _Medium:
    """The file system that a path lies on."""

    def __init__(self, path: Path) -> None:
        self.name = file_system_of(path)
        self.id = str(path.stat().st_dev)
        self.huge_page_bytes = 0
        status = os.statvfs(path)
        self.bytes = status.f_blocks * status.f_frsize
        self.free_bytes = status.f_bavail * status.f_frsize
        self.read_only = bool(status.f_flag & os.ST_RDONLY)
        if self.name == HUGE_PAGES:
            self.id = "huge pages"
            self.huge_page_bytes = status.f_bsize
            self.bytes, self.free_bytes = huge_pages_bytes(status.f_bsize)
        if self.name in MEMORY_FILE_SYSTEMS:
            self.id = "memory"
            # A memory file system promises half of the memory, whether or not that much is left: filling it
            # beyond what is left starts the out-of-memory killer and gives no error message.
            available = memory_available_bytes()
            if available is not None and available < self.free_bytes:
                self.free_bytes = available
                self.name = "memory"


def _medium(path: Path) -> _Medium:
    return _Medium(path)


def file_system_of(path: Path, mountinfo: str | None = None) -> str:
    """The type of the file system at `path`, like tmpfs."""
    text = Path("/proc/self/mountinfo").read_text() if mountinfo is None else mountinfo
    target, best, kind = str(path.resolve()), -1, "unknown"
    for line in text.splitlines():
        fields, _, after = line.partition(" - ")
        mount = re.sub(
            r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), fields.split()[4]
        )  # a blank is \040
        below = target == mount or target.startswith(mount.rstrip("/") + "/")
        if below and len(mount) >= best:
            best, kind = len(mount), after.split()[0]
    return kind


def huge_pages_bytes(page_bytes: int) -> tuple[int, int]:
    """Bytes in all huge pages of that size, and in the free ones. The file system itself may say 0."""
    folder = Path(f"/sys/kernel/mm/hugepages/hugepages-{page_bytes // 1024}kB")
    try:
        total, free, promised = (
            int((folder / f"{name}_hugepages").read_text()) for name in ("nr", "free", "resv")
        )
    except (OSError, ValueError):
        return 0, 0
    return total * page_bytes, (free - promised) * page_bytes


def memory_available_bytes() -> int | None:
    """Memory that this process could still fill, by the kernel's estimate and its control group's limit."""
    known = [amount for amount in (_memory_of_machine(), _memory_of_group()) if amount is not None]
    return min(known) if known else None


def _memory_of_machine() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None


def _memory_of_group() -> int | None:
    """What the memory limit of the control group leaves; page cache that can be dropped counts as free."""
    try:
        group = next(
            line.rpartition("::")[2]
            for line in Path("/proc/self/cgroup").read_text().splitlines()
            if "::" in line
        )
        folder = Path("/sys/fs/cgroup") / group.lstrip("/")
        if not (folder / "memory.max").exists():
            folder = Path("/sys/fs/cgroup")  # inside a container the group is mounted as the root
        limit = int((folder / "memory.max").read_text())
        used = int((folder / "memory.current").read_text())
        counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return max(0, limit - used + int(counts.get("inactive_file", 0)))
    except (OSError, ValueError, StopIteration):
        return None  # no limit ("max"), or another kind of system
