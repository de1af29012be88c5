"""Regions: blocks in and out, eviction, counters, looking without touching, damage."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

from children import children, until
from format.layout_file import RegionBytes
from kvpool import _native
from kvpool.errors import (
    MediumUnavailable,
    RegionError,
)
from kvpool.outcomes import MissReason
from kvpool.region import Geometry, Region
from regions import NS, UNIT, make, patch, snapshot
from strategies import (
    buffers,
    contents,
    keys_of,
    namespace,
    small_geometry,
    wrong_hits,
)

# -- upkeep ------------------------------------------------------------------------------------------------


def test_scrub_stops_at_its_bytes_whatever_the_sizes_of_blocks_and_goes_on_there(folder: Path) -> None:
    """Small blocks make a small mean size: a bound in blocks would let the large ones through."""
    path = folder / "region"
    Region.format(path, small_geometry(4096, block_bytes=1024, slots_per_extent=512))
    small, large = NS, namespace(256 * 1024, "large")
    with Region.attach(path) as region:
        for keys in (keys_of(small, range(1000)), keys_of(large, range(8))):
            assert region.store(keys, contents(keys)).stored_count == len(keys)
        budget, position, read, checked = 100_000, 0, 0, 0
        while True:
            report = region.scrub(start=position, bytes_max=budget)
            assert report.bytes <= budget + 256 * 1024 + 64  # a block is read whole
            read, checked, position = read + report.bytes, checked + report.checked, report.next_slot
            if position == 0:
                break
        assert checked == 1008
        assert read >= 1000 * 1024 + 8 * 256 * 1024


def test_scrub_of_the_daemon_keeps_its_rate_on_average(folder: Path) -> None:
    from kvpool.daemon.chores import SCRUB_BYTES_PER_S, Scrub

    path = folder / "region"
    Region.format(path, small_geometry(2048, block_bytes=1024, slots_per_extent=512))
    keys = keys_of(namespace(256 * 1024, "large"), range(8))
    with Region.attach(path) as region:
        assert region.store(keys, contents(keys)).stored_count == len(keys)
        scrub = Scrub(region, period_s=1 / 512)
        budget = SCRUB_BYTES_PER_S / 512
        for runs in range(1, 200):
            scrub.run()
            assert scrub.bytes <= budget * runs + 256 * 1024 + 64
        assert scrub.rounds > 1
        assert scrub.bytes > 0.8 * budget * 200


# -- what works --------------------------------------------------------------------------------------------


def test_stored_blocks_are_hits_until_closed_and_after_attaching_again(folder: Path) -> None:
    path = make(folder / "region")
    keys = keys_of(NS, range(5))
    with Region.attach(path) as region:
        assert region.store(keys, contents(keys)).stored_count == 5
        assert region.store(keys, contents(keys)).present_count == 5
        assert region.lookup(keys).hit_count == 5
    with Region.attach(path) as region:
        out = buffers(keys)
        result = region.load(keys, out)
        assert (result.hit_count, result.bytes_loaded) == (5, 5 * UNIT)
        assert not wrong_hits(keys, result.codes, out)


def test_batches_of_nothing_are_no_error(folder: Path) -> None:
    with Region.attach(make(folder / "region")) as region:
        nothing = keys_of(NS, [])
        assert (
            len(region.load(nothing, []))
            == len(region.store(nothing, []))
            == len(region.lookup(nothing))
            == 0
        )


def test_the_same_key_twice_in_one_batch_is_stored_once(folder: Path) -> None:
    with Region.attach(make(folder / "region")) as region:
        keys = keys_of(NS, [1, 1, 2, 1])
        result = region.store(keys, contents(keys))
        assert (result.stored_count, result.present_count) == (2, 2)
        assert region.usage().blocks == 2
        out = buffers(keys)
        assert region.load(keys, out).hit_count == 4
        assert [bytes(b) for b in out] == contents(keys)


@pytest.mark.parametrize("block_bytes", [1, 63, 64, 65, 1000, 4095, 4096, 10000])
def test_blocks_of_any_size_whole_or_in_pieces(folder: Path, block_bytes: int) -> None:
    path = folder / "region"
    Region.format(
        path, Geometry(1 << 20, min_block_bytes=64, extent_bytes=16384, participants=2, namespaces=2)
    )
    ns = namespace(block_bytes)
    keys = keys_of(ns, range(3))
    with Region.attach(path) as region:
        whole = contents(keys)
        pieces = [
            [b[:1], b[1 : block_bytes // 2], b[block_bytes // 2 :]] if block_bytes > 3 else [b] for b in whole
        ]
        assert region.store(keys, pieces).stored_count == 3
        out = buffers(keys)
        assert region.load(keys, [[memoryview(b)[:5], memoryview(b)[5:]] for b in out]).hit_count == 3
        assert [bytes(b) for b in out] == whole


def test_a_full_region_evicts_and_never_declines(folder: Path) -> None:
    with Region.attach(make(folder / "region")) as region:
        for first in range(0, 200, 10):
            keys = keys_of(NS, range(first, first + 10))
            assert region.store(keys, contents(keys)).stored_count == 10
            usage = region.usage()
            assert usage.used_bytes <= usage.capacity_bytes
        assert usage.blocks == usage.slots_total
        old = region.load(keys_of(NS, range(10)), buffers(keys_of(NS, range(10))))
        assert set(old.reasons) <= {MissReason.EVICTED, MissReason.NEVER_STORED}
        assert MissReason.EVICTED in set(old.reasons)


def test_blocks_that_are_read_outlive_those_that_are_not(folder: Path) -> None:
    path = folder / "region"
    Region.format(path, small_geometry(64, block_bytes=UNIT, slots_per_extent=16))
    with Region.attach(path) as region:
        hot = keys_of(NS, range(8))
        region.store(hot, contents(hot))
        for i in range(100, 400):
            keys = keys_of(NS, [i])
            region.store(keys, contents(keys))
            region.load(hot, buffers(hot))
        assert region.lookup(hot).hit_count >= 7


def test_evict_stops_at_its_target_and_says_how_many(folder: Path) -> None:
    with Region.attach(make(folder / "region")) as region:
        keys = keys_of(NS, range(16))
        region.store(keys, contents(keys))
        assert region.evict(1.0, 100) == 0
        assert region.evict(0.0, 0) == 0
        assert region.evict(0.0, 3) == 3
        assert region.evict(0.5, 100) == 16 - 3 - 8
        usage = region.usage()
        assert usage.used_bytes <= usage.capacity_bytes // 2
        assert region.counters().evictions == 8


def test_evict_counts_what_blocks_can_fill_and_not_the_rest_of_each_extent(folder: Path) -> None:
    """Blocks of three quarters of an extent fill it to 75 %: a watermark of 90 % must still work."""
    with Region.attach(make(folder / "region")) as region:
        keys = keys_of(namespace(3 * UNIT), range(20))
        region.store(keys, contents(keys))
        full = region.usage()
        assert full.blocks == full.slots_total
        assert region.evict(0.9, 100) == 1
        assert region.evict(0.9, 100) == 0


def test_counters_survive_the_process_and_add_up(folder: Path) -> None:
    path = make(folder / "region")
    for _ in range(3):
        with Region.attach(path) as region:
            keys = keys_of(NS, [0, 1])
            region.store(keys, contents(keys))
            region.load(keys, buffers(keys))
            region.record(3, 1, {MissReason.EVICTED: 2})
    with Region.attach(path) as region:
        c = region.counters()
        assert (c.stored, c.present, c.bytes_stored, c.bytes_loaded) == (2, 4, 2 * UNIT, 6 * UNIT)
        assert (c.lookups, c.hits, c.misses) == (9, 3, {"evicted": 6})
        assert sum(c.load_latency) == sum(c.store_latency) == 3


def test_namespaces_and_participants_and_dump_tell_what_is_there(folder: Path) -> None:
    path = make(folder / "region", hosts=2)
    with Region.attach(path, host=1, node_name="node-b", role="tool") as region:
        keys = keys_of(namespace(UNIT - 24, "a model", tenant="secret"), range(3))
        region.store(keys, contents(keys))
        (ns,) = region.namespaces()
        assert (ns.digest, ns.block_bytes, ns.blocks, ns.bytes) == (
            keys.namespace.digest.hex(),
            UNIT - 24,
            3,
            3 * (UNIT - 24),
        )
        assert ns.description["model"] == "a model"
        assert "secret" not in str(ns.description)
        (me,) = region.participants()
        assert (me.host, me.role, me.pid, me.alive) == (1, "tool", os.getpid(), True)
        slots = list(region.dump())
        assert [(s.host, s.state, s.length_bytes, s.header_ok) for s in slots] == [
            (1, "stored", UNIT - 24, True)
        ] * 3
        assert {s.key for s in slots} == {keys.packed[i : i + 6].hex() for i in (0, 32, 64)}
        hosts = region.usage().hosts
        assert [(h.state, h.node_name, h.blocks) for h in hosts] == [
            ("never attached", "", 0),
            ("ready", "node-b", 3),
        ]


def test_read_only_region_looks_and_changes_nothing(folder: Path) -> None:
    path = make(folder / "region")
    keys = keys_of(NS, range(3))
    with Region.attach(path) as region:
        region.store(keys, contents(keys))
    before = snapshot(folder)
    with Region.open_read_only(path) as region:
        assert region.lookup(keys).hit_count == 3
        assert region.usage().blocks == 3
        assert len(list(region.dump())) == 3
        assert region.check().ok
        assert region.participants() == []
        for forbidden in (
            lambda: region.store(keys, contents(keys)),
            lambda: region.evict(0.0, 1),
            lambda: region.reap(),
            lambda: region.scrub(),
            lambda: region.heartbeat(),
            lambda: region.adopt(0, 1),
        ):
            with pytest.raises(RegionError, match=r"opened read-only. Attach as a participant to do this"):
                forbidden()
    assert Region.fsck(path).ok
    assert snapshot(folder) == before


def test_threads_share_a_region_and_close_waits_for_them(folder: Path) -> None:
    region = Region.attach(make(folder / "region"))
    keys = keys_of(NS, range(10))
    wrong: list[object] = []

    def work() -> None:
        try:
            while True:
                region.store(keys, contents(keys))
                out = buffers(keys)
                wrong.extend(wrong_hits(keys, region.load(keys, out).codes, out))
        except RegionError:
            pass

    threads = [threading.Thread(target=work) for _ in range(3)]
    for t in threads:
        t.start()
    threading.Event().wait(0.1)
    region.close()
    for t in threads:
        t.join(10)
        assert not t.is_alive()
    assert not wrong


# -- damage ------------------------------------------------------------------------------------------------


def damage(path: Path, content: bytes) -> None:
    """Flips a bit of the block with this content."""
    at = path.read_bytes().index(content) + 500
    patch(path, at, bytes([content[500] ^ 1]))


def test_damaged_payload_is_failed_checksum_once_then_evicted_and_the_next_store_stores_it_anew(
    folder: Path,
) -> None:
    path = make(folder / "region")
    keys = keys_of(NS, range(3))
    with Region.attach(path) as region:
        region.store(keys, contents(keys))
        damage(path, contents(keys)[1])
        assert list(region.load(keys, buffers(keys)).reasons) == [None, MissReason.FAILED_CHECKSUM, None]
        assert list(region.load(keys, buffers(keys)).reasons) == [None, MissReason.EVICTED, None]
        assert region.counters().scrub_bad == 1
        result = region.store(keys, contents(keys))
        assert (result.stored_count, result.present_count) == (1, 2)
        out = buffers(keys)
        assert region.load(keys, out).hit_count == 3
        assert out == contents(keys)
        assert region.check().ok


def test_damaged_payload_that_nobody_loads_is_found_and_evicted_by_scrub(folder: Path) -> None:
    path = make(folder / "region")
    keys = keys_of(NS, range(3))
    with Region.attach(path) as region:
        region.store(keys, contents(keys))
        damage(path, contents(keys)[1])
        report = region.scrub()
        assert (report.checked, report.bad, report.next_slot) == (3, 1, 0)
        assert region.store(keys, contents(keys)).stored_count == 1
        assert region.load(keys, buffers(keys)).hit_count == 3
        assert region.counters().scrub_bad == 1


def test_damaged_payload_of_another_host_stays_a_miss_until_its_owner_reads_it(folder: Path) -> None:
    path = make(folder / "region", hosts=2)
    keys = keys_of(NS, [1])
    with Region.attach(path, host=0) as owner, Region.attach(path, host=1) as other:
        owner.store(keys, contents(keys))
        damage(path, contents(keys)[0])
        for _ in range(2):
            assert list(other.load(keys, buffers(keys)).reasons) == [MissReason.FAILED_CHECKSUM]
        assert list(owner.load(keys, buffers(keys)).reasons) == [MissReason.FAILED_CHECKSUM]
        assert list(other.load(keys, buffers(keys)).reasons) == [MissReason.EVICTED]
        assert other.store(keys, contents(keys)).stored_count == 1
        for region in (owner, other):
            out = buffers(keys)
            assert region.load(keys, out).hit_count == 1
            assert out == contents(keys)


def test_damaged_payload_of_a_shard_that_another_host_took_is_left_alone(folder: Path) -> None:
    """A reader that lost its shard may not write there any more, not even to drop a block."""
    path = make(folder / "region", hosts=2)
    keys = keys_of(NS, [1])
    with Region.attach(path, host=0) as owner, Region.attach(path, host=1) as adopter:
        owner.store(keys, contents(keys))
        adopter.adopt(0, 1)
        damage(path, contents(keys)[0])
        for _ in range(2):
            assert list(owner.load(keys, buffers(keys)).reasons) == [MissReason.FAILED_CHECKSUM]
        assert owner.counters().scrub_bad == 0
        assert list(adopter.load(keys, buffers(keys)).reasons) == [MissReason.FAILED_CHECKSUM]
        assert list(adopter.load(keys, buffers(keys)).reasons) == [MissReason.EVICTED]
        assert adopter.counters().scrub_bad == 1


def test_damaged_namespace_row_costs_its_blocks_once_and_the_next_store_opens_another(folder: Path) -> None:
    path = make(folder / "region")
    keys, others = keys_of(NS, range(3)), keys_of(NS, range(3, 6))
    with Region.attach(path) as region:
        region.store(keys, contents(keys))
        at = RegionBytes(path.read_bytes()).namespaces(0).start + 40
        patch(path, at, bytes([path.read_bytes()[at] ^ 1]))
        with Region.attach(path) as next_one:
            assert set(next_one.load(keys, buffers(keys)).reasons) == {MissReason.WRONG_NAMESPACE}
            assert next_one.store(keys, contents(keys)).stored_count == 3
            assert region.store(others, contents(others)).stored_count == 3, "it knew the row from before"
        with Region.attach(path) as next_one:
            for batch in (keys, others):
                out = buffers(batch)
                assert next_one.load(batch, out).hit_count == 3
                assert out == contents(batch)


def test_scrub_goes_on_where_it_stopped(folder: Path) -> None:
    with Region.attach(make(folder / "region")) as region:
        keys = keys_of(NS, range(10))
        region.store(keys, contents(keys))
        start, checked, rounds = 0, 0, 0
        while True:
            report = region.scrub(start=start, limit=3)
            start, checked, rounds = report.next_slot, checked + report.checked, rounds + 1
            assert report.checked <= 3
            if start == 0:
                break
        assert checked == 10
        assert rounds >= 4


def test_file_truncated_under_running_readers_is_a_tier_error_and_the_process_lives(folder: Path) -> None:
    path = make(folder / "region", hosts=2)

    def run() -> list[set[MissReason | None]]:
        regions = [Region.attach(path, host=h) for h in (0, 1)]
        keys = keys_of(NS, range(10))
        regions[0].store(keys, contents(keys))
        seen: list[set[MissReason | None]] = [set() for _ in range(4)]
        ended = threading.Event()

        def read(place: int) -> None:
            while not ended.is_set():
                out = buffers(keys)
                result = regions[place % 2].load(keys, out)
                assert not wrong_hits(keys, result.codes, out)
                seen[place] |= set(result.reasons)
                if place > 1:
                    regions[place % 2].store(keys, contents(keys))

        threads = [threading.Thread(target=read, args=(i,)) for i in range(4)]
        for t in threads:
            t.start()
        ended.wait(0.05)
        os.truncate(path, 8192)
        until(lambda: all(MissReason.TIER_ERROR in reasons for reasons in seen), 20)  # all have had a turn
        ended.set()
        for t in threads:
            t.join()
        for region in regions:
            assert set(region.lookup(keys).reasons) == {MissReason.TIER_ERROR}
            assert set(region.store(keys, contents(keys)).reasons) == {MissReason.TIER_ERROR}
            for call in (region.usage, region.counters, region.reap, region.heartbeat, region.scrub):
                with pytest.raises(MediumUnavailable, match="the medium failed"):
                    call()
            assert any("medium failed" in p for p in region.check().problems)
            region.record(1, 0, {MissReason.EVICTED: 1})
            region.close()
        return seen

    with children() as start:
        for reasons in start(run).result():
            assert MissReason.TIER_ERROR in reasons


def test_medium_that_fails_in_the_middle_of_attaching_is_an_error_and_no_hang(folder: Path) -> None:
    """The one who attaches reaps the dead, under locks of the region that closing it needs as well."""
    path = make(folder / "region")

    def die() -> None:
        region = Region.attach(path)
        keys = keys_of(NS, [1])
        _native.stop_at("store.payload", 1, signal.SIGKILL)
        region.store(keys, contents(keys))

    def attach() -> str:
        _native.stop_at("attach.live", 1, signal.SIGSTOP)
        with pytest.raises(MediumUnavailable, match="the medium failed"):
            Region.attach(path)
        return "refused"

    with children() as start:
        assert start(die).wait() == -signal.SIGKILL
        child = start(attach, timeout_s=20)
        assert child.wait_stopped()
        os.truncate(path, RegionBytes(path.read_bytes()).header(0, 0, 0).start)
        child.signal(signal.SIGCONT)
        assert child.result() == "refused"
