"""What engines count in files of their own: the same as the regions, whatever ends in between."""

from __future__ import annotations

import fcntl
import json
import os
import random
import shutil
import signal
import stat
import struct
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from children import children
from kvpool import engine_file, engines, paths
from kvpool.engine_file import FILE_BYTES, PAGE, SUFFIX
from kvpool.explain import explain
from kvpool.keys import Namespace
from kvpool.outcomes import MissReason
from kvpool.pool import Pool
from kvpool.provision import provision
from kvpool.report import NamespaceCounts, PrefillCurve
from kvpool.spec import PoolSpec
from kvpool.view import look
from strategies import buffers, contents, keys_of, namespace, seed

UNIT = 4096
NAME = "counted"
NS = namespace(UNIT)
OTHER = namespace(UNIT, model="other")


@pytest.fixture
def spec(folder: Path, monkeypatch: pytest.MonkeyPatch) -> PoolSpec:
    monkeypatch.setenv(paths.RUNTIME_ENV, str(folder / "run"))
    monkeypatch.delenv("HOSTNAME", raising=False)
    tier = {
        "name": "dram",
        "medium": "DRAM",
        "capacity": "16Mi",
        "minBlockSize": "4Ki",
        "source": {"path": str(folder / "r")},
    }
    made = PoolSpec.from_object(
        {
            "apiVersion": "kvpool.dev/v1alpha1",
            "kind": "KVPool",
            "metadata": {"name": NAME},
            "spec": {"tiers": [tier]},
        }
    )
    paths.ensure_pool_dir(NAME)
    provision(made, 0, timeout_s=0, progress=lambda *_: None, waiting=lambda _: None)
    return made


def use(spec: PoolSpec, ns: Namespace, first: int, engine: str = "") -> None:
    """Four blocks stored, loaded, and four more missed."""
    with Pool.open(spec, engine=engine) as pool:
        work(pool, ns, first)


def work(pool: Pool, ns: Namespace, first: int) -> None:
    keys = keys_of(ns, range(first, first + 4))
    pool.store(keys, contents(keys))
    pool.load(keys, buffers(keys))
    absent = keys_of(ns, range(first + 1000, first + 1004))
    pool.load(absent, buffers(absent))
    pool.record_misses(MissReason.BELOW_MINIMUM, 2, ns)


def die(spec: PoolSpec, ns: Namespace, first: int) -> None:
    work(Pool.open(spec), ns, first)
    os.kill(os.getpid(), signal.SIGKILL)


FOUR = NamespaceCounts(
    hits=4,
    misses={"below-minimum": 2, "never-stored": 4},
    stored=4,
    bytes_loaded=4 * UNIT,
    bytes_stored=4 * UNIT,
)


def sums() -> dict[str, NamespaceCounts]:
    return {digest: n.counts for digest, n in engines.look(NAME).namespaces.items()}


def test_reports_together_say_what_the_region_says(spec: PoolSpec) -> None:
    with Pool.open(spec) as pool, children() as start:
        work(pool, NS, 0)
        start(use, spec, OTHER, 100).result()
        assert start(die, spec, NS, 200).wait() == -signal.SIGKILL
        reports = engines.look(NAME)
        region = pool.counters()
        assert [e.ended_at is None for e in reports.engines].count(True) == 1
        total = reports.total
        assert (total.lookups, total.hits, total.misses) == (region.lookups, region.hits, region.misses)
        assert (total.stored, total.bytes_loaded) == (region.stored, region.bytes_loaded)
        assert sums() == {NS.digest.hex(): FOUR + FOUR, OTHER.digest.hex(): FOUR}

        # Folding, once and again, changes who tells it, and not what is told.
        folder = engines.Folder(NAME, 0)
        assert (folder.fold(), folder.fold()) == (2, 0)
        assert engines.look(NAME).total == total
        assert len(list(paths.engines_path(NAME).glob(f"*{SUFFIX}"))) == 1
        assert len(engines.look(NAME).engines) == 3
    assert engines.Folder(NAME, 0).fold() == 1
    assert engines.look(NAME).total == total


def test_crash_between_sums_and_removal_counts_nothing_twice(spec: PoolSpec) -> None:
    use(spec, NS, 0)
    (file,) = paths.engines_path(NAME).glob(f"*{SUFFIX}")
    content = file.read_bytes()
    engines.Folder(NAME, 0).fold()
    file.write_bytes(content)  # as if it had not been removed
    assert sums() == {NS.digest.hex(): FOUR}
    assert engines.Folder(NAME, 0).fold() == 0
    assert not file.exists()
    assert sums() == {NS.digest.hex(): FOUR}


