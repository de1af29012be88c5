"""Races that need two processes at chosen places: adoption, forks, entries used again, namespaces."""

from __future__ import annotations

import os
import signal
import struct
import time
from pathlib import Path

import pytest

from children import Child, children, until
from crash import tally
from kvpool import _native
from kvpool.errors import RegionError
from kvpool.keys import Namespace
from kvpool.outcomes import MissReason
from kvpool.region import Coherence, Region
from strategies import buffers, contents, keys_of, namespace, region_folder, small_geometry, wrong_hits

UNIT = 512
A, B = namespace(UNIT, "a"), namespace(2 * UNIT, "b")


def make(
    path: Path, coherence: Coherence = "hardware", hosts: int = 2, participants: int = 4, namespaces: int = 4
) -> Path:
    Region.format(
        path,
        small_geometry(
            16,
            hosts=hosts,
            block_bytes=UNIT,
            slots_per_extent=4,
            participants=participants,
            namespaces=namespaces,
            coherence=coherence,
        ),
    )
    return path


def store(region: Region, indices: list[int]) -> list[MissReason | None]:
    keys = keys_of(A, indices)
    return list(region.store(keys, contents(keys)).reasons)


def adopt_home_and_stop(path: Path, step: str, epoch: int) -> None:
    with Region.attach(path, host=0) as region:
        _native.stop_at(step, 1, signal.SIGSTOP)
        region.adopt(0, epoch)


@pytest.mark.parametrize("coherence", ["hardware", "software"])
@pytest.mark.parametrize("step", ["adopt.claimed", "adopt.freed", "adopt.log.refill"])
def test_nobody_writes_to_a_shard_before_its_adoption_is_done(step: str, coherence: Coherence) -> None:
    """An engine is attached while its daemon takes the shard back: its claims must not be freed under it."""
    with region_folder() as folder, children() as start:
        path = make(folder / "region", coherence)
        with Region.attach(path, host=0) as engine, Region.attach(path, host=1) as other:
            assert store(engine, [0, 1]) == [None, None]
            other.adopt(0, 1)
            assert store(engine, [2]) == [MissReason.FENCED]
            adopter = start(adopt_home_and_stop, path, step, 2)
            assert adopter.wait_stopped()
            assert store(engine, [3]) == [MissReason.FENCED]
            assert engine.evict(0.0, 10) == 0
            assert engine.scrub().checked == 0
            keys = keys_of(A, [0, 1])
            assert engine.load(keys, buffers(keys)).hit_count == 2  # reads go on
            adopter.signal(signal.SIGCONT)
            adopter.result()
            assert store(engine, [3]) == [None]
            assert engine.check().ok


def dies_in_a_store(path: Path, host: int) -> None:
    region = Region.attach(path, host=host)
    _native.stop_at("store.payload", 1, signal.SIGKILL)
    store(region, [9])


@pytest.mark.parametrize("coherence", ["hardware", "software"])
def test_a_host_that_lost_a_shard_does_not_clean_up_there(coherence: Coherence) -> None:
    """Participant numbers repeat on every host: the old owner must not free what that number writes now."""
    with region_folder() as folder, children() as start:
        path = make(folder / "region", coherence)
        with Region.attach(path, host=1) as other:
            other.adopt(0, 1)
            with Region.attach(path, host=0) as back:
                back.adopt(0, 2)
                writer = start(stops_in_a_store, path, 0)
                assert writer.wait_stopped()
                dead = start(dies_in_a_store, path, 1)  # has the same number on its host as the writer
                assert tally.ended(dead) == -signal.SIGKILL
                assert other.reap().dead == 1
                assert back.check().totals["writing"] == 1, "the living writer's slot was freed"
                writer.signal(signal.SIGCONT)
                assert writer.result() == [None]
                assert back.check().ok


def stops_in_a_store(path: Path, host: int) -> list[MissReason | None]:
    with Region.attach(path, host=host) as region:
        _native.stop_at("store.payload", 1, signal.SIGSTOP)
        return store(region, [8])


def participant_word_offset(path: Path, host: int, index: int) -> int:
    with path.open("rb") as f:
        superblock = f.read(4096)
    shard_offset, shard_bytes = struct.unpack_from("<QQ", superblock, 64)
    (participants_offset,) = struct.unpack_from("<Q", superblock, 168)
    return int(shard_offset + host * shard_bytes + participants_offset + index * 1024)


