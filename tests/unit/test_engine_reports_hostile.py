"""Whoever may write among a pool's engine reports can neither end, stop nor mislead anybody else."""

from __future__ import annotations

import json
import os
import resource
import signal
import struct
import threading
import time
import zlib
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from children import children, until
from kvpool import engine_file, engine_sums, engines, paths
from kvpool.engine_file import FILE_BYTES, HITS, PAGE, SUFFIX, EngineFile
from kvpool.errors import KvpoolError
from kvpool.keys import Namespace
from kvpool.outcomes import MissReason
from kvpool.report import EngineReports, PrefillCurve
from kvpool.text import TEXT_MAX, flat, printable
from strategies import namespace

NAME = "hostile"
NS = namespace(4096)
SURROGATE = "\udcff"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(paths.RUNTIME_ENV, str(tmp_path / "run"))
    monkeypatch.delenv("HOSTNAME", raising=False)
    paths.ensure_pool_dir(NAME)
    made = paths.engines_path(NAME)
    made.mkdir()
    return made


def opened(**given: Any) -> EngineFile:
    return EngineFile(
        paths.engines_path(NAME), **{"host": 0, "started_at": 1.7e9, "tiers": ["dram"], **given}
    )


def put(
    folder: Path,
    number: int = 1,
    *,
    host: int = 0,
    head: dict[str, Any] | None = None,
    description: object = None,
    hits: int = 1,
    digests: tuple[bytes, ...] = (NS.digest,),
    block_bytes: object = 4096,
) -> Path:
    """A report of a process that has ended, as anybody may write it."""
    said = {"host": host, "pid": 1, "pod": "", "engine": "", "started_at": 1.7e9, "tiers": ["dram"]}
    text = json.dumps(said | (head or {})).encode()
    made = bytearray(FILE_BYTES)
    struct.pack_into("<8sIIII", made, 0, b"KVPENGIN", 1, len(digests), len(text), zlib.crc32(text))
    made[128 : 128 + len(text)] = text
    row = {"description": {"model": "m"} if description is None else description, "block_bytes": block_bytes}
    text = json.dumps(row).encode()
    for i, digest in enumerate(digests):
        at = PAGE * (1 + i)
        struct.pack_into("<II32s", made, at, len(text), zlib.crc32(text), digest)
        struct.pack_into("<Q", made, at + 64 + 8 * HITS, hits)
        made[at + 576 : at + 576 + len(text)] = text
    path = folder / f"h{host}-{number:016x}{SUFFIX}"
    path.write_bytes(made)
    return path


def seen() -> EngineReports:
    reports = engines.look(NAME)
    json.dumps(asdict(reports), ensure_ascii=False, allow_nan=False).encode()
    return reports


def hits() -> int:
    return seen().total.hits


# --- the engine ---------------------------------------------------------------------------------------------


def use(report: EngineFile) -> None:
    report.know(namespace(4096, model="another"))
    report.served(NS, 1, {MissReason.EVICTED: 1}, 4096)
    report.stored(NS, 1, 1, {MissReason.NO_SPACE: 1})
    report.saved(NS, 5, 1)
    report.served(None, 1, {}, 0)
    report.measured(PrefillCurve(1.0, 2.0, 3, True))


def test_truncated_report_costs_numbers_and_no_engine(folder: Path) -> None:
    report = opened()
    for length in (0, 1, PAGE, PAGE + 70, 3 * PAGE):
        os.truncate(report.path, length)
        use(report)
    assert report.path.stem in seen().skipped
    report.close()
    use(report)


@pytest.mark.parametrize("at", [0, 8, 12, 16, 20, PAGE, PAGE + 64, 2 * PAGE + 64, 2 * PAGE + 64 + 8 * HITS])
def test_flipped_bits_never_reach_the_engine(folder: Path, at: int) -> None:
    """It counts on from what it knows, and so puts counters right."""
    report = opened()
    report.served(NS, 1, {}, 0)
    with open(report.path, "r+b") as out:
        out.seek(at)
        out.write(b"\xff" * 8)
    use(report)
    if at >= PAGE + 64:
        assert hits() == 3


def test_counter_at_its_end_stays_there(folder: Path) -> None:
    report = opened()
    for _ in range(3):
        report.served(NS, engine_file.COUNT_MAX, {MissReason.EVICTED: 1 << 70}, -1)
    assert hits() == engine_file.COUNT_MAX


