"""Where a pool's files lie on this machine."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from kvpool.errors import KvpoolError, MediumUnavailable
from kvpool.quantity import shown
from kvpool.rules import NAME_MAX, NAME_PATTERN
from kvpool.spec import PoolSpec, TierSpec

MANIFEST_NAME = "pool.yaml"
HOST_NAME = "host"
RUNTIME_ENV = "KVPOOL_RUNTIME_DIR"
HOST_ENV = "KVPOOL_HOST"
POOL_ENV = "KVPOOL_POOL"  # in pods: the one pool that this process is about


def runtime_dir() -> Path:
    """The directory with a folder for each pool: manifest, locks, reports and logs. No blocks."""
    given = os.environ.get(RUNTIME_ENV)
    if given:
        return Path(given).absolute()
    if os.geteuid() == 0:
        return Path("/run/kvpool")
    session = os.environ.get("XDG_RUNTIME_DIR")
    if session:
        return Path(session) / "kvpool"
    return Path(f"/tmp/kvpool-{os.geteuid()}")


def pool_dir(name: str) -> Path:
    """The folder of the pool `name`."""
    # The name comes from a command line as well: it must not leave the runtime directory.
    if not re.fullmatch(NAME_PATTERN.strip("^$"), name) or len(name) > NAME_MAX:
        raise KvpoolError(f"{shown(name)} is not the name of a pool. Expected a name like prefix-pool.")
    return runtime_dir() / name


def manifest_path(name: str) -> Path:
    """The manifest that the pool `name` was started with."""
    return pool_dir(name) / MANIFEST_NAME


def report_path(name: str, host: int) -> Path:
    """What the daemon of `host` last reported (JSON)."""
    return pool_dir(name) / f"report.h{host}.json"


def daemon_lock_path(name: str, host: int) -> Path:
    """The file that the daemon of `host` keeps locked while it lives."""
    return pool_dir(name) / f"daemon.h{host}.lock"


def daemon_log_path(name: str, host: int) -> Path:
    """What the daemon of `host` logs when it runs in the background."""
    return pool_dir(name) / f"daemon.h{host}.log"


def engines_path(name: str) -> Path:
    """The folder in which each engine process of the pool `name` counts what it does."""
    return pool_dir(name) / "engines"


def api_lock_path() -> Path:
    """The file that the status API of this machine's pools keeps locked while it lives."""
    return runtime_dir() / "api.lock"


def api_address_path() -> Path:
    """Where the status API of this machine's pools says its URL."""
    return runtime_dir() / "api.url"


def api_log_path() -> Path:
    """What the status API of this machine's pools logs when it runs in the background."""
    return runtime_dir() / "api.log"


def provision_lock_path(name: str) -> Path:
    """The file that is locked while regions of the pool are made or removed."""
    return pool_dir(name) / "provision.lock"


def pool_names() -> list[str]:
    """The pools whose manifest is kept on this machine, running or not, sorted."""
    return sorted(path.parent.name for path in runtime_dir().glob(f"*/{MANIFEST_NAME}"))


def region_path(spec: PoolSpec, tier: TierSpec, host: int) -> Path:
    """The file or device that holds the region of `tier` for `host`.

    A shared tier has one region for all hosts. Any other tier has one for each host; since several hosts may
    live on one machine, as in tests, the file of a host above 0 ends in .h<host>. Devices keep their names,
    and so do all files where the machine was assigned its one number (see `default_host`).
    """
    path = _declared_path(spec, tier)
    if tier.shared or host == 0 or is_device_path(path) or host_path(spec.name).exists():
        return path
    return path.with_name(f"{path.name}.h{host}")


def is_device_path(path: Path) -> bool:
    """Whether `path` names a device by its place: below /dev, but not on a memory file system there."""
    parts = path.parts
    return parts[:2] == ("/", "dev") and len(parts) > 2 and parts[2] not in ("shm", "hugepages")


def _declared_path(spec: PoolSpec, tier: TierSpec) -> Path:
    if tier.source and tier.source.path:
        return Path(tier.source.path)
    if tier.medium != "DRAM":
        raise MediumUnavailable(
            f'tier "{tier.name}" of pool "{spec.name}" has no path on this machine: '
            f"{tier.medium} tiers without source.path are not in this version."
        )
    folder = "/dev/hugepages" if tier.huge_pages else "/dev/shm"
    return Path(folder) / f"kvpool.{spec.name}.{tier.name}"


def ensure_pool_dir(name: str) -> Path:
    """The folder of the pool `name`, made if it is missing.

    Raises:  MediumUnavailable when it cannot be made, or when the one below /tmp belongs to somebody else.
    """
    folder = pool_dir(name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        owner = folder.parent.lstat()
    except OSError as error:
        raise MediumUnavailable(
            f"runtime directory {folder}: {error.strerror}. Set {RUNTIME_ENV} to a directory of your own."
        ) from None
    # Anybody can make a directory below /tmp first, and then read or swap what is put into it.
    foreign = owner.st_uid != os.geteuid() or stat.S_ISLNK(owner.st_mode)
    if foreign and folder.parent == Path(f"/tmp/kvpool-{os.geteuid()}"):
        raise MediumUnavailable(
            f"runtime directory {folder.parent} belongs to user {owner.st_uid}, not to you. "
            f"Set {RUNTIME_ENV} to a directory of your own."
        )
    return folder


def host_path(name: str) -> Path:
    """The file in which the pool's daemon says which host this machine is, where somebody assigns that."""
    return pool_dir(name) / HOST_NAME


def default_host(pool: str | None = None) -> int:
    """The host number of this machine: KVPOOL_HOST, else what the daemon of `pool` wrote down, else 0."""
    given, where = os.environ.get(HOST_ENV), f"{HOST_ENV}="
    if given is None and pool is not None:
        given, where = _assigned_host(pool), f"{host_path(pool)}: "
    if given is None:
        return 0
    if not given.isdecimal() or len(given) > 4:
        raise KvpoolError(f"{where}{shown(given)} is not a host number; set it to 0, 1, ...")
    return int(given)


def _assigned_host(pool: str) -> str | None:
    path = host_path(pool)
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise KvpoolError(
            f"{path}: {error.strerror}. Set {HOST_ENV} to this machine's host number."
        ) from None
