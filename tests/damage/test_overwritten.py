"""A medium that lies: many bits flipped, whole lines, blocks or shards lost, misplaced or exchanged.

Blocks may be lost. Wrong bytes, crashes, hangs and other errors than KvpoolError may not happen.
`make test-damage` tries many more than the quick suite.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from damage.blocks import LARGE_SPACES, SPACES, make, use
from damage.tally import Row
from damage.workers import try_all
from format.layout_file import RegionBytes
from kvpool.region import Coherence
from strategies import region_folder, seed

ROUNDS = int(os.environ.get("KVPOOL_DAMAGE_ROUNDS", "60"))


@dataclass(frozen=True)
class Size:
    """Of a region and its blocks."""

    slots: int
    each: int
    large: bool

    @property
    def indices(self) -> range:
        return range(2 * self.each)


SMALL, LARGE = Size(48, 6, large=False), Size(256, 40, large=True)


class Damage:
    """Ways in which bytes go wrong. `data` is the region, `good` how it was."""

    def __init__(self, data: memoryview, good: bytes, dice: random.Random) -> None:
        self.data, self.good, self.dice = data, good, dice
        self.r = RegionBytes(good)

    def somewhere(self, size: int) -> int:
        """Mostly where the directory is: the first part of a shard."""
        if self.dice.random() < 0.3:
            at = self.dice.randrange(len(self.good) - size)
        else:
            shard = self.r.shard(self.dice.randrange(2)).start
            at = shard + self.dice.randrange(self.r.sb["extents_offset"] + 4096)
            at = min(at, len(self.good) - size)
        return at // 64 * 64 if size >= 64 and self.dice.random() < 0.7 else at

    def size(self) -> int:
        return self.dice.choice((1, 2, 8, 64, 64, 256, 512, 1024, 4096))

    def bits(self) -> str:
        for _ in range(self.dice.choice((2, 3, 8, 100))):
            at = self.somewhere(1)
            self.data[at] ^= 1 << self.dice.randrange(8)
        return "several bits flipped"

    def zeros(self) -> str:
        size = self.size()
        at = self.somewhere(size)
        self.data[at : at + size] = bytes(size)
        return "zeros"

    def ones(self) -> str:
        size = self.size()
        at = self.somewhere(size)
        self.data[at : at + size] = b"\xff" * size
        return "ones"

    def noise(self) -> str:
        size = self.size()
        at = self.somewhere(size)
        self.data[at : at + size] = self.dice.randbytes(size)
        return "noise"

    def another(self) -> str:
        """What belongs to another place: as if a write had gone to the wrong address."""
        size = self.size()
        to, origin = self.somewhere(size), self.somewhere(size)
        self.data[to : to + size] = self.good[origin : origin + size]
        return "another block's bytes"

    def shifted(self) -> str:
        """A range moved by some bytes: as if a write had begun too early or too late."""
        size = max(64, self.size())
        at = self.somewhere(size + 256)
        by = self.dice.choice((1, 8, 16, 63, 64, 128))
        self.data[at + by : at + by + size] = self.good[at : at + size]
        return "shifted"

    def lines(self) -> str:
        """Two lines, each in the place of the other."""
        self._swap(self.somewhere(64) // 64 * 64, self.somewhere(64) // 64 * 64, 64)
        return "lines swapped"

    def headers(self) -> str:
        """Two slot headers of one shard, each in the place of the other: every field of both is right."""
        host = self.dice.randrange(2)
        places = [place for place in self.r.stored.values() if place[0] == host]
        a, b = (self.r.header(*place).start for place in self.dice.sample(places, 2))
        self._swap(a, b, 64)
        return "headers swapped"

    def shards(self) -> str:
        """Shards, or the parts that change hands, each in the place of the other."""
        a, b = self.r.shard(0), self.r.shard(1)
        skip = self.dice.choice((0, self.r.sb["namespaces_offset"], self.r.sb["extents_offset"]))
        self._swap(a.start + skip, b.start + skip, a.bytes - skip)
        return "shards swapped"

    def _swap(self, a: int, b: int, size: int) -> None:
        there = bytes(self.data[b : b + size])
        self.data[b : b + size] = bytes(self.data[a : a + size])
        self.data[a : a + size] = there

    def any(self) -> str:
        ways: tuple[Callable[[], str], ...] = (
            self.bits,
            self.zeros,
            self.ones,
            self.noise,
            self.another,
            self.shifted,
            self.lines,
            self.headers,
        )
        return self.shards() if self.dice.random() < 0.02 else self.dice.choice(ways)()


@pytest.mark.parametrize("size", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("coherence", ["hardware", "software"])
def test_damaged_anywhere_never_wrong_bytes_nor_a_crash_nor_a_hang(coherence: Coherence, size: Size) -> None:
    """Each round of a seed of its own: KVPOOL_TEST_SEED=that KVPOOL_DAMAGE_ROUNDS=1 repeats it."""
    first = seed("test_damaged_anywhere")
    spaces = LARGE_SPACES if size.large else SPACES
    with region_folder() as folder:

        def prepare(worker: int, row: Row) -> Callable[[int], None]:
            path = folder / str(worker)
            make(path, coherence, spaces=spaces, slots=size.slots, each=size.each)
            good = path.read_bytes()

            def one(number: int) -> None:
                dice = random.Random(number)
                data = bytearray(good)
                with memoryview(data) as view:
                    damage = Damage(view, good, dice)
                    for _ in range(dice.choice((1, 1, 3, 20))):
                        row.add(damage.any())
                with path.open("r+b", buffering=0) as f:
                    f.write(data)
                use(path, row, spaces, size.indices, dice)

            return one

        try_all(range(first, first + (ROUNDS // 4 if size.large else ROUNDS)), prepare)