def test_write_that_fails_ends_the_counting_and_nothing_else(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = opened()
    report.served(NS, 1, {}, 0)
    with monkeypatch.context() as broken:
        broken.setattr(os, "pwrite", _no_space)
        use(report)
    use(report)
    assert engines.Folder(NAME, 0).fold() == 1  # what it had counted is there, and nobody holds it any more
    assert hits() == 1


def _no_space(*_: object) -> int:
    raise OSError(28, "No space left on device")


def test_forked_child_ends_while_another_thread_counts(folder: Path) -> None:
    report = engines.open_report(NAME, 0, ["dram"])
    assert report is not None
    children_pids = []
    with report._lock:  # as another thread may hold it at the fork
        for _ in range(3):
            pid = os.fork()
            if pid == 0:
                report.served(NS, 1, {}, 0)
                again = engines.open_report(NAME, 0, ["dram"])
                os._exit(0 if again is not None and again is not report else 1)
            children_pids.append(pid)
    deadline = time.monotonic() + 20
    codes = []
    for pid in children_pids:
        while (ended := os.waitpid(pid, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
            time.sleep(0.01)
        if ended[0] == 0:
            os.kill(pid, signal.SIGKILL)
            ended = os.waitpid(pid, 0)
        codes.append(ended[1])
    engines.close_report(report)
    assert codes == [0, 0, 0]
    assert engines.Folder(NAME, 0).fold() == 4  # no child keeps the parent's report


def test_report_that_begins_while_another_thread_forks_is_not_kept_by_the_child(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, runs = os.ftruncate, folder / "child-runs"
    with children() as start:

        def fork_here(fd: int, length: int) -> None:
            start(_say_and_sleep, runs)
            real(fd, length)

        monkeypatch.setattr(os, "ftruncate", fork_here)
        opened().close()
        until(runs.exists)  # before that it may not have let go yet
        assert engines.Folder(NAME, 0).fold() == 1  # though the child lives


def _say_and_sleep(runs: Path) -> None:
    runs.touch()
    time.sleep(30)


@pytest.mark.parametrize("letter", ["a", "\u4e00", "\U0001f600", SURROGATE, '"', "\n"])
def test_long_texts_are_cut_so_that_they_fit(
    folder: Path, letter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = opened(pod=letter * 500, engine=letter * 500, tiers=[letter * 100] * 40)
    for i in range(engine_file.ROWS - 1):
        report.know(namespace(4096, model=letter * 600, weights=f"{i}", extra={"x": letter * 4000}))
    reports = seen()
    assert reports.skipped == {}
    assert len(reports.namespaces) == engine_file.ROWS - 1
    (engine,) = reports.engines
    assert engine.pod
    assert engine.tiers
    assert all(n.description["model"] and n.description["block_tokens"] for n in reports.namespaces.values())


def test_model_path_that_is_no_utf8_is_counted(folder: Path) -> None:
    report = opened(pod=SURROGATE)
    report.served(namespace(4096, model=f"/models/ll{SURROGATE}ama", extra={SURROGATE: 1}), 3, {}, 0)
    report.close()
    assert engines.Folder(NAME, 0).fold() == 1
    (said,) = seen().namespaces.values()
    assert (said.description["model"], said.counts.hits) == ("/models/ll?ama", 3)


def test_what_is_counted_outlives_a_kill(folder: Path) -> None:
    with children() as start:
        assert start(_count_and_die).wait() == -signal.SIGKILL
    assert hits() == 10_000


def _count_and_die() -> None:
    report = opened()
    for _ in range(10_000):
        report.served(NS, 1, {}, 0)
    os.kill(os.getpid(), signal.SIGKILL)


def test_threads_count_together(folder: Path) -> None:
    report = opened()
    spaces = [namespace(4096, model=f"m{i}") for i in range(4)]

    def count(space: Namespace) -> None:
        for _ in range(500):
            report.served(space, 1, {}, 0)

    threads = [threading.Thread(target=count, args=(space,)) for space in spaces * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert hits() == 4000


# --- files that are none ------------------------------------------------------------------------------------


@pytest.fixture
def in_time() -> Any:
    """A test that would wait for ever, or take all memory, fails."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    old = signal.signal(signal.SIGALRM, _too_late)
    signal.alarm(20)
    resource.setrlimit(resource.RLIMIT_AS, (4 << 30, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, limits)
    signal.alarm(0)
    signal.signal(signal.SIGALRM, old)


def _too_late(*_: object) -> None:
    raise TimeoutError


@pytest.mark.parametrize("host", [0, 3])
@pytest.mark.parametrize("kind", ["fifo", "zero", "link", "folder", "long", "nested", "version"])
def test_sums_that_are_none_are_said_and_cost_only_themselves(
    folder: Path, kind: str, host: int, in_time: None, caplog: pytest.LogCaptureFixture
) -> None:
    put(folder, hits=5)
    path, victim = folder / f"totals.h{host}.json", folder.parent / "victim"
    victim.write_text("precious")
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "zero":
        path.symlink_to("/dev/zero")
    elif kind == "link":
        path.symlink_to(victim)
    elif kind == "folder":
        path.mkdir()
    elif kind == "long":
        path.touch()
        os.truncate(path, 1 << 40)
    elif kind == "nested":
        path.write_text('{"namespaces":' + "[" * 100_000)
    else:
        path.write_text('{"version": 2}')
    assert path.name in seen().skipped
    assert hits() == 5
    with caplog.at_level("WARNING", "kvpool.pool"):
        assert engines.Folder(NAME, 0).fold() == 1
    assert hits() == 5
    assert victim.read_text() == "precious"
    if host == 0:  # ours: it is kept aside, and counting goes on
        assert os.path.lexists(folder / "totals.h0.damaged")
        assert "engine_sums_damaged" in caplog.text
        assert seen().skipped == {}


@pytest.mark.parametrize("make", ["link", "fifo", "folder"])
def test_unfinished_sums_of_others_are_not_written_to(folder: Path, make: str, in_time: None) -> None:
    victim, making = folder.parent / "victim", folder / "totals.h0.making"
    victim.write_text("precious")
    if make == "link":
        making.symlink_to(victim)
    elif make == "fifo":
        os.mkfifo(making)
    else:
        making.mkdir()
    put(folder)
    assert engines.Folder(NAME, 0).fold() == 1
    assert (victim.read_text(), hits()) == ("precious", 1)
    assert not list(folder.glob(".*.making"))


def test_unfinished_files_of_dead_writers_go(folder: Path) -> None:
    for name in (".totals.h0-00.making", ".h0-00.making", "totals.h0.making"):
        (folder / name).touch()
        os.utime(folder / name, (0, 0))
    (folder / ".new.making").touch()
    engines.Folder(NAME, 0).fold()
    assert [path.name for path in folder.glob("*.making")] == [".new.making"]


# --- reports that poison ------------------------------------------------------------------------------------


def nested(depth: int) -> object:
    made: object = 1
    for _ in range(depth):
        made = [made]
    return {"a": made, "model": "m"}


@pytest.mark.parametrize(
    "given",
    [
        {"head": {"pod": SURROGATE, "engine": SURROGATE, "tiers": [SURROGATE]}},
        {"head": {"pod": "p" * 3000, "tiers": ["t"] * 400}},
        {"head": {"started_at": 4.6e15}},
        {"head": {"started_at": float("nan")}},
        {"head": {"pid": (1 << 62) - 1}},
        {"description": {"model": SURROGATE, SURROGATE: "x"}},
        {"description": nested(300)},
        {"description": nested(900)},
        {"description": {"a": float("nan"), "b": float("inf"), "c": 10**3000, "d": -1, "e": True}},
        {"description": {f"{i}": i for i in range(300)}},
        {"block_bytes": -5},
        {"block_bytes": True},
        {"block_bytes": 10**3000},
        {"hits": 1 << 62},
        {"digests": (NS.digest, NS.digest)},
        {"digests": (bytes(32), b"\xff" * 32)},
    ],
)
def test_report_of_nonsense_is_bounded_or_left_out(folder: Path, given: dict[str, Any]) -> None:
    for number in range(3):
        put(folder, number, **given)
    put(folder, 100, digests=(b"\x09" * 32,), hits=7)
    seen()
    assert engines.Folder(NAME, 0).fold() in (1, 4)
    put(folder, 101, digests=(b"\x09" * 32,), hits=7)
    assert engines.Folder(NAME, 0).fold() == 1
    reports = seen()
    assert reports.namespaces["09" * 32].counts.hits == 14
    assert "totals.h0.json" not in reports.skipped
    assert engines.reports_from(json.loads(json.dumps(asdict(reports)))) == reports


@pytest.mark.parametrize(
    "said",
    [
        {"namespaces": [{"digest": "x", "description": {}, "block_bytes": 1}]},
        {"namespaces": [{"digest": "", "description": {}, "block_bytes": 1, "counts": {"hits": -1}}]},
        {
            "namespaces": [
                {"digest": "", "description": {}, "block_bytes": 1, "counts": {"misses": {"\x1b": 1}}}
            ]
        },
        {"namespaces": [{"digest": "", "description": {}, "block_bytes": 1, "counts": {"hits": 1 << 63}}]},
    ],
)
def test_sums_with_wrong_numbers_are_damaged(folder: Path, said: dict[str, Any]) -> None:
    (folder / "totals.h0.json").write_text(json.dumps({"version": 1, **said}))
    assert "totals.h0.json" in seen().skipped
    put(folder)
    assert engines.Folder(NAME, 0).fold() == 1
    assert (hits(), seen().skipped) == (1, {})


def test_sums_that_get_too_long_show_fewer_engines_and_count_all(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_sums, "TOTALS_BYTES_MAX", 8000)
    for number in range(20):
        put(folder, number)
    assert engines.Folder(NAME, 0).fold() == 20
    assert (hits(), seen().skipped) == (20, {})
    assert 0 < len(seen().engines) < 20


# --- many, and several daemons ------------------------------------------------------------------------------


def test_many_damaged_files_need_few_descriptors(folder: Path) -> None:
    for number in range(400):
        (folder / f"h0-{number:016x}{SUFFIX}").write_bytes(b"x")
    for number in range(400, 405):
        put(folder, number)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 60, limits[1]))
    try:
        assert engines.Folder(NAME, 0).fold() == 5
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    reports = seen()
    assert reports.total.hits == 5
    assert len(reports.skipped) == engines.SKIPPED_MAX + 1
    assert f"({400 - engines.SKIPPED_MAX} more)" in reports.skipped


def test_all_are_counted_and_those_left_out_of_the_list_are_said(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "ENGINES_MAX", 10)
    for number in range(35):
        put(folder, number)
    reports = seen()
    assert (reports.total.hits, len(reports.engines), reports.left_out) == (35, 10, 25)
    assert reports.grouped().left_out == 25
    assert (reports + reports).left_out == 50


def test_more_than_can_be_read_at_once_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "READ_MAX", 20)
    for number in range(35):
        put(folder, number)
    assert seen().skipped == {
        "(25 others)": "they are too many: at most 20 files and rows are read at one look"
    }


def test_namespaces_without_end_become_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "NAMESPACES_SEEN_MAX", 10)
    for number in range(30):
        put(folder, number, digests=(bytes([1 + number]) * 32,))
    reports = seen()
    assert (len(reports.namespaces), reports.total.hits) == (11, 30)


def test_daemon_that_fell_before_the_removal_is_not_repeated_by_another(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both look after a host that has none: the first has told it, the file is still there."""
    path = put(folder, host=5, hits=100)
    with monkeypatch.context() as killed:
        killed.setattr(engines.Folder, "_remove", lambda *_: [])
        assert engines.Folder(NAME, 0).fold(others={1}) == 1
    assert (path.exists(), hits()) == (True, 100)
    assert engines.Folder(NAME, 1).fold(others={0}) == 0
    assert (path.exists(), hits()) == (False, 100)
    assert engines.look(NAME, 5).total.hits == 0


def test_file_that_another_daemon_has_removed_meanwhile_is_not_folded(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(folder, host=5)

    def slow(path: Path) -> int:
        fd = engine_file.open_to_read(path)
        monkeypatch.undo()
        monkeypatch.setenv(paths.RUNTIME_ENV, str(folder.parents[1]))
        assert engines.Folder(NAME, 1).fold(others={0}) == 1
        return fd

    monkeypatch.setattr(engines, "open_to_read", slow)
    assert engines.Folder(NAME, 0).fold(others={1}) == 0
    assert hits() == 1


def test_files_that_cannot_be_removed_are_counted_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "FOLDED_MAX", 10)
    monkeypatch.setattr(Path, "unlink", _not_permitted)
    for number in range(14):
        put(folder, number)
    daemon = engines.Folder(NAME, 0)
    for _ in range(4):
        with pytest.raises(KvpoolError, match="10 reports of engines that ended are counted, and cannot be"):
            daemon.fold()
        assert hits() == 14
    monkeypatch.undo()
    monkeypatch.setenv(paths.RUNTIME_ENV, str(folder.parents[1]))
    assert (daemon.fold(), daemon.fold(), hits()) == (4, 0, 14)
    assert not list(folder.glob(f"*{SUFFIX}"))


def _not_permitted(*_: object, **__: object) -> None:
    raise PermissionError(1, "Operation not permitted")


def test_report_folded_while_it_was_read_is_told_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(folder, hits=5)
    real = engines._Look.read_totals

    def fold_first(self: Any, *given: Any) -> Any:
        engines.Folder(NAME, 0).fold()
        return real(self, *given)

    monkeypatch.setattr(engines._Look, "read_totals", fold_first)
    assert hits() == 5


# --- texts --------------------------------------------------------------------------------------------------


def test_description_is_flat_and_bounded() -> None:
    said = flat(
        {"a": "x" * 5000, "b": [1], "c": {}, 4: 4, "d": None, "e": 1.5, "f": float("inf"), "g": 1 << 70}
    )
    assert said == {"a": "x" * TEXT_MAX, "d": None, "e": 1.5}


def test_control_characters_are_written_out() -> None:
    assert (
        printable("A\x1b]0;evil\x07\nfake \u202eline\x9b é 一")
        == "A\\x1b]0;evil\\x07\\nfake \\u202eline\\x9b é 一"
    )
    assert printable(SURROGATE) == "\\udcff"
