"""What a node is to do for a pool: the spec of its KVPoolNode, kept on disk for when nobody can be asked."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from kvpool.errors import KvpoolError, ManifestError
from kvpool.paths import pool_dir
from kvpool.rules import HOSTS_MAX
from kvpool.spec import PoolSpec
from kvpool_operator.assign import State

CACHE_NAME = "kvpoolnode.json"
STATES: tuple[State, ...] = get_args(State)
HOST_MAX = HOSTS_MAX - 1


@dataclass(frozen=True, slots=True)
class Adoption:
    """A shard of the shared tiers that this node is to take over, with the arbiter's epoch."""

    shard: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Assignment:
    """The spec of a KVPoolNode, checked."""

    name: str
    generation: int
    host: int
    state: State
    adopt: tuple[Adoption, ...]
    pool: PoolSpec

    @classmethod
    def from_object(cls, node: Mapping[str, Any], pool: str) -> Assignment:
        """The assignment that `node`, a KVPoolNode of the pool named `pool`, holds.

        Raises:  ManifestError with what is wrong; the operator writes these objects, so it is its mistake.
        """
        try:
            metadata, spec = node["metadata"], node["spec"]
            name = str(metadata["name"])
        except (KeyError, TypeError):
            raise ManifestError("the KVPoolNode has no metadata.name or no spec.") from None
        source = f"KVPoolNode {name}"
        if spec.get("pool") != pool:
            raise ManifestError(f"{source}: spec.pool is {spec.get('pool')!r}, this daemon serves {pool!r}.")
        host, state = spec.get("host", 0), spec.get("state", "Active")
        if isinstance(host, bool) or not isinstance(host, int) or not 0 <= host <= HOST_MAX:
            raise ManifestError(f"{source}: spec.host is {host!r}; expected a number from 0 to {HOST_MAX}.")
        if state not in STATES:
            raise ManifestError(f"{source}: spec.state is {state!r}; expected one of {', '.join(STATES)}.")
        declared = PoolSpec.from_object(spec.get("manifest"), source=f"{source}: spec.manifest")
        if declared.name != pool:
            raise ManifestError(f"{source}: spec.manifest is of pool {declared.name!r}, not of {pool!r}.")
        if host >= declared.hosts:
            raise ManifestError(f"{source}: spec.host is {host}, but the pool has {declared.hosts} host(s).")
        return cls(
            name=name,
            generation=int(metadata.get("generation") or 0),
            host=host,
            state=state,
            adopt=tuple(_adoption(source, each) for each in spec.get("adopt") or ()),
            pool=declared,
        )


def _adoption(source: str, given: Mapping[str, Any]) -> Adoption:
    shard, epoch = given.get("shard"), given.get("epoch")
    if not isinstance(shard, int) or not 0 <= shard <= HOST_MAX or not isinstance(epoch, int) or epoch < 1:
        raise ManifestError(
            f"{source}: spec.adopt has {dict(given)!r}; expected a shard, and an epoch from 1."
        )
    return Adoption(shard, epoch)


def _cache_path(pool: str) -> Path:
    return pool_dir(pool) / CACHE_NAME


def remember(pool: str, node: Mapping[str, Any]) -> None:
    """Keep the KVPoolNode for the next start, completely or not at all."""
    metadata = node.get("metadata") or {}
    kept = {
        "metadata": {
            key: metadata[key] for key in ("name", "namespace", "uid", "generation") if key in metadata
        },
        "spec": node.get("spec"),
    }
    path = _cache_path(pool)
    making = path.with_suffix(".making")
    making.write_text(json.dumps(kept) + "\n")
    os.replace(making, path)


def recall(pool: str) -> dict[str, Any] | None:
    """The KVPoolNode that was kept last; None when there is none that can be read."""
    try:
        node = json.loads(_cache_path(pool).read_text())
    except (OSError, ValueError, RecursionError, KvpoolError):
        return None
    return node if isinstance(node, dict) else None


def forget(pool: str) -> None:
    _cache_path(pool).unlink(missing_ok=True)
