"""The `kvpool cxl` commands, on memories made of files."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from kvpool.cli import app
from kvpool.region import Geometry, Region

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "cxl.md"
UUID = "11111111-2222-4333-8444-555555555555"
Run = Callable[..., Result]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("KVPOOL_CXL_BACKEND", f"file:{tmp_path}?memories=2x64Mi")
    monkeypatch.setenv("KVPOOL_RUNTIME_DIR", str(tmp_path / "run"))
    return lambda *arguments: CliRunner().invoke(app, ["cxl", *arguments])


def compose(run: Run, *more: str) -> Result:
    return run("compose", "--uuid", UUID, "--memory", "0x1", "--size", "32Mi", *more)


def test_compose_prints_the_device_and_list_has_it(run: Run) -> None:
    made = compose(run)
    assert made.exit_code == 0
    assert f"region {UUID} of 0x1: " in made.stdout
    assert f"{UUID}.dax, 32.0 MiB" in made.stdout
    lines = run("list").stdout.splitlines()
    assert lines[1].split() == ["0x1", "mem0", "64.0", "MiB", "pmem", "-", "healthy", UUID]
    assert lines[2].split() == ["0x2", "mem1", "64.0", "MiB", "pmem", "-", "healthy", "-"]
    assert lines[3] == f"region {UUID}: 32.0 MiB of 0x1"
    assert lines[4].endswith(f"/regions/{UUID}.dax: 32.0 MiB, mappings of 2.0 MiB")


def test_list_tells_of_bytes_without_a_recipe_and_of_ill_memories(run: Run, tmp_path: Path) -> None:
    compose(run)
    (tmp_path / "regions" / f"{UUID}.json").unlink()
    (tmp_path / "memories" / "0x2.json").write_text('{"sizeBytes": 1e999}')
    lines = run("list").stdout.splitlines()
    assert lines[1].split()[-1] == "-", "whose memory it is, nobody knows"
    assert "0x2.json cannot be read: sizeBytes is no whole number of at least 1, below 2^62" in lines[2]
    assert lines[3] == f"region {UUID}: 32.0 MiB"
    assert lines[4].startswith(f"  {UUID}.json is missing, so its memories are not known and count as free")
    assert compose(run).exit_code == 0
    assert run("list").stdout.splitlines()[3] == f"region {UUID}: 32.0 MiB of 0x1"


def test_json_has_memories_and_regions(run: Run) -> None:
    made = json.loads(compose(run, "-o", "json").stdout)
    assert (made["uuid"], made["memories"], made["size_bytes"]) == (UUID, ["0x1"], 32 << 20)
    listed = json.loads(run("list", "--output", "json").stdout)
    assert [memory["serial"] for memory in listed["memories"]] == ["0x1", "0x2"]
    assert listed["regions"] == [made]


def test_compose_without_a_uuid_makes_one_up(run: Run) -> None:
    made = run("compose", "--memory", "0x2", "--memory", "0X1", "--size", "64Mi", "-o", "json")
    described = json.loads(made.stdout)
    assert len(described["uuid"]) == 36
    assert described["memories"] == ["0x2", "0x1"]


def test_resize_and_destroy(run: Run, tmp_path: Path) -> None:
    path = json.loads(compose(run, "-o", "json").stdout)["device"]["path"]
    Region.format(path, Geometry(capacity_bytes=32 << 20), force=True)
    assert "64.0 MiB" in run("resize", UUID, "--size", "64Mi").stdout
    refused = run("destroy", UUID)
    assert refused.exit_code == 1
    assert "holds a kvpool region" in refused.stderr
    assert "--with-blocks" in refused.stderr
    assert run("destroy", UUID, "--with-blocks").exit_code == 0
    assert json.loads(run("destroy", UUID, "-o", "json").stdout) == {"destroyed": UUID}
    assert json.loads(run("list", "-o", "json").stdout)["regions"] == []


def test_destroy_says_whether_there_was_a_region(run: Run) -> None:
    compose(run)
    assert run("destroy", UUID).stdout == f"region {UUID} is gone from this machine\n"
    assert run("destroy", UUID).stdout == f"there was no region {UUID}; nothing was changed\n"


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("compose", "--memory", "0x9", "--size", "1Mi"), 1, "there is no memory 0x9 here"),
        (("compose", "--memory", "0x1", "--size", "1GB"), 2, '"1GB" is not a quantity'),
        (("compose", "--memory", "0x1", "--size", "1Mi", "--uuid", "x"), 2, '"x" is not a UUID'),
        (("compose", "--memory", "0x1", "--size", "1Mi", "--granularity", "1"), 2, "granularity 1"),
        (("compose", "--memory", "0x1", "--size", "1Mi", "--align", "8Ki"), 2, "align 8192"),
        (("compose", "--memory", "0x1", "--memory", "0x1", "--size", "1Mi"), 2, "different ones"),
        (
            ("compose", "--memory", "0x1", "--size", "1Mi", "--uuid", str(uuid.UUID(int=0))),
            2,
            "a UUID of its own",
        ),
        (("compose", "--memory", "0x1", "--size", "65Mi"), 1, "give at most 64Mi"),
        (("compose", "--size", "1Mi"), 2, "--memory"),
        (("resize", UUID, "--size", "1Mi"), 1, "does not exist"),
        (("destroy", "x"), 2, '"x" is not a UUID'),
        (("list", "--backend", "nvme"), 2, 'backend "nvme" does not exist; expected sysfs, file:/FOLDER'),
    ],
)
def test_wrong_use_is_told_with_its_exit_code(
    run: Run, arguments: tuple[str, ...], code: int, words: str
) -> None:
    result = run(*arguments)
    assert result.exit_code == code
    assert words in result.stderr


def test_machine_without_cxl_lists_nothing(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    if Path("/sys/bus/cxl/devices").exists():
        pytest.skip("this machine has CXL memory, or at least its driver")
    assert run("list", "--backend", "sysfs").stdout == "no CXL memory here\n"


def test_documented_session_works(tmp_path: Path) -> None:
    (session,) = re.findall(r"```sh\n(export KVPOOL_CXL_BACKEND=.*?)```", DOCUMENT.read_text(), re.DOTALL)
    assert "file:/tmp/cxl?" in session
    script = "set -e\n" + session.replace("/tmp/cxl", str(tmp_path / "cxl"))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, timeout=120, env=os.environ | {"PATH": path}
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"region {UUID} of 0x1, 0x2: {tmp_path}/cxl/regions/{UUID}.dax, 128.0 MiB") == 2
