"""Who may use a shard after a reboot, and what two machines with one host number are told."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from kvpool import Geometry, KeyBatch, Namespace, Region, region
from kvpool.errors import FencedError, RegionBusyError

NAMESPACE = Namespace("model", "weights", "float32", "LBHNC", 32, 4096, "sha256")
KEYS = KeyBatch.from_hashes(NAMESPACE, [bytes([n]) * 32 for n in range(8)])
BLOCKS = [bytes([n]) * 4096 for n in range(8)]


@pytest.fixture(params=["hardware", "software"])
def path(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(region, "_HEARTBEAT_PATIENCE_S", 0.2)
    made = tmp_path / "region"
    Region.format(
        made,
        Geometry(
            4 << 20, hosts=2, min_block_bytes=4096, participants=4, namespaces=2, coherence=request.param
        ),
    )
    return made


def reboot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(region, "boot_id", lambda: b"another boot id!")


def damage(path: Path, block: bytes) -> None:
    """Overwrite the first bytes of a stored payload in the medium."""
    with path.open("r+b") as medium:
        at = medium.read().index(block)
        medium.seek(at)
        medium.write(b"late")


def test_engine_after_reboot_is_refused_until_the_daemon_took_the_shard_over(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Region.attach(path) as before:
        assert before.store(KEYS, BLOCKS).stored_count == 8
    reboot(monkeypatch)
    with pytest.raises(FencedError, match=r"another boot.*kvpool up"):
        Region.attach(path)
    with Region.attach(path, role="daemon") as daemon, Region.attach(path) as engine:
        out = [bytearray(4096) for _ in BLOCKS]
        assert engine.load(KEYS, out).hit_count == 8
        assert [bytes(b) for b in out] == BLOCKS
        assert daemon.usage().hosts[0].epoch == 1
        assert daemon.check().ok


def test_daemon_is_refused_while_another_machine_beats_as_the_same_host(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Region.attach(path, role="daemon", node_name="node-a") as first:
        stop = threading.Event()

        def beat() -> None:
            while not stop.is_set():
                first.heartbeat()
                time.sleep(0.01)

        thread = threading.Thread(target=beat)
        thread.start()
        try:
            reboot(monkeypatch)
            with pytest.raises(RegionBusyError, match="node-a is alive as host 0"):
                Region.attach(path, role="daemon", node_name="node-b")
        finally:
            stop.set()
            thread.join()


def test_adopted_shard_stays_warm_and_its_old_owner_stores_nothing_more(path: Path) -> None:
    with Region.attach(path, host=0) as old, Region.attach(path, host=1, role="daemon") as new:
        old.store(KEYS[:4], BLOCKS[:4])
        report = new.adopt(0, 1)
        assert (report.kept, report.freed) == (4, 0)
        late = old.store(KEYS[4:], BLOCKS[4:])
        assert {str(r) for r in late.reasons} == {"fenced"}
        old.heartbeat()  # acknowledges: what it wrote is flushed now
        damage(path, BLOCKS[1])  # as a late write of the old owner could
        new.heartbeat()  # audits, once
        assert (new.lookup(KEYS[1:2]).hit_count, new.usage().blocks) == (0, 3)
        assert old.store(KEYS[1:2], BLOCKS[1:2]).declined_count == 1
        assert new.store(KEYS[1:2], BLOCKS[1:2]).stored_count == 1
        assert new.lookup(KEYS).hit_count == old.lookup(KEYS).hit_count == 4
        with pytest.raises(FencedError, match="not higher"):
            new.adopt(0, 1)
        assert new.check().ok


def test_child_after_fork_is_told_to_attach_for_itself(path: Path) -> None:
    import os

    with Region.attach(path) as parent:
        pid = os.fork()
        if pid == 0:
            try:
                parent.lookup(KEYS)
            except Exception as error:
                os._exit(0 if "before a fork" in str(error) else 2)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert parent.store(KEYS, BLOCKS).stored_count == 8


def test_audit_of_a_large_shard_takes_several_heartbeats_and_scrub_reads_adopted_shards(
    tmp_path: Path,
) -> None:
    path, count, size = tmp_path / "region", 150, 1 << 20
    large = Namespace("model", "weights", "float32", "LBHNC", 32, size, "sha256")
    keys = KeyBatch.from_hashes(large, [n.to_bytes(32, "little") for n in range(count)])
    blocks = [(n + 1).to_bytes(8, "little") * (size // 8) for n in range(count)]
    Region.format(
        path, Geometry(340 << 20, hosts=2, min_block_bytes=size, participants=4, coherence="software")
    )
    with Region.attach(path, host=0) as old, Region.attach(path, host=1) as new:
        assert old.store(keys, blocks).stored_count == count
        new.adopt(0, 1)
        assert new.heartbeat().audited == []
        assert old.heartbeat().acknowledged == [0]
        damage(path, blocks[count - 1])
        assert new.heartbeat().audited == [], "at most 128 MiB of payload each time"
        assert new.heartbeat().audited == [0]
        assert new.heartbeat().audited == []
        out = [bytearray(size) for _ in blocks]
        result = new.load(keys, out)
        assert result.hit_count == count - 1
        assert [bytes(b) for b in out[:-1]] == blocks[:-1]

        damage(path, blocks[0])
        assert old.scrub().checked == 0  # it may not write there any more
        report = new.scrub()
        assert (report.checked, report.bad, report.next_slot) == (count - 1, 1, 0)
        position, checked = 0, 0
        while True:  # in pieces, through its own shard and then the adopted one
            report = new.scrub(start=position, limit=20)
            checked, position = checked + report.checked, report.next_slot
            if position == 0:
                break
        assert checked == count - 2
