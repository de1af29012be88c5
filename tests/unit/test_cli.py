"""The `kvpool` command: what it prints, where, and with which exit code."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from children import kill_holders
from kvpool import paths
from kvpool.cli import app
from kvpool.daemon.lock import holder

try:
    import kvpool._native
except ImportError:
    native = None
else:
    native = kvpool._native
needs_native = pytest.mark.skipif(native is None, reason="the compiled part of kvpool is not built")

MANIFEST = """
apiVersion: kvpool.dev/v1alpha1
kind: KVPool
metadata: {name: NAME}
spec:
  hosts: 2
  tiers:
  - {name: dram, medium: DRAM, capacity: 8Mi, source: {path: MEDIA/dram}}
  - {name: cxl, medium: CXL, capacity: 16Mi, shared: true, source: {path: MEDIA/cxl}}
"""

Run = Callable[..., Result]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A runtime directory, a folder for media, and a manifest of two tiers and two hosts."""
    monkeypatch.setenv("KVPOOL_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.delenv("KVPOOL_HOST", raising=False)
    (tmp_path / "media").mkdir()
    text = MANIFEST.replace("MEDIA", str(tmp_path / "media")).replace("NAME", "cli-test")
    (tmp_path / "pool.yaml").write_text(text)
    return tmp_path


@pytest.fixture
def run(folder: Path) -> Iterator[Run]:
    """Runs a command; {} in an argument is the manifest. Daemons that it leaves behind are ended."""

    def call(*arguments: str) -> Result:
        return CliRunner().invoke(app, [a.replace("{}", str(folder / "pool.yaml")) for a in arguments])

    yield call
    kill_holders((folder / "run").glob("*/daemon.h*.lock"))


def as_json(result: Result) -> Any:
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def listing(folder: Path) -> dict[str, int]:
    return {str(p.relative_to(folder)): p.stat().st_size for p in sorted(folder.rglob("*")) if p.is_file()}


# --- without the compiled part ------------------------------------------------------------------------------


def test_validate_good_manifest_is_described(run: Run) -> None:
    result = run("validate", "-f", "{}")
    assert result.exit_code == 0
    assert 'valid. Pool "cli-test", 2 hosts' in result.stdout
    described = as_json(run("validate", "-f", "{}", "--output", "json"))
    assert described["valid"]
    assert described["manifest"]["spec"]["tiers"][0]["capacity"] == "8Mi"


def test_validate_bad_manifest_is_exit_2_with_all_mistakes(run: Run, folder: Path) -> None:
    text = (folder / "pool.yaml").read_text().replace("8Mi", "8MB").replace("hosts:", "host:")
    (folder / "pool.yaml").write_text(text)
    result = run("validate", "-f", "{}")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert 'spec.host: no such field; did you mean "hosts"?' in result.stderr
    assert "like 8Mi (binary) or 8M (decimal)" in result.stderr
    result = run("validate", "-f", "{}", "-o", "json")
    assert result.exit_code == 2
    error = json.loads(result.stdout)["error"]
    assert error["kind"] == "ManifestError"
    assert [p["path"] for p in error["problems"]] == ["spec.host", "spec.tiers[0].capacity"]


def test_validate_standard_input(folder: Path) -> None:
    text = (folder / "pool.yaml").read_text()
    result = CliRunner().invoke(app, ["validate", "-f", "-"], input=text)
    assert result.exit_code == 0


def test_validate_warns_of_what_up_will_refuse(run: Run, folder: Path) -> None:
    with open(folder / "pool.yaml", "a") as file:
        file.write("  - {name: ssd, medium: SSD, capacity: 1Ti, source: {hostPath: /var/lib/x}}\n")
    result = run("validate", "-f", "{}")
    assert result.exit_code == 0
    assert "SSD tiers are not in this version of kvpool; 'kvpool up' refuses it" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["up"], 2, "NAME"),
        (["up", "-f", "/no/such/file"], 2, "No such file"),
        (["up", "a", "-f", "{}"], 2, "NAME"),
        (["down", "nobody"], 1, 'no pool "nobody" on this machine'),
        (["status", "nobody"], 1, "Start it with 'kvpool up -f FILE'"),
        (["explain", "../etc"], 1, "not the name of a pool"),
        (["fsck", "/no/such/region"], 1, "no such file or device"),
        (["frobnicate"], 2, "frobnicate"),
        (["format", "/tmp/x", "--capacity", "64GB"], 2, "like 64Gi"),
        (["format", "/tmp/x", "--capacity", "64Gi", "--coherence", "soft"], 2, "hardware or software"),
        (["status", "--output", "xml"], 2, "xml"),
    ],
)
def test_wrong_use_and_failures_have_their_exit_code(
    run: Run, arguments: list[str], code: int, said: str
) -> None:
    result = run(*arguments)
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    assert said in result.stderr


