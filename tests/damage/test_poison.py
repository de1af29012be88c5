"""Pages of a region that cannot be read any more: what lies in them is a miss, all the rest goes on.

A slot here is one page, so that a page is one block's payload; or a page is the headers of a whole extent.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from children import children
from format.blocks import Blocks, load, namespace, store
from format.layout_file import Place, RegionBytes
from kvpool import _native
from kvpool.errors import MediumUnavailable, RegionError
from kvpool.region import Coherence, Geometry, Region
from poison import WAYS, Poison, poisoning
from strategies import region_folder

SPACE = namespace("poisoned", 4096)
BLOCKS = Blocks(SPACE, tuple(f"block {i}" for i in range(40)))
MORE = Blocks(SPACE, tuple(f"more {i}" for i in range(400)))


@pytest.fixture
def path() -> Iterator[Path]:
    with region_folder() as folder:
        yield folder / "region"


def make(path: Path, coherence: Coherence = "hardware") -> None:
    geometry = Geometry(
        2 << 20,
        hosts=2,
        extent_bytes=64 << 10,
        min_block_bytes=4096,
        participants=4,
        namespaces=4,
        coherence=coherence,
    )
    Region.format(path, geometry)


def place_of(path: Path, block: int) -> tuple[Place, Place]:
    """Header and payload of a stored block."""
    data = RegionBytes(path.read_bytes())
    packed = BLOCKS.keys.packed
    host, extent, slot = data.stored[packed[block * 32 : block * 32 + 32]]
    return data.header(host, extent, slot), data.payload(host, extent, slot, 4096)


def in_extent_of(path: Path, block: int) -> set[int]:
    """The blocks whose headers lie in the same page as this one's."""
    page = place_of(path, block)[0].start // 4096
    return {i for i in range(len(BLOCKS)) if place_of(path, i)[0].start // 4096 == page}


def missed(reasons: list[str]) -> set[int]:
    return {i for i, reason in enumerate(reasons) if reason}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("coherence", ["hardware", "software"])
def test_payload_that_cannot_be_read_is_one_miss_and_its_slot_is_retired(
    path: Path, coherence: Coherence, way: str
) -> None:
    make(path, coherence)
    with Region.attach(path, host=0) as owner, poisoning(way) as poison:
        assert store(owner, BLOCKS) == [""] * len(BLOCKS)
        bad = place_of(path, 7)[1]
        poison.page(path, bad.start)
        assert load(owner, BLOCKS) == ["tier-error" if i == 7 else "" for i in range(len(BLOCKS))]
        # Its slot is out of use, and the next store finds another one.
        assert [h.slots_retired for h in owner.usage().hosts] == [1, 0]
        assert store(owner, BLOCKS) == [""] * len(BLOCKS)
        assert load(owner, BLOCKS) == [""] * len(BLOCKS)
        assert place_of(path, 7)[1] != bad
        report = owner.check()
        assert report.ok
        assert report.totals["retired"] == 1


@pytest.mark.parametrize("way", WAYS)
def test_other_host_misses_what_it_cannot_read_and_nothing_else(path: Path, way: str) -> None:
    """Also of the block before it: while that one is copied, the next one's lines leave the cache."""
    make(path, "software")
    with Region.attach(path, host=0) as owner:
        assert store(owner, BLOCKS) == [""] * len(BLOCKS)
    with Region.attach(path, host=1) as other, poisoning(way) as poison:
        assert load(other, BLOCKS) == [""] * len(BLOCKS)
        bad = {0, 3, 4, 39}
        for block in bad:
            poison.page(path, place_of(path, block)[1].start)
        for _ in range(3):
            assert missed(load(other, BLOCKS)) == bad
        # It is not this host's to retire.
        assert [h.slots_retired for h in other.usage().hosts] == [0, 0]


@pytest.mark.parametrize("way", WAYS)
def test_store_into_a_slot_that_cannot_be_written_goes_elsewhere(path: Path, way: str) -> None:
    make(path)
    with Region.attach(path, host=0) as region, poisoning(way) as poison:
        assert store(region, BLOCKS) == [""] * len(BLOCKS)
        bad = [place_of(path, block)[1].start for block in (2, 11, 12)]
        region.evict(0.0, 1 << 20)
        for at in bad:
            poison.page(path, at)
        free = region.usage().hosts[0].slots_free
        for round_ in range(3):  # every slot of the shard is filled, and evicted for another block
            blocks = Blocks(SPACE, tuple(f"{name} {round_}" for name in MORE.names))
            assert store(region, blocks) == [""] * len(blocks)
        usage = region.usage().hosts[0]
        assert usage.slots_retired == len(bad)
        assert usage.slots_free + usage.blocks + len(bad) >= free
        kept = Blocks(SPACE, blocks.names[-20:])
        assert load(region, kept) == [""] * 20
        assert region.check().ok


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("coherence", ["hardware", "software"])
def test_headers_that_cannot_be_read_cost_their_extent_and_upkeep_goes_on(
    path: Path, coherence: Coherence, way: str
) -> None:
    make(path, coherence)
    with (
        Region.attach(path, host=0) as owner,
        Region.attach(path, host=1) as other,
        poisoning(way) as poison,
    ):
        assert store(owner, BLOCKS) == [""] * len(BLOCKS)
        assert load(other, BLOCKS) == [""] * len(BLOCKS)
        gone = in_extent_of(path, 7)
        assert gone != set(range(len(BLOCKS)))
        header = place_of(path, 7)[0]
        poison.page(path, header.start)
        for _ in range(2):
            assert missed(load(other, BLOCKS)) == gone
            assert missed(load(owner, BLOCKS)) == gone
        other.usage(), other.check(), list(other.dump())
    with Region.attach(path, host=0) as owner, poisoning(way) as poison:
        poison.page(path, header.start)
        assert missed(load(owner, BLOCKS)) == gone
        for round_ in range(2):
            blocks = Blocks(SPACE, tuple(f"{name} {round_}" for name in MORE.names))
            assert store(owner, blocks) == [""] * len(blocks)
        owner.heartbeat(), owner.reap(), owner.scrub(), owner.evict(0.5, 1000), list(owner.dump())
        assert owner.usage().hosts[0].slots_retired == 0
        owner.adopt(1, 5)
        problems = owner.check().problems
        assert [p for p in problems if "slot headers cannot be read (poisoned memory)" in p] == problems != []
        assert any("slot headers that cannot be read" in left for left in owner.repair().left)


def _directory(data: RegionBytes) -> dict[str, int]:
    return {
        "bucket": data.buckets(0).start + 4096,
        "log": data.within_shard(0, "log", "log_ring_offset", 4096).start,
        "tail": data.within_shard(0, "tail", "log_tail_offset", 64).start,
        "row": data.namespaces(0).start,
        "descriptor": data.within_shard(0, "descriptors", "extent_descriptors_offset", 64).start,
        "claim": data.claims(0).start,
    }


@pytest.mark.parametrize("line", ["bucket", "log", "tail", "row", "descriptor", "claim"])
@pytest.mark.parametrize("host", [0, 1])
def test_page_of_the_directory_that_cannot_be_read_ends_no_process(path: Path, line: str, host: int) -> None:
    make(path, "software")
    with Region.attach(path, host=0) as owner:
        assert store(owner, BLOCKS) == [""] * len(BLOCKS)
    with Region.attach(path, host=host) as region, poisoning() as poison:
        region.lookup(BLOCKS.keys)
        poison.page(path, _directory(RegionBytes(path.read_bytes()))[line])
        for use in (load, store, load):
            assert {*use(region, BLOCKS)} <= {
                *(
                    "",
                    "tier-error",
                    "never-stored",
                    "wrong-namespace",
                    "evicted",
                    "no-space",
                    "namespaces-full",
                ),
            }
        for upkeep in (
            region.usage,
            region.counters,
            region.participants,
            region.reap,
            region.scrub,
            region.heartbeat,
            region.owners,
            lambda: list(region.dump()),
            lambda: region.evict(0.0, 3),
            lambda: region.adopt(1 - host, 1 << 40),
            lambda: region.resize(region.info.capacity_bytes),
        ):
            with suppress(MediumUnavailable, RegionError):
                upkeep()
        region.check()


def test_what_failed_is_named(path: Path) -> None:
    make(path)
    with Region.attach(path, host=0) as region, poisoning() as poison:
        poison.page(path, _directory(RegionBytes(path.read_bytes()))["tail"])
        with pytest.raises(MediumUnavailable, match=r"failed at byte \d+, in the directory of shard 0"):
            region.evict(0.0, 1)


def first_payloads(path: Path) -> tuple[int, int]:
    """The bytes of the first extent's payload."""
    data = RegionBytes(path.read_bytes())
    return data.payload(0, 0, 0, 4096).start, 16 * 4096


def _give_up(path: Path, step: str) -> None:
    with Region.attach(path, host=0) as region:
        _native.stop_at(step, 1, signal.SIGKILL)
        region.give_up([first_payloads(path)])


@pytest.mark.parametrize("step", ["retire.claim", "retire.slot", "evict.claim"])
def test_killed_while_a_slot_is_retired_the_next_one_retires_it(path: Path, step: str) -> None:
    make(path)
    with Region.attach(path, host=0) as region:
        assert store(region, BLOCKS) == [""] * len(BLOCKS)
        region.evict(0.0 if step == "retire.claim" else 1.0, 1 << 20)
    with children() as start:
        assert start(_give_up, path, step).wait() == -signal.SIGKILL
    with Region.attach(path, host=0) as region:
        assert region.check().ok
        report = region.give_up([first_payloads(path)])
        assert report.slots_retired == region.usage().hosts[0].slots_retired >= 15
        assert region.check().ok


def _dies(path: Path) -> None:
    region = Region.attach(path, host=0)
    assert store(region, MORE)
    os.kill(os.getpid(), signal.SIGKILL)


def test_retired_slot_outlives_reaper_adopter_resize_and_other_sizes(path: Path) -> None:
    make(path)
    other = Blocks(namespace("larger", 8192), tuple(f"large {i}" for i in range(300)))
    with Region.attach(path, host=0) as region, Region.attach(path, host=1) as neighbour, children() as start:
        assert store(region, BLOCKS) == [""] * len(BLOCKS)
        header, payload = place_of(path, 7)
        report = region.give_up([(payload.start + 100, 1)])
        assert (report.slots, report.blocks, report.left) == (1, 1, 0)
        assert region.give_up([(payload.start, 4096)]).retired_before == 1
        word = path.read_bytes()[header.start : header.start + 8]

        def stays() -> bool:
            return path.read_bytes()[header.start : header.start + 8] == word

        assert start(_dies, path).wait() == -signal.SIGKILL
        assert region.reap().dead == 1
        assert stays()
        assert {*store(region, other), *store(region, MORE)} == {""}
        assert stays()
        neighbour.adopt(0, 3)
        assert stays()
        region.heartbeat(), neighbour.heartbeat()
        assert stays()
        region.adopt(0, 4)
        neighbour.heartbeat(), region.heartbeat()
        assert stays()
        assert region.check().ok
        assert region.check().totals["retired"] == 1
        smallest = region.info.smallest_bytes
        while not region.resize(smallest).done:
            pass
        while not region.resize(region.info.capacity_bytes).done:
            pass
        assert stays()
        assert region.check().ok
        # The memory can be read: repair gives the slot back.
        assert any("in use again" in done for done in region.repair().done)
        assert not stays()
        assert region.check().totals["retired"] == 0


def test_memory_that_is_known_to_be_bad_is_given_up_before_anybody_meets_it(path: Path) -> None:
    make(path)
    with Region.attach(path, host=0) as region:
        assert store(region, BLOCKS) == [""] * len(BLOCKS)
        header, payload = place_of(path, 7)
        gone = {
            i
            for i in range(len(BLOCKS))
            if place_of(path, i)[1].start in (payload.start, payload.start + 4096)
        }
        report = region.give_up([(payload.start, 4097)])
        assert (report.slots, report.blocks) == (2, len(gone))
        assert missed(load(region, BLOCKS)) == gone
        report = region.give_up([(header.start, 64)])
        assert (report.extents, report.directory_bytes) == (1, 0)
        data = RegionBytes(path.read_bytes())
        report = region.give_up([(data.buckets(0).start, 128), (data.buckets(1).start, 64), (0, 8192)])
        assert (report.directory_bytes, report.slots) == (128, 0)
        assert region.give_up([(region.info.capacity_bytes - 10, 1 << 60)]).slots == 0
        assert {*store(region, MORE)} == {""}


UPKEEP: dict[str, Callable[[Region, Poison], object]] = {
    "audit": lambda region, _: region.heartbeat(),
    "scrub": lambda region, _: region.scrub(),
    "repair": lambda region, _: region.repair(),
}


@pytest.mark.parametrize("what", UPKEEP)
def test_upkeep_drops_what_it_cannot_read_and_keeps_the_rest(path: Path, what: str) -> None:
    """An adopted shard, as its auditor, scrubber or repairer meets it."""
    make(path, "software")
    with Region.attach(path, host=0) as region:
        assert store(region, BLOCKS) == [""] * len(BLOCKS)
    with Region.attach(path, host=0) as before, Region.attach(path, host=1) as region, poisoning() as poison:
        payload = place_of(path, 7)[1]
        poison.page(path, payload.start)
        region.adopt(0, 3)
        before.heartbeat()
        UPKEEP[what](region, poison)
        assert missed(load(region, BLOCKS)) == {7}
        assert len(RegionBytes(path.read_bytes()).stored) == len(BLOCKS) - 1
