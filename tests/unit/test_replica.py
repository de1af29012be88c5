"""The replica of other hosts' directories agrees with what the other hosts store, evict and overwrite."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from kvpool import Geometry, KeyBatch, Namespace, Region

BLOCK = 1024


def batch(numbers: list[int]) -> KeyBatch:
    namespace = Namespace("model", "weights", "float32", "LBHNC", 32, BLOCK, "sha256")
    return KeyBatch.from_hashes(namespace, [n.to_bytes(32, "little") for n in numbers])


def payload(number: int) -> bytes:
    return number.to_bytes(8, "little") * (BLOCK // 8)


@pytest.mark.parametrize("coherence", ["hardware", "software"])
def test_lookup_on_every_host_agrees_with_what_the_others_hold(tmp_path: Path, coherence: str) -> None:
    hosts, seed = 5, 20261129
    rng = random.Random(seed)
    path = tmp_path / "region"
    geometry = Geometry(
        24 << 20, hosts=hosts, min_block_bytes=BLOCK, participants=4, namespaces=4, coherence=coherence
    )  # type: ignore[arg-type]
    Region.format(path, geometry)
    regions = [Region.attach(path, host=h) for h in range(hosts)]
    try:
        for step in range(120):
            writer = rng.randrange(hosts)
            numbers = [rng.randrange(4000) for _ in range(rng.randrange(1, 200))]
            numbers = list(dict.fromkeys(numbers))
            regions[writer].store(batch(numbers), [payload(n) for n in numbers])
            if step % 7 == 0:
                regions[rng.randrange(hosts)].evict(rng.random() * 0.05, 10**6)
            asked = rng.sample(range(4000), 300)
            answers = {bytes(r.lookup(batch(asked)).found) for r in regions}
            assert len(answers) == 1, f"step {step}, seed {seed}: hosts disagree on what is stored"
            out = [bytearray(BLOCK) for _ in asked]
            result = regions[rng.randrange(hosts)].load(batch(asked), out)
            for number, block, reason in zip(asked, out, result.reasons, strict=True):
                assert reason is not None or bytes(block) == payload(number), f"step {step}, seed {seed}"
        assert sum(r.lookup(batch(list(range(4000)))).hit_count for r in regions) > 0
    finally:
        for region in regions:
            region.close()


def test_log_overtakes_reader_then_blocks_are_found_by_walking_again(tmp_path: Path) -> None:
    path = tmp_path / "region"
    Region.format(path, Geometry(4 << 20, hosts=2, min_block_bytes=BLOCK, participants=2, namespaces=2))
    with Region.attach(path, host=0) as writer, Region.attach(path, host=1) as reader:
        ring = 2 * writer.usage().capacity_bytes // BLOCK  # at least as many changes as the ring has records
        reader.lookup(batch([0]))  # the replica starts to follow
        for start in range(0, 2 * ring, 500):
            numbers = list(range(start, start + 500))
            writer.store(batch(numbers), [payload(n) for n in numbers])
        newest = batch(list(range(2 * ring - 200, 2 * ring)))
        assert reader.lookup(newest).found == writer.lookup(newest).found
        for _ in range(50):  # the walk goes on a piece at each lookup; the answer is the same all the while
            assert reader.lookup(newest).found == writer.lookup(newest).found
