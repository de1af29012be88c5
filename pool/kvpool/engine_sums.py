"""The sums of engine reports that a host's daemon has folded, in a file in the folder of the reports.

Every engine of the pool may write there. So nothing is opened but plain files, nothing read without a limit,
and a file whose numbers or texts are not as this version writes them is damaged as a whole.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import secrets
import stat
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from pydantic import TypeAdapter

from kvpool.engine_file import (
    COUNT_MAX,
    ENGINE_MAX,
    POD_MAX,
    ROWS,
    TIER_MAX,
    TIERS_MAX,
    YEAR_9999,
    EngineFileError,
    open_to_read,
)
from kvpool.errors import KvpoolError
from kvpool.report import EngineReport, NamespaceCounts, NamespaceReport
from kvpool.text import flat, valid

VERSION = 1
TOTALS_BYTES_MAX = 16 << 20
ALL_TOTALS_BYTES_MAX = 64 << 20  # that are read at one look
REPORT_NAME = re.compile(r"h([0-9]{1,4})-[0-9a-f]{16}")
_TOTALS_NAME = re.compile(r"totals\.h([0-9]{1,4})\.json")
_DIGEST = re.compile(r"([0-9a-f]{64})?")
_REASON = re.compile(r"[a-z0-9-]{1,64}")


class TotalsDamaged(EngineFileError):
    """Sums that nobody can use: no plain file, too long, or not what this version writes."""


@dataclass(frozen=True, slots=True)
class Totals:
    """What a host's daemon has folded."""

    version: int = VERSION
    folded: list[str] = field(default_factory=list)  # names of files that are in the sums, the newest last
    ended: list[EngineReport] = field(default_factory=list)  # of the last hour, the newest last
    namespaces: list[NamespaceReport] = field(default_factory=list)  # the one used last is the last


_TOTALS = TypeAdapter(Totals)


