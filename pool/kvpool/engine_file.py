"""The file in which one process of an engine counts what it does, read by others while it lives.

Little-endian. Page 0, the head, each field as offset, size, name:
    0  8  magic    8  4  version   12  4  row_count    16  4  head_bytes   20  4  head_crc32
   32  8  curve_state (1 trusted)   40  8  samples   48  8  a_us (double)   56  8  b_ns (double)
  128  head_bytes  JSON: host, pid, pod, engine, started_at, tiers
Page 1 + i, row i, one namespace each; row 0 counts what belongs to none:
    0  4  text_bytes   4  4  text_crc32   8  32  digest   64  64 x 8  counters (COUNTERS below)
  576  text_bytes  JSON: the namespace's description, block_bytes, and keyed: it has a tenant (not which)

Whatever is not as it should be makes the whole file unread, with a reason. The process counts in its own
memory, and writes a row's counters with one call: if it is killed nothing is lost. It never reads them back
and maps nothing: whoever may write in the folder may damage the file, cut it short or remove it, and costs
the process its numbers only.
The process holds a flock on its file, which the kernel drops with it; that also works between containers,
where a process id does not. A file has its name only when its lock is held.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import stat
import struct
import weakref
import zlib
from array import array
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from kvpool.errors import KvpoolError
from kvpool.outcomes import CODE_BY_REASON, REASON_BY_CODE, MissReason
from kvpool.report import EngineReport, NamespaceCounts, NamespaceReport, PrefillCurve
from kvpool.text import TEXT_MAX, flat, valid

if TYPE_CHECKING:  # who only reads needs no compiled part
    from kvpool.keys import Namespace

MAGIC = b"KVPENGIN"
VERSION = 1
SUFFIX = ".engine"
PAGE = 4096
ROWS = 64
FILE_BYTES = PAGE * (1 + ROWS)
_HEAD = struct.Struct("<8sIIII")
_ROW_COUNT = struct.Struct("<I")
_ROW_COUNT_AT = 12
_CURVE = struct.Struct("<QQdd")
_CURVE_AT = 32
_HEAD_TEXT_AT = 128
_ROW = struct.Struct("<II32s")
_COUNTERS_AT = 64
_COUNTERS = 64
_ROW_TEXT_AT = _COUNTERS_AT + 8 * _COUNTERS
COUNT_MAX = 1 << 62
POD_MAX, ENGINE_MAX, TIER_MAX, TIERS_MAX = 253, 128, 63, 16  # characters, and how many
YEAR_9999 = 253_370_764_800
# Places of the counters in a row. Reasons have their outcome code behind the base; append only.
HITS, STORED, PRESENT, BYTES_LOADED, BYTES_STORED, SAVED_US, TIMED_HITS = range(7)
MISSES, DECLINED, CODES_MAX = 16, 40, 24
NO_DIGEST = bytes(32)


class EngineFileError(KvpoolError):
    """A file that is no engine's report, or of another version, or damaged; the message says which."""


class _Row:
    """One namespace's counters. The file has a copy at `at`."""

    __slots__ = ("at", "counts")

    def __init__(self, at: int) -> None:
        self.at, self.counts = at, array("Q", bytes(8 * _COUNTERS))

    def add(self, index: int, more: int) -> None:
        self.counts[index] = min(self.counts[index] + max(more, 0), COUNT_MAX)


