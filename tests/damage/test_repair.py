"""`fsck --repair` of random damage, and beside processes that go on. (tests/crash kills it.)

Afterwards fsck is clean, what could be served can be served, and nothing else is.
"""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest

from children import children
from damage.blocks import SPACES, make
from damage.ways import Damage
from kvpool.errors import KvpoolError
from kvpool.region import Coherence, Region
from strategies import buffers, contents, keys_of, region_folder, seed, wrong_hits

ROUNDS = int(os.environ.get("KVPOOL_DAMAGE_ROUNDS", "60"))
CLAIM = "claim"  # what a host's own claim line says about another host's shard, only a person can judge

INDICES = range(12)  # of the blocks in it
Block = tuple[str, int, int]


def damaged(whole: bytes, dice: random.Random, times: int) -> tuple[bytes, list[str]]:
    """A region gone wrong, and how."""
    data = bytearray(whole)
    with memoryview(data) as view:
        damage = Damage(view, whole, dice)
        what = [damage.any() for _ in range(times)]
    return bytes(data), what


def served(path: Path) -> set[Block]:
    """The blocks that are hits; their bytes are right."""
    found = set()
    for host in (0, 1):
        with Region.attach(path, host=host) as region:
            for ns in SPACES:
                keys = keys_of(ns, INDICES)
                out = buffers(keys)
                result = region.load(keys, out)
                wrong = wrong_hits(keys, result.codes, out)
                assert not wrong, f"wrong bytes for {ns.model} {wrong}"
                found |= {(ns.model, host, i) for i, code in enumerate(result.codes) if code == 0}
    return found


def repaired(path: Path) -> list[str]:
    """What is left. Twice: a damaged word may name the repairing process itself as the one that is at it."""
    left: list[str] = []
    for host in (0, 1, 0, 1):
        left = left if host else []
        with Region.attach(path, host=host, role="tool") as region:
            left += region.repair().left
    return left


@pytest.mark.slow
@pytest.mark.parametrize("coherence", ["hardware", "software"])
def test_random_damage_is_repaired_and_no_right_block_is_lost(coherence: Coherence) -> None:
    value = seed("test_random_damage_is_repaired")
    clean = 0
    with region_folder() as folder:
        whole_path, path = folder / "whole", folder / "region"
        make(whole_path, coherence)
        whole = whole_path.read_bytes()
        for number in range(value, value + ROUNDS):
            dice = random.Random(number)
            data, what = damaged(whole, dice, dice.choice((1, 1, 3, 20)))
            again = f"KVPOOL_TEST_SEED={number} KVPOOL_DAMAGE_ROUNDS=1: {what}"
            path.write_bytes(data)
            try:
                before = served(path)
                path.write_bytes(data)  # what using it put right by the way is damaged again
                left = repaired(path)
            except KvpoolError:
                continue  # the superblocks, or the line that names the machine: refused, and untouched
            problems = Region.fsck(path).problems
            if any(CLAIM in text for text in left):
                continue
            assert not left, again
            assert not problems, f"{problems} {again}"
            assert served(path) >= before, again
            clean += 1
    assert clean > ROUNDS / 2


def use_for_a_while(path: Path, host: int, until: float) -> int:
    dice = random.Random(os.getpid())
    stored = 0
    with Region.attach(path, host=host) as region:
        while time.monotonic() < until:
            ns = dice.choice(SPACES)
            keys = keys_of(ns, dice.sample(range(60), 8))
            stored += region.store(keys, contents(keys)).stored_count
            out = buffers(keys)
            assert not wrong_hits(keys, region.load(keys, out).codes, out)
    return stored


def repair_for_a_while(path: Path, host: int, until: float) -> tuple[int, list[str]]:
    runs, left = 0, []
    with Region.attach(path, host=host, role="tool") as region:
        while time.monotonic() < until:
            left += region.repair().left
            runs += 1
    return runs, left


@pytest.mark.slow
@pytest.mark.parametrize("coherence", ["hardware", "software"])
def test_repair_beside_writers_drops_nothing_of_theirs(coherence: Coherence) -> None:
    with region_folder() as folder, children() as start:
        path = folder / "region"
        make(path, coherence)
        until = time.monotonic() + 3
        users = [start(use_for_a_while, path, host, until) for host in (0, 0, 1)]
        repairers = [start(repair_for_a_while, path, host, until) for host in (0, 1)]
        assert all(user.result() > 0 for user in users)
        for repairer in repairers:
            runs, left = repairer.result()
            assert runs > 1
            assert left == []
        report = Region.fsck(path)
        assert report.ok, report.problems


@pytest.mark.slow
def test_damage_and_repair_beside_writers_never_wrong_bytes_and_clean_in_the_end() -> None:
    dice = random.Random(seed("test_damage_and_repair_beside_writers"))
    with region_folder() as folder, children() as start:
        path = folder / "region"
        make(path)
        until = time.monotonic() + 3
        users = [start(use_for_a_while, path, host, until) for host in (0, 0, 1)]
        repairers = [start(repair_for_a_while, path, host, until) for host in (0, 1)]
        size = path.stat().st_size
        info = Region.inspect(path)
        shards = [(8192 + host * (size - 8192) // info.hosts) for host in range(info.hosts)]
        with path.open("r+b", buffering=0) as f:
            while time.monotonic() < until - 0.5:
                at = dice.choice(shards) + dice.randrange(16384, (size - 8192) // info.hosts)
                f.seek(min(at, size - 8))
                f.write(dice.choice((dice.randbytes(8), bytes(64), dice.randbytes(1))))
                time.sleep(0.005)
        for child in users + repairers:
            child.result()
        left = repaired(path)
        assert left == []
        report = Region.fsck(path)
        assert report.ok, report.problems
