"""Any single bit of a region may be wrong.

Never wrong bytes, never a crash, never a hang, and no block is lost but the one that the bit belongs to. The
quick suite flips a sample, `make test-damage` (KVPOOL_EVERY_BIT=1) every bit.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import pytest

from damage.tally import Row
from damage.tiny import ALL, FAILED_CHECKSUM, NEW, SLOT_BYTES, SPACE, Tiny
from damage.workers import try_all
from format.blocks import Blocks, load, store
from kvpool.errors import FencedError, RegionError
from kvpool.outcomes import CODE_BY_REASON, MissReason
from kvpool.region import Coherence, Region
from strategies import region_folder, seed

EVERY_BIT = bool(os.environ.get("KVPOOL_EVERY_BIT"))
COPY_BITS = 4096 * 8
T = TypeVar("T")
EVICTED = CODE_BY_REASON[MissReason.EVICTED]


@pytest.fixture(params=["hardware", "software"])
def coherence(request: pytest.FixtureRequest) -> Coherence:
    chosen: Coherence = request.param
    return chosen


@pytest.fixture
def tiny_of(coherence: Coherence) -> Iterator[Callable[[int], Tiny]]:
    """A region a worker."""
    with region_folder() as folder:
        yield lambda worker: Tiny(folder / str(worker), coherence)


@pytest.fixture
def any_tiny_of() -> Iterator[Callable[[int], Tiny]]:
    """Where the way of coherence makes no difference: nothing is read before the superblock."""
    with region_folder() as folder:
        yield lambda worker: Tiny(folder / str(worker), "hardware")


def chosen(every: Sequence[T], sample: int, what: str) -> Sequence[T]:
    """All of them, or a sample."""
    if EVERY_BIT or len(every) <= sample:
        return every
    return sorted(random.Random(seed(what)).sample(every, sample))


def bits_of(bytes_: Iterable[int]) -> list[int]:
    return [at * 8 + i for at in bytes_ for i in range(8)]


def use_everything(tiny: Tiny, region: Region, row: Row) -> None:
    """Whatever reads the directory must come back, and a store must give right bytes or decline."""
    region.check()
    region.usage()
    region.counters()
    region.participants()
    assert len(list(region.dump())) <= 8
    if store(region, NEW) == [""]:
        assert load(region, NEW) == [""]
    region.scrub()
    region.store(ALL.keys, ALL.payloads)
    tiny.load(region, row)
    region.reap()
    region.heartbeat()
    region.evict(0.0, 3)
    tiny.load(region, row)


def attach(path: Path, row: Row, **more: int) -> Region:
    row.add("openings")
    return Region.attach(path, **more)


def test_superblock_bit_flipped_second_copy_serves(any_tiny_of: Callable[[int], Tiny]) -> None:
    """Each bit of each copy: the other copy is used, nothing is lost, and inspect says that a copy is bad."""

    def prepare(worker: int, row: Row) -> Callable[[int], None]:
        tiny = any_tiny_of(worker)

        def use(bit: int) -> None:
            tiny.restore()
            tiny.flip(bit)
            row.add("bit flipped")
            row.add("openings")
            assert Region.inspect(tiny.path).superblock_copies_ok == 1
            with attach(tiny.path, row) as region:
                assert not any(tiny.load(region, row))

        return use

    # Dense where there are fields, sparse where there is nothing but the checksum's cover.
    fields = [bit for copy in (0, COPY_BITS) for bit in range(copy, copy + 248 * 8)]
    rest = sorted(set(range(2 * COPY_BITS)) - set(fields))
    try_all(chosen(fields, 400, "superblock fields") + chosen(rest, 200, "superblock"), prepare)


def test_superblock_bit_flipped_in_both_copies_is_refused(any_tiny_of: Callable[[int], Tiny]) -> None:
    """Two bad copies are an error with a way out, and nothing is written."""

    def prepare(worker: int, row: Row) -> Callable[[int], None]:
        tiny = any_tiny_of(worker)
        openings = (Region.attach, Region.open_read_only, Region.inspect, Region.fsck)

        def use(bit: int) -> None:
            with tiny.flipped(bit), tiny.flipped(bit + COPY_BITS):
                row.add("bit flipped in both superblocks")
                row.add("openings")
                before = tiny.map[:]
                with pytest.raises(RegionError, match="Nothing was changed"):
                    openings[bit % 4](tiny.path)
                row.add("refused")
                assert tiny.map[:] == before

        return use

    try_all(chosen(range(COPY_BITS), 400, "both superblocks"), prepare)


def test_shard_bit_flipped_before_attach_costs_at_most_its_block(tiny_of: Callable[[int], Tiny]) -> None:
    def prepare(worker: int, row: Row) -> Callable[[int], None]:
        tiny = tiny_of(worker)
        own = tiny.bytes.shard(0).start
        # Where there is more than payload and room, all is done for each bit, elsewhere for one bit a byte.
        shards = [tiny.bytes.shard(host).start for host in (0, 1)]
        directory = tiny.bytes.sb["extents_offset"] + 4 * 64
        dense = [any(s <= at < s + directory for s in shards) for at in range(len(tiny.good))]

        def use(bit: int) -> None:
            tiny.restore()
            tiny.flip(bit)
            row.add("bit flipped")
            try:
                region = attach(tiny.path, row)
            except FencedError:
                row.add("refused")  # right where the line that names the host's machine is damaged
                assert own <= bit // 8 < own + 128, tiny.place_of(bit // 8)
                return
            with region:
                tiny.check(region, bit, row)
                if dense[bit // 8] or bit % 8 == bit // 8 % 8:
                    use_everything(tiny, region, row)

        return use

    try_all(_shard_bits(tiny_of(9), 0.4), prepare)


def test_shard_bit_flipped_under_attached_hosts_costs_at_most_its_block(
    tiny_of: Callable[[int], Tiny],
) -> None:
    """All but payload: there is another test for what a bit costs that its reader may drop."""

    def prepare(worker: int, row: Row) -> Callable[[int], None]:
        tiny = tiny_of(worker)
        hosts = [Region.attach(tiny.path, host=0), Region.attach(tiny.path, host=1)]

        def use(bit: int) -> None:
            with tiny.flipped(bit):
                row.add("bit flipped")
                for region in hosts:
                    tiny.check(region, bit, row)

        return use

    tiny = tiny_of(9)
    try_all([bit for bit in _shard_bits(tiny, 1.0) if bit // 8 not in tiny.in_payload], prepare)


def test_payload_bit_flipped_under_attached_hosts_is_dropped_by_its_owner_and_stored_anew(
    tiny_of: Callable[[int], Tiny],
) -> None:
    """Another host may not write there: for it the block is a miss until its owner sees the damage."""

    def prepare(worker: int, row: Row) -> Callable[[int], None]:
        tiny = tiny_of(worker)

        hosts = [Region.attach(tiny.path, host=0), Region.attach(tiny.path, host=1)]
        ones = [Blocks(SPACE, (name,)) for name in ALL.names]
        kept = len(ALL) - 1

        def use(damage: tuple[int, int]) -> None:
            block, bit = damage
            owner = hosts[tiny.stored[block][0]]
            other = hosts[1 - tiny.stored[block][0]]
            bad_before = owner.counters().scrub_bad if bit == 0 else 0
            tiny.flip(tiny.payload_now(block) * 8 + bit)
            row.add("bit flipped")
            for reader in (other, other, owner):  # the first two may not drop it, so they see it again
                codes = tiny.load(reader, row)
                assert codes[block] == FAILED_CHECKSUM
                assert codes.count(0) == kept
            assert owner.lookup(ones[block].keys).codes[0] == EVICTED, "the damaged block stayed"
            stored = owner.store(ones[block].keys, ones[block].payloads)
            assert stored.stored_count == 1, "the dropped block was present"
            for reader in hosts:
                assert not any(tiny.load(reader, row)), "it is there again, with right bytes, for both hosts"
            if bit == 0:
                assert owner.counters().scrub_bad == bad_before + 1

        return use

    every = [(block, bit) for block in range(len(ALL)) for bit in range(SPACE.block_bytes * 8)]
    try_all(chosen(every, 400, "payload"), prepare)


def _shard_bits(tiny: Tiny, share: float) -> list[int]:
    """Every bit of both shards, or a sample that favours what a load depends on."""
    shards = tiny.bytes.shard(0).start, len(tiny.good)
    if EVERY_BIT:
        return bits_of(range(*shards))
    r, dice = tiny.bytes, random.Random(seed("shard bits"))
    picked: set[int] = set()

    def pick(start: int, size: int, sample: float) -> None:
        every = bits_of(range(start, start + size))
        picked.update(dice.sample(every, min(len(every), int(sample * share))))

    for place in tiny.stored:
        pick(r.header(*place).start, 64, 130)
        pick(r.payload(*place, SLOT_BYTES).start, SLOT_BYTES, 60)
    for host in (0, 1):
        pick(r.buckets(host).start, r.buckets(host).bytes, 300)
        pick(r.namespaces(host).start, 1024, 100)
        pick(r.shard(host).start, r.shard(host).bytes, 400)
    return sorted(picked)
