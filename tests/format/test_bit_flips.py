"""Any single bit of a region may be wrong.

Never wrong bytes, never a crash, and no block is lost but the one that the bit belongs to. The quick suite
flips a sample; KVPOOL_EVERY_BIT=1 flips every bit of the region (half an hour).
KVPOOL_SEED draws another sample.
"""

from __future__ import annotations

import mmap
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

from format.blocks import Blocks, load, namespace, store
from format.isolation import Progress, isolated
from format.layout_file import Place, RegionBytes
from kvpool.errors import FencedError, RegionError
from kvpool.region import Coherence, Geometry, Region

EVERY_BIT = bool(os.environ.get("KVPOOL_EVERY_BIT"))
SEED = int(os.environ.get("KVPOOL_SEED", "20"))
SPACE = namespace("tiny", 1000)  # 24 bytes short of its slot
SLOT_BYTES = 1024
MINE = Blocks(SPACE, ("a", "b", "c", "d", "e"))
THEIRS = Blocks(SPACE, ("x", "y", "z"))
NEW = Blocks(SPACE, ("new",))


@dataclass
class Tiny:
    """The smallest region of two hosts with all kinds of lines: a file to be damaged and restored."""

    path: Path
    good: bytes
    map: mmap.mmap

    @cached_property
    def bytes(self) -> RegionBytes:
        return RegionBytes(self.good)

    def restore(self) -> None:
        self.map[:] = self.good

    @contextmanager
    def flipped(self, bit: int) -> Iterator[None]:
        self.map[bit // 8] ^= 1 << bit % 8
        try:
            yield
        finally:
            self.map[bit // 8] ^= 1 << bit % 8


@pytest.fixture(params=["hardware", "software"])
def tiny(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Tiny]:
    coherence: Coherence = request.param
    path = tmp_path / "tiny"
    Region.format(
        path,
        Geometry(
            56 << 10,
            hosts=2,
            extent_bytes=4096,
            min_block_bytes=SLOT_BYTES,
            participants=2,
            namespaces=1,
            align_bytes=4096,
            coherence=coherence,
        ),
    )
    with Region.attach(path, host=0) as a, Region.attach(path, host=1) as b:
        assert store(a, Blocks(SPACE, ("gone",))) == [""]
        assert a.evict(0, 1) == 1  # leaves its ghost in a bucket
        assert store(a, MINE) == [""] * len(MINE)
        assert store(b, THEIRS) == [""] * len(THEIRS)
        assert load(b, MINE) == [""] * len(MINE)  # a row of touches
    with open(path, "r+b") as f, mmap.mmap(f.fileno(), 0) as m:
        yield Tiny(path, m[:], m)


def bits(start: int, size: int, sample: int) -> list[int]:
    """All bits of a range of bytes, or a sample of them."""
    every = range(start * 8, (start + size) * 8)
    return (
        list(every)
        if EVERY_BIT or len(every) <= sample
        else sorted(random.Random(SEED).sample(every, sample))
    )


def owners(region: RegionBytes, offset: int) -> tuple[set[bytes], bool]:
    """The keys of the blocks that damage at `offset` may cost, and whether it must cost exactly those."""
    stored = region.stored
    for key, (host, extent, slot) in stored.items():
        if offset in region.header(host, extent, slot):
            return {key}, True
        if offset in (payload := region.payload(host, extent, slot, SLOT_BYTES)):
            return ({key}, True) if offset - payload.start < SPACE.block_bytes else (set(), True)
    for host in (0, 1):
        its = {key for key, (h, _, _) in stored.items() if h == host}
        if offset in region.buckets(host):
            return its, False  # at most one of them, which the caller checks
        if (
            offset in region.namespaces(host)
            or region.shard(host).start <= offset < region.shard(host).start + 8
        ):  # "nobody ever attached"
            return its, False
    return set(), True


def check_blocks(region: Region, expected: RegionBytes, bit: int) -> None:
    may_miss, exactly = owners(expected, bit // 8)
    missed: dict[bytes, str] = {}
    for blocks in (MINE, THEIRS):
        keys = blocks.keys
        found = region.lookup(keys).codes
        for i, reason in enumerate(load(region, blocks)):
            if reason:
                missed[keys.packed[i * 32 : i * 32 + 32]] = reason
            else:
                assert found[i] == 0, "a block that loads must be found by lookup"
    assert set(missed) <= may_miss, f"lost blocks that the bit does not belong to: {sorted(missed.values())}"
    stored = expected.stored
    in_bucket = any(bit // 8 in expected.buckets(h) for h in (0, 1))
    assert not in_bucket or len(missed) <= 1, "one bit of a bucket cost more than one block"
    for key in may_miss if exactly else ():
        place = expected.header(*stored[key])
        in_payload = bit // 8 not in place
        assert key in missed, f"the damaged block was served ({'payload' if in_payload else 'header'})"
        assert not in_payload or missed[key] == "failed-checksum", missed[key]


def attach_or_refused(path: Path, offset: int, size: int, expected: RegionBytes) -> Region | None:
    """None: refused, which is right where the line that names the host's machine is damaged."""
    try:
        return Region.attach(path, host=0)
    except FencedError:
        name = expected.shard(0)
        assert name.start - size < offset < name.start + 128, "refused for other damage"
        return None


def use_everything(region: Region) -> None:
    """Whatever reads the directory must come back, and a store must give right bytes or decline."""
    region.check()
    region.usage()
    region.participants()
    assert len(list(region.dump())) <= 16
    if store(region, NEW) == [""]:
        assert load(region, NEW) == [""]
    region.scrub()
    load(region, MINE)
    region.evict(0.0, 3)
    load(region, MINE)
    load(region, THEIRS)


def test_superblock_bit_flipped_second_copy_serves(tiny: Tiny) -> None:
    """Each bit of each copy: the other copy is used, nothing is lost, and inspect says that a copy is bad."""

    def body(progress: Progress) -> None:
        for copy in (0, tiny.bytes.sb["align_bytes"]):
            for bit in [*bits(copy, 248, 600), *bits(copy + 248, 4096 - 248, 200)]:
                progress.at(
                    f"bit {bit % 8} of superblock byte {bit // 8 - copy} (copy at {copy}) was flipped"
                )
                with tiny.flipped(bit):
                    assert Region.inspect(tiny.path).superblock_copies_ok == 1
                    with Region.open_read_only(tiny.path) as region:
                        assert region.capacity_bytes == len(tiny.good)
        tiny.restore()
        with Region.attach(tiny.path) as region:
            assert load(region, MINE) == [""] * len(MINE)

    isolated(body)


def test_superblock_bit_flipped_in_both_copies_is_refused(tiny: Tiny) -> None:
    """Two bad copies are an error with a way out, and nothing is written."""

    def body(progress: Progress) -> None:
        second = tiny.bytes.sb["align_bytes"] * 8
        for bit in bits(0, 4096, 400):
            progress.at(f"bit {bit} of both superblocks was flipped")
            with tiny.flipped(bit), tiny.flipped(bit + second):
                before = tiny.map[:]
                with pytest.raises(RegionError, match="Nothing was changed"):
                    Region.attach(tiny.path)
                assert tiny.map[:] == before

    isolated(body)


def shard_bits(tiny: Tiny, share: float) -> list[int]:
    """Every bit of both shards, or a sample that favours what a load depends on."""
    r = tiny.bytes
    chosen: set[int] = set()
    for host, extent, slot in r.stored.values():
        chosen.update(bits(r.header(host, extent, slot).start, 64, int(130 * share)))
        payload = r.payload(host, extent, slot, SLOT_BYTES)
        chosen.update(bits(payload.start, payload.bytes, int(60 * share)))
    for host in (0, 1):
        buckets = r.buckets(host)
        chosen.update(bits(buckets.start, buckets.bytes, int(300 * share)))
        chosen.update(bits(r.namespaces(host).start, 1024, int(100 * share)))
        chosen.update(bits(r.shard(host).start, r.shard(host).bytes, int(400 * share)))
    return sorted(chosen)


def test_shard_bit_flipped_before_attach_costs_at_most_its_block(tiny: Tiny) -> None:
    def body(progress: Progress) -> None:
        expected = tiny.bytes
        for bit in shard_bits(tiny, 0.2):
            progress.at(f"attaching with bit {bit % 8} of {place_of(expected, bit // 8)} flipped")
            tiny.restore()
            tiny.map[bit // 8] ^= 1 << bit % 8
            region = attach_or_refused(tiny.path, bit // 8, 1, expected)
            if region is None:
                continue
            with region:
                check_blocks(region, expected, bit)
                use_everything(region)

    isolated(body, seconds=3600 if EVERY_BIT else 100)


def test_shard_bit_flipped_under_attached_hosts_costs_at_most_its_block(tiny: Tiny) -> None:
    def body(progress: Progress) -> None:
        expected = tiny.bytes
        with Region.attach(tiny.path, host=0) as a, Region.attach(tiny.path, host=1) as b:
            for bit in shard_bits(tiny, 1.0):
                progress.at(f"two hosts read, bit {bit % 8} of {place_of(expected, bit // 8)} flipped")
                with tiny.flipped(bit):
                    for region in (a, b):
                        check_blocks(region, expected, bit)

    isolated(body, seconds=3600 if EVERY_BIT else 100)


def test_lines_lost_or_misplaced_never_serve_wrong_bytes(tiny: Tiny) -> None:
    """A line or page that was never written, came from elsewhere, or is noise."""
    draw = random.Random(SEED)

    def body(progress: Progress) -> None:
        for trial in range(4000 if EVERY_BIT else 150):
            size = draw.choice((8, 64, 64, 512, 4096))
            first = tiny.bytes.sb["shard_offset"] // size
            to, origin = (draw.randrange(first, len(tiny.good) // size) * size for _ in range(2))
            kind = draw.choice(("zeros", "noise", "copy"))
            progress.at(
                f"trial {trial}: {kind} of {size} bytes at {to} (from {origin}); again: KVPOOL_SEED={SEED}"
            )
            tiny.restore()
            tiny.map[to : to + size] = {
                "zeros": bytes(size),
                "noise": draw.randbytes(size),
                "copy": tiny.good[origin : origin + size],
            }[kind]
            region = attach_or_refused(tiny.path, to, size, tiny.bytes)
            if region is None:
                continue
            with region:
                for blocks in (MINE, THEIRS):
                    load(region, blocks)
                use_everything(region)

    isolated(body, seconds=3600 if EVERY_BIT else 100)


def place_of(r: RegionBytes, offset: int) -> str:
    places: list[Place] = []
    for host in range(r.sb["host_count"]):
        places += [r.claims(host), r.namespaces(host), r.buckets(host), r.shard(host)]
    for host, extent, slot in r.stored.values():
        places[:0] = [r.header(host, extent, slot), r.payload(host, extent, slot, SLOT_BYTES)]
    return next((f"{p.what}, byte {offset - p.start}" for p in places if offset in p), "superblock")
