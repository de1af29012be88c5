"""Sizes at the edge of the format, as sparse files: half a tebibyte, tens of millions of slots, 64 hosts."""

from __future__ import annotations

import ctypes
import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from format.blocks import Blocks, load, namespace, store
from format.layout_file import SECTIONS, RegionBytes
from kvpool.buffers import PageLayout, Pages
from kvpool.errors import GeometryError
from kvpool.keys import KeyBatch, Namespace
from kvpool.region import Geometry, Region

TIB = 1 << 40
HUGE = Geometry(TIB // 2, hosts=2, min_block_bytes=16384, participants=4, namespaces=4, align_bytes=4096)


@pytest.fixture
def sparse(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "region"
    yield path
    path.unlink(missing_ok=True)


def head(path: Path) -> RegionBytes:
    with open(path, "rb") as f:
        return RegionBytes(f.read(4096))


def poke(path: Path, offset: int, data: bytes) -> None:
    with open(path, "r+b") as f:
        f.seek(offset)
        f.write(data)


def word(state: int) -> bytes:
    """A slot word of count 1 of a participant that nobody reaps, because it never lived."""
    return struct.pack("<Q", state << 62 | 1 << 24 | 3 << 14 | 1)


def test_half_a_tebibyte_has_tens_of_millions_of_slots_and_costs_nothing_until_used(sparse: Path) -> None:
    plan = HUGE.plan(str(sparse))
    slots = int(plan["host_count"]) * int(plan["extent_count"]) * int(plan["slots_per_extent"])
    assert slots >= 33_000_000
    Region.format(sparse, HUGE, preallocate=False)
    blocks = Blocks(namespace("huge", 16384), tuple(f"block {i}" for i in range(300)))
    with Region.attach(sparse, host=1) as here, Region.attach(sparse, host=0) as there:
        assert store(here, blocks) == [""] * len(blocks)
        assert load(here, blocks) == load(there, blocks) == [""] * len(blocks)
        assert there.lookup(blocks.keys).hit_count == len(blocks)
        assert there.lookup(KeyBatch.from_hashes(blocks.space, os.urandom(32 * 500))).hit_count == 0
    assert sparse.stat().st_size == TIB // 2
    assert sparse.stat().st_blocks * 512 < 256 << 20


def test_last_slot_of_the_last_extent_at_half_a_tebibyte_holds_a_block(sparse: Path) -> None:
    """All other slots of the last shard are made to look taken: the allocator must go to the very end."""
    Region.format(sparse, HUGE, preallocate=False)
    r = head(sparse)
    last_extent, last_slot = r.sb["extent_count"] - 1, r.sb["slots_per_extent"] - 1
    descriptors = r.shard(1).start + r.sb["extent_descriptors_offset"]
    at_word, at_slot_bytes = (SECTIONS["extent descriptor"][f][0] for f in ("word", "slot_bytes"))
    for extent in range(last_extent):
        poke(sparse, descriptors + extent * 64 + at_slot_bytes, struct.pack("<Q", 65536))
        poke(sparse, descriptors + extent * 64 + at_word, word(2))
        poke(sparse, r.header(1, extent, 0).start, word(1))  # somebody writes there: it cannot be cut anew
    taken = r.header(1, last_extent, 0).start
    poke(sparse, taken, (word(1) + bytes(56)) * last_slot)
    block = Blocks(namespace("huge", 16384), ("last",))
    with Region.attach(sparse, host=1) as here, Region.attach(sparse, host=0) as there:
        for _ in range(20_000):  # the allocator looks at a few slots a call
            if store(here, block) == [""]:
                break
        else:
            pytest.fail("the last slot was never found")
        assert [(s.extent, s.slot) for s in here.dump() if s.state == "stored"] == [(last_extent, last_slot)]
        assert load(here, block) == load(there, block) == [""]
    end = r.payload(1, last_extent, last_slot, 16384)
    assert TIB // 2 - (end.start + end.bytes) < 64 << 20  # what is left over is less than a thousandth


def test_64_hosts_each_stores_and_all_others_load(sparse: Path) -> None:
    Region.format(
        sparse,
        Geometry(
            TIB // 64,
            hosts=64,
            min_block_bytes=16384,
            participants=2,
            namespaces=2,
            align_bytes=4096,
            coherence="software",
        ),
        preallocate=False,
    )
    space = namespace("many hosts", 16384)
    regions = [Region.attach(sparse, host=h) for h in range(64)]
    try:
        for h, region in enumerate(regions):
            assert store(region, Blocks(space, (f"of host {h}",))) == [""]
        everything = Blocks(space, tuple(f"of host {h}" for h in range(64)))
        for region in (regions[0], regions[31], regions[63]):
            assert load(region, everything) == [""] * 64
        assert regions[5].usage().blocks == 64
    finally:
        for region in regions:
            region.close()
    with pytest.raises(GeometryError, match="0 to 63"):
        Region.attach(sparse, host=64)
    with pytest.raises(GeometryError, match="1 to 64 hosts"):
        Geometry(TIB, hosts=65).plan()


@pytest.mark.parametrize("slots", [200_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_attach_to_a_warm_region_is_quick(
    sparse: Path, slots: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """The time is printed, and only held against a bound that no machine misses: this is not a benchmark."""
    space = namespace("warm", 64)
    Region.format(
        sparse,
        Geometry(slots * 260, min_block_bytes=64, participants=4, namespaces=2, align_bytes=4096),
        preallocate=False,
    )
    _fill(sparse, space, slots)
    times = []
    for _ in range(3):
        start = time.perf_counter()
        with Region.attach(sparse) as region:
            times.append(time.perf_counter() - start)
            assert region.lookup(_keys(space, 0, 1000)).hit_count == 1000
    with capsys.disabled():
        print(
            f"\n  attach to a region of {slots} blocks: {min(times) * 1e3:.1f} to {max(times) * 1e3:.1f} ms"
        )
    assert min(times) < 5


def _keys(space: Namespace, start: int, count: int) -> KeyBatch:
    return KeyBatch.from_hashes(
        space, b"".join(i.to_bytes(32, "little") for i in range(start, start + count))
    )


def _fill(path: Path, space: Namespace, slots: int) -> None:
    block = (ctypes.c_char * 64)()
    pages = PageLayout([(ctypes.addressof(block), 0, 64)], keepalive=block)
    step = 20_000
    with Region.attach(path) as region:
        for start in range(0, slots, step):
            assert region.store(_keys(space, start, step), Pages(pages, [0] * step)).stored_count == step
