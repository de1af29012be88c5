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
from damage.ways import Damage
from damage.workers import try_all
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
