"""What a command is about: a pool by name, a manifest, or a region by path."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from kvpool import paths
from kvpool.errors import KvpoolError, ManifestError
from kvpool.regions_here import RegionTarget, regions_of
from kvpool.spec import PoolSpec

NameArgument = Annotated[
    str | None, typer.Argument(metavar="NAME", help="The pool's name.", show_default=False)
]
TargetArgument = Annotated[
    str | None,
    typer.Argument(metavar="NAME|PATH", help="A pool's name, or the path of a region.", show_default=False),
]
FileOption = Annotated[
    str | None,
    typer.Option("--file", "-f", metavar="FILE", help="The pool's manifest; - reads it from standard input."),
]
HostOption = Annotated[
    int | None,
    typer.Option("--host", min=0, help="Host number; else KVPOOL_HOST, else 0.", show_default=False),
]


def read_manifest(file: str) -> PoolSpec:
    """The manifest in a file or on standard input. Raises: ManifestError."""
    if file != "-":
        return PoolSpec.from_file(file)
    try:
        text = sys.stdin.read()
    except UnicodeDecodeError:
        raise ManifestError("standard input: not UTF-8 text. Expected a KVPool manifest.") from None
    return PoolSpec.from_text(text, "standard input")


def one_of(name: str | None, file: str | None) -> None:
    """Raises: BadParameter unless exactly one of the two is given."""
    if (name is None) == (file is None):
        raise typer.BadParameter("give either a pool's name or -f FILE", param_hint="NAME")


def pool(name: str | None, file: str | None) -> PoolSpec:
    """The pool that a command names, with the manifest that it was started with, if it was.

    Raises:  KvpoolError for a pool that this machine does not know.
    """
    one_of(name, file)
    if file is not None:
        spec = read_manifest(file)
        kept = paths.manifest_path(spec.name)
        return PoolSpec.from_file(kept) if kept.exists() else spec
    assert name is not None
    kept = paths.manifest_path(name)
    if not kept.exists():
        known = ", ".join(paths.pool_names()) or "none"
        raise KvpoolError(
            f'no pool "{name}" on this machine (looked in {paths.runtime_dir()}; known: {known}). '
            "Start it with 'kvpool up -f FILE'."
        )
    return PoolSpec.from_file(kept)


def host_or_default(host: int | None, pool: str | None = None) -> int:
    return paths.default_host(pool) if host is None else host


def require_host(spec: PoolSpec, host: int) -> None:
    """Raises: KvpoolError when the pool has no such host."""
    if host >= spec.hosts:
        raise KvpoolError(f'host {host} is not in pool "{spec.name}" (0 to {spec.hosts - 1}).')


def regions(
    target: str | None, file: str | None, tier: str | None = None, host: int | None = None
) -> list[RegionTarget]:
    """The regions that a command names: those of a pool that are on this machine, or one by its path.

    With `host`, only those that it uses, and of them the shards that are its own.

    Raises:  KvpoolError when there is none.
    """
    if target is not None and file is None and ("/" in target or target.startswith(".")):
        path = Path(target)
        try:
            there = path.exists()
        except OSError as error:  # no permission for the folder, or too long a name
            raise KvpoolError(f"{path}: {error.strerror}.") from None
        if not there:
            raise KvpoolError(f"{path}: no such file or device.")
        number = paths.default_host() if host is None else host
        return [RegionTarget(str(path), None, path, number, (number,))]
    spec = pool(target, file)
    if host is not None:
        require_host(spec, host)
    found = [region for region in regions_of(spec, host) if tier in (None, region.tier)]
    if tier is not None and not found:
        names = ", ".join(t.name for t in spec.tiers)
        raise KvpoolError(f'pool "{spec.name}" has no tier "{tier}" here; its tiers are {names}.')
    present = [region for region in found if region.path.exists()]
    if not present:
        if host is not None:
            raise KvpoolError(f'host {host} of pool "{spec.name}" has no region on this machine.')
        raise KvpoolError(
            f"pool \"{spec.name}\" has no region on this machine. Start it with 'kvpool up -f FILE'."
        )
    return present
