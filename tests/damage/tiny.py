"""The smallest region of two hosts with all kinds of lines: a file to be damaged and restored."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

from damage.tally import Row
from format.blocks import Blocks, load, namespace, store
from format.layout_file import Place, RegionBytes
from kvpool.outcomes import CODE_BY_REASON, REASON_BY_CODE, MissReason
from kvpool.region import Coherence, Geometry, Region

SPACE = namespace("tiny", 1000)  # 24 bytes short of its slot
SLOT_BYTES = 1024
STABLE = 2
MINE = Blocks(SPACE, ("a", "b", "c"))
THEIRS = Blocks(SPACE, ("x", "y", "z"))
GONE = Blocks(SPACE, ("gone",))
NEW = Blocks(SPACE, ("new",))
ALL = Blocks(SPACE, MINE.names + THEIRS.names)
FAILED_CHECKSUM = CODE_BY_REASON[MissReason.FAILED_CHECKSUM]


class Tiny:
    """One copy of it, mapped here."""

    def __init__(self, path: Path, coherence: Coherence) -> None:
        self.path = path
        geometry = Geometry(
            32 << 10,
            hosts=2,
            extent_bytes=4096,
            min_block_bytes=SLOT_BYTES,
            participants=1,
            namespaces=1,
            align_bytes=4096,
            coherence=coherence,
        )
        Region.format(path, geometry, force=path.exists())
        with Region.attach(path, host=0) as a, Region.attach(path, host=1) as b:
            assert store(a, GONE) == [""]
            assert a.evict(0, 1) == 1  # leaves its ghost in a bucket
            assert store(a, MINE) == [""] * len(MINE)
            assert store(b, THEIRS) == [""] * len(THEIRS)
            assert load(b, MINE) == [""] * len(MINE)  # a row of touches
        with path.open("r+b") as f:
            self.map = mmap.mmap(f.fileno(), 0)
        self.good = self.map[:]
        self._headers = [self.bytes.header(host, 0, 0).start for host in (0, 1)]
        self._payloads = [self.bytes.payload(host, 0, 0, SLOT_BYTES).start for host in (0, 1)]
        self._out = ALL.buffers()
        self._spoiled = b"\xee" * SPACE.block_bytes

    @cached_property
    def bytes(self) -> RegionBytes:
        return RegionBytes(self.good)

    def restore(self) -> None:
        self.map[:] = self.good

    def flip(self, bit: int) -> None:
        self.map[bit // 8] ^= 1 << bit % 8

    @contextmanager
    def flipped(self, bit: int) -> Iterator[None]:
        self.flip(bit)
        try:
            yield
        finally:
            self.flip(bit)

    # -- what one bit may cost ---------------------------------------------------------------------------

    @cached_property
    def stored(self) -> list[tuple[int, int, int]]:
        """host, extent, slot of each block of ALL."""
        keys = ALL.keys.packed
        return [self.bytes.stored[keys[i * 32 : i * 32 + 32]] for i in range(len(ALL))]

    def payload_now(self, block: int) -> int:
        """Where the payload of a block lies at the moment."""
        host = self.stored[block][0]
        key = ALL.keys.packed[block * 32 : block * 32 + 32]
        for slot in range(self.bytes.sb["slots_per_extent"]):
            header = self._headers[host] + slot * 64
            if self.map[header + 7] >> 6 == STABLE and self.map[header + 8 : header + 40] == key:
                return self._payloads[host] + slot * SLOT_BYTES
        raise AssertionError(f"block {ALL.names[block]} is not stored")

    @cached_property
    def in_payload(self) -> dict[int, int]:
        """byte -> the block whose payload it is."""
        return {
            at: i
            for i, place in enumerate(self.stored)
            for start in [self.bytes.payload(*place, SLOT_BYTES).start]
            for at in range(start, start + SPACE.block_bytes)
        }

    @cached_property
    def in_header(self) -> dict[int, int]:
        """byte -> the block whose header it is in."""
        return {
            at: i
            for i, place in enumerate(self.stored)
            for start in [self.bytes.header(*place).start]
            for at in range(start, start + 64)
        }

    @cached_property
    def may_cost(self) -> dict[int, tuple[frozenset[int], int]]:
        """byte -> blocks that damage there may cost, and how many of them at most."""
        costs: dict[int, tuple[frozenset[int], int]] = {}
        for host in (0, 1):
            its = frozenset(i for i, place in enumerate(self.stored) if place[0] == host)
            shard = self.bytes.shard(host).start
            for place, at_most in (
                (self.bytes.buckets(host), 1),
                (self.bytes.namespaces(host), len(its)),
                (Place("state: nobody ever attached", shard, 8), len(its)),
            ):
                costs.update((at, (its, at_most)) for at in range(place.start, place.start + place.bytes))
        return costs

    def place_of(self, offset: int) -> str:
        r = self.bytes
        places: list[Place] = []
        for host in range(r.sb["host_count"]):
            places += [r.claims(host), r.namespaces(host), r.buckets(host), r.shard(host)]
        for host, extent, slot in r.stored.values():
            places[:0] = [r.header(host, extent, slot), r.payload(host, extent, slot, SLOT_BYTES)]
        return next((f"{p.what}, byte {offset - p.start}" for p in places if offset in p), "superblock")

    # -- what is done with it ----------------------------------------------------------------------------

    def load(self, region: Region, row: Row) -> bytes:
        """Loads everything and counts what came of it. Wrong bytes are counted too, and named."""
        for buffer in self._out:
            buffer[:] = self._spoiled
        codes = region.load(ALL.keys, self._out).codes
        row.add("hits", codes.count(0))
        for i, code in enumerate(codes):
            if code:
                row.add(str(REASON_BY_CODE[code]))
            elif self._out[i] != ALL.payloads[i]:
                row.add("wrong")
                row.add("hits", -1)
                row.note(f"block {ALL.names[i]} of {region.path}")
        return codes

    def check(self, region: Region, bit: int, row: Row) -> None:
        """Loads everything: no wrong bytes, and missed is only what the bit belongs to, with its reason."""
        found = region.lookup(ALL.keys).codes
        codes = self.load(region, row)
        assert not any(f and not c for f, c in zip(found, codes, strict=True)), "it loads, but is not found"
        at = bit // 8
        if not any(codes) and at not in self.in_payload and at not in self.in_header:
            return
        missed = [i for i, code in enumerate(codes) if code]
        where = (
            f"bit {bit % 8} of {self.place_of(at)}: missed {[str(REASON_BY_CODE[codes[i]]) for i in missed]}"
        )
        if (block := self.in_payload.get(at)) is not None:
            assert missed == [block], where
            assert codes[block] == FAILED_CHECKSUM, where
        elif (block := self.in_header.get(at)) is not None:
            assert missed == [block], where
        else:
            blocks, at_most = self.may_cost.get(at, (frozenset(), 0))
            assert blocks.issuperset(missed), where
            assert len(missed) <= at_most, where
