"""A medium that lies: overwritten, swapped or copied while in use.

Blocks may be lost. Wrong bytes, crashes and hangs may not happen.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from children import children
from kvpool.errors import KvpoolError
from kvpool.region import Coherence, Region
from strategies import buffers, contents, keys_of, namespace, region_folder, seed, small_geometry, wrong_hits

ROUNDS = int(os.environ.get("KVPOOL_DAMAGE_ROUNDS", "60"))
UNIT = 256
SPACES = [namespace(UNIT, "a"), namespace(4 * UNIT - 5, "b"), namespace(10, "c")]
INDICES = range(12)


def make(path: Path, coherence: Coherence = "hardware", first: int = 0) -> None:
    Region.format(
        path,
        small_geometry(
            48,
            hosts=2,
            block_bytes=UNIT,
            slots_per_extent=8,
            participants=3,
            namespaces=4,
            coherence=coherence,
        ),
        force=path.exists(),
    )
    for host in (0, 1):
        with Region.attach(path, host=host) as region:
            for ns in SPACES:
                keys = keys_of(ns, range(first + 6 * host, first + 6 * host + 6))
                region.store(keys, contents(keys))
            region.evict(0.5, 2)


def use(path: Path) -> Counter[str]:
    """Everything that anybody may do with a region, on both hosts. Wrong bytes fail."""
    facts: Counter[str] = Counter()
    for host in (0, 1):
        try:
            region = Region.attach(path, host=host)
        except KvpoolError as e:
            facts[type(e).__name__] += 1
            continue
        with region:
            for ns in SPACES:
                keys = keys_of(ns, INDICES)
                for again in (False, True):
                    out = buffers(keys)
                    result = region.load(keys, out)
                    wrong = wrong_hits(keys, result.codes, out)
                    assert not wrong, f"wrong bytes for {ns.model} {wrong} ({again=})"
                    for reason in result.reasons:
                        facts[str(reason or "hit")] += 1
                    if not again:
                        for reason in region.store(keys, contents(keys)).reasons:
                            facts[f"store {reason or 'ok'}"] += 1
            region.lookup(keys_of(SPACES[0], INDICES))
            region.check()
            region.usage()
            region.counters()
            region.participants()
            list(region.dump())
            region.reap()
            region.heartbeat()
            region.scrub()
            region.evict(0.5, 5)
            region.adopt(1 - host, 1 << 62 | host) if facts["adopt"] % 2 else None
    return facts


def damage(data: bytearray, dice: random.Random) -> str:
    """One of the ways in which bytes go wrong."""
    size = len(data)
    at = dice.randrange(size)
    # Half of the damage goes where the directory is dense: the first half of each shard.
    if dice.random() < 0.7:
        at = 8192 + dice.randrange(min(size - 8192, 40000))
    length = min(dice.choice((1, 2, 8, 64, 64, 512, 4096)), size - at)
    how = dice.choice(("flip", "random", "zero", "ones", "copy", "swap"))
    aligned = at // 64 * 64
    if how == "flip":
        data[at] ^= 1 << dice.randrange(8)
    elif how == "random":
        data[at : at + length] = dice.randbytes(length)
    elif how == "zero":
        data[at : at + length] = bytes(length)
    elif how == "ones":
        data[at : at + length] = b"\xff" * length
    else:  # whole lines that belong elsewhere
        other = dice.randrange(size // 64) * 64
        line, there = data[aligned : aligned + 64], data[other : other + 64]
        data[aligned : aligned + 64] = there
        if how == "swap":
            data[other : other + 64] = line
    return f"{how} at {at} length {length}"


def damaged_and_used(path: Path, whole: bytes, first_seed: int, rounds: int) -> Counter[str]:
    facts: Counter[str] = Counter()
    for number in range(first_seed, first_seed + rounds):
        dice = random.Random(number)
        data = bytearray(whole)
        what = [damage(data, dice) for _ in range(dice.choice((1, 1, 3, 20)))]
        path.write_bytes(data)
        (path.parent / "now").write_text(f"seed={number} {what}")
        facts += use(path)
    return facts


@pytest.mark.parametrize("coherence", ["hardware", "software"])
def test_damaged_anywhere_never_wrong_bytes_nor_a_crash_nor_a_hang(coherence: Coherence) -> None:
    value = seed("test_damaged_anywhere")
    with region_folder() as folder, children() as start:
        path = folder / "region"
        make(path, coherence)
        child = start(
            damaged_and_used, folder / "damaged", path.read_bytes(), value, ROUNDS, timeout_s=60 + ROUNDS
        )
        code = child.wait()
        assert code == 0, (
            f"{code}: {(folder / 'now').read_text()}; again: KVPOOL_TEST_SEED=... KVPOOL_DAMAGE_ROUNDS=1"
        )
        facts = child.result()
        print(sorted(facts.items()))
        assert facts["hit"] > facts["failed-checksum"]


def damaged_while_used(path: Path, until: float) -> int:
    """A reader and writer that the medium is changed under."""
    calls = 0
    regions = [Region.attach(path, host=host) for host in (0, 1)]
    dice = random.Random(1)
    while time.monotonic() < until or calls < 10:
        region, ns = dice.choice(regions), dice.choice(SPACES)
        keys = keys_of(ns, dice.sample(range(30), 8))
        region.store(keys, contents(keys))
        out = buffers(keys)
        result = region.load(keys, out)
        assert not wrong_hits(keys, result.codes, out)
        if calls % 20 == 0:
            region.scrub()
            region.evict(0.7, 10)
            region.check()
        calls += 1
    return calls


@pytest.mark.parametrize("coherence", ["hardware", "software"])
def test_damaged_while_in_use_never_wrong_bytes_nor_a_crash_nor_a_hang(coherence: Coherence) -> None:
    value = seed("test_damaged_while_in_use")
    dice = random.Random(value)
    with region_folder() as folder, children() as start:
        path = folder / "region"
        make(path, coherence)
        until = time.monotonic() + 1.5
        users = [start(damaged_while_used, path, until, timeout_s=60) for _ in range(2)]
        size = path.stat().st_size
        with path.open("r+b", buffering=0) as f:
            while time.monotonic() < until:
                at = dice.randrange(8192, size)
                f.seek(at)
                f.write(dice.choice((dice.randbytes(8), bytes(64), dice.randbytes(1))))
                time.sleep(0.002)
        for user in users:
            assert user.result() >= 10


def test_files_of_two_regions_swapped_under_their_names() -> None:
    with region_folder() as folder, children() as start:
        a, b = folder / "a", folder / "b"
        make(a, first=0)
        make(b, first=100)
        whole_a, whole_b = a.read_bytes(), b.read_bytes()
        a.write_bytes(whole_b)
        with Region.attach(a) as region:
            for first, hits in ((0, 0), (100, 1)):
                keys = keys_of(SPACES[0], range(first, first + 12))
                out = buffers(keys)
                result = region.load(keys, out)
                assert not wrong_hits(keys, result.codes, out)
                assert (result.hit_count > 0) == bool(hits)
        # Halves of both in one file: the blocks of either may be found, but none with the other's content.
        for cut in range(4096, len(whole_a), len(whole_a) // 9):
            a.write_bytes(whole_a[:cut] + whole_b[cut:])
            start(use, a).result()


def fill_for_ever(path: Path) -> None:
    dice = random.Random(os.getpid())
    with Region.attach(path) as region:
        while True:
            ns = dice.choice(SPACES)
            keys = keys_of(ns, dice.sample(range(60), 8))
            region.store(keys, contents(keys))
            region.load(keys, buffers(keys))


def test_file_copied_while_in_use_is_a_region_with_right_blocks() -> None:
    with region_folder() as folder, children() as start:
        path, copy = folder / "region", folder / "copy"
        make(path)
        writers = [start(fill_for_ever, path) for _ in range(2)]
        for _ in range(10):
            time.sleep(0.02)
            shutil.copyfile(path, copy)
            with Region.attach(copy) as region:  # its participants are not alive here
                assert all(p.alive or p.host == 1 for p in region.participants())
                for ns in SPACES:
                    keys = keys_of(ns, range(60))
                    out = buffers(keys)
                    result = region.load(keys, out)
                    assert not wrong_hits(keys, result.codes, out)
                region.scrub()
                report = region.check()
                assert report.ok, report.problems
                assert report.totals["writing"] == 0
        for writer in writers:
            writer.signal(signal.SIGKILL)