def listed(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def all_totals(
    folder: Path, skipped: dict[str, str], first: int | None = None
) -> Iterator[tuple[int, Totals]]:
    """The sums of each host, one after the other."""
    matches = [_TOTALS_NAME.fullmatch(entry) for entry in listed(folder)]
    found = [(int(match.group(1)), match.group()) for match in matches if match]
    room = ALL_TOTALS_BYTES_MAX
    for of, name in sorted(found, key=lambda each: (each[0] != first, each)):
        if room <= 0:
            skipped[name] = "there are too many sums; remove those that no daemon writes"
            continue
        try:
            content = _content(folder / name)
            room -= max(len(content), 1 << 12)
            yield of, _parsed(content)
        except FileNotFoundError:
            continue
        except EngineFileError as error:
            skipped[name] = str(error)


def _content(path: Path) -> bytes:
    try:
        fd = open_to_read(path)
    except EngineFileError:
        if _is_something_else(path):
            raise TotalsDamaged("it is no plain file; its daemon moves it aside") from None
        raise
    try:
        content = b""
        if os.fstat(fd).st_size > TOTALS_BYTES_MAX:
            raise TotalsDamaged(f"it has more than {TOTALS_BYTES_MAX} bytes; its daemon moves it aside")
        while len(content) <= TOTALS_BYTES_MAX and (part := os.read(fd, TOTALS_BYTES_MAX + 1 - len(content))):
            content += part
    except OSError as error:
        raise EngineFileError(f"it cannot be read: {error.strerror}") from None
    finally:
        os.close(fd)
    if len(content) > TOTALS_BYTES_MAX:
        raise TotalsDamaged(f"it has more than {TOTALS_BYTES_MAX} bytes; its daemon moves it aside")
    return content


def _is_something_else(path: Path) -> bool:
    try:
        return not stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False


def read_totals(path: Path) -> Totals:
    """Raises: FileNotFoundError, TotalsDamaged, EngineFileError for what cannot be read now."""
    return _parsed(_content(path))


def _parsed(content: bytes) -> Totals:
    """Raises: TotalsDamaged."""
    try:
        said = _TOTALS.validate_json(content)
        if said.version != VERSION:
            raise ValueError
        return Totals(
            folded=[name for name in said.folded if REPORT_NAME.fullmatch(name)],
            ended=[_sound_engine(engine) for engine in said.ended],
            namespaces=[_sound_namespace(row) for row in said.namespaces],
        )
    except (ValueError, RecursionError):
        raise TotalsDamaged(
            "it is damaged, or of another version; its daemon moves it aside and counts anew"
        ) from None


def _sound_engine(said: EngineReport) -> EngineReport:
    times = [said.started_at, said.ended_at or 0.0]
    curve = said.curve
    numbers = [said.host, said.pid, curve.samples]
    if (
        not REPORT_NAME.fullmatch(said.name)
        or not all(0 <= each < YEAR_9999 for each in times)
        or not all(0 <= each <= COUNT_MAX for each in numbers)
        or not all(each >= 0 and math.isfinite(each) for each in (curve.a_us, curve.b_ns))
        or not len(said.namespaces) <= ROWS
        or not all(_DIGEST.fullmatch(digest) for digest in said.namespaces)
    ):
        raise ValueError(said.name)
    return replace(
        said,
        pod=valid(said.pod, POD_MAX),
        engine=valid(said.engine, ENGINE_MAX),
        tiers=[valid(tier, TIER_MAX) for tier in said.tiers[:TIERS_MAX]],
        namespaces={digest: _sound_counts(counts) for digest, counts in said.namespaces.items()},
        more_pids=[],
    )


def _sound_namespace(said: NamespaceReport) -> NamespaceReport:
    if not _DIGEST.fullmatch(said.digest) or not 0 <= said.block_bytes <= COUNT_MAX:
        raise ValueError(said.digest)
    return replace(said, description=flat(said.description), counts=_sound_counts(said.counts))


def _sound_counts(said: NamespaceCounts) -> NamespaceCounts:
    reasons = [*said.misses, *said.declined]
    if not all(0 <= count <= COUNT_MAX for count in _numbers(said)) or len(reasons) > 2 * ROWS:
        raise ValueError
    if not all(_REASON.fullmatch(reason) for reason in reasons):
        raise ValueError
    return said


def _numbers(counts: NamespaceCounts) -> list[int]:
    single = [counts.hits, counts.stored, counts.present, counts.bytes_loaded, counts.bytes_stored]
    more = [counts.saved_us, counts.timed_hits, *counts.misses.values(), *counts.declined.values()]
    return single + more


def write_sums(path: Path, totals: Totals) -> None:
    """Nothing replaces sums that could not be read again. Raises: KvpoolError."""
    content = json.dumps(asdict(totals)).encode()
    while len(content) > TOTALS_BYTES_MAX and totals.ended:  # they are only shown
        totals = replace(totals, ended=totals.ended[(len(totals.ended) + 1) // 2 :])
        content = json.dumps(asdict(totals)).encode()
    try:
        if len(content) > TOTALS_BYTES_MAX:
            raise TotalsDamaged(f"it would have more than {TOTALS_BYTES_MAX} bytes")
        _parsed(content)
    except TotalsDamaged as error:
        raise KvpoolError(f"{path}: the new sums are not written: {error}") from None
    making = path.with_name(f".{path.stem}-{secrets.token_hex(8)}.making")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with open(os.open(making, flags, 0o666), "wb") as out:
            out.write(content)
            out.flush()
            os.fsync(out.fileno())
        os.replace(making, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            making.unlink()
        raise KvpoolError(f"{path}: the sums cannot be written: {error.strerror}") from None


def bounded(row: NamespaceReport) -> NamespaceReport:
    """A report of nonsense must not make sums that nobody reads again."""
    if max(_numbers(row.counts)) <= COUNT_MAX:
        return row
    said = asdict(row.counts)
    for name, value in said.items():
        said[name] = (
            {k: min(v, COUNT_MAX) for k, v in value.items()}
            if isinstance(value, dict)
            else min(value, COUNT_MAX)
        )
    return replace(row, counts=NamespaceCounts(**said))
