"""The pool's folder on the node, which engines have too."""

from __future__ import annotations

import os
import shutil

from kvpool.errors import ManifestError
from kvpool.paths import host_path, manifest_path, pool_dir
from kvpool.spec import PoolSpec


def write_host(pool: str, host: int) -> None:
    """Say which host this node is, for engines: completely or not at all."""
    path = host_path(pool)
    making = path.with_name(f"{path.name}.making")
    making.write_text(f"{host}\n")
    os.replace(making, path)


def kept_manifest(pool: str) -> PoolSpec | None:
    """The manifest that is in force for engines; None when there is none that can be read."""
    path = manifest_path(pool)
    try:
        return PoolSpec.from_file(path) if path.exists() else None
    except ManifestError:
        return None  # of another version; the next one is written over it


def empty(pool: str) -> None:
    """Remove all that the folder holds. The folder itself is a mount."""
    path = pool_dir(pool)
    for entry in list(os.scandir(path)) if path.is_dir() else []:
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path, ignore_errors=True)
        else:
            os.unlink(entry.path)
