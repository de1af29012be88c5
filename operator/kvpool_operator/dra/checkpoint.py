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
import re
import zlib
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast, get_args

from kvpool_operator.dra.allocation import UID, ClaimRef, Result
from kvpool_operator.dra.parameters import POLICIES

log = logging.getLogger("kvpool.dra")

VERSION = 1
_LOCKS = 1 << 16

State = Literal["preparing", "prepared", "released"]
_STATES = get_args(State)
_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")  # of a namespace or claim; part of addresses


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
        self._damaged: dict[str, str] = {}  # what was said of records already

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
            record = _record(uid, json.loads(path.read_text()))
        except FileNotFoundError:
            record = None
        except (OSError, ValueError, RecursionError) as error:
            said = str(error) or type(error).__name__
            if self._damaged.get(uid) != said:  # it is looked at again and again
                self._damaged[uid] = said
                log.error("checkpoint_unreadable claim=%s error=%r", uid, said)
            return None
        self._damaged.pop(uid, None)
        return record

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
        self._damaged.pop(uid, None)

    def uids(self) -> set[str]:
        return {path.stem for path in self._folder.glob("*.json") if UID.fullmatch(path.stem)}

    def unfinished(self) -> list[Path]:
        """What a killed process had begun to write."""
        return list(self._folder.glob(".*"))

    def _path(self, uid: str) -> Path:
        if not UID.fullmatch(uid):  # it becomes part of a path
            raise ValueError(f"{uid!r} is no uid of a claim")
        return self._folder / f"{uid}.json"


def _record(uid: str, found: Any) -> Record:
    """The claim's record out of its file. Raises: ValueError, with what is wrong."""
    d = _fields(found, "record", ("version", "ref", "state", "results", "region", "policy"))
    if type(d["version"]) is not int or d["version"] != VERSION:
        raise ValueError(f"version {d['version']!r}, and this build reads {VERSION}")
    ref = ClaimRef(**_texts(d["ref"], "ref", ("namespace", "name", "uid")))
    if ref.uid != uid or not _NAME.fullmatch(ref.namespace) or not _NAME.fullmatch(ref.name):
        raise ValueError(f"ref {ref.namespace!r}, {ref.name!r}, {ref.uid!r} is not of this claim")
    results = d["results"]
    if not isinstance(results, list) or not results:
        raise ValueError("results is no list of devices")
    region = d["region"]
    if region != "" and not (isinstance(region, str) and UID.fullmatch(region)):
        raise ValueError(f"region {region!r} is no UUID")
    for key, words in (("state", _STATES), ("policy", POLICIES)):
        if d[key] not in words:
            raise ValueError(f"{key} {d[key]!r} is none of {', '.join(words)}")
    return Record(
        ref,
        cast(State, d["state"]),
        tuple(Result(**_texts(result, "result", ("request", "pool", "device"))) for result in results),
        region,
        d["policy"],
    )


def _fields(found: Any, name: str, keys: tuple[str, ...]) -> dict[str, Any]:
    if not isinstance(found, dict) or set(found) != set(keys):
        raise ValueError(f"{name} is no object of {', '.join(keys)}")
    return found


def _texts(found: Any, name: str, keys: tuple[str, ...]) -> dict[str, str]:
    fields = _fields(found, name, keys)
    if not all(isinstance(text, str) and text for text in fields.values()):
        raise ValueError(f"{name} has a field that is no text")
    return fields