@pytest.mark.parametrize("generation", [1, 2, 0x3FFE, 0x3FFF])
def test_generation_wraps_and_the_dead_one_before_is_still_cleaned_up(generation: int) -> None:
    with region_folder() as folder, children() as start:
        path = make(folder / "region", hosts=1, participants=1)
        with path.open("r+b") as f:
            f.seek(participant_word_offset(path, 0, 0))
            f.write(struct.pack("<Q", (generation - 1) << 32))
        assert tally.ended(start(dies_in_a_store, path, 0)) == -signal.SIGKILL
        with Region.attach(path) as region:
            assert (
                region.participants()[0].generation == generation % 0x3FFF + 1
                if generation == 0x3FFF
                else generation + 1
            )
            report = region.check()
            assert report.ok, report.problems
            assert report.totals["writing"] == 0


def forks_and_dies(path: Path, pid_file: Path) -> None:
    region = Region.attach(path)
    helper = os.fork()
    if helper == 0:
        signal.alarm(30)
        while True:
            time.sleep(1)
    pid_file.write_text(str(helper))
    _native.stop_at("store.payload", 1, signal.SIGKILL)
    store(region, [9])


def test_forked_helper_that_lives_on_does_not_keep_its_dead_parent_alive() -> None:
    with region_folder() as folder, children() as start:
        path, pid_file = make(folder / "region"), folder / "pid"
        assert tally.ended(start(forks_and_dies, path, pid_file)) == -signal.SIGKILL
        helper = int(pid_file.read_text())
        try:
            with Region.attach(path) as region:
                assert region.check().totals["writing"] == 0
                assert [p for p in region.participants() if not p.alive] == []
        finally:
            os.kill(helper, signal.SIGKILL)


def uses_its_parents_region(region: Region) -> str:
    try:
        store(region, [1])
    except RegionError as e:
        region.close()  # the parent stays attached
        return str(e)
    return "no error"


def test_region_used_after_fork_raises_and_the_parent_stays_attached() -> None:
    with region_folder() as folder, children() as start:
        path = make(folder / "region")
        with Region.attach(path) as region:
            store(region, [0])
            message = start(uses_its_parents_region, region).result()
            assert "before a fork" in message
            assert "attach for itself" in message
            with Region.attach(path) as other:
                assert other.reap().dead == 0
            assert [p.alive for p in region.participants()] == [True]
            assert store(region, [0, 2]) == [None, None]


def adds_a_namespace(path: Path, go: Path, name: str) -> list[MissReason | None]:
    with Region.attach(path) as region:
        until(go.exists)
        keys = keys_of(namespace(UNIT, name), [1])
        return list(region.store(keys, contents(keys)).reasons)


def test_one_namespace_added_by_several_processes_takes_one_row() -> None:
    with region_folder() as folder, children() as start:
        for number in range(15):
            path, go = make(folder / f"region{number}", namespaces=1), folder / f"go{number}"
            workers = [start(adds_a_namespace, path, go, "new") for _ in range(3)]
            go.touch()
            for worker in workers:
                assert worker.result() == [None]


def test_namespaces_beyond_the_rows_are_declined_with_their_reason() -> None:
    with region_folder() as folder:
        path = make(folder / "region", namespaces=2)
        with Region.attach(path) as region:
            outcomes = []
            for number in range(3):
                keys = keys_of(namespace(UNIT, f"m{number}"), [1])
                outcomes += list(region.store(keys, contents(keys)).reasons)
            assert outcomes == [None, None, MissReason.NAMESPACES_FULL]


def cut_and_stop(path: Path) -> list[MissReason | None]:
    with Region.attach(path, host=0) as region:
        keys = keys_of(B, range(4))
        _native.stop_at("extent.recut.claim", 1, signal.SIGSTOP)
        return list(region.store(keys, contents(keys)).reasons)


def test_extent_being_cut_by_a_stopped_process_others_go_on() -> None:
    with region_folder() as folder, children() as start:
        path = make(folder / "region")
        with Region.attach(path, host=0) as region:
            assert set(store(region, list(range(30)))) == {None}
            cutter = start(cut_and_stop, path)
            assert cutter.wait_stopped()
            for _ in range(3):
                assert set(store(region, list(range(30, 60)))) == {None}
            region.evict(0.3, 100)
            region.scrub()
            keys = keys_of(A, range(60))
            out = buffers(keys)
            assert not wrong_hits(keys, region.load(keys, out).codes, out)
            cutter.signal(signal.SIGCONT)
            assert set(cutter.result()) == {None}
            report = region.check()
            assert report.ok, report.problems
            usage = region.usage()
            assert usage.used_bytes <= usage.capacity_bytes


def hammer_count(path: Path, times: int) -> None:
    """Turns one slot over so often that the low bits of its count that entries keep come round."""
    keys = [keys_of(A, [i]) for i in range(3)]
    data = [contents(k) for k in keys]
    with Region.attach(path) as region:
        for i in range(times):
            region.store(keys[i % 3], data[i % 3])
            if i % 97 == 0:
                out = buffers(keys[i % 3])
                result = region.load(keys[i % 3], out)
                assert result.hit_count == 1
                assert not wrong_hits(keys[i % 3], result.codes, out)
                assert region.lookup(keys[(i + 1) % 3]).hit_count == 0


