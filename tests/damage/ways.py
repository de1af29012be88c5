"""Ways in which the bytes of a region go wrong."""

from __future__ import annotations

import random
from collections.abc import Callable

from format.layout_file import RegionBytes


class Damage:
    """`data` is the region, `good` how it was. Each method damages it once, and says how."""

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
