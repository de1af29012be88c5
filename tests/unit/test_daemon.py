"""The daemon: its chores with a fake region, its loop with a fake clock, its lock with real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpool import paths
from kvpool.daemon.chores import EVICT_BLOCKS, SCRUB_SLOTS_MAX, KeepFree, Scrub
from kvpool.daemon.lock import DaemonLock, holder, stop
from kvpool.daemon.loop import RETRY_S_MAX, Chore, Daemon, OpenTier, serve
from kvpool.errors import FencedError, KvpoolError, MediumUnavailable, RegionBusyError
from kvpool.report import Counters, ParticipantInfo, ReapReport, ScrubReport, Usage
from kvpool.spec import Eviction, PoolSpec, TierSpec

SLOTS = 10_000


class FakeRegion:
    """A region of 10,000 slots that hold nothing but a count."""

    def __init__(self, blocks: int = 0) -> None:
        self.blocks = blocks
        self.evictions = 0
        self.heartbeats = 0
        self.closed = False
        self.fails: Exception | None = None
        self.usage_fails: Exception | None = None
        self.capacity_bytes = SLOTS << 20

    def heartbeat(self) -> None:
        self.heartbeats += 1
        if self.fails:
            raise self.fails

    def reap(self) -> ReapReport:
        return ReapReport(dead=1, freed=2, republished=0)

    def evict(self, used_fraction: float, blocks_max: int) -> int:
        count = max(0, min(blocks_max, self.blocks - int(SLOTS * used_fraction)))
        self.blocks -= count
        self.evictions += count
        return count

    def scrub(self, *, start: int = 0, limit: int | None = None) -> ScrubReport:
        end = min(SLOTS, start + (limit or SLOTS))
        return ScrubReport(checked=end - start, bad=int(start <= 300 < end), next_slot=end % SLOTS)

    def usage(self) -> Usage:
        if self.usage_fails:
            raise self.usage_fails
        return Usage(SLOTS << 20, self.blocks << 20, self.blocks, SLOTS, SLOTS - self.blocks, 64, 0, [], [])

    def counters(self) -> Counters:
        return Counters(lookups=4, hits=3, misses={"evicted": 1}, evictions=self.evictions)

    def participants(self) -> list[ParticipantInfo]:
        return [ParticipantInfo(0, 0, "daemon", os.getpid(), 1, True)]

    def close(self) -> None:
        self.closed = True


# --- chores -------------------------------------------------------------------------------------------------


def test_keep_free_below_high_watermark_does_nothing() -> None:
    region = FakeRegion(9499)
    assert KeepFree(region, Eviction()).run() == 0


def test_keep_free_above_high_watermark_goes_down_to_low_one() -> None:
    region = FakeRegion(9600)
    chore = KeepFree(region, Eviction(), clock=lambda: 0.0)
    assert chore.run() == 600
    assert region.blocks == 9000
    assert chore.run() == 0


def test_keep_free_out_of_time_goes_on_in_the_next_run() -> None:
    region = FakeRegion(SLOTS)
    ticks = iter(range(1000))
    chore = KeepFree(region, Eviction(), clock=lambda: float(next(ticks)))
    assert chore.run() == 2 * EVICT_BLOCKS
    runs = 1
    while chore.run():
        runs += 1
    assert region.blocks == 9000
    assert runs > 1


def test_scrub_goes_round_for_ever_within_its_budget() -> None:
    scrub = Scrub(FakeRegion(), period_s=1.0)
    while scrub.rounds < 2:
        assert scrub.run().checked <= SCRUB_SLOTS_MAX
    assert (scrub.checked, scrub.bad, scrub.next_slot) == (2 * SLOTS, 2, 0)


def test_scrub_of_huge_blocks_checks_at_least_one() -> None:
    scrub = Scrub(FakeRegion(), period_s=1.0, block_bytes=1 << 30)
    assert scrub.run().checked == 1


# --- loop ---------------------------------------------------------------------------------------------------


def test_chore_failing_is_retried_ever_more_rarely_then_recovers(caplog: pytest.LogCaptureFixture) -> None:
    region = FakeRegion()
    chore = Chore("heartbeat", 1.0, region.heartbeat, clock=lambda: 0.0)
    region.fails = OSError("medium gone")
    waits = []
    for _ in range(10):
        now = chore.due
        chore.attempt(now)
        waits.append(chore.due - now)
    assert waits == [2, 4, 8, 16, 32, 60, 60, 60, 60, 60]
    assert len(caplog.records) == 1  # the same failure is told once
    region.fails = None
    chore.attempt(chore.due)
    assert (chore.failures, chore.problem) == (0, "")


def test_chore_fenced_waits_for_the_arbiter() -> None:
    region = FakeRegion()
    region.fails = FencedError("host 1 owns shard 0")
    chore = Chore("heartbeat", 1.0, region.heartbeat)
    chore.attempt(0.0)
    assert chore.due == RETRY_S_MAX


MANIFEST = {
    "apiVersion": "kvpool.dev/v1alpha1",
    "kind": "KVPool",
    "metadata": {"name": "p"},
    "spec": {"tiers": [{"name": "dram", "medium": "DRAM", "capacity": "1Gi"}]},
}


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVPOOL_RUNTIME_DIR", str(tmp_path))
    return tmp_path


def test_serve_reports_then_stops_cleanly(runtime: Path) -> None:
    region, ending, reports = FakeRegion(9600), threading.Event(), []

    def attach(tier: TierSpec, path: Path, shard: int) -> FakeRegion:
        assert (tier.name, path, shard) == ("dram", Path("/dev/shm/kvpool.p.dram"), 0)
        return region

    def ready() -> None:
        reports.append(json.loads(paths.report_path("p", 0).read_text()))
        ending.set()

    serve(PoolSpec.from_object(MANIFEST), 0, {}, ready=ready, attach=attach, stop=ending)
    (report,) = reports
    assert region.closed
    assert region.heartbeats == 1
    assert region.blocks == 9000
    assert not paths.report_path("p", 0).exists()
    assert (report["name"], report["host"], report["pid"], report["ready"]) == ("p", 0, os.getpid(), True)
    assert (report["lookups"], report["hits"], report["hit_rate"], report["misses"]) == (
        4,
        3,
        0.75,
        {"evicted": 1},
    )
    assert report["tiers"][0]["capacity_bytes"] == SLOTS << 20
    assert report["participants"][0]["role"] == "daemon"


def test_report_tier_that_fails_keeps_its_last_numbers(runtime: Path) -> None:
    region = FakeRegion(9000)
    tier = PoolSpec.from_object(MANIFEST).tiers[0]
    opened = OpenTier(tier, Path("/x"), region, KeepFree(region, Eviction()), Scrub(region, 1.0))
    daemon = Daemon(PoolSpec.from_object(MANIFEST), 0, [opened])
    assert daemon.report_object()["problems"] == []
    region.usage_fails = MediumUnavailable("the medium failed")
    report = daemon.report_object()
    assert report["problems"] == ["tier dram: the medium failed"]
    assert report["tiers"][0]["blocks"] == 9000


def test_serve_tier_that_cannot_be_opened_releases_all(runtime: Path) -> None:
    def attach(tier: TierSpec, path: Path, shard: int) -> FakeRegion:
        raise RegionBusyError("all participant entries are taken")

    spec = PoolSpec.from_object(MANIFEST)
    for _ in range(2):  # the second time the lock is free again
        with pytest.raises(RegionBusyError, match="participant"):
            serve(spec, 0, {}, ready=lambda: None, attach=attach, stop=threading.Event())


# --- lock ---------------------------------------------------------------------------------------------------

HOLD = """
import signal, sys, time
from pathlib import Path
from kvpool.daemon.lock import DaemonLock
if sys.argv[2] == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
lock = DaemonLock(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture(params=["willing", "stubborn"])
def held(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Path, subprocess.Popen[str], str]]:
    path = tmp_path / "daemon.lock"
    command = [sys.executable, "-c", HOLD, str(path), request.param]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield path, process, request.param
        process.kill()


