"""The folder of a pool's engine reports: making and reading them, and folding those that ended into sums.

Sums are kept by host in totals.h<host>.json, written by that host's daemon alone. It names the files that it
holds: a crash between writing it and removing a file counts nothing twice, and who reads files first and the
sums afterwards misses nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import re
import stat
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from threading import Lock

from pydantic import TypeAdapter, ValidationError

from kvpool import paths
from kvpool.engine_file import SUFFIX, EngineFile, EngineFileError, is_free, open_to_read, read
from kvpool.errors import KvpoolError
from kvpool.report import EngineReport, EngineReports, NamespaceCounts, NamespaceReport

log = logging.getLogger("kvpool.pool")

VERSION = 1
ENDED_S = 3600.0  # how long an engine that ended is shown
ENGINES_MAX = 256  # that are shown, and files that are read at one look
FOLDED_ONCE = 128  # files that are folded in one step
FOLDED_MAX = 1024  # names that are remembered: a file is read and removed within milliseconds
NAMESPACES_MAX = 256  # of which sums are kept; those least used become one
TOTALS_BYTES_MAX = 16 << 20
REST = ""  # the digest under which namespaces beyond NAMESPACES_MAX are summed
_NAME = re.compile(r"h(\d{1,4})-[0-9a-f]{16}")

# --- making -------------------------------------------------------------------------------------------------

_Place = tuple[str, int, str]  # folder, host, engine
_open: dict[_Place, tuple[EngineFile, int]] = {}  # this process's reports, and how many pools count in each
_opening = Lock()


def _after_fork() -> None:
    """A child counts for itself, and must not keep its parent's report alive."""
    global _opening
    _opening = Lock()
    for report, _ in _open.values():
        report.close()
    _open.clear()


os.register_at_fork(after_in_child=_after_fork)


def open_report(pool: str, host: int, tiers: list[str], engine: str = "") -> EngineFile | None:
    """This process's report on what it does with a pool: one, however often it opens the pool.

    None where none can be made; that is said once in the log, and costs numbers only.
    """
    try:
        folder = paths.engines_path(pool)
        with _opening:
            place = (str(folder), host, engine)
            report, users = _open.get(place, (None, 0))
            if report is None:
                _ensure(folder)
                pod = os.environ.get("KVPOOL_POD_NAME") or _hostname_of_a_pod()
                report = EngineFile(
                    folder, host=host, pod=pod, engine=engine, started_at=time.time(), tiers=tiers
                )
            _open[place] = (report, users + 1)
            return report
    except (KvpoolError, OSError) as error:
        log.info(
            "engine_not_counted pool=%s reason=%r: the pool works, but hit rates by engine and namespace "
            "leave it out. The pool's daemon makes the folder; this user has to be able to write there.",
            pool,
            str(error),
        )
        return None


def close_report(report: EngineFile) -> None:
    """A pool of this process counts no more; the last one lets go of the file."""
    with _opening:
        for place, (known, users) in list(_open.items()):
            if known is report:
                if users > 1:
                    _open[place] = (known, users - 1)
                    return
                del _open[place]
        report.close()


def _hostname_of_a_pod() -> str:
    return os.environ.get("HOSTNAME", "") if "KUBERNETES_SERVICE_HOST" in os.environ else ""


def _ensure(folder: Path) -> None:
    """The folder. As for regions, umask and group of who makes it decide who may write there; what is made
    in it has its group.

    Raises: OSError, also when the pool has no folder here.
    """
    if folder.is_dir():
        return
    with contextlib.suppress(FileExistsError):
        folder.mkdir()
        folder.chmod(stat.S_IMODE(folder.stat().st_mode) | stat.S_ISGID)


# --- reading ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Totals:
    """What a host's daemon has folded."""

    version: int = VERSION
    folded: list[str] = field(default_factory=list)  # names of files that are in the sums, the newest last
    ended: list[EngineReport] = field(default_factory=list)  # of the last hour, the newest last
    namespaces: list[NamespaceReport] = field(default_factory=list)  # the one used last is the last


_TOTALS = TypeAdapter(_Totals)
_REPORTS = TypeAdapter(EngineReports)


def reports_from(said: object) -> EngineReports:
    """What `asdict` made of reports. Raises: ValueError for what another version wrote."""
    return _REPORTS.validate_python(said)


def look(pool: str, host: int | None = None, clock: Callable[[], float] = time.time) -> EngineReports:
    """All engines of a pool on this machine, or those of one host. Changes nothing."""
    folder = paths.engines_path(pool)
    hosts = {host} if host is not None else None
    return _look(folder, lambda of: hosts is None or of in hosts, clock())


def _look(folder: Path, wanted: Callable[[int], bool], now: float) -> EngineReports:
    skipped: dict[str, str] = {}
    found: list[tuple[EngineReport, list[NamespaceReport]]] = []
    for name, of in _names(folder):
        if wanted(of) and len(found) < ENGINES_MAX:
            try:
                found.append(_read(folder, name))
            except FileNotFoundError:
                continue  # folded just now
            except EngineFileError as error:
                skipped[name] = str(error)
    totals = [
        _read_totals(path, skipped)
        for path in sorted(folder.glob("totals.h*.json"))
        if (number := path.name[len("totals.h") : -len(".json")]).isdecimal() and wanted(int(number))
    ]
    folded = {name for each in totals for name in each.folded}
    live = [(engine, rows) for engine, rows in found if engine.name not in folded]
    ended = [e for each in totals for e in each.ended if now - (e.ended_at or 0) < ENDED_S]
    namespaces: dict[str, NamespaceReport] = {}
    for rows in ([each.namespaces for each in totals], [rows for _, rows in live]):
        for row in (row for group in rows for row in group):
            before = namespaces.get(row.digest)
            namespaces[row.digest] = row if before is None else before + row
    engines = sorted([engine for engine, _ in live] + ended, key=lambda e: (e.ended_at or now, e.started_at))
    return EngineReports(engines[-ENGINES_MAX:], namespaces, skipped)


