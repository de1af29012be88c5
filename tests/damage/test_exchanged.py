"""Whole regions change under or between their users: swapped, copied, overwritten, of another version."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from damage.blocks import SPACES, load, make, opener, user
from damage.tally import TALLY
from damage.workers import users
from format.layout_file import SECTIONS, RegionBytes
from kvpool.errors import FormatVersionError
from kvpool.region import Coherence, Region
from strategies import keys_of, region_folder, seed

SECONDS = float(os.environ.get("KVPOOL_DAMAGE_SECONDS", "0.25"))
ROW = TALLY.here
MANY = range(60)


@pytest.fixture
def area() -> Iterator[Path]:
    with region_folder() as folder:
        yield folder


def done(kind: str) -> None:
    """One damage, which was meant to be."""
    ROW.add("intended")
    ROW.add(kind)


def overwrite(path: Path, data: bytes, at: int = 0) -> None:
    """In place: whoever has mapped the file sees it."""
    with path.open("r+b", buffering=0) as f:
        f.seek(at)
        f.write(data)


@pytest.mark.parametrize("coherence", ["hardware", "software"])
def test_overwritten_under_readers_and_writers_never_wrong_bytes(area: Path, coherence: Coherence) -> None:
    dice = random.Random(seed("test_overwritten_under_readers_and_writers"))
    path = area / "region"
    make(path, coherence)
    size = path.stat().st_size
    with users(
        user(path, 0, MANY, stores=True),
        user(path, 1, MANY, stores=True),
        user(path, 0, MANY),
        user(path, 1, MANY),
    ):
        until = time.monotonic() + SECONDS
        while time.monotonic() < until:
            damage = dice.choice((dice.randbytes(8), bytes(64), dice.randbytes(1), dice.randbytes(256)))
            overwrite(path, damage, dice.randrange(8192, size - 256))
            done("overwritten in use")
            time.sleep(0.002)


def test_regions_swapped_at_rest_each_is_what_its_bytes_say(area: Path) -> None:
    a, b = area / "a", area / "b"
    make(a, first=0)
    make(b, first=100)
    a.write_bytes(b.read_bytes())
    done("regions swapped")
    ROW.add("openings")
    with Region.attach(a) as region:
        assert 0 not in load(region, keys_of(SPACES[0], range(12)), ROW)
        assert 0 in load(region, keys_of(SPACES[0], range(100, 112)), ROW)


def test_second_superblock_of_another_region_is_one_copy_less(area: Path) -> None:
    a, b = area / "a", area / "b"
    make(a)
    make(b)
    second = RegionBytes(a.read_bytes()).sb["align_bytes"]
    overwrite(a, b.read_bytes()[second : second + 4096], second)
    done("another block's bytes")
    ROW.add("openings")
    assert Region.inspect(a).superblock_copies_ok == 1
    with Region.attach(a) as region:
        assert 0 in load(region, keys_of(SPACES[0], range(12)), ROW)
        assert any("superblock" in problem for problem in region.check().problems)


def test_halves_of_two_regions_never_one_block_with_the_bytes_of_another(area: Path) -> None:
    a, b = area / "a", area / "b"
    make(a, first=0)
    make(b, first=100)
    whole_a, whole_b = a.read_bytes(), b.read_bytes()
    for cut in range(4096, len(whole_a), len(whole_a) // (200 if SECONDS > 1 else 10)):
        a.write_bytes(whole_a[:cut] + whole_b[cut:])
        done("halves of two regions")
        for host in (0, 1):
            ROW.add("openings")
            with Region.attach(a, host=host) as region:
                for space in SPACES:
                    load(region, keys_of(space, [*range(12), *range(100, 112)]), ROW)
                    region.scrub()
    assert not TALLY.total("wrong")


@pytest.mark.parametrize("how", ["renamed", "in place", "shards in place"])
def test_regions_swapped_under_running_and_next_readers_never_wrong_bytes(area: Path, how: str) -> None:
    """Renamed: running readers keep the old file. In place: they find themselves in another region."""
    a, b, spare = area / "a", area / "b", area / "spare"
    make(a, first=0)
    make(b, first=30)
    whole = [a.read_bytes(), b.read_bytes()]
    first, second = RegionBytes(whole[0]).shard(0), RegionBytes(whole[0]).shard(1)
    shards = [whole[0][p.start : p.start + p.bytes] for p in (first, second)]
    with users(
        user(a, 0, MANY),
        user(a, 1, MANY),
        user(b, 0, MANY, stores=True),
        user(a, 1, MANY, stores=True),
        opener(a, MANY),
    ):
        until = time.monotonic() + SECONDS
        turn = 0
        while time.monotonic() < until:
            time.sleep(0.01)
            turn ^= 1
            if how == "renamed":
                a.rename(spare)
                b.rename(a)
                spare.rename(b)
            elif how == "in place":
                overwrite(a, whole[turn])
                overwrite(b, whole[1 - turn])
            else:
                overwrite(a, shards[turn], first.start)
                overwrite(a, shards[1 - turn], second.start)
            done("shards swapped" if how == "shards in place" else "regions swapped")


def test_copied_while_in_use_is_a_region_with_right_blocks(area: Path) -> None:
    path, copy = area / "region", area / "copy"
    make(path)
    with users(user(path, 0, MANY, stores=True), user(path, 1, MANY, stores=True)):
        until = time.monotonic() + SECONDS
        while time.monotonic() < until:
            time.sleep(0.005)
            copy.unlink(missing_ok=True)
            copy.write_bytes(path.read_bytes())
            done("copied in use")
            ROW.add("openings")
            with Region.attach(copy) as region:
                assert all(p.alive or p.host == 1 for p in region.participants())  # nobody else is alive here
                for space in SPACES:
                    load(region, keys_of(space, MANY), ROW)
                region.scrub()
                report = region.check()
                assert report.totals["writing"] == 0 or not report.ok
            for host in (0, 1):
                with Region.attach(copy, host=host) as region:
                    region.scrub()
                    report = region.check()
                    # An extent cut anew while it was copied: its line from before, its blocks from after.
                    others = [
                        problem for problem in report.problems if "descriptor is damaged" not in problem
                    ]
                    assert host == 0 or not others, others
                    if report.problems:  # each host repairs the shards that it owns
                        region.repair()
                        report = region.check()
            assert report.ok, report.problems
            assert report.totals["writing"] == 0
    assert not TALLY.total("wrong")


def test_descriptors_of_another_moment_are_put_in_order(area: Path) -> None:
    """What a copy of a region in use may have: extents said to be cut for another size than they are."""
    path, copy = area / "region", area / "copy"
    make(path)
    with users(user(path, 0, MANY, stores=True), user(path, 1, MANY, stores=True)):
        time.sleep(0.3)
        before = path.read_bytes()
        time.sleep(0.3)
        after = bytearray(path.read_bytes())
    there = RegionBytes(after)
    length = there.sb["extent_count"] * 64
    for host in (0, 1):
        at = there.shard(host).start + there.sb["extent_descriptors_offset"]
        after[at : at + length] = before[at : at + length]
    copy.write_bytes(after)
    for host in (0, 1):
        with Region.attach(copy, host=host) as region:
            region.scrub()
            region.repair()
            report = region.check()
            for space in SPACES:
                load(region, keys_of(space, MANY), ROW)
    assert report.ok, report.problems
    assert not TALLY.total("wrong")


def test_another_version_is_refused_by_the_next_and_harms_no_running_reader(area: Path) -> None:
    path = area / "region"
    make(path)
    whole = path.read_bytes()
    at, size = SECTIONS["superblock"]["format_version"]
    second = RegionBytes(whole).sb["align_bytes"]
    with users(user(path, 0, MANY), user(path, 1, MANY, stores=True)):
        for version in (0, 2, 9, 0xFFFFFFFF):
            for copy in (0, second):
                overwrite(path, version.to_bytes(size, "little"), copy + at)
            done("another format version")
            before = path.read_bytes()[: second + 4096]
            for refused in (Region.attach, Region.open_read_only, Region.inspect, Region.fsck):
                ROW.add("openings")
                with pytest.raises(FormatVersionError, match="Nothing was changed"):
                    refused(path)
                ROW.add("refused")
            assert path.read_bytes()[: second + 4096] == before
            time.sleep(0.02)
        for copy in (0, second):
            overwrite(path, whole[copy : copy + 4096], copy)
        with Region.attach(path) as region:
            region.check()
