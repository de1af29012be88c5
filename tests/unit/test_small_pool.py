"""A pool that holds a quarter of what is asked for has no errors, and hits as often as an exact LRU would."""

from __future__ import annotations

import random
from collections import OrderedDict
from pathlib import Path

from kvpool import Geometry, KeyBatch, Namespace, Region

BLOCK = 4096
NAMESPACE = Namespace("model", "weights", "float32", "LBHNC", 32, BLOCK, "sha256")
SEED = 20261129


def key(number: int) -> KeyBatch:
    return KeyBatch.from_hashes(NAMESPACE, number.to_bytes(32, "little"))


def lru_hits(requests: list[int], places: int) -> int:
    held: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for number in requests:
        if number in held:
            hits += 1
            held.move_to_end(number)
        else:
            held[number] = None
            if len(held) > places:
                held.popitem(last=False)
    return hits


def test_working_set_of_four_times_the_capacity_is_served_about_as_by_lru(tmp_path: Path) -> None:
    path = tmp_path / "region"
    Region.format(path, Geometry(3 << 20, min_block_bytes=BLOCK, participants=4, namespaces=2))
    with Region.attach(path) as region:
        places = region.usage().capacity_bytes // BLOCK
        blocks = 4 * places
        # Some blocks are asked for much more often than others, as system prompts are.
        weights = [1 / (rank + 1) for rank in range(blocks)]
        requests = random.Random(SEED).choices(range(blocks), weights, k=12 * blocks)
        hits, out = 0, bytearray(BLOCK)
        for number in requests:
            content = number.to_bytes(8, "little") * (BLOCK // 8)
            if region.load(key(number), [out]).hit_count:
                assert out == content
                hits += 1
            else:
                assert region.store(key(number), [content]).declined_count == 0
        usage = region.usage()
        assert usage.used_bytes <= usage.capacity_bytes
        assert usage.blocks > 0.9 * places  # evicted one by one, not in heaps
        best = lru_hits(requests, places)
        print(f"hit rate {hits / len(requests):.1%}, exact LRU {best / len(requests):.1%}")
        assert hits > 0.9 * best, f"{hits} hits where an exact LRU has {best}; seed {SEED}"
        assert region.check().ok
