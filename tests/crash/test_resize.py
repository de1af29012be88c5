"""A region shrinks and grows under processes that use it; whoever resizes it dies at every step."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import pytest

from children import Child, children
from crash import tally
from crash.world import clean
from kvpool import _native
from kvpool.geometry import Coherence, Geometry
from kvpool.keys import KeyBatch
from kvpool.region import Region
from strategies import namespace, region_folder, seed

UNIT = 4096
MIB = 1 << 20
NS = namespace(UNIT)
SIZES = (16 * MIB, 4 * MIB, 8 * MIB, 3 * MIB, 12 * MIB)
KEYS = 6000
BATCH = 32


def make(path: Path, coherence: Coherence) -> None:
    geometry = Geometry(
        8 * MIB,
        min_block_bytes=UNIT,
        extent_bytes=256 << 10,
        coherence=coherence,
        participants=16,
        namespaces=4,
    )
    Region.format(path, geometry.with_room(path, 32 * MIB))


def keys(first: int, count: int = BATCH) -> KeyBatch:
    return KeyBatch.from_hashes(NS, [n.to_bytes(32, "big") for n in range(first, first + count)])


def content(first: int, count: int = BATCH) -> list[bytes]:
    return [n.to_bytes(8, "little") * (UNIT // 8) for n in range(first, first + count)]


def look(region: Region, first: int) -> int:
    """Loads a batch; wrong bytes fail. The number of hits."""
    out = [bytearray(UNIT) for _ in range(BATCH)]
    with tally.in_time(f"a load of {BATCH} blocks"):
        result = region.load(keys(first), out)
    wrong = [i for i, code in enumerate(result.codes) if code == 0 and out[i] != content(first)[i]]
    tally.count(tally.LOADED, result.hit_count)
    tally.count(tally.WRONG, len(wrong))
    assert not wrong, f"wrong bytes from {first}: {wrong}"
    return result.hit_count


def use(path: Path, seconds: float, value: int) -> tuple[int, int]:
    """Stores and loads for a while; (blocks stored, blocks served)."""
    dice, stored, served = random.Random(value), 0, 0
    end = time.monotonic() + seconds
    with Region.attach(path) as region:
        while time.monotonic() < end:
            first = dice.randrange(KEYS)
            with tally.in_time(f"a store of {BATCH} blocks"):
                codes = region.store(keys(first), content(first)).codes
            stored += codes.count(0)
            assert set(codes) <= {0, 1}, codes  # a shrinking region evicts, and never declines
            served += look(region, dice.randrange(KEYS))
    return stored, served


def resize(path: Path, capacity: int, step: str, nth: int, timeout_s: float = 30.0) -> None:
    with Region.attach(path, role="daemon") as region:
        if step:
            _native.stop_at(step, nth, signal.SIGKILL)
        end = time.monotonic() + timeout_s
        while not region.resize(capacity).done:
            assert time.monotonic() < end, "it does not come to an end"


def judge(path: Path, capacity: int) -> None:
    with Region.attach(path, role="daemon") as region:
        region.reap()
        clean(region.check())
        assert region.capacity_bytes == capacity
        assert region.usage().used_bytes <= capacity
    assert path.stat().st_blocks * 512 <= capacity + MIB


@pytest.mark.parametrize("coherence", ["hardware", "software"])
def test_resized_again_and_again_under_writers_and_readers(coherence: Coherence) -> None:
    with region_folder() as folder, children() as start:
        path = folder / "r"
        make(path, coherence)
        users = [start(use, path, 1.0, value) for value in range(2)]
        for round_ in range(5):
            capacity = SIZES[round_ % len(SIZES)]
            tally.result(start(resize, path, capacity, "", 0))
        for user in users:
            stored, served = tally.result(user)
            assert stored > 0
            assert served > 0
        tally.result(start(resize, path, 4 * MIB, "", 0))
        judge(path, 4 * MIB)


def steps_of_a_resize(coherence: Coherence) -> list[str]:
    with region_folder() as folder:
        path = folder / "r"
        make(path, coherence)
        with Region.attach(path, role="daemon") as region:
            for first in range(0, 2000, BATCH):
                region.store(keys(first), content(first))
            _native.record_steps()
            for capacity in (4 * MIB, 16 * MIB):
                while not region.resize(capacity).done:
                    pass
            return list(_native.recorded_steps())


@pytest.mark.slow
@pytest.mark.parametrize("coherence", ["hardware", "software"])
def test_killed_at_every_step_of_a_resize_the_next_one_completes_it(coherence: Coherence) -> None:
    dice = random.Random(seed("test_killed_at_every_step_of_a_resize"))
    steps = steps_of_a_resize(coherence)
    assert {
        "extent.retire.claim",
        "extent.retired",
        "resize.before_punch",
        "resize.allowed",
        "resize.filled",
    } <= {*steps}
    with region_folder() as folder, children() as start:
        path = folder / "r"
        make(path, coherence)
        users: list[Child] = []
        with Region.attach(path) as survivor:
            for number, step in enumerate(steps):
                nth = 1 if step == "resize.allowed" else dice.choice((1, 2, 5))
                capacity = 16 * MIB if step == "resize.filled" else 4 * MIB
                print(f"step={step} nth={nth}")
                tally.result(start(resize, path, 20 * MIB - capacity, "", 0))
                for first in range(0, 3000, BATCH):
                    assert set(survivor.store(keys(first), content(first)).codes) <= {0, 1}
                users = [start(use, path, 0.15, number)]
                tally.intend(1)
                assert tally.ended(start(resize, path, capacity, step, nth)) == -signal.SIGKILL
                for user in users:
                    tally.result(user)
                served = sum(look(survivor, first) for first in range(0, 1500, BATCH))
                tally.result(start(resize, path, capacity, "", 0))
                assert served > 0
                judge(path, capacity)