def _names(folder: Path) -> list[tuple[str, int]]:
    """Names of the reports in a folder, with their hosts."""
    try:
        entries = sorted(entry for entry in os.listdir(folder) if entry.endswith(SUFFIX))
    except OSError:
        return []
    matches = [_NAME.fullmatch(entry.removesuffix(SUFFIX)) for entry in entries]
    return [(match.group(), int(match.group(1))) for match in matches if match]


def _read(folder: Path, name: str) -> tuple[EngineReport, list[NamespaceReport]]:
    fd = open_to_read(folder / f"{name}{SUFFIX}")
    try:
        # When nobody has folded it yet: the last write that reached the file system, which is about the end.
        ended_at = max(0.0, os.fstat(fd).st_mtime) if is_free(fd) else None
        try:
            return read(fd, name, ended_at=ended_at)
        except EngineFileError:
            if ended_at is not None:
                raise
            return read(fd, name, ended_at=None)  # it was being written
    finally:
        os.close(fd)


def _read_totals(path: Path, skipped: dict[str, str]) -> _Totals:
    try:
        if path.stat().st_size > TOTALS_BYTES_MAX:
            raise ValueError
        totals = _TOTALS.validate_json(path.read_bytes())
        if totals.version != VERSION:
            raise ValueError
        return totals
    except FileNotFoundError:
        return _Totals()
    except OSError as error:
        skipped[path.name] = f"it cannot be read: {error.strerror}"
    except (ValueError, ValidationError, RecursionError):
        skipped[path.name] = "it is damaged, or of another version; remove it to count anew"
    return _Totals()


# --- folding ------------------------------------------------------------------------------------------------


class Folder:
    """Keeps a pool's engine reports few: a daemon's chore.

    Threads: one process at a time for each host; the daemon's lock sees to that.
    """

    def __init__(self, pool: str, host: int, clock: Callable[[], float] = time.time) -> None:
        self._pool, self._host, self._clock = pool, host, clock
        self._path = paths.engines_path(pool) / f"totals.h{host}.json"

    def make(self) -> None:
        """The folder, so that engines of other users find it. Raises: OSError."""
        _ensure(self._path.parent)

    def fold(self, others: Iterable[int] = ()) -> int:
        """Adds the reports of engines that have ended to the sums, and removes them; how many.

        `others`: hosts whose own daemons do this for them.
        Raises: KvpoolError when the sums cannot be read: nothing is folded then, and nothing is lost.
        """
        folder, now, not_ours = self._path.parent, self._clock(), set(others)
        ours = [name for name, of in _names(folder) if of == self._host or of not in not_ours]
        skipped: dict[str, str] = {}
        totals = _read_totals(self._path, skipped)
        if skipped:
            raise KvpoolError(f"{self._path}: {skipped[self._path.name]}")
        known = set(totals.folded)
        done: list[tuple[EngineReport, list[NamespaceReport]]] = []
        with contextlib.ExitStack() as locked:
            for name in ours:
                if name not in known and len(done) < FOLDED_ONCE:
                    ended = self._ended(name, now, locked)
                    done += [ended] if ended else []
            kept = [e for e in totals.ended if now - (e.ended_at or 0) < ENDED_S]
            if done or len(kept) != len(totals.ended):
                self._write(_with(totals, kept, done))
            for name in {*known, *(engine.name for engine, _ in done)} & set(ours):
                (folder / f"{name}{SUFFIX}").unlink(missing_ok=True)
        for path in folder.glob(".*.making"):  # of processes that were killed while they began
            with contextlib.suppress(OSError):
                if now - path.stat().st_mtime > ENDED_S:
                    path.unlink()
        return len(done)

    def _ended(
        self, name: str, now: float, locked: contextlib.ExitStack
    ) -> tuple[EngineReport, list[NamespaceReport]] | None:
        """What an engine that has ended had counted, its file locked; None when it lives, or is damaged."""
        try:
            fd = open_to_read(self._path.parent / f"{name}{SUFFIX}")
        except (FileNotFoundError, EngineFileError):
            return None
        locked.callback(os.close, fd)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return read(fd, name, ended_at=now)
        except (BlockingIOError, EngineFileError):
            return None

    def _write(self, totals: _Totals) -> None:
        making = self._path.with_suffix(".making")
        with open(making, "w", encoding="utf-8") as out:
            json.dump(asdict(totals), out)
            out.flush()
            os.fsync(out.fileno())
        os.replace(making, self._path)


def _with(
    before: _Totals, ended: list[EngineReport], done: list[tuple[EngineReport, list[NamespaceReport]]]
) -> _Totals:
    namespaces = {row.digest: row for row in before.namespaces}
    for _, rows in done:
        for row in rows:
            known = namespaces.pop(row.digest, None)  # to the end: the one used last
            namespaces[row.digest] = row if known is None else row + known
    rest = namespaces.pop(REST, NamespaceReport(REST, {}, 0))
    ordered = list(namespaces.values())
    surplus, kept = ordered[: max(0, len(ordered) - NAMESPACES_MAX)], ordered[-NAMESPACES_MAX:]
    rest = replace(rest, counts=sum((row.counts for row in surplus), rest.counts))
    known_rest = [rest] if rest.counts != NamespaceCounts() else []
    return _Totals(
        folded=[*before.folded, *(engine.name for engine, _ in done)][-FOLDED_MAX:],
        ended=[*ended, *(engine for engine, _ in done)][-ENGINES_MAX:],
        namespaces=[*known_rest, *kept],
    )
