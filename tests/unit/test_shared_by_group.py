"""Processes of several users share a pool by a group of theirs: file modes, locks without process ids."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from children import children
from kvpool import KeyBatch, Pool, engines, paths
from kvpool.provision import provision
from kvpool.region import Region
from kvpool.spec import PoolSpec
from strategies import namespace

UNIT = 4096
GROUP, DAEMON, ENGINE, STRANGER = 64000, 64001, 64002, 64003
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be several users")


def spec_in(folder: Path) -> PoolSpec:
    tier = {
        "name": "dram",
        "medium": "DRAM",
        "capacity": "16Mi",
        "minBlockSize": "4Ki",
        "source": {"path": str(folder / "r")},
    }
    return PoolSpec.from_object(
        {
            "apiVersion": "kvpool.dev/v1alpha1",
            "kind": "KVPool",
            "metadata": {"name": "p"},
            "spec": {"tiers": [tier]},
        }
    )


def become(user: int, group: int, others: list[int]) -> None:
    os.setgroups(others)
    os.setgid(group)
    os.setuid(user)


def make(folder: Path, umask: int) -> None:
    become(DAEMON, GROUP, [])
    os.umask(umask)
    provision(spec_in(folder), 0, timeout_s=0, progress=lambda *_: None, waiting=lambda _: None)


def keys(count: int) -> KeyBatch:
    return KeyBatch.from_hashes(namespace(UNIT), [n.to_bytes(32, "big") for n in range(count)])


def use(folder: Path, others: list[int]) -> int:
    become(ENGINE, ENGINE, others)
    with Pool.open(spec_in(folder)) as pool:
        pool.store(keys(32), [bytes([n]) * UNIT for n in range(32)])
        return pool.load(keys(32), [bytearray(UNIT) for _ in range(32)]).hit_count


def attach_as_stranger(folder: Path) -> str:
    become(STRANGER, STRANGER, [])
    try:
        Region.attach(folder / "r")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.fixture
def place(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    runtime = folder / "runtime"
    runtime.mkdir()
    for path in (folder, runtime):
        os.chown(path, DAEMON, GROUP)
        path.chmod(0o775)
    monkeypatch.setenv("KVPOOL_RUNTIME_DIR", str(runtime))
    return folder


def test_engine_of_another_user_in_the_group_stores_and_loads(place: Path) -> None:
    with children() as start:
        start(make, place, 0o007).result()
        status = (place / "r").stat()
        assert (stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid) == (0o660, DAEMON, GROUP)
        assert start(use, place, [GROUP]).result() == 32
        with Region.attach(place / "r", role="daemon") as region:  # root's, as another user again
            assert region.reap().dead == 0


def make_engines_folder(umask: int) -> None:
    become(DAEMON, GROUP, [])
    os.umask(umask)
    paths.ensure_pool_dir("p")
    engines.Folder("p", 0).make()


def fold() -> int:
    become(DAEMON, GROUP, [])
    return engines.Folder("p", 0).fold()


def test_engine_of_another_user_reports_and_the_daemon_folds_it(place: Path) -> None:
    with children() as start:
        start(make, place, 0o007).result()
        start(make_engines_folder, 0o007).result()
        folder = paths.engines_path("p")
        assert stat.S_IMODE(folder.stat().st_mode) == 0o2770
        assert start(use, place, [GROUP]).result() == 32
        (report,) = folder.iterdir()
        assert (report.stat().st_uid, report.stat().st_gid) == (ENGINE, GROUP)
        assert start(fold).result() == 1
        assert engines.look("p").total.hits == 32


def test_engine_that_may_not_write_there_works_without_a_report(place: Path) -> None:
    with children() as start:
        start(make, place, 0o007).result()
        start(make_engines_folder, 0o077).result()
        assert start(use, place, [GROUP]).result() == 32
        assert engines.look("p").engines == []


def test_stranger_is_refused_with_what_to_do(place: Path) -> None:
    with children() as start:
        start(make, place, 0o007).result()
        told = start(attach_as_stranger, place).result()
    assert told.startswith("MediumUnavailable")
    assert "permission" in told


def test_mode_of_a_region_follows_the_umask(place: Path) -> None:
    with children() as start:
        start(make, place, 0o027).result()
    assert stat.S_IMODE((place / "r").stat().st_mode) == 0o640
