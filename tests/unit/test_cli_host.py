"""`--host N`: the regions and shards that are this host's own, and hosts that there are not."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from children import kill_holders
from kvpool.cli import app

pytest.importorskip("kvpool._native", reason="the compiled part of kvpool is not built")

MANIFEST = """
apiVersion: kvpool.dev/v1alpha1
kind: KVPool
metadata: {name: two}
spec:
  hosts: 2
  tiers:
  - {name: dram, medium: DRAM, capacity: 8Mi, source: {path: MEDIA/dram}}
  - {name: cxl, medium: CXL, capacity: 16Mi, shared: true, source: {path: MEDIA/cxl}}
"""

Run = Callable[..., Result]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a manifest of two hosts. Daemons that are left behind are ended."""
    monkeypatch.setenv("KVPOOL_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.delenv("KVPOOL_HOST", raising=False)
    (tmp_path / "pool.yaml").write_text(MANIFEST.replace("MEDIA", str(tmp_path)))
    yield tmp_path
    kill_holders(tmp_path.glob("*/*/daemon.h*.lock"))


@pytest.fixture
def run(folder: Path) -> Run:
    def call(*arguments: str) -> Result:
        return CliRunner().invoke(app, [a.replace("@", f"{folder}/") for a in arguments])

    return call


def test_scrub_and_repair_of_a_host_take_its_own_regions_and_shards(run: Run, folder: Path) -> None:
    for host in ("0", "1"):
        assert run("up", "-f", "@pool.yaml", "--host", host).exit_code == 0
    scrubbed = run("scrub", "two", "--host", "1", "-o", "json")
    assert scrubbed.exit_code == 0, scrubbed.output
    regions = json.loads(scrubbed.stdout)["regions"]
    assert [(Path(r["path"]).name, r["shard"]) for r in regions] == [("dram.h1", 0), ("cxl", 1)]
    repaired = run("fsck", "two", "--repair", "--host", "1", "-o", "json")
    assert repaired.exit_code == 0, repaired.output
    assert [Path(r["path"]).name for r in json.loads(repaired.stdout)["regions"]] == ["dram.h1", "cxl"]
    for command in (["scrub", "two"], ["fsck", "two", "--repair"]):
        wrong = run(*command, "--host", "2")
        assert wrong.exit_code == 1
        assert 'host 2 is not in pool "two" (0 to 1)' in wrong.stderr


def test_down_of_a_host_that_is_not_in_the_pool_is_an_error(run: Run, folder: Path) -> None:
    assert run("up", "-f", "@pool.yaml").exit_code == 0
    wrong = run("down", "two", "--host", "4")
    assert wrong.exit_code == 1
    assert 'host 4 is not in pool "two" (0 to 1)' in wrong.stderr
    assert 'pool "two" was not running' in run("down", "two", "--host", "1").stdout
    assert "stopped daemon" in run("down", "two", "--host", "0").stdout


def test_litmus_with_hosts_that_there_are_not_says_which_there_are(run: Run, folder: Path) -> None:
    for hosts, said in (("2", "write numbers below 2, without 0, like 1."), ("1", "it has no others.")):
        made = run("format", f"@of{hosts}", "--capacity", "16Mi", "--hosts", hosts)
        assert made.exit_code == 0, made.output
        wrong = run("litmus", "--path", f"@of{hosts}", "--peer-hosts", "7")
        assert wrong.exit_code == 2
        assert said in " ".join(wrong.stderr.replace("\u2502", "").split())


def test_dump_of_a_state_that_there_is_not_is_wrong_use(run: Run, folder: Path) -> None:
    assert run("format", "@region", "--capacity", "16Mi").exit_code == 0
    wrong = run("dump", "@region", "--state", "foo")
    assert wrong.exit_code == 2
    assert "write writing, stored, lent, retired." in " ".join(wrong.stderr.replace("\u2502", "").split())
    assert run("dump", "@region", "--state", "Stored").exit_code == 0


def test_fsck_of_what_is_no_region_does_not_advise_a_repair(run: Run, folder: Path) -> None:
    (folder / "thesis").write_text("four years of work")
    wrong = run("fsck", "@thesis")
    assert wrong.exit_code == 1
    assert "no kvpool region here" in wrong.stdout
    assert "--repair" not in wrong.output


def test_up_alone_says_that_coherence_is_not_verified(run: Run, folder: Path) -> None:
    alone = "; coherence not verified yet: no other host runs"
    assert alone in run("up", "-f", "@pool.yaml").stdout
    assert json.loads(run("up", "two", "-o", "json").stdout)["coherence"] == "NoPeer"
    both = run("up", "two", "--host", "1")
    assert both.exit_code == 0
    assert "not verified" not in both.stdout