def test_engines_that_ended_are_shown_for_an_hour_and_counted_for_ever(spec: PoolSpec) -> None:
    use(spec, NS, 0)
    now = 1_000_000.0
    engines.Folder(NAME, 0, clock=lambda: now).fold()
    assert len(engines.look(NAME, clock=lambda: now + 3599).engines) == 1
    late = engines.look(NAME, clock=lambda: now + 3601)
    assert (late.engines, late.total) == ([], FOUR)
    engines.Folder(NAME, 0, clock=lambda: now + 3601).fold()
    assert json.loads((paths.engines_path(NAME) / "totals.h0.json").read_text())["ended"] == []
    assert sums() == {NS.digest.hex(): FOUR}


def test_settings_of_engines_long_gone_explain_nothing(spec: PoolSpec) -> None:
    """They are counted, and differ from nobody any more."""
    now = time.time()
    with Pool.open(spec) as pool:
        pool.record_misses(MissReason.NEVER_STORED, 5, namespace(UNIT, block_tokens=32))
    use(spec, NS, 0)
    assert len(explain(look(spec).counters, look(spec).namespaces).namespaces) == 1
    engines.Folder(NAME, 0, clock=lambda: now - 4000).fold()
    seen = look(spec)
    assert seen.reports.total.misses["never-stored"] == 9
    assert explain(seen.counters, seen.namespaces).namespaces == ()


def test_namespaces_beyond_the_limit_become_one(spec: PoolSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "NAMESPACES_MAX", 2)
    for i in range(4):
        use(spec, namespace(UNIT, model=f"m{i}"), 10 * i)
        engines.Folder(NAME, 0).fold()
    reports = engines.look(NAME)
    assert [n.description.get("model") for n in reports.namespaces.values()] == [None, "m2", "m3"]
    assert reports.total.hits == 16
    assert reports.namespaces[""].counts == FOUR + FOUR


def test_more_namespaces_than_a_file_has_rows_are_counted_without_name(spec: PoolSpec) -> None:
    with Pool.open(spec) as pool:
        for i in range(engine_file.ROWS + 10):
            pool.record_misses(MissReason.EVICTED, 1, namespace(UNIT, model=f"m{i}"))
        pool.record_misses(MissReason.EVICTED, 1)
        reports = engines.look(NAME)
        assert reports.total.misses == {"evicted": engine_file.ROWS + 11}
        assert len(reports.namespaces) == engine_file.ROWS


def test_processes_of_one_engine_are_shown_as_one(spec: PoolSpec) -> None:
    with Pool.open(spec, engine="e"), Pool.open(spec, engine="e") as twice, children() as start:
        work(twice, NS, 0)
        assert len(list(paths.engines_path(NAME).glob(f"*{SUFFIX}"))) == 1
        start(use, spec, NS, 100, "e").result()
        (engine,) = engines.look(NAME).grouped().engines
        assert (engine.engine, engine.ended_at, engine.shown) == ("e", None, f"h0/{os.getpid()}")
        assert engine.total == FOUR + FOUR


def test_names_are_unique_when_a_process_opens_the_pool_again_and_again(spec: PoolSpec) -> None:
    for _ in range(2):
        with Pool.open(spec) as before:
            work(before, NS, 0)
    with Pool.open(spec) as pool:
        work(pool, NS, 0)
        shown = {e.shown: e.ended_at is None for e in engines.look(NAME).grouped().engines}
    name = f"h0/{os.getpid()}"
    assert shown == {name: True, f"{name}#2": False, f"{name}#3": False}


def test_what_was_measured_is_told(spec: PoolSpec) -> None:
    with Pool.open(spec) as pool:
        pool.record_use(NS)
        pool.record_curve(PrefillCurve(12.5, 0.25, 20, True))
        pool.record_saved(NS, 0.5, 3)
        (engine,) = engines.look(NAME).engines
        assert engine.curve == PrefillCurve(12.5, 0.25, 20, True)
        assert engine.namespaces == {NS.digest.hex(): NamespaceCounts(saved_us=500_000, timed_hits=3)}


def test_a_tenant_shows_as_such_and_not_who(spec: PoolSpec) -> None:
    with Pool.open(spec) as pool:
        pool.record_use(namespace(UNIT, tenant="secret"))
        (said,) = engines.look(NAME).namespaces.values()
        assert said.keyed
        assert b"secret" not in b"".join(p.read_bytes() for p in paths.engines_path(NAME).iterdir())


@pytest.mark.parametrize(
    ("at", "value", "why"),
    [
        (0, b"X", "no engine's report"),
        (8, b"\x02", "format 2, this build reads 1"),
        (12, b"\xff", "claims 255 rows"),
        (130, b"\x00", "checksum"),
        (PAGE + 580, b"\x00", "checksum"),
        (PAGE + 64, b"\xff" * 8, "beyond all measure"),
    ],
)
def test_damaged_file_is_left_alone_and_said(spec: PoolSpec, at: int, value: bytes, why: str) -> None:
    use(spec, NS, 0)
    (file,) = paths.engines_path(NAME).glob(f"*{SUFFIX}")
    with open(file, "r+b") as out:
        out.seek(at)
        out.write(value)
    use(spec, OTHER, 10)
    reports = engines.look(NAME)
    assert [why in said for said in reports.skipped.values()] == [True]
    assert set(sums()) == {OTHER.digest.hex()}
    assert engines.Folder(NAME, 0).fold() == 1
    assert file.exists()