def test_count_of_a_slot_wraps_in_its_entries_without_harm() -> None:
    with region_folder() as folder, children() as start:
        path = folder / "region"
        Region.format(path, small_geometry(1, block_bytes=UNIT, participants=2, namespaces=1))
        start(hammer_count, path, 40000).result()  # two changes a store at least: 16 bits
        report = Region.fsck(path)
        assert report.ok, report.problems
        assert report.totals["stored"] == report.totals["slots"] == 1


def test_region_closed_while_others_call_it_ends_their_calls_cleanly() -> None:
    import threading

    with region_folder() as folder:
        path = make(folder / "region")
        region = Region.attach(path)
        store(region, list(range(10)))
        ended: list[BaseException | None] = []

        def work() -> None:
            keys = keys_of(A, range(10))
            try:
                while True:
                    region.load(keys, buffers(keys))
            except RegionError as e:
                ended.append(e)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for t in threads:
            t.start()
        time.sleep(0.05)
        region.close()
        for t in threads:
            t.join(10)
        assert len(ended) == 4
        assert all("was closed" in str(e) for e in ended)
    assert Child is not None


def evicts_and_stops(path: Path) -> int:
    with Region.attach(path, host=0) as region:
        _native.stop_at("evict.claim", 1, signal.SIGSTOP)
        return region.evict(0.5, 1000)


def test_block_read_while_the_daemon_evicts_is_not_taken_for_the_oldest() -> None:
    """It has been touched after the daemon had looked at the clock."""
    with region_folder() as folder, children() as start:
        path = folder / "region"
        Region.format(path, small_geometry(96, block_bytes=UNIT, slots_per_extent=32))
        with Region.attach(path) as region:
            for i in range(96):
                assert store(region, [i]) == [None]
            daemon = start(evicts_and_stops, path)
            assert daemon.wait_stopped()
            for i in range(5):  # the clock goes on
                store(region, [1000 + i])
            old = keys_of(A, range(20))
            still_there = [i for i, code in enumerate(region.load(old, buffers(old)).codes) if code == 0]
            assert len(still_there) > 10
            daemon.signal(signal.SIGCONT)
            assert daemon.result() > 20
            assert region.lookup(keys_of(A, still_there)).hit_count == len(still_there)


def stops_holding_slots(path: Path, indices: list[int]) -> None:
    with Region.attach(path, host=0) as region:
        for i in indices:
            _native.stop_at("store.payload", 1, signal.SIGSTOP)
            store(region, [i])


@pytest.mark.parametrize("holders", [1, 2, 3])
def test_other_size_finds_an_extent_although_stopped_processes_hold_slots(holders: int) -> None:
    """Its first store has to cut an extent anew; those with a stopped writer in it cannot be had."""
    with region_folder() as folder, children() as start:
        path = make(folder / "region", participants=8)  # 4 extents
        with Region.attach(path, host=0) as region:
            store(region, list(range(30)))
            stopped = [start(stops_holding_slots, path, [100 + i]) for i in range(holders)]
            assert all(child.wait_stopped() for child in stopped)
            held = {s.extent for s in region.dump() if s.state == "writing"}
            keys = keys_of(B, range(3))
            reasons = set(region.store(keys, contents(keys)).reasons)
            assert reasons == {None} or len(held) == 4, (held, reasons)
            lost = sum(1 for s in region.dump() if s.state == "stored" and s.extent in held)
            assert lost >= 4 * len(held) - holders - 1, "an extent that could not be had was emptied"
            for child in stopped:
                child.signal(signal.SIGCONT)
                child.result()
            assert region.check().ok


def test_size_whose_only_slot_is_held_by_a_stopped_process_gets_another_extent() -> None:
    with region_folder() as folder, children() as start:
        path = folder / "region"
        Region.format(path, small_geometry(8, block_bytes=UNIT, slots_per_extent=2, participants=4))
        whole = namespace(Region.inspect(path).extent_bytes, "as large as an extent")
        with Region.attach(path) as region:
            store(region, list(range(6)))  # three of four extents
            child = start(stops_holding_the_large_one, path, whole)
            assert child.wait_stopped()
            store(region, [50 + i for i in range(3)])
            keys = keys_of(whole, [1])
            assert list(region.store(keys, contents(keys)).reasons) == [None]
            child.signal(signal.SIGCONT)
            child.result()
            assert region.check().ok


def stops_holding_the_large_one(path: Path, ns: Namespace) -> None:
    with Region.attach(path) as region:
        keys = keys_of(ns, [0])
        _native.stop_at("store.payload", 1, signal.SIGSTOP)
        region.store(keys, contents(keys))
