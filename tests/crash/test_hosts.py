"""Two hosts with their daemons over one region: shards change hands, and hosts test each other."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from children import Child, children, until
from crash import tally
from kvpool import _native, paths
from kvpool.daemon.lock import holder
from kvpool.region import Region
from strategies import buffers, contents, keys_of, namespace, wrong_hits

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

MANIFEST = """
apiVersion: kvpool.dev/v1alpha1
kind: KVPool
metadata: {name: two}
spec:
  hosts: 2
  tiers:
  - {name: cxl, medium: CXL, capacity: 4Mi, shared: true, coherence: COHERENCE, minBlockSize: 4Ki,
     source: {path: MEDIUM}}
"""
NS = namespace(4096)
DIGIT = 100  # block numbers of one part of the test
STOP_INSIDE = 1000  # from here on the engine stops itself in the middle of its store

Kvpool = Callable[..., Any]


@pytest.fixture(params=["hardware", "software"])
def kvpool(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Kvpool]:
    """Runs a command in a process of its own and returns its JSON; `code` is the exit code it must have."""
    monkeypatch.setenv("KVPOOL_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.delenv("KVPOOL_HOST", raising=False)
    text = MANIFEST.replace("MEDIUM", str(tmp_path / "region")).replace("COHERENCE", request.param)
    (tmp_path / "pool.yaml").write_text(text)

    def run(*arguments: str, code: int = 0) -> Any:
        command = [sys.executable, "-m", "kvpool", *arguments, "-o", "json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == code, done.stdout + done.stderr
        return json.loads(done.stdout)

    yield run
    for lock in (tmp_path / "run").glob("*/daemon.h*.lock"):
        pid = holder(lock)
        if pid:
            tally.intend(1, tally.DAEMON)
            os.kill(pid, signal.SIGKILL)
            until(lambda lock=lock: holder(lock) is None)  # type: ignore[misc]
            tally.count(tally.KILLS, row=tally.DAEMON)


def engine(path: Path, host: int, orders: int, answers: int) -> None:
    """Stores blocks from the number that it reads on, and says what became of them."""
    with Region.attach(path, host=host) as region:
        while True:
            order = os.read(orders, 8)
            if not order:
                return
            first = int.from_bytes(order, "little")
            if first >= STOP_INSIDE:
                _native.stop_at("store.header.body", 1, signal.SIGSTOP)
            keys = keys_of(NS, range(first, first + 10))
            outcomes = {str(reason or "stored") for reason in region.store(keys, contents(keys)).reasons}
            out = buffers(keys)
            result = region.load(keys, out)
            assert not wrong_hits(keys, result.codes, out)
            os.write(answers, (",".join(sorted(outcomes)) + f" {result.hit_count}\n").encode())


class Engine:
    """A process that stores and loads when it is told to."""

    def __init__(self, start: Callable[..., Child], path: Path, host: int) -> None:
        (theirs, self._orders), (answers, ours) = os.pipe(), os.pipe()
        os.set_inheritable(theirs, True)
        self.child = start(engine, path, host, theirs, ours, timeout_s=100)
        os.close(theirs)
        os.close(ours)
        self._answers = os.fdopen(answers)

    def order(self, first: int) -> None:
        os.write(self._orders, first.to_bytes(8, "little"))

    def answer(self) -> str:
        return self._answers.readline().strip()

    def store(self, first: int) -> str:
        self.order(first)
        return self.answer()

    def close(self) -> None:
        os.close(self._orders)
        self._answers.close()


def report(host: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(paths.report_path("two", host).read_text())
    return found


def kinds(host: int) -> set[str]:
    return {event["kind"] for event in report(host)["events"]}


def wait_for_events(host: int, *wanted: str) -> None:
    until(lambda: kinds(host) >= set(wanted), timeout_s=20)


def test_host_stopped_its_shard_adopted_woken_stores_nothing_until_it_has_the_shard_back(
    kvpool: Kvpool, tmp_path: Path
) -> None:
    path, file = tmp_path / "region", str(tmp_path / "pool.yaml")
    daemons = [kvpool("up", "-f", file, "--host", str(host))["pid"] for host in (0, 1)]
    with children() as start, closing(Engine(start, path, 0)) as zero, closing(Engine(start, path, 1)) as one:
        assert zero.store(0) == one.store(DIGIT) == "stored 10"
        # Alive, it keeps its shard.
        refused = kvpool("adopt", "two", "--shard", "0", "--epoch", "1", "--host", "1", code=1)
        assert "is alive" in refused["error"]["message"]

        zero.order(STOP_INSIDE)
        assert zero.child.wait_stopped()
        os.kill(daemons[0], signal.SIGSTOP)
        tally.count(tally.STOPS, 2, tally.STOPPED)
        (adopted,) = kvpool("adopt", "two", "--shard", "0", "--epoch", "1", "--host", "1")["regions"]
        assert adopted["kept"] >= 10
        wait_for_events(1, "ShardAdopted")
        assert one.store(0) == "present 10" or one.store(3 * DIGIT) == "stored 10"
        again = kvpool("adopt", "two", "--shard", "0", "--epoch", "1", "--host", "1", code=1)
        assert "is not higher" in again["error"]["message"]

        for pid in (zero.child.pid, daemons[0]):
            os.kill(pid, signal.SIGCONT)
        zero.answer()  # what it had begun before may be stored or not, but not with wrong bytes
        assert zero.store(4 * DIGIT) == "fenced 0"
        wait_for_events(0, "ShardLost", "ShardReleased")
        wait_for_events(1, "ShardAdopted", "ShardAudited")
        until(lambda: any("kvpool adopt two --shard 0" in problem for problem in report(0)["problems"]), 10)
        (pool,) = kvpool("status", "two")["pools"]
        assert pool["state"] == "Degraded"
        assert "fenced" in " ".join(kvpool("explain", "two")["problems"])
        assert_right(path, range(10), range(DIGIT, DIGIT + 10))
        assert kvpool("fsck", "two")["ok"]

        kvpool("adopt", "two", "--shard", "0", "--epoch", "2", "--host", "0")
        assert zero.store(5 * DIGIT) == "stored 10"
        assert one.store(6 * DIGIT) == "stored 10"
        wait_for_events(1, "ShardLost", "ShardReleased")
        wait_for_events(0, "ShardAdopted", "ShardAudited")
        until(lambda: not any("kvpool adopt" in problem for problem in report(0)["problems"]), 10)
        assert_right(path, range(10), range(5 * DIGIT, 5 * DIGIT + 10))
        assert kvpool("fsck", "two")["ok"]


def assert_right(path: Path, *ranges: range) -> None:
    """All these blocks are hits on both hosts, with the right bytes."""
    for host in (0, 1):
        with Region.attach(path, host=host) as region:
            for numbers in ranges:
                keys = keys_of(NS, numbers)
                out = buffers(keys)
                result = region.load(keys, out)
                wrong = wrong_hits(keys, result.codes, out)
                tally.count(tally.LOADED, result.hit_count)
                tally.count(tally.WRONG, len(wrong))
                assert result.hit_count == len(keys)
                assert not wrong


def conditions(host: int) -> dict[str, Any]:
    (condition,) = report(host)["conditions"]
    return dict(condition)


def test_daemons_of_two_hosts_verify_their_coherence(kvpool: Kvpool, tmp_path: Path) -> None:
    file = str(tmp_path / "pool.yaml")
    kvpool("up", "-f", file, "--host", "0")
    alone = conditions(0)
    assert (alone["status"], alone["reason"]) == ("Unknown", "NoPeer")
    assert "kvpool litmus" in alone["message"]
    began = time.monotonic()
    kvpool("up", "-f", file, "--host", "1")
    assert time.monotonic() - began < 10
    # The second one has tested before it said that it is ready; the first one soon after.
    assert (conditions(1)["status"], conditions(1)["reason"]) == ("True", "Verified")
    until(lambda: conditions(0)["status"] == "True", 10)
    (pool,) = kvpool("status", "two")["pools"]
    (condition,) = pool["conditions"]
    assert (condition["type"], condition["status"]) == ("CoherenceVerified", "True")
    assert pool["state"] == "Ready"
    # A third process of a host has no turn while its daemon answers.
    refused = kvpool("litmus", "--path", str(tmp_path / "region"), "--host", "0", code=1)
    assert "kvpool status" in refused["error"]["message"]


def test_litmus_of_two_processes_as_two_hosts_then_of_one_alone(kvpool: Kvpool, tmp_path: Path) -> None:
    path = str(tmp_path / "region")
    kvpool("format", path, "--capacity", "4Mi", "--hosts", "2", "--coherence", "software")
    alone = kvpool("litmus", "--path", path, "--host", "0", "--timeout", "0.3", code=3)
    assert (alone["status"], alone["reason"]) == ("Unknown", "PeerMissing")
    command = [sys.executable, "-m", "kvpool", "litmus", "--path", path, "-o", "json", "--host"]
    both = [subprocess.Popen([*command, host], stdout=subprocess.PIPE) for host in ("0", "1")]
    for process in both:
        said, _ = process.communicate(timeout=60)
        found = json.loads(said)
        assert process.returncode == 0, found
        assert (found["status"], found["coherence"]) == ("True", "software")
        (peer,) = found["peers"]
        assert peer["flushed"] == peer["plain"] == 64
        assert peer["flushed_lost"] == peer["reordered"] == 0
        assert peer["same_machine"]
        assert peer["round_trip_us"] > 0