def test_foreign_files_are_not_touched(spec: PoolSpec) -> None:
    use(spec, NS, 0)
    folder = paths.engines_path(NAME)
    (folder / f"h0-{'0' * 16}{SUFFIX}").write_bytes(b"short")
    (folder / f"h0-{'1' * 16}{SUFFIX}").symlink_to("/etc/passwd")
    (folder / f"h0-{'2' * 16}{SUFFIX}").mkdir()
    os.mkfifo(folder / f"h0-{'3' * 16}{SUFFIX}")
    (folder / "notes.txt").write_text("mine")
    assert len(engines.look(NAME).skipped) == 4
    assert engines.Folder(NAME, 0).fold() == 1
    assert len(list(folder.iterdir())) == 6  # and the sums


def test_damaged_sums_are_kept_aside_and_counting_goes_on(spec: PoolSpec) -> None:
    use(spec, NS, 0)
    totals = paths.engines_path(NAME) / "totals.h0.json"
    totals.write_text('{"version": 1, "namespaces": [17]}')
    assert "moves it aside" in engines.look(NAME).skipped[totals.name]
    assert sums() == {NS.digest.hex(): FOUR}
    assert engines.Folder(NAME, 0).fold() == 1
    assert sums() == {NS.digest.hex(): FOUR}
    assert "17" in totals.with_suffix(".damaged").read_text()


def test_counters_torn_off_by_another_process_do_not_reach_the_engine(spec: PoolSpec) -> None:
    with Pool.open(spec) as pool:
        work(pool, NS, 0)
        (file,) = paths.engines_path(NAME).glob(f"*{SUFFIX}")
        file.unlink()
        work(pool, NS, 100)  # counts where nobody reads
        assert sums() == {}


def test_without_a_folder_the_engine_works_and_says_so_once(
    spec: PoolSpec, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.rmtree(paths.pool_dir(NAME))
    with caplog.at_level("INFO", "kvpool.pool"):
        use(spec, NS, 0)
    assert sum("engine_not_counted" in message for message in caplog.messages) == 1
    assert engines.look(NAME).engines == []


def test_daemon_of_another_host_leaves_the_file(spec: PoolSpec) -> None:
    use(spec, NS, 0)
    assert engines.Folder(NAME, 1).fold(others={0}) == 0
    assert engines.Folder(NAME, 1).fold() == 1  # nobody else does it


def test_living_file_is_locked_before_it_has_a_name(spec: PoolSpec) -> None:
    with Pool.open(spec):
        (file,) = paths.engines_path(NAME).glob(f"*{SUFFIX}")
        fd = os.open(file, os.O_RDONLY)
        try:
            with pytest.raises(BlockingIOError):
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        finally:
            os.close(fd)
        assert file.stat().st_size == FILE_BYTES
        assert file.parent.stat().st_mode & stat.S_ISGID


def test_layout_is_what_the_docstring_says() -> None:
    """The first engine of another version reads these bytes."""
    assert (struct.calcsize("<8sIIII"), struct.calcsize("<II32s")) == (24, 40)
    assert (engine_file.MISSES, engine_file.DECLINED, engine_file.CODES_MAX) == (16, 40, 24)
    assert engine_file.TIMED_HITS == 6


def test_whatever_the_bytes_are_reading_is_no_error(spec: PoolSpec) -> None:
    """Each time one engine is left out at most, and the one beside it is read."""
    use(spec, OTHER, 10)
    (right,) = paths.engines_path(NAME).glob(f"*{SUFFIX}")
    engine = right.name
    use(spec, NS, 0)
    (file,) = (f for f in paths.engines_path(NAME).glob(f"*{SUFFIX}") if f.name != engine)
    content = file.read_bytes()[: 3 * PAGE]
    number = seed("whatever_the_bytes_are")
    chance = random.Random(number)
    for _ in range(150):
        damaged = bytearray(content)
        for _ in range(chance.randrange(1, 4)):
            places = chance.randrange(200), PAGE + chance.randrange(700), chance.randrange(3 * PAGE)
            damaged[chance.choice(places)] = chance.randrange(256)
        with open(file, "r+b") as out:
            out.write(damaged)
            out.truncate(chance.randrange(FILE_BYTES) if chance.random() < 0.1 else FILE_BYTES)
        reports = engines.look(NAME).grouped()
        assert sums()[OTHER.digest.hex()] == FOUR, number
        assert len(reports.engines) + len(reports.skipped) == 2, number
        assert engines.reports_from(json.loads(json.dumps(asdict(reports)))) == reports, number
