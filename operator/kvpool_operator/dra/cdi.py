"""CDI files: what a container that uses a claim is given, one file for each claim."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvpool_operator.dra.allocation import UID
from kvpool_operator.names import DRIVER

CDI_VERSION = "0.7.0"  # the first with additionalGids
KIND = f"{DRIVER}/claim"
_PREFIX = f"{DRIVER}-claim_"


@dataclass(frozen=True, slots=True)
class Mount:
    """A file or folder of the node in the container."""

    host_path: str
    container_path: str
    read_only: bool = False


@dataclass(frozen=True, slots=True)
class Node:
    """A character device of the node in the container."""

    host_path: str
    container_path: str
    read_only: bool = False


@dataclass(frozen=True, slots=True)
class Given:
    """Everything that a claim gives to a container."""

    mounts: tuple[Mount, ...] = ()
    nodes: tuple[Node, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    group_id: int | None = None


def device_name(uid: str) -> str:
    """The CDI device of a claim: the same on every node."""
    return f"{KIND}={uid}"


def spec(uid: str, given: Given) -> dict[str, Any]:
    """The CDI file of a claim. Pure."""
    edits: dict[str, Any] = {"env": [f"{name}={value}" for name, value in given.environment]}
    if given.mounts:
        edits["mounts"] = [
            {
                "hostPath": mount.host_path,
                "containerPath": mount.container_path,
                "options": ["ro" if mount.read_only else "rw", "rbind", "rprivate", "nosuid", "nodev"],
            }
            for mount in given.mounts
        ]
    if given.nodes:
        edits["deviceNodes"] = [
            {
                "hostPath": node.host_path,
                "path": node.container_path,
                "type": "c",
                "permissions": "r" if node.read_only else "rw",
                "fileMode": 0o440 if node.read_only else 0o660,
                **({"gid": given.group_id} if given.group_id is not None else {}),
            }
            for node in given.nodes
        ]
    if given.group_id is not None:
        edits["additionalGids"] = [given.group_id]
    return {
        "cdiVersion": CDI_VERSION,
        "kind": KIND,
        "devices": [{"name": uid, "containerEdits": edits}],
    }


class Folder:
    """The folder in which the container runtime looks for CDI files."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def file(self, uid: str) -> Path:
        if not UID.fullmatch(uid):  # it becomes part of a path
            raise ValueError(f"{uid!r} is no uid of a claim")
        return self._path / f"{_PREFIX}{uid}.json"

    def has(self, uid: str) -> bool:
        return self.file(uid).is_file()

    def write(self, uid: str, given: Given) -> None:
        """The claim's file, completely or not at all."""
        made = self.file(uid)
        self._path.mkdir(parents=True, exist_ok=True)
        # The runtime reads *.json only. One name for all: what a killed process had begun is written over,
        # and the claim's lock keeps others away.
        making = self._path / f".{_PREFIX}{uid}.making"
        try:
            with making.open("w") as file:
                json.dump(spec(uid, given), file, indent=1)
                file.flush()
                os.fsync(file.fileno())
            os.replace(making, made)
        finally:
            making.unlink(missing_ok=True)

    def remove(self, uid: str) -> None:
        self.file(uid).unlink(missing_ok=True)

    def uids(self) -> set[str]:
        """The claims that have a file."""
        names = (path.name for path in self._path.glob(f"{_PREFIX}*.json"))
        found = {name.removeprefix(_PREFIX).removesuffix(".json") for name in names}
        return {uid for uid in found if UID.fullmatch(uid)}

    def unfinished(self) -> Iterable[Path]:
        """What a killed process had begun to write."""
        return self._path.glob(f".{_PREFIX}*")
