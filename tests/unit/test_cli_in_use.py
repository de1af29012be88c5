"""Regions that somebody uses are not given to another pool, not erased, and not removed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from children import kill_holders
from kvpool.cli import app

pytest.importorskip("kvpool._native", reason="the compiled part of kvpool is not built")

MANIFEST = """
apiVersion: kvpool.dev/v1alpha1
kind: KVPool
metadata: {name: NAME}
spec:
  tiers:
  - {name: TIER, medium: DRAM, capacity: 8Mi, source: {path: PATH}}
"""

Run = Callable[..., Result]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Pools `first` and `second`, whose manifests name one file. Daemons that are left behind are ended."""
    monkeypatch.setenv("KVPOOL_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.delenv("KVPOOL_HOST", raising=False)
    for name, tier in (("first", "dram"), ("second", "memory")):
        text = MANIFEST.replace("PATH", str(tmp_path / "region")).replace("NAME", name)
        (tmp_path / f"{name}.yaml").write_text(text.replace("TIER", tier))
    yield tmp_path
    kill_holders(tmp_path.glob("*/*/daemon.h*.lock"))


@pytest.fixture
def run(folder: Path) -> Run:
    def call(*arguments: str) -> Result:
        return CliRunner().invoke(app, [a.replace("@", f"{folder}/") for a in arguments])

    return call


@contextmanager
def engine(pool: str) -> Iterator[int]:
    """The process of an engine that has the pool open."""
    code = f"from kvpool import Pool\nwith Pool.open({pool!r}): print('in', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "in\n"
        try:
            yield process.pid
        finally:
            process.communicate("\n")


def pid_of(result: Result) -> int:
    assert result.exit_code == 0, result.output
    up: Any = json.loads(result.stdout)
    return int(up["pid"])


def failed(result: Result) -> str:
    assert result.exit_code == 1, result.output
    return " ".join(result.stderr.split())


@pytest.mark.parametrize("opened", [False, True], ids=["by-its-daemon", "by-an-engine"])
def test_format_force_of_a_region_in_use_names_the_process(run: Run, folder: Path, opened: bool) -> None:
    pid = pid_of(run("up", "-f", "@first.yaml", "-o", "json"))
    before = (folder / "region").stat()
    erase = ("format", "@region", "--capacity", "16Mi", "--force")
    if opened:
        with engine("first") as of_engine:
            assert run("down", "first").exit_code == 0
            said = failed(run(*erase))
            assert f"engine process {of_engine}" in said
    else:
        said = failed(run(*erase))
        assert f"daemon process {pid}" in said
    assert "it is in use. Nothing was changed. Stop the pool ('kvpool down') and its engines first" in said
    after = (folder / "region").stat()
    assert (after.st_ino, after.st_size) == (before.st_ino, before.st_size)
    run("down", "first")
    assert run(*erase).exit_code == 0


def test_up_of_a_region_that_is_another_pools_is_refused(run: Run, folder: Path) -> None:
    pid_of(run("up", "-f", "@first.yaml", "-o", "json"))
    before = (folder / "region").read_bytes()[:4096]
    said = failed(run("up", "-f", "@second.yaml"))
    assert (
        f'tier "memory": region {folder}/region is pool first\'s (tier "dram"). Nothing was changed.' in said
    )
    assert "Write another spec.tiers[0].source.path" in said
    run("down", "first")  # which keeps its blocks
    assert "is pool first's" in failed(run("up", "-f", "@second.yaml"))
    assert not (folder / "run" / "second").exists()
    (folder / "link").symlink_to(folder / "region")
    text = (folder / "second.yaml").read_text()
    (folder / "linked.yaml").write_text(text.replace(f"{folder}/region", f"{folder}/link"))
    assert "is pool first's" in failed(run("up", "-f", "@linked.yaml"))
    assert (folder / "region").read_bytes()[:64] == before[:64]
    assert run("down", "first", "--delete").exit_code == 0
    assert run("up", "-f", "@second.yaml").exit_code == 0


def test_up_of_a_region_that_processes_of_another_runtime_directory_use_is_refused(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = pid_of(run("up", "-f", "@first.yaml", "-o", "json"))
    assert pid_of(run("up", "first", "-o", "json")) == pid
    with engine("first") as of_engine:
        monkeypatch.setenv("KVPOOL_RUNTIME_DIR", str(folder / "other"))
        said = failed(run("up", "-f", "@second.yaml"))
        assert f"daemon process {pid}" in said
        assert f"engine process {of_engine}" in said
        monkeypatch.setenv("KVPOOL_RUNTIME_DIR", str(folder / "run"))
        assert run("down", "first").exit_code == 0
        pid_of(run("up", "first", "-o", "json"))  # its own engine stays


def test_down_delete_of_a_file_that_another_pool_serves_is_refused(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = pid_of(run("up", "-f", "@first.yaml", "-o", "json"))
    # As an older build let it be: the manifest of a pool on the same file is kept elsewhere.
    other = folder / "other" / "second"
    other.mkdir(parents=True)
    (other / "pool.yaml").write_text((folder / "second.yaml").read_text())
    monkeypatch.setenv("KVPOOL_RUNTIME_DIR", str(folder / "other"))
    for arguments in (["--delete"], ["--delete", "--force"]):
        said = failed(run("down", "second", *arguments))
        assert f"in use by daemon process {pid} (tiers memory)" in said
        assert "Nothing was stopped or removed" in said
    assert (folder / "region").exists()
    assert other.exists()


@pytest.mark.parametrize("replaced", [False, True], ids=["removed", "replaced"])
def test_up_starts_a_daemon_anew_whose_region_is_gone(run: Run, folder: Path, replaced: bool) -> None:
    pid = pid_of(run("up", "-f", "@first.yaml", "-o", "json"))
    (folder / "region").rename(folder / "old")
    if replaced:
        (folder / "region").write_bytes((folder / "old").read_bytes())
    again = run("up", "first", "-o", "json")
    assert "its region was removed or replaced: starting the daemon anew" in again.stderr
    other = pid_of(again)
    assert other != pid
    assert json.loads(again.stdout)["tiers"][0]["region"] == ("kept" if replaced else "made")
    assert pid_of(run("up", "first", "-o", "json")) == other


def test_up_with_another_source_for_a_tier_is_refused(run: Run, folder: Path) -> None:
    pid = pid_of(run("up", "-f", "@first.yaml", "-o", "json"))
    text = (folder / "first.yaml").read_text()
    (folder / "moved.yaml").write_text(text.replace(f"{folder}/region", f"{folder}/elsewhere"))
    said = failed(run("up", "-f", "@moved.yaml"))
    assert (
        f'tier "dram": its region is {folder}/region, and spec.tiers[0].source is for {folder}/else' in said
    )
    assert f"To keep its blocks write source.path: {folder}/region; to give them up" in said
    assert not (folder / "elsewhere").exists()
    assert pid_of(run("up", "first", "-o", "json")) == pid
    (folder / "renamed.yaml").write_text((folder / "moved.yaml").read_text().replace("dram,", "other,"))
    assert run("up", "-f", "@renamed.yaml").exit_code == 0
