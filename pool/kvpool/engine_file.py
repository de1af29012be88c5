"""The file in which one process of an engine counts what it does, read by others while it lives.

Little-endian. Page 0, the head, each field as offset, size, name:
    0  8  magic    8  4  version   12  4  row_count    16  4  head_bytes   20  4  head_crc32
   32  8  curve_state (1 trusted)   40  8  samples   48  8  a_us (double)   56  8  b_ns (double)
  128  head_bytes  JSON: host, pid, pod, engine, started_at, tiers
Page 1 + i, row i, one namespace each; row 0 counts what belongs to none:
    0  4  text_bytes   4  4  text_crc32   8  32  digest   64  64 x 8  counters (COUNTERS below)
  576  text_bytes  JSON: the namespace's description, block_bytes, and keyed: it has a tenant (not which)

Whatever is not as it should be makes the whole file unread, with a reason. Counters are written in place,
each 8 bytes at once: a process that is killed loses nothing, and a reader sees each number before or after.
The process holds a flock on its file, which the kernel drops with it; that also works between containers,
where a process id does not. A file has its name only when its lock is held.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import secrets
import stat
import struct
import zlib
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from kvpool.errors import KvpoolError
from kvpool.outcomes import CODE_BY_REASON, REASON_BY_CODE, MissReason
from kvpool.report import EngineReport, NamespaceCounts, NamespaceReport, PrefillCurve

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
# Places of the counters in a row. Reasons have their outcome code behind the base; append only.
HITS, STORED, PRESENT, BYTES_LOADED, BYTES_STORED, SAVED_US, TIMED_HITS = range(7)
MISSES, DECLINED, CODES_MAX = 16, 40, 24
NO_DIGEST = bytes(32)


class EngineFileError(KvpoolError):
    """A file that is no engine's report, or of another version, or damaged; the message says which."""


class EngineFile:
    """This process's report. It counts from several threads.

    Threads: any. Raises: nothing once it is open, and no call enters the kernel but the first of a namespace.
    """

    def __init__(
        self, folder: Path, *, host: int, pod: str = "", engine: str = "", started_at: float, tiers: list[str]
    ) -> None:
        """Raises: OSError when no file can be made in `folder`."""
        name = f"h{host}-{secrets.token_hex(8)}"
        self.path = folder / f"{name}{SUFFIX}"
        making = folder / f".{name}.making"
        text = _packed(
            {
                "host": host,
                "pid": os.getpid(),
                "pod": pod[:253],
                "engine": engine[:128],
                "started_at": round(started_at, 3),
                "tiers": tiers[:16],
            }
        )
        self._lock = Lock()
        self._rows: dict[bytes, memoryview] = {}
        self._fd = os.open(making, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o660)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(self._fd, FILE_BYTES)
            os.posix_fallocate(self._fd, 0, 2 * PAGE)  # a full disk is an error here, and no SIGBUS later
            self._bytes = _mapped(making)
            self._bytes[_HEAD_TEXT_AT : _HEAD_TEXT_AT + len(text)] = text
            _HEAD.pack_into(self._bytes, 0, MAGIC, VERSION, 0, len(text), zlib.crc32(text))
            self._other = self._add_row(NO_DIGEST, _packed({"description": {}, "block_bytes": 0}))
            os.rename(making, self.path)
        except BaseException:
            os.close(self._fd)
            making.unlink(missing_ok=True)
            raise

    def close(self) -> None:
        """Let go of the file. What was counted stays there for others to read."""
        with self._lock:
            fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def served(
        self, namespace: Namespace | None, hits: int, misses: dict[MissReason, int], loaded: int
    ) -> None:
        """Blocks that were looked up: hits, and misses by reason; `loaded` bytes came of it."""
        with self._lock:
            row = self._row(namespace)
            row[HITS] += hits
            row[BYTES_LOADED] += loaded
            for reason, count in misses.items():
                row[MISSES + CODE_BY_REASON[reason]] += count

    def stored(
        self, namespace: Namespace, stored: int, present: int, declined: dict[MissReason, int]
    ) -> None:
        """What became of blocks that were to be stored."""
        with self._lock:
            row = self._row(namespace)
            row[STORED] += stored
            row[BYTES_STORED] += stored * namespace.block_bytes
            row[PRESENT] += present
            for reason, count in declined.items():
                row[DECLINED + CODE_BY_REASON[reason]] += count

    def saved(self, namespace: Namespace, microseconds: int, blocks: int) -> None:
        """Prefill that loading `blocks` blocks has made needless."""
        with self._lock:
            row = self._row(namespace)
            row[SAVED_US] += microseconds
            row[TIMED_HITS] += blocks

    def measured(self, curve: PrefillCurve) -> None:
        """How long this process computes."""
        with self._lock:
            values = (int(curve.trusted), curve.samples, curve.a_us, curve.b_ns)
            _CURVE.pack_into(self._bytes, _CURVE_AT, *values)

    def know(self, namespace: Namespace) -> None:
        """This process uses `namespace`, also when it has done nothing in it yet."""
        with self._lock:
            self._row(namespace)

    def _row(self, namespace: Namespace | None) -> memoryview:
        if namespace is None:
            return self._other
        row = self._rows.get(namespace.digest)
        if row is None:
            row = self._rows[namespace.digest] = self._open_row(namespace)
        return row

    def _open_row(self, namespace: Namespace) -> memoryview:
        if len(self._rows) + 1 >= ROWS or self._fd < 0:
            return self._other
        described: dict[str, Any] = {
            "description": namespace.describe(),
            "block_bytes": namespace.block_bytes,
            "keyed": bool(namespace.tenant),
        }
        text = _packed(described)
        if len(text) > PAGE - _ROW_TEXT_AT:  # what is needed to count tokens, and a name
            short = {k: namespace.describe()[k] for k in ("block_tokens", "tp_size", "pp_size")}
            text = _packed({**described, "description": {**short, "model": namespace.model[:512]}})
        try:
            os.posix_fallocate(self._fd, 0, PAGE * (3 + len(self._rows)))
        except OSError:
            return self._other
        return self._add_row(namespace.digest, text)

    def _add_row(self, digest: bytes, text: bytes) -> memoryview:
        index = _ROW_COUNT.unpack_from(self._bytes, _ROW_COUNT_AT)[0]
        at = PAGE * (1 + index)
        self._bytes[at + _ROW_TEXT_AT : at + _ROW_TEXT_AT + len(text)] = text
        _ROW.pack_into(self._bytes, at, len(text), zlib.crc32(text), digest)
        _ROW_COUNT.pack_into(self._bytes, _ROW_COUNT_AT, index + 1)  # last: a reader sees it whole or not
        return self._bytes[at + _COUNTERS_AT : at + _ROW_TEXT_AT].cast("Q")


def _mapped(path: Path) -> memoryview:
    """The file's bytes. Opened anew: a map keeps its descriptor, and would keep the lock with it."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return memoryview(mmap.mmap(fd, FILE_BYTES))
    finally:
        os.close(fd)


def _packed(value: dict[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


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
    try:
        report = EngineReport(
            name=name,
            host=_whole(said["host"]),
            pid=_whole(said["pid"]),
            pod=_text(said["pod"]),
            engine=_text(said["engine"]),
            started_at=float(_whole(int(said["started_at"] * 1000))) / 1000,
            ended_at=ended_at,
            tiers=[_text(tier) for tier in said["tiers"]],
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
    if not isinstance(description, dict) or not isinstance(said.get("block_bytes"), int):
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
        description,
        said["block_bytes"],
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


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(value)
    return value
