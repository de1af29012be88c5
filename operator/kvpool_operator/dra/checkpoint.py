"""What was prepared on this node: one small file for each claim, so that it survives every restart.

Two instances of the plugin work on one folder during a rolling update. They keep each other away from a claim
by a lock on one byte of one file, which the kernel drops when a process dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import zlib
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from kvpool_operator.dra.allocation import UID, ClaimRef, Result

log = logging.getLogger("kvpool.dra")

VERSION = 1
_LOCKS = 1 << 16

State = Literal["preparing", "prepared", "released"]


@dataclass(frozen=True, slots=True)
class Record:
    """A claim that this node has, or had, something of."""

    ref: ClaimRef
    state: State
    results: tuple[Result, ...]
    region: str = ""  # the UUID of the region that was composed for it
    policy: str = "Retain"  # what becomes of the region when the claim is gone

    def told(self, **changes: object) -> Record:
        return replace(self, **changes)  # type: ignore[arg-type]


class Checkpoint:
    """The records of this node, below `folder`.

    Threads: one event loop; any number of processes.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "claims"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._here: dict[int, asyncio.Lock] = {}

    def close(self) -> None:
        os.close(self._lock)

    @contextlib.asynccontextmanager
    async def locked(self, uid: str) -> AsyncIterator[None]:
        """Nobody else, in this process or another, works on this claim meanwhile."""
        place = zlib.crc32(uid.encode()) % _LOCKS
        async with self._here.setdefault(place, asyncio.Lock()):
            while True:
                try:
                    fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
                    break
                except OSError:
                    await asyncio.sleep(0.05)  # the other instance has it, for seconds at most
            try:
                yield
            finally:
                fcntl.lockf(self._lock, fcntl.LOCK_UN, 1, place)

    def read(self, uid: str) -> Record | None:
        """The claim's record; one that cannot be read counts as none."""
        path = self._path(uid)
        try:
            found = json.loads(path.read_text())
            if found["version"] != VERSION or found["ref"]["uid"] != uid:
                raise ValueError(f"version {found['version']} for {found['ref']['uid']}")
            return Record(
                ClaimRef(**found["ref"]),
                found["state"],
                tuple(Result(**result) for result in found["results"]),
                found["region"],
                found["policy"],
            )
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.error("checkpoint_unreadable claim=%s error=%r", uid, str(error))
            return None

    def write(self, record: Record) -> None:
        """Completely or not at all, also when the machine loses power."""
        path = self._path(record.ref.uid)
        making = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            with making.open("w") as file:
                json.dump({"version": VERSION, **asdict(record)}, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(making, path)
        finally:
            making.unlink(missing_ok=True)

    def remove(self, uid: str) -> None:
        self._path(uid).unlink(missing_ok=True)

    def uids(self) -> set[str]:
        return {path.stem for path in self._folder.glob("*.json") if UID.fullmatch(path.stem)}

    def unfinished(self) -> list[Path]:
        """What a killed process had begun to write."""
        return list(self._folder.glob(".*"))

    def _path(self, uid: str) -> Path:
        if not UID.fullmatch(uid):  # it becomes part of a path
            raise ValueError(f"{uid!r} is no uid of a claim")
        return self._folder / f"{uid}.json"
