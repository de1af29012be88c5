"""The folder of a pool's engine reports: making and reading them, and folding those that ended into sums.

Sums are kept by host in totals.h<host>.json, written by that host's daemon alone. It names the files that it
holds: a crash between writing it and removing a file counts nothing twice, and who reads files first and the
sums afterwards misses nothing. A report of a host without a daemon is added by one that has it locked.

Every engine of the pool may write in the folder. So nothing there is opened but plain files, nothing read
without a limit, and what cannot be used is left out with a reason.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import stat
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from threading import Lock

from pydantic import TypeAdapter

from kvpool import paths
from kvpool.engine_file import SUFFIX, EngineFile, EngineFileError, is_free, open_to_read, read
from kvpool.engine_sums import (
    REPORT_NAME,
    Totals,
    TotalsDamaged,
    all_totals,
    bounded,
    listed,
    read_totals,
    write_sums,
)
from kvpool.errors import KvpoolError
from kvpool.report import EngineReport, EngineReports, NamespaceCounts, NamespaceReport

log = logging.getLogger("kvpool.pool")

ENDED_S = 3600.0  # how long an engine that ended is shown
ENGINES_MAX = 256  # that are shown; all are counted
READ_MAX = 1 << 16  # files and rows that are read at one look, about 2 s
LOOKS_MAX = 5  # until no report was folded while it was read
SKIPPED_MAX = 32  # files that are named with the reason why they were not read
FOLDED_ONCE = 128  # files that are folded in one step
FOLDED_MAX = 1024  # names that are remembered of files that are gone, and files that may defy removal
NAMESPACES_MAX = 256  # of which sums are kept; those least used become one
NAMESPACES_SEEN_MAX = 1024  # at one look; the sums of all hosts, and what lives
REST = ""  # the digest under which namespaces beyond NAMESPACES_MAX are summed

# --- making -------------------------------------------------------------------------------------------------

_Place = tuple[str, int, str]  # folder, host, engine
_open: dict[_Place, tuple[EngineFile, int]] = {}  # this process's reports, and how many pools count in each
_opening = Lock()


def _after_fork() -> None:
    """A child counts for itself."""
    global _opening
    _opening = Lock()
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


_REPORTS = TypeAdapter(EngineReports)
_Read = tuple[EngineReport, list[NamespaceReport]]


def reports_from(said: object) -> EngineReports:
    """What `asdict` made of reports. Raises: ValueError for what another version wrote."""
    return _REPORTS.validate_python(said)


def look(pool: str, host: int | None = None, clock: Callable[[], float] = time.time) -> EngineReports:
    """All engines of a pool on this machine, or those of one host. Changes nothing."""
    folder, folded = paths.engines_path(pool), frozenset[str]()
    for _ in range(LOOKS_MAX):
        seen = _Look(clock())
        counted = seen.read_files(folder, host, folded)
        folded = frozenset(seen.read_totals(folder, host))
        if not counted & folded:
            break
    return seen.reports()


class _Look:
    """One look into a folder. What it keeps is bounded, however much lies there."""

    def __init__(self, now: float) -> None:
        self._now = now
        self._engines: list[EngineReport] = []
        self._engines_count = 0
        self._live: dict[str, NamespaceReport] = {}
        self._folded: dict[str, NamespaceReport] = {}
        self._skipped: dict[str, str] = {}

    def read_files(self, folder: Path, host: int | None, folded: frozenset[str]) -> set[str]:
        """Those that are not in the sums; the names of what was read."""
        counted: set[str] = set()
        room = READ_MAX
        names = [name for name, of in _names(folder) if host in (None, of) and name not in folded]
        for place, name in enumerate(names):
            if room <= 0:
                why = f"they are too many: at most {READ_MAX} files and rows are read at one look"
                self._skipped[f"({len(names) - place} others)"] = why
                break
            room -= 1
            try:
                engine, rows = _read(folder, name, self._now)
            except FileNotFoundError:
                continue  # folded just now
            except EngineFileError as error:
                self._skipped[name] = str(error)
                continue
            room -= len(rows)
            counted.add(name)
            self._show(engine)
            _add(self._live, rows)
        return counted

    def read_totals(self, folder: Path, host: int | None) -> set[str]:
        """The sums; the names of all files that are in any host's."""
        folded: set[str] = set()
        for of, totals in all_totals(folder, self._skipped, first=host):
            folded.update(totals.folded)
            if host in (None, of):
                for engine in totals.ended:
                    if self._now - (engine.ended_at or 0) < ENDED_S:
                        self._show(engine)
                _add(self._folded, totals.namespaces)
        return folded

    def _show(self, engine: EngineReport) -> None:
        self._engines.append(engine)
        self._engines_count += 1
        if len(self._engines) >= 2 * ENGINES_MAX:
            self._engines = self._newest()

    def _newest(self) -> list[EngineReport]:
        return sorted(self._engines, key=lambda e: (e.ended_at or self._now, e.started_at))[-ENGINES_MAX:]

    def reports(self) -> EngineReports:
        engines = self._newest()
        named = sorted(self._skipped, key=lambda name: name.startswith("h"))  # sums, and how many more, first
        skipped = {name: self._skipped[name] for name in named[:SKIPPED_MAX]}
        if len(self._skipped) > len(skipped):
            more = len(self._skipped) - len(skipped)
            skipped[f"({more} more)"] = "they are damaged, or no reports"
        _add(self._folded, self._live.values())
        return EngineReports(engines, self._folded, skipped, self._engines_count - len(engines))