def test_status_no_pools_is_an_empty_list(run: Run) -> None:
    assert as_json(run("status", "--output", "json")) == {"pools": []}
    assert "no pools on this machine" in run("status").stdout


def test_help_names_every_command(run: Run) -> None:
    text = run("--help").stdout
    for command in [
        "up",
        "down",
        "status",
        "fsck",
        "litmus",
        "adopt",
        "scrub",
        "dump",
        "explain",
        "format",
        "layout",
        "validate",
    ]:
        assert f" {command} " in text


# --- the real thing, on small files -------------------------------------------------------------------------


def store(host: int, count: int, start: int = 0, **namespace: Any) -> tuple[int, int]:
    """Store `count` blocks as an engine of `host`, load them again; (stored, right hits)."""
    from kvpool import KeyBatch, Namespace, Pool

    fields: dict[str, Any] = {"dtype": "bfloat16", "block_bytes": 32768} | namespace
    space = Namespace(
        model="m", weights="w", kv_layout="l", block_tokens=16, hash_scheme="sha256:0", **fields
    )
    numbers = range(start, start + count)
    blocks = [number.to_bytes(32, "little") * 1024 for number in numbers]
    with Pool.open("cli-test", host=host) as pool:
        keys = KeyBatch.from_hashes(space, [number.to_bytes(32, "little") for number in numbers])
        stored = pool.store(keys, blocks).stored_count
        out = [bytearray(32768) for _ in numbers]
        loaded = pool.load(keys, out)
        right = sum(
            code == 0 and got == put for code, got, put in zip(loaded.codes, out, blocks, strict=True)
        )
        assert right == loaded.hit_count
    return stored, right


@needs_native
def test_up_status_down_up_keeps_blocks(run: Run, folder: Path) -> None:
    first = as_json(run("up", "-f", "{}", "--output", "json"))
    assert (first["name"], first["host"], first["ready"]) == ("cli-test", 0, True)
    assert [t["region"] for t in first["tiers"]] == ["made", "made"]
    assert as_json(run("up", "-f", "{}", "--output", "json"))["pid"] == first["pid"]
    assert [t["region"] for t in as_json(run("up", "cli-test", "--host", "1", "-o", "json"))["tiers"]] == [
        "made",
        "kept",
    ]
    assert store(0, 50) == (50, 50)
    assert store(1, 50) == (50, 50)  # new in its own DRAM tier, hits by then
    (pool,) = as_json(run("status", "-o", "json"))["pools"]
    assert (pool["name"], pool["state"], pool["lookups"], pool["hits"]) == ("cli-test", "Ready", 100, 100)
    assert (pool["hit_rate"], pool["misses"]) == (1.0, {})
    assert [t["name"] for t in pool["tiers"]] == ["dram", "dram", "cxl"]
    for tier in pool["tiers"]:
        assert tier["capacity_bytes"] == {"DRAM": 8 << 20, "CXL": 16 << 20}[tier["medium"]]
        assert tier["used_bytes"] == 50 * 32768
        assert (tier["blocks"], tier["evictions"]) == (50, 0)
        assert Path(tier["path"]).parent == folder / "media"
    assert {p["role"] for p in pool["participants"]} == {"daemon"}
    assert "hit rate 100.0%" in run("status", "cli-test").stdout

    stopped = as_json(run("down", "cli-test", "-o", "json"))
    assert [s["host"] for s in stopped["stopped"]] == [0, 1]
    assert len(stopped["kept"]) == 3
    assert as_json(run("status", "-o", "json"))["pools"][0]["state"] == "Stopped"
    assert [t["region"] for t in as_json(run("up", "-f", "{}", "-o", "json"))["tiers"]] == ["kept", "kept"]
    assert store(0, 50) == (0, 50)