def test_lock_is_held_by_one_process_that_the_kernel_names(
    held: tuple[Path, subprocess.Popen[str], str],
) -> None:
    path, process, manner = held
    assert holder(path) == process.pid
    with pytest.raises(RegionBusyError, match=f"process {process.pid} serves this host already"):
        DaemonLock(path)
    if manner == "stubborn":
        with pytest.raises(KvpoolError, match="--kill"):
            stop(path, timeout_s=0.2)
        assert holder(path) == process.pid
    done = stop(path, timeout_s=0.2 if manner == "stubborn" else 10, kill=True)
    assert done is not None
    assert (done.pid, done.killed) == (process.pid, manner == "stubborn")
    assert process.wait() == (-signal.SIGKILL if manner == "stubborn" else -signal.SIGTERM)
    assert holder(path) is None
    assert stop(path, timeout_s=1) is None


def test_lock_of_a_killed_process_is_free_at_once(held: tuple[Path, subprocess.Popen[str], str]) -> None:
    path, process, _ = held
    process.kill()
    process.wait()
    assert path.exists()
    assert holder(path) is None
    DaemonLock(path).close()


def test_holder_no_file_is_nobody(tmp_path: Path) -> None:
    assert holder(tmp_path / "none") is None
    assert stop(tmp_path / "none", timeout_s=0) is None


# --- the process --------------------------------------------------------------------------------------------


def test_main_failure_is_told_to_whoever_waits(runtime: Path) -> None:
    reader, writer = os.pipe()
    command = [sys.executable, "-m", "kvpool.daemon", "unknown", "--ready-fd", str(writer)]
    done = subprocess.run(command, pass_fds=[writer], capture_output=True, text=True, check=False)
    os.close(writer)
    with open(reader) as said:
        assert "Expected the file of a KVPool manifest" in said.read()
    assert done.returncode == 1
    assert "ERROR failed pool=unknown host=0" in done.stderr
    assert "Traceback" not in done.stderr