def _add(namespaces: dict[str, NamespaceReport], rows: Iterable[NamespaceReport]) -> None:
    for row in rows:
        if row.digest not in namespaces and len(namespaces) >= NAMESPACES_SEEN_MAX:
            row = NamespaceReport(REST, {}, 0, row.counts)
        before = namespaces.get(row.digest)
        namespaces[row.digest] = row if before is None else before + row


def _names(folder: Path) -> list[tuple[str, int]]:
    """Names of the reports in a folder, with their hosts."""
    found = (entry.removesuffix(SUFFIX) for entry in listed(folder) if entry.endswith(SUFFIX))
    matches = [REPORT_NAME.fullmatch(entry) for entry in found]
    return [(match.group(), int(match.group(1))) for match in matches if match]


def _read(folder: Path, name: str, now: float) -> _Read:
    fd = open_to_read(folder / f"{name}{SUFFIX}")
    try:
        # When nobody has folded it yet: the last write that reached the file system, which is about the end.
        ended_at = min(max(0.0, os.fstat(fd).st_mtime), now) if is_free(fd) else None
        try:
            return read(fd, name, ended_at=ended_at)
        except EngineFileError:
            if ended_at is not None:
                raise
            return read(fd, name, ended_at=None)  # it was being written
    except OSError as error:
        raise EngineFileError(f"it cannot be read: {error.strerror}") from None
    finally:
        os.close(fd)


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

        `others`: hosts whose own daemons do this for them. Sums that are damaged are moved aside, and counted
        anew.
        Raises: KvpoolError when the sums cannot be read or written: nothing is folded then, and nothing is
        lost; and when reports cannot be removed: they are counted once all the same.
        """
        folder, now, not_ours = self._path.parent, self._clock(), set(others)
        names = _names(folder)
        ours = [name for name, of in names if of == self._host or of not in not_ours]
        totals = self._own()
        known = set(totals.folded)
        present = known.intersection(name for name, _ in names)
        room = min(FOLDED_ONCE, FOLDED_MAX - len(present))
        with contextlib.ExitStack() as locked:
            ended: list[_Read] = []
            for name in ours:
                if name not in known and len(ended) < room:
                    found = self._ended(name, now, locked)
                    ended += [found] if found else []
            # Read under the locks: a daemon that fell between its sums and the removal has told them already.
            elsewhere = self._folded_elsewhere() if ended else set()
            done = [each for each in ended if each[0].name not in elsewhere]
            kept = [e for e in totals.ended if now - (e.ended_at or 0) < ENDED_S]
            if done or len(kept) != len(totals.ended):
                write_sums(self._path, _with(totals, kept, done, present))
            stuck = self._remove({*known.intersection(ours), *(engine.name for engine, _ in ended)})
        self._remove_unfinished(now)
        if stuck:
            raise KvpoolError(
                f"{folder}: {len(stuck)} reports of engines that ended are counted, and cannot be removed: "
                f"{stuck[0].strerror}. Let the daemon's user write there."
            )
        return len(done)

    def _own(self) -> Totals:
        try:
            return read_totals(self._path)
        except FileNotFoundError:
            return Totals()
        except TotalsDamaged as error:
            aside = self._path.with_suffix(".damaged")
            try:
                os.replace(self._path, aside)
            except OSError as failed:
                raise KvpoolError(
                    f"{self._path}: {error}. It cannot be moved aside: {failed.strerror}. Remove it."
                ) from None
            log.warning("engine_sums_damaged path=%s kept=%s reason=%r", self._path, aside, str(error))
            return Totals()
        except EngineFileError as error:
            raise KvpoolError(f"{self._path}: {error}") from None

    def _folded_elsewhere(self) -> set[str]:
        found = all_totals(self._path.parent, {})
        return {name for of, totals in found if of != self._host for name in totals.folded}

    def _ended(self, name: str, now: float, locked: contextlib.ExitStack) -> _Read | None:
        """What an engine that has ended had counted, its file locked; None when it lives, or is damaged."""
        path = self._path.parent / f"{name}{SUFFIX}"
        try:
            fd = open_to_read(path)
        except (FileNotFoundError, EngineFileError):
            return None
        with contextlib.ExitStack() as closing:
            closing.callback(os.close, fd)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not os.path.samestat(os.fstat(fd), path.lstat()):
                    return None  # another daemon was faster
                found = read(fd, name, ended_at=now)
            except (OSError, EngineFileError):
                return None
            locked.enter_context(closing.pop_all())
        return found

    def _remove(self, names: Iterable[str]) -> list[OSError]:
        failed: list[OSError] = []
        for name in names:
            try:
                (self._path.parent / f"{name}{SUFFIX}").unlink(missing_ok=True)
            except OSError as error:
                failed.append(error)
        return failed

    def _remove_unfinished(self, now: float) -> None:
        """Files of processes that were killed while they began."""
        for path in self._path.parent.glob("*.making"):
            with contextlib.suppress(OSError):
                if now - path.lstat().st_mtime > ENDED_S:
                    path.unlink()


def _with(before: Totals, ended: list[EngineReport], done: list[_Read], present: set[str]) -> Totals:
    """`present`: names that stay remembered, since their files are still there."""
    namespaces = {row.digest: row for row in before.namespaces}
    for _, rows in done:
        for row in rows:
            known = namespaces.pop(row.digest, None)  # to the end: the one used last
            namespaces[row.digest] = bounded(row if known is None else row + known)
    rest = namespaces.pop(REST, NamespaceReport(REST, {}, 0))
    ordered = list(namespaces.values())
    surplus, kept = ordered[: max(0, len(ordered) - NAMESPACES_MAX)], ordered[-NAMESPACES_MAX:]
    rest = bounded(replace(rest, counts=sum((row.counts for row in surplus), rest.counts)))
    known_rest = [rest] if rest.counts != NamespaceCounts() else []
    folded = [*before.folded, *(engine.name for engine, _ in done)]
    gone = [name for name in before.folded if name not in present]
    forgotten = set(gone[: max(0, len(gone) - FOLDED_MAX)])
    return Totals(
        folded=[name for name in folded if name not in forgotten],
        ended=[*ended, *(engine for engine, _ in done)][-ENGINES_MAX:],
        namespaces=[*known_rest, *kept],
    )