@needs_native
def test_daemon_killed_engines_go_on_and_up_restarts_it(run: Run) -> None:
    pid = as_json(run("up", "-f", "{}", "-o", "json"))["pid"]
    os.kill(pid, signal.SIGKILL)
    while holder(paths.daemon_lock_path("cli-test", 0)) is not None:
        time.sleep(0.01)
    assert store(0, 30) == (30, 30)
    (pool,) = as_json(run("status", "-o", "json"))["pools"]
    assert pool["state"] in ("Degraded", "Stopped")
    assert any("ended without being stopped" in problem for problem in pool["problems"])
    again = as_json(run("up", "cli-test", "-o", "json"))
    assert again["pid"] != pid
    assert as_json(run("status", "-o", "json"))["pools"][0]["state"] == "Ready"
    assert as_json(run("fsck", "cli-test", "-o", "json"))["ok"]
    assert store(0, 30) == (0, 30)


@needs_native
def test_daemon_keeps_free_space_of_a_pool_that_is_too_small(run: Run) -> None:
    run("up", "-f", "{}")
    stored, _ = store(0, 1000)  # 32 MB into 8 MiB and 16 MiB
    assert stored == 1000
    for _ in range(100):
        (pool,) = as_json(run("status", "-o", "json"))["pools"]
        dram = pool["tiers"][0]
        if dram["used_bytes"] <= 0.95 * dram["usable_bytes"]:
            break
        time.sleep(0.05)
    assert dram["used_bytes"] <= 0.95 * dram["usable_bytes"]
    assert dram["evictions"] > 0
    assert as_json(run("fsck", "cli-test", "-o", "json"))["ok"]


@needs_native
def test_down_delete_removes_everything(run: Run, folder: Path) -> None:
    run("up", "-f", "{}")
    run("up", "-f", "{}", "--host", "1")
    assert run("down", "cli-test", "--delete", "--host", "1").exit_code == 2
    result = as_json(run("down", "-f", "{}", "--delete", "-o", "json"))
    assert len(result["removed"]) == 3
    assert listing(folder / "media") == {}
    assert list((folder / "run").iterdir()) == []


@needs_native
def test_down_deletion_policy_delete_removes_everything(run: Run, folder: Path) -> None:
    with open(folder / "pool.yaml", "a") as file:
        file.write("  deletionPolicy: Delete\n")
    run("up", "-f", "{}")
    assert run("down", "cli-test").exit_code == 0
    assert listing(folder / "media") == {}


@needs_native
def test_down_delete_while_an_engine_runs_needs_force(run: Run, folder: Path) -> None:
    run("up", "-f", "{}")
    code = "from kvpool import Pool\nwith Pool.open('cli-test'): print('in', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as engine:
        assert engine.stdout is not None
        assert engine.stdout.readline() == "in\n"
        before = listing(folder / "media")
        result = run("down", "cli-test", "--delete")
        assert result.exit_code == 1
        assert f"in use by engine process {engine.pid} (tiers dram, cxl)" in result.stderr
        assert listing(folder / "media") == before
        assert holder(paths.daemon_lock_path("cli-test", 0)) is not None
        assert run("down", "cli-test", "--delete", "--force").exit_code == 0
        engine.communicate("\n")
    assert listing(folder / "media") == {}


@needs_native
def test_up_with_other_sizes_is_refused_and_the_daemon_goes_on(run: Run, folder: Path) -> None:
    pid = as_json(run("up", "-f", "{}", "-o", "json"))["pid"]
    before = listing(folder / "media")
    text = (folder / "pool.yaml").read_text()
    (folder / "pool.yaml").write_text(text.replace("8Mi", "64Mi").replace("hosts: 2", "hosts: 3"))
    result = run("up", "-f", "{}", "-o", "json")
    assert result.exit_code == 1
    error = json.loads(result.stdout)["error"]
    assert error["kind"] == "GeometryError"
    assert "spec.tiers[0].capacity is 64Mi, the region has room for " in error["message"]
    assert "spec.hosts is 3, the region has 2" in error["message"]
    assert listing(folder / "media") == before
    assert holder(paths.daemon_lock_path("cli-test", 0)) == pid