class EngineFile:
    """This process's report. It counts from several threads.

    Threads: any. Raises: nothing once it is open: what cannot be written is not counted any more.
    """

    def __init__(
        self, folder: Path, *, host: int, pod: str = "", engine: str = "", started_at: float, tiers: list[str]
    ) -> None:
        """Raises: OSError when no file can be made in `folder`."""
        name = f"h{host}-{secrets.token_hex(8)}"
        self.path = folder / f"{name}{SUFFIX}"
        making = folder / f".{name}.making"
        text = _packed_within(
            PAGE - _HEAD_TEXT_AT,
            lambda limit: {
                "host": host,
                "pid": os.getpid(),
                "pod": valid(pod, min(limit, POD_MAX)),
                "engine": valid(engine, min(limit, ENGINE_MAX)),
                "started_at": round(started_at, 3),
                "tiers": [valid(tier, min(limit, TIER_MAX)) for tier in tiers[:TIERS_MAX]],
            },
        )
        self._lock = Lock()
        self._rows: dict[bytes, _Row] = {}
        self._row_count = 0
        self._fd = os.open(making, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o660)
        _made.add(self)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(self._fd, FILE_BYTES)
            os.posix_fallocate(self._fd, 0, 2 * PAGE)  # a full disk is an error here, and none later
            os.pwrite(self._fd, _HEAD.pack(MAGIC, VERSION, 0, len(text), zlib.crc32(text)), 0)
            os.pwrite(self._fd, text, _HEAD_TEXT_AT)
            self._other = self._add_row(NO_DIGEST, _packed({"description": {}, "block_bytes": 0}))
            os.rename(making, self.path)
        except BaseException:
            self.close()
            making.unlink(missing_ok=True)
            raise

    def close(self) -> None:
        """Let go of the file. What was counted stays there for others to read."""
        with self._lock:
            self._let_go()

    def abandon(self) -> None:
        """Let go of the file of a parent, in a forked child: another thread may have held the lock."""
        self._lock = Lock()
        self._let_go()

    def served(
        self, namespace: Namespace | None, hits: int, misses: dict[MissReason, int], loaded: int
    ) -> None:
        """Blocks that were looked up: hits, and misses by reason; `loaded` bytes came of it."""
        with self._lock:
            row = self._row(namespace)
            row.add(HITS, hits)
            row.add(BYTES_LOADED, loaded)
            for reason, count in misses.items():
                row.add(MISSES + CODE_BY_REASON[reason], count)
            self._put(row.counts, row.at)

    def stored(
        self, namespace: Namespace, stored: int, present: int, declined: dict[MissReason, int]
    ) -> None:
        """What became of blocks that were to be stored."""
        with self._lock:
            row = self._row(namespace)
            row.add(STORED, stored)
            row.add(BYTES_STORED, stored * namespace.block_bytes)
            row.add(PRESENT, present)
            for reason, count in declined.items():
                row.add(DECLINED + CODE_BY_REASON[reason], count)
            self._put(row.counts, row.at)

    def saved(self, namespace: Namespace, microseconds: int, blocks: int) -> None:
        """Prefill that loading `blocks` blocks has made needless."""
        with self._lock:
            row = self._row(namespace)
            row.add(SAVED_US, microseconds)
            row.add(TIMED_HITS, blocks)
            self._put(row.counts, row.at)

    def measured(self, curve: PrefillCurve) -> None:
        """How long this process computes."""
        samples = min(max(curve.samples, 0), COUNT_MAX)
        with self._lock:
            self._put(_CURVE.pack(int(curve.trusted), samples, curve.a_us, curve.b_ns), _CURVE_AT)

    def know(self, namespace: Namespace) -> None:
        """This process uses `namespace`, also when it has done nothing in it yet."""
        with self._lock:
            self._row(namespace)

    def _row(self, namespace: Namespace | None) -> _Row:
        if namespace is None:
            return self._other
        row = self._rows.get(namespace.digest)
        if row is None:
            row = self._rows[namespace.digest] = self._open_row(namespace)
        return row

    def _open_row(self, namespace: Namespace) -> _Row:
        if self._row_count >= ROWS or self._fd < 0:
            return self._other
        described = flat(namespace.describe())
        needed = {k: described[k] for k in ("block_tokens", "tp_size", "pp_size") if k in described}
        text = _packed_within(
            PAGE - _ROW_TEXT_AT,
            lambda limit: {
                # When it is too long: what is needed to count tokens, and a name.
                "description": described
                if limit == TEXT_MAX
                else needed | {"model": valid(namespace.model, limit)},
                "block_bytes": namespace.block_bytes,
                "keyed": bool(namespace.tenant),
            },
        )
        try:
            os.posix_fallocate(self._fd, 0, PAGE * (2 + self._row_count))
        except OSError:
            return self._other
        return self._add_row(namespace.digest, text)

    def _add_row(self, digest: bytes, text: bytes) -> _Row:
        row = _Row(PAGE * (1 + self._row_count) + _COUNTERS_AT)
        self._put(_ROW.pack(len(text), zlib.crc32(text), digest), row.at - _COUNTERS_AT)
        self._put(row.counts, row.at)
        self._put(text, row.at - _COUNTERS_AT + _ROW_TEXT_AT)
        self._row_count += 1
        self._put(_ROW_COUNT.pack(self._row_count), _ROW_COUNT_AT)  # last: a reader sees it whole or not
        return row

    def _put(self, content: bytes | array[int], at: int) -> None:
        """About 2 us. When that fails, others may have what was counted until then."""
        if self._fd < 0:
            return
        try:
            os.pwrite(self._fd, content, at)
        except OSError:
            self._let_go()

    def _let_go(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.close(fd)


_made: weakref.WeakSet[EngineFile] = weakref.WeakSet()  # by this process, also those that just begin


def _after_fork() -> None:
    """A child must not keep its parent's report alive."""
    for report in list(_made):
        report.abandon()
    _made.clear()


os.register_at_fork(after_in_child=_after_fork)


def _packed_within(size: int, said: Callable[[int], dict[str, Any]]) -> bytes:
    """What `said` says with the longest texts that leave it `size` bytes; with none it is far shorter."""
    limit = TEXT_MAX
    while len(text := _packed(said(limit))) > size and limit:
        limit //= 2
    return text


def _packed(value: dict[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def is_free(fd: int) -> bool:
    """Whether the process that counted in the file has ended."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    fcntl.flock(fd, fcntl.LOCK_UN)
    return True


def open_to_read(path: Path) -> int:
    """Raises: EngineFileError for what is no plain file that may be read, FileNotFoundError."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise EngineFileError(f"it cannot be opened: {error.strerror}") from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise EngineFileError("it is no plain file")
    return fd


def read(fd: int, name: str, *, ended_at: float | None) -> tuple[EngineReport, list[NamespaceReport]]:
    """What the file says: the process, and its namespaces with their descriptions. Changes nothing.

    Raises: EngineFileError.
    """
    size = os.fstat(fd).st_size
    if size != FILE_BYTES:
        raise EngineFileError(f"it has {size} bytes, expected {FILE_BYTES}: it is damaged")
    head = os.pread(fd, PAGE, 0)
    magic, version, row_count, head_bytes, head_crc = _HEAD.unpack_from(head)
    if magic != MAGIC:
        raise EngineFileError("it is no engine's report")
    if version != VERSION:
        raise EngineFileError(f"format {version}, this build reads {VERSION}; upgrade kvpool here")
    if not 1 <= row_count <= ROWS:
        raise EngineFileError(f"it claims {row_count} rows, expected 1 to {ROWS}: it is damaged")
    said = _checked(head[_HEAD_TEXT_AT:], head_bytes, head_crc)
    rows = [_read_row(os.pread(fd, PAGE, PAGE * (1 + i))) for i in range(row_count)]
    if len({row.digest for row in rows}) != len(rows):
        raise EngineFileError("a namespace is there twice: it is damaged")
    try:
        report = EngineReport(
            name=name,
            host=_whole(said["host"]),
            pid=_whole(said["pid"]),
            pod=_text(said["pod"], POD_MAX),
            engine=_text(said["engine"], ENGINE_MAX),
            started_at=_time(said["started_at"]),
            ended_at=ended_at,
            tiers=[_text(tier, TIER_MAX) for tier in said["tiers"][:TIERS_MAX]],
            namespaces={row.digest: row.counts for row in rows if row.digest or row.counts.lookups},
            curve=_curve(head),
        )
    except (KeyError, TypeError, ValueError, OverflowError):
        raise EngineFileError("its head is not as expected: it is damaged") from None
    return report, [row for row in rows if row.digest in report.namespaces]


def _read_row(page: bytes) -> NamespaceReport:
    text_bytes, text_crc, digest = _ROW.unpack_from(page)
    said = _checked(page[_ROW_TEXT_AT:], text_bytes, text_crc)
    description = said.get("description")
    try:
        block_bytes = _whole(said.get("block_bytes"))
    except ValueError:
        block_bytes = -1
    if not isinstance(description, dict) or block_bytes < 0:
        raise EngineFileError("a namespace is not described as expected: it is damaged")
    values = struct.unpack_from(f"<{_COUNTERS}Q", page, _COUNTERS_AT)
    if max(values) > COUNT_MAX:
        raise EngineFileError("a counter is beyond all measure: it is damaged")
    counts = NamespaceCounts(
        hits=values[HITS],
        misses=_by_reason(values[MISSES : MISSES + CODES_MAX]),
        stored=values[STORED],
        present=values[PRESENT],
        declined=_by_reason(values[DECLINED : DECLINED + CODES_MAX]),
        bytes_loaded=values[BYTES_LOADED],
        bytes_stored=values[BYTES_STORED],
        saved_us=values[SAVED_US],
        timed_hits=values[TIMED_HITS],
    )
    return NamespaceReport(
        "" if digest == NO_DIGEST else digest.hex(),
        flat(description),
        block_bytes,
        counts,
        keyed=said.get("keyed") is True,
    )


def _by_reason(values: tuple[int, ...]) -> dict[str, int]:
    """Reasons of a newer version are counted, and have no name here."""
    names = [reason.value if reason is not None else "" for reason in REASON_BY_CODE]
    return {names[i] if i < len(names) else f"reason-{i}": n for i, n in enumerate(values) if n and i > 1}


def _curve(head: bytes) -> PrefillCurve:
    state, samples, a_us, b_ns = _CURVE.unpack_from(head, _CURVE_AT)
    whole = state <= 1 and samples <= COUNT_MAX and 0 <= a_us < 1e12 and 0 <= b_ns < 1e12
    return PrefillCurve(a_us, b_ns, samples, bool(state)) if whole else PrefillCurve()


def _checked(rest: bytes, size: int, crc: int) -> dict[str, Any]:
    text = rest[:size]
    if len(text) != size or zlib.crc32(text) != crc:
        raise EngineFileError("its text does not match its checksum: it is damaged")
    try:
        said = json.loads(text)
    except (ValueError, RecursionError):
        raise EngineFileError("its text is no JSON: it is damaged") from None
    if not isinstance(said, dict):
        raise EngineFileError("its text is not as expected: it is damaged")
    return said


def _whole(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < COUNT_MAX:
        raise ValueError(value)
    return value


def _time(value: object) -> float:
    if not isinstance(value, (int, float)) or not 0 <= value < YEAR_9999:
        raise ValueError(value)
    return float(value)


def _text(value: object, limit: int) -> str:
    if not isinstance(value, str):
        raise TypeError(value)
    return valid(value, limit)
