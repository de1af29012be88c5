"""The daemon: its chores with a fake region, its loop with a fake clock, its lock with real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvpool import paths
from kvpool.daemon.chores import EVICT_BLOCKS, SCRUB_BYTES_PER_S, SCRUB_SLOTS_MAX, KeepFree, Scrub
from kvpool.daemon.events import EVENTS_MAX, EventLog
from kvpool.daemon.lock import DaemonLock, holder, stop
from kvpool.daemon.loop import RETRY_S_MAX, Chore, Daemon, OpenTier, serve
from kvpool.daemon.ownership import Ownership
from kvpool.errors import FencedError, KvpoolError, MediumUnavailable, RegionBusyError
from kvpool.report import (
    Counters,
    HeartbeatReport,
    ParticipantInfo,
    PeerLitmus,
    PoisonReport,
    ReapReport,
    ResizeReport,
    ScrubReport,
    ShardOwner,
    Usage,
)
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
        self.block_bytes = 64 << 10

    def heartbeat(self) -> HeartbeatReport:
        self.heartbeats += 1
        if self.fails:
            raise self.fails
        return HeartbeatReport([ShardOwner(0, 0, True)], [], [])

    def reap(self) -> ReapReport:
        return ReapReport(dead=1, freed=2, republished=0)

    def evict(self, used_fraction: float, blocks_max: int) -> int:
        count = max(0, min(blocks_max, self.blocks - int(SLOTS * used_fraction)))
        self.blocks -= count
        self.evictions += count
        return count

    def resize(self, capacity_bytes: int, *, budget_s: float) -> ResizeReport:
        self.capacity_bytes = capacity_bytes
        return ResizeReport(capacity_bytes, 64, 0, True)

    def scrub(self, *, start: int = 0, limit: int | None = None, bytes_max: int | None = None) -> ScrubReport:
        blocks = min(limit or SLOTS, -(-(bytes_max or SLOTS * self.block_bytes) // self.block_bytes))
        end = min(SLOTS, start + blocks)
        return ScrubReport(
            checked=end - start,
            bad=int(start <= 300 < end),
            next_slot=end % SLOTS,
            bytes=(end - start) * self.block_bytes,
        )

    def told_bad(self) -> list[tuple[int, int]]:
        return []

    def give_up(self, ranges: Iterable[tuple[int, int]]) -> PoisonReport:
        raise AssertionError("no memory is known to be bad")

    def litmus_begin(self) -> bool:
        raise AssertionError("a region of one host")

    def litmus_end(self) -> None:
        raise AssertionError("a region of one host")

    def litmus_serve(self, budget_s: float) -> bool:
        raise AssertionError("a region of one host")

    def litmus_beats(self) -> list[int]:
        raise AssertionError("a region of one host")

    def litmus_measure(self, peer: int, rounds: int) -> PeerLitmus:
        raise AssertionError("a region of one host")

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


def test_scrub_of_huge_blocks_checks_one_then_waits_for_its_budget() -> None:
    region = FakeRegion()
    region.block_bytes = 1 << 30
    scrub = Scrub(region, period_s=1.0)
    runs = (1 << 30) // SCRUB_BYTES_PER_S
    assert [scrub.run().checked for _ in range(2 * runs + 1)] == [1, *[0] * (runs - 1)] * 2 + [1]


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
    assert [(c["status"], c["reason"]) for c in report["conditions"]] == [("True", "SingleHost")]


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


# --- events -------------------------------------------------------------------------------------------------


def test_events_are_counted_and_not_repeated_and_bounded() -> None:
    now = iter(range(1000))
    events = EventLog(clock=lambda: float(next(now)))
    events.add("DamageFound", "dram", "1 block")
    events.add("ShardLost", "cxl", "host 1")
    events.add("DamageFound", "dram", "2 blocks")
    first, second = events.to_object()
    assert (first["kind"], first["count"]) == ("ShardLost", 1)
    assert second == {
        "kind": "DamageFound",
        "subject": "dram",
        "message": "2 blocks",
        "count": 2,
        "first_at": 0.0,
        "last_at": 2.0,
    }
    for number in range(2 * EVENTS_MAX):
        events.add("DamageFound", f"tier {number}", "")
    assert len(events.to_object()) == EVENTS_MAX


def test_daemon_damage_deaths_and_a_failing_medium_are_events(runtime: Path) -> None:
    region = FakeRegion(9000)
    tier = PoolSpec.from_object(MANIFEST).tiers[0]
    opened = OpenTier(tier, Path("/x"), region, KeepFree(region, Eviction()), Scrub(region, 1.0))
    daemon = Daemon(PoolSpec.from_object(MANIFEST), 0, [opened])
    daemon.step()
    region.fails = MediumUnavailable("region /x: the medium failed")
    for chore in daemon.chores:
        chore.due = 0.0
    daemon.step()
    events = {event["kind"]: event for event in daemon.report_object()["events"]}
    assert set(events) == {"DamageFound", "ParticipantReaped", "MediumError"}
    assert "1 blocks were damaged" in events["DamageFound"]["message"]
    assert events["ParticipantReaped"]["count"] == 2
    assert events["MediumError"]["message"] == "region /x: the medium failed"


def test_region_file_that_is_removed_or_replaced_is_a_problem_and_an_event(runtime: Path) -> None:
    path, region = runtime / "region", FakeRegion()
    path.write_text("region")
    tier = PoolSpec.from_object(MANIFEST).tiers[0]
    opened = OpenTier(tier, path, region, KeepFree(region, Eviction()), Scrub(region, 1.0))
    daemon = Daemon(PoolSpec.from_object(MANIFEST), 0, [opened])
    assert daemon.report_object()["problems"] == []
    path.rename(runtime / "old")  # which keeps the number of the file from being used again
    for what in ("removed", "replaced"):
        for _ in range(2):
            report = daemon.report_object()
            (problem,) = report["problems"]
            assert f"tier dram: {path} was {what} while it was in use" in problem
            assert "Run 'kvpool up " in problem
        path.write_text("another")
    ((kind, count),) = [(event["kind"], event["count"]) for event in report["events"]]
    assert (kind, count) == ("MediumError", 2)
    (runtime / "old").replace(path)
    assert daemon.report_object()["problems"] == []


def owned(*owners: int, epoch: int = 0, acknowledged: list[int] | None = None) -> HeartbeatReport:
    return HeartbeatReport([ShardOwner(o, epoch, True) for o in owners], acknowledged or [], [])


def test_ownership_changes_are_events_and_a_lost_shard_a_problem() -> None:
    events = EventLog()
    ownership = Ownership("pool", "cxl", 0, events)
    ownership.look(owned(0, 1))
    assert events.to_object() == []
    ownership.look(owned(1, 1, epoch=4, acknowledged=[0]))
    assert [event["kind"] for event in events.to_object()] == ["ShardLost", "ShardReleased"]
    assert "kvpool adopt pool --shard 0 --host 0 --epoch 5" in ownership.problem
    ownership.look(owned(0, 0, epoch=5))
    assert ownership.problem == ""
    (adopted,) = [event for event in events.to_object() if event["kind"] == "ShardAdopted"]
    assert adopted["count"] == 2  # its own back, and that of host 1
    assert "adopted shard 1 from host 1" in adopted["message"]


# --- coherence ----------------------------------------------------------------------------------------------

SHARED = {
    **MANIFEST,
    "spec": {
        "hosts": 2,
        "tiers": [
            {
                "name": "cxl",
                "medium": "CXL",
                "capacity": "1Gi",
                "shared": True,
                "coherence": "hardware",
                "source": {"path": "/x"},
            }
        ],
    },
}


class SharedRegion(FakeRegion):
    """A region of two hosts, the other one of which always answers."""

    stale = 0
    alive = True
    beats = 1

    def litmus_begin(self) -> bool:
        return True

    def litmus_end(self) -> None:
        self.alive = False

    def litmus_serve(self, budget_s: float) -> bool:
        return False

    def litmus_beats(self) -> list[int]:
        self.beats += 1
        return [0, 1 << 32 | self.beats if self.alive else 0]

    def litmus_measure(self, peer: int, rounds: int) -> PeerLitmus:
        return PeerLitmus(peer, "measured", rounds, self.stale, 0, rounds, self.stale, 0, rounds)

    def heartbeat(self) -> HeartbeatReport:
        return owned(0, 1)


def serve_shared(region: SharedRegion) -> tuple[list[str], dict[str, Any]]:
    """What serving says while it starts, and its first report after that."""
    said: list[str] = []
    reports: list[dict[str, Any]] = []
    ending = threading.Event()

    def tell(text: str) -> None:
        said.append(text)
        reports.append(json.loads(paths.report_path("p", 0).read_text()))
        ending.set()

    spec = PoolSpec.from_object(SHARED)
    serve(spec, 0, {}, ready=lambda: tell("ready"), refused=tell, attach=lambda *_: region, stop=ending)
    return said, reports[0]


def test_serve_tests_coherence_before_it_is_ready(runtime: Path) -> None:
    region = SharedRegion()
    said, report = serve_shared(region)
    assert said == ["ready"]
    (condition,) = report["conditions"]
    assert (condition["type"], condition["status"], condition["reason"]) == (
        "CoherenceVerified",
        "True",
        "Verified",
    )
    assert (report["ready"], report["problems"]) == (True, [])
    assert not region.alive  # it said goodbye


def test_serve_stale_reads_are_not_ready_and_the_report_says_what_to_do(runtime: Path) -> None:
    region = SharedRegion()
    region.stale = 5
    said, report = serve_shared(region)
    (why,) = said
    assert "10 of 128 plain reads returned old content" in why
    assert "give the tier coherence: software" in why
    (condition,) = report["conditions"]
    assert (condition["status"], condition["reason"]) == ("False", "StaleReads")
    assert (report["ready"], report["problems"]) == (False, [why])
    assert [event["kind"] for event in report["events"]] == ["CoherenceFailed"]


def test_serve_nobody_there_is_ready_at_once_and_unknown(runtime: Path) -> None:
    region = SharedRegion()
    region.alive = False
    said, report = serve_shared(region)
    assert said == ["ready"]
    (condition,) = report["conditions"]
    assert (condition["status"], condition["reason"]) == ("Unknown", "NoPeer")


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