@needs_native
def test_up_with_another_capacity_keeps_the_blocks(run: Run, folder: Path) -> None:
    run("up", "-f", "{}")
    stored, _ = store(0, 50)
    assert stored == 50
    text = (folder / "pool.yaml").read_text()
    for capacity, size in (("16Mi", 16 << 20), ("8Mi", 8 << 20)):
        (folder / "pool.yaml").write_text(text.replace("8Mi", capacity))
        assert run("up", "-f", "{}").exit_code == 0
        for _ in range(100):
            (dram, *_) = as_json(run("status", "-o", "json"))["pools"][0]["tiers"]
            if dram["capacity_bytes"] == size:
                break
            time.sleep(0.1)
        assert (dram["capacity_bytes"], dram["blocks"]) == (size, 50)


@needs_native
def test_up_with_other_watermarks_restarts_the_daemon(run: Run, folder: Path) -> None:
    pid = as_json(run("up", "-f", "{}", "-o", "json"))["pid"]
    with open(folder / "pool.yaml", "a") as file:
        file.write("  eviction: {highWatermark: 50, lowWatermark: 40}\n")
    assert as_json(run("up", "-f", "{}", "-o", "json"))["pid"] != pid
    store(0, 200)
    time.sleep(0.6)
    dram = as_json(run("status", "-o", "json"))["pools"][0]["tiers"][0]
    assert dram["used_bytes"] <= 0.5 * dram["usable_bytes"]


@needs_native
def test_up_too_small_for_its_blocks_changes_nothing(run: Run, folder: Path) -> None:
    text = (folder / "pool.yaml").read_text().replace("8Mi", "1Mi, minBlockSize: 1Mi")
    (folder / "pool.yaml").write_text(text)
    result = run("up", "-f", "{}")
    assert result.exit_code == 1
    assert 'tier "dram": capacity' in result.stderr
    assert "Nothing was changed." in result.stderr
    assert listing(folder / "media") == {}


@needs_native
def test_up_damaged_first_superblock_uses_the_second(run: Run, folder: Path) -> None:
    run("up", "-f", "{}")
    store(0, 20)
    run("down", "cli-test")
    with open(folder / "media" / "dram", "r+b") as file:
        file.write(b"x" * 200)
    assert run("up", "-f", "{}").exit_code == 0
    assert store(0, 20) == (0, 20)


@needs_native
def test_region_of_another_version_is_refused_until_it_is_erased(run: Run, folder: Path) -> None:
    run("up", "-f", "{}")
    run("down", "cli-test")
    region = folder / "media" / "dram"
    with open(region, "r+b") as file:
        for copy in (0, 4096):
            file.seek(copy + 8)
            file.write(b"\x09")
    before = region.read_bytes()
    for arguments in (["up", "-f", "{}"], ["format", str(region), "--capacity", "8Mi"]):
        result = run(*arguments)
        assert result.exit_code == 1
        assert "format 9, this build reads 1. Nothing was changed." in result.stderr
        assert region.read_bytes() == before
    assert run("format", str(region), "--capacity", "8Mi", "--force").exit_code == 0
    assert run("up", "-f", "{}").exit_code == 0


@needs_native
def test_up_two_at_once_end_with_one_daemon(folder: Path, run: Run) -> None:
    command = [sys.executable, "-m", "kvpool", "up", "-f", str(folder / "pool.yaml"), "-o", "json"]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(2)]
    results = [(process.communicate(timeout=60), process.returncode) for process in both]
    assert [code for _, code in results] == [0, 0], results
    assert len({json.loads(said[0])["pid"] for said, _ in results}) == 1


