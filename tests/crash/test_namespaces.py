"""Namespace rows whose writer died or stopped, and damaged ones: others wait a while, and no row is lost."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from children import Child, children
from crash import tally
from crash.world import HONEST, UNIT, clean, load
from format.layout_file import RegionBytes
from kvpool import _native
from kvpool.keys import Namespace
from kvpool.outcomes import MissReason
from kvpool.region import Region
from strategies import contents, keys_of, namespace, region_folder, seed, small_geometry

A, B = namespace(UNIT, "a"), namespace(UNIT, "b")
WAIT_S = 0.05  # for a row that a living process is writing
FULL = [MissReason.NAMESPACES_FULL]
STEPS = ("namespace.claim", "namespace.stable")
Start = Callable[..., Child]


def make(path: Path, rows: int) -> Path:
    Region.format(path, small_geometry(24, block_bytes=UNIT, participants=8, namespaces=rows))
    return path


def store_one(region: Region, ns: Namespace, index: int = 1) -> list[MissReason | None]:
    keys = keys_of(ns, [index])
    with tally.in_time("a store of one block"):
        return list(region.store(keys, contents(keys)).reasons)


def stores_up_to(path: Path, step: str, signal_number: int) -> list[str]:
    with Region.attach(path) as region:
        _native.stop_at(step, 1, signal_number)
        return [str(reason) for reason in store_one(region, A)]


def stopped_at(start: Start, path: Path, step: str) -> Child:
    child = start(stores_up_to, path, step, signal.SIGSTOP)
    assert child.wait_stopped()
    tally.count(tally.STOPS)
    return child


def died_at(start: Start, path: Path, step: str) -> None:
    tally.intend(1)
    assert tally.ended(start(stores_up_to, path, step, signal.SIGKILL)) == -signal.SIGKILL


@pytest.mark.parametrize("step", STEPS)
def test_row_of_a_stopped_writer_others_take_another_one_after_a_bounded_wait(step: str) -> None:
    with region_folder() as folder, children() as start:
        path = make(folder / "region", rows=3)
        with Region.attach(path) as region, Region.attach(path) as other:
            child = stopped_at(start, path, step)
            began = time.process_time()
            assert store_one(region, B) == [None]
            assert store_one(other, A) == [None]  # the very namespace that is being written
            assert time.process_time() - began < 20 * WAIT_S
            assert region.reap().dead == 0  # it lives
            child.signal(signal.SIGCONT)
            assert tally.result(child) == ["None"]
            for reader in (region, other):
                assert load(reader, A, [1]) == load(reader, B, [1]) == [None]
            clean(region.check())


def test_only_row_is_held_by_a_stopped_writer_others_are_declined_until_it_is_done() -> None:
    with region_folder() as folder, children() as start:
        path = make(folder / "region", rows=1)
        with Region.attach(path) as region:
            child = stopped_at(start, path, "namespace.claim")
            for _ in range(3):
                assert store_one(region, A) == FULL
            child.signal(signal.SIGCONT)
            assert tally.result(child) == ["None"]
            assert store_one(region, A, 2) == [None], "it was declined once, and not for ever"
            assert store_one(region, B) == FULL
            clean(region.check())


@pytest.mark.parametrize("step", STEPS)
def test_only_row_of_a_dead_writer_is_taken_without_waiting_for_the_reaper(step: str) -> None:
    with region_folder() as folder, children() as start:
        path = make(folder / "region", rows=1)
        with Region.attach(path) as region:
            died_at(start, path, step)
            assert store_one(region, A) == [None]
            region.reap()
            assert load(region, A, [1]) == [None]
            clean(region.check())


def damage_row(path: Path, bits: int, dice: random.Random, row: int = 0) -> None:
    place = RegionBytes(path.read_bytes()).namespaces(0)
    data = bytearray(path.read_bytes()[place.start : place.start + place.bytes])
    for bit in dice.sample(range(row * 1024 * 8 + 64, row * 1024 * 8 + 130 * 8), bits):  # all but the word
        data[bit // 8] ^= 1 << bit % 8
    with path.open("r+b") as f:
        f.seek(place.start)
        f.write(data)


@pytest.mark.parametrize("by", ["scrub", "store"])
def test_damaged_row_is_judged_by_scrub_or_the_next_one_that_wants_it_and_used_again(by: str) -> None:
    dice = random.Random(seed("test_damaged_row_is_judged"))
    with region_folder() as folder:
        path = make(folder / "region", rows=1)
        with Region.attach(path) as region:
            assert store_one(region, A) == [None]
            damage_row(path, 7, dice)
            with Region.attach(path) as other:
                if by == "scrub":
                    assert other.scrub().bad == 1
                    clean(other.check())
                assert store_one(other, B) == [None]
                # The first one still knows the row as its own: it must not store under another's name.
                assert store_one(region, A, 2) == FULL
                assert load(other, B, [1]) == [None]
                clean(other.check())


def test_one_bit_of_a_row_is_wrong_scrub_puts_it_right_and_no_block_is_lost() -> None:
    dice = random.Random(seed("test_one_bit_of_a_row"))
    with region_folder() as folder:
        path = make(folder / "region", rows=2)
        with Region.attach(path) as region:
            assert store_one(region, A) == [None]
            for _ in range(20):
                damage_row(path, 1, dice)
                assert region.scrub().bad == 0
                with Region.attach(path) as other:
                    assert load(other, A, [1]) == [None]
                assert store_one(region, A, 2) in ([None], FULL)
            clean(region.check())


def scrubs_up_to(path: Path, step: str) -> None:
    with Region.attach(path, role="tool") as region:
        _native.stop_at(step, 1, signal.SIGKILL)
        region.scrub()


def test_judge_of_a_row_dies_the_next_one_frees_it() -> None:
    dice = random.Random(seed("test_judge_of_a_row_dies"))
    with region_folder() as folder, children() as start:
        path = make(folder / "region", rows=1)
        with Region.attach(path) as region:
            assert store_one(region, A) == [None]
            damage_row(path, 5, dice)
            tally.intend(1)
            assert tally.ended(start(scrubs_up_to, path, "namespace.judged")) == -signal.SIGKILL
            assert store_one(region, B) == [None]
            load(region, A, [1], HONEST | {MissReason.WRONG_NAMESPACE})  # a hit or not: right bytes
            region.reap()
            region.scrub()
            clean(region.check())