@needs_native
def test_up_ended_while_it_fills_a_file_leaves_nothing(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr("kvpool.cli.output._Tenths.__call__", interrupted)
    before = signal.getsignal(signal.SIGTERM)
    result = run("up", "-f", "{}")
    assert result.exit_code == 128 + signal.SIGTERM
    assert listing(folder / "media") == {}
    assert signal.getsignal(signal.SIGTERM) is before


@needs_native
def test_status_regions_that_cannot_be_read_are_shown_as_reported(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvpool.errors import MediumUnavailable
    from kvpool.region import Region

    def refused(*_: object, **__: object) -> None:
        raise MediumUnavailable("no permission.")

    run("up", "-f", "{}")
    live = as_json(run("status", "-o", "json"))["pools"][0]
    monkeypatch.setattr(Region, "open_read_only", refused)
    (pool,) = as_json(run("status", "-o", "json"))["pools"]
    assert (pool["state"], pool["problems"]) == ("Ready", [])
    assert pool["notes"] == [
        f"tier {name} is shown as its daemon last reported it: no permission." for name in ("dram", "cxl")
    ]
    for tier in (*pool["tiers"], *live["tiers"]):
        assert tier["shards"][0].pop("heartbeat") >= 0
    assert pool["tiers"] == live["tiers"]
    assert pool["participants"] == live["participants"]
    run("down", "cli-test")
    assert as_json(run("status", "-o", "json"))["pools"][0]["state"] == "Failed"


@needs_native
def test_up_foreground_ends_cleanly_with_sigterm(folder: Path, run: Run) -> None:
    command = [sys.executable, "-m", "kvpool", "up", "-f", str(folder / "pool.yaml"), "--foreground"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        while "is ready" not in process.stdout.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=20)
    assert process.returncode == 0
    assert "INFO ready pool=cli-test host=0 tiers=dram,cxl" in log
    assert "INFO stopping" in log
    assert as_json(run("status", "-o", "json"))["pools"][0]["state"] == "Stopped"


@needs_native
def test_scrub_finds_a_flipped_bit(run: Run, folder: Path) -> None:
    run("up", "-f", "{}")
    store(0, 20)
    run("down", "cli-test")
    region = folder / "media" / "dram"
    content = bytearray(region.read_bytes())
    where = content.index((7).to_bytes(32, "little") * 1024)
    content[where + 5000] ^= 1
    with open(region, "r+b") as file:
        file.write(content)
    assert as_json(run("scrub", str(folder / "media" / "cxl"), "-o", "json"))["ok"]
    result = run("scrub", "cli-test", "-o", "json")
    assert result.exit_code == 1
    found = {r["path"]: (r["checked"], r["bad"]) for r in json.loads(result.stdout)["regions"]}
    assert found == {str(region): (20, 1), str(folder / "media" / "cxl"): (20, 0)}
    assert as_json(run("scrub", "cli-test", "-o", "json"))["ok"]


@needs_native
@pytest.mark.slow
def test_fsck_repair_puts_in_order_what_fsck_finds(run: Run, folder: Path) -> None:
    run("up", "-f", "{}")
    store(0, 20)
    run("down", "cli-test")
    region = folder / "media" / "dram"
    content = bytearray(region.read_bytes())
    content[10:200] = bytes(190)  # one superblock
    where = content.index((7).to_bytes(32, "little") * 1024)
    content[where + 5000] ^= 1  # one block
    region.write_bytes(content)
    found = run("fsck", "cli-test", "-o", "json")
    assert found.exit_code == 1
    (problem,) = json.loads(found.stdout)["regions"][0]["problems"]
    assert "only one of two copies" in problem
    (dram, cxl) = as_json(run("fsck", "cli-test", "--repair", "-o", "json"))["regions"]
    assert dram["repaired"] == [
        "shard 0: 1 copy of the superblock written anew from the right one",
        "shard 0: 1 damaged blocks dropped; they are misses",
    ]
    assert cxl["repaired"] == []
    assert as_json(run("fsck", "cli-test", "-o", "json"))["ok"]
    assert "repaired" not in as_json(run("fsck", "cli-test", "-o", "json"))["regions"][0]
    run("up", "-f", "{}")
    assert store(0, 20) == (1, 20)


@needs_native
@pytest.mark.slow
def test_scrub_of_the_daemon_raises_an_event(run: Run, folder: Path) -> None:
    run("up", "-f", "{}")
    store(0, 20)
    region = folder / "media" / "cxl"
    at = region.read_bytes().index((7).to_bytes(32, "little") * 1024)
    with open(region, "r+b") as file:  # into the running pool: the same memory
        file.seek(at + 5000)
        file.write(b"flip")
    deadline = time.monotonic() + 20
    events: list[dict[str, Any]] = []
    while not events and time.monotonic() < deadline:
        time.sleep(0.1)
        events = as_json(run("status", "-o", "json"))["pools"][0]["events"]
    (event,) = events
    assert (event["kind"], event["subject"], event["host"], event["count"]) == ("DamageFound", "cxl", 0, 1)
    assert "DamageFound (host 0, cxl): 1 blocks were damaged" in run("status", "cli-test").stdout


@needs_native
@pytest.mark.slow
def test_adopt_and_litmus_wrong_use_is_named(run: Run, folder: Path) -> None:
    run("up", "-f", "{}")
    for arguments, code, said in [
        (["adopt", "cli-test", "--shard", "0"], 2, "--epoch"),
        (["adopt", "cli-test", "--shard", "7", "--epoch", "1"], 1, "there is no shard 7"),
        (["adopt", str(folder / "media" / "dram"), "--shard", "0", "--epoch", "1"], 1, "several hosts share"),
        (["litmus", "--path", str(folder / "media" / "cxl"), "--peer-hosts", "0"], 2, "numbers below 2"),
        (["litmus", "--path", str(folder / "media" / "cxl")], 1, "most likely its daemon"),
        (["litmus", "--path", str(folder / "media" / "none")], 1, "cannot be opened"),
    ]:
        result = run(*arguments)
        assert result.exit_code == code, result.output
        assert said in result.stderr
    single = run("litmus", "--path", str(folder / "media" / "dram"), "-o", "json")
    assert (single.exit_code, json.loads(single.stdout)["reason"]) == (0, "SingleHost")
    adopted = as_json(run("adopt", "cli-test", "--shard", "1", "--epoch", "3", "-o", "json"))
    assert [region["tier"] for region in adopted["regions"]] == ["cxl"]


@needs_native
def test_dump_lists_slots_and_no_whole_key(run: Run) -> None:
    run("up", "-f", "{}")
    store(0, 20)
    slots = as_json(run("dump", "cli-test", "--tier", "dram", "-o", "json"))
    assert len(slots) == 20
    assert {(s["tier"], s["state"], len(s["key"])) for s in slots} == {("dram", "stored", 12)}
    assert len(as_json(run("dump", "cli-test", "--limit", "3", "-o", "json"))) == 6
    assert as_json(run("dump", "cli-test", "--state", "writing", "-o", "json")) == []
    assert run("dump", "cli-test").exit_code == 0
    assert 'no tier "x"' in run("dump", "cli-test", "--tier", "x").stderr


@needs_native
def test_explain_names_the_setting_that_keeps_two_engines_apart(run: Run) -> None:
    run("up", "-f", "{}")
    store(0, 20)
    store(0, 20, start=1000, dtype="float16")
    explanation = as_json(run("explain", "cli-test", "-o", "json"))
    (difference,) = explanation["namespaces"]
    assert [d["field"] for d in difference["differences"]] == ["dtype"]
    assert "100.0% of 40 looked-up blocks were served" in run("explain", "cli-test").stdout


@needs_native
def test_layout_prints_the_format(run: Run) -> None:
    assert "superblock" in run("layout").stdout
    assert as_json(run("layout", "-o", "json"))["format_version"] >= 1


@needs_native
def test_status_watch_prints_a_json_line_a_look(folder: Path, run: Run) -> None:
    command = [sys.executable, "-m", "kvpool", "status", "--watch", "--interval", "0.1", "-o", "json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert [json.loads(process.stdout.readline()) for _ in range(2)] == [{"pools": []}] * 2
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=20) == 0
