"""A region that lost its end: refused when it is attached, a miss when it happens under a reader."""

from __future__ import annotations

import faulthandler
import mmap
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from children import children
from damage import blocks as many
from damage.tally import TALLY, Row
from damage.workers import try_all, users
from format.blocks import Blocks, load, namespace, store
from format.layout_file import RegionBytes
from kvpool.errors import MediumUnavailable, RegionError
from kvpool.outcomes import MissReason
from kvpool.region import Coherence, Geometry, Region
from strategies import region_folder, seed

SECONDS = float(os.environ.get("KVPOOL_DAMAGE_SECONDS", "0.25"))
SPACE = namespace("truncated", 4096)
BLOCKS = Blocks(SPACE, tuple(f"block {i}" for i in range(40)))
# Behind the end: zeros up to the end of the page, SIGBUS beyond.
REASONS = {
    str(r)
    for r in MissReason
    if r not in (MissReason.BELOW_MINIMUM, MissReason.DECLINED_BY_COST, MissReason.QUOTA)
}


def make(path: Path) -> bytes:
    geometry = Geometry(
        512 << 10,
        hosts=2,
        extent_bytes=64 << 10,
        min_block_bytes=4096,
        participants=2,
        namespaces=2,
        align_bytes=4096,
    )
    Region.format(path, geometry, force=path.exists())
    with Region.attach(path, host=0) as region:
        assert store(region, BLOCKS) == [""] * len(BLOCKS)
    return path.read_bytes()


@pytest.fixture
def folder() -> Iterator[Path]:
    with region_folder() as made:
        yield made


def lengths(data: bytes) -> list[int]:
    """Around every place where something ends, and evenly between."""
    r = RegionBytes(data)
    ends = [0, 8, 4096, 8192, len(data)]
    for host in (0, 1):
        ends += [
            r.shard(host).start,
            r.buckets(host).start,
            r.header(host, 0, 0).start,
            r.payload(host, 0, 0, 4096).start,
            r.shard(host).start + r.shard(host).bytes,
        ]
    near = {e + d for e in ends for d in (-4096, -64, -1, 0, 1, 64)}
    return sorted(n for n in near | set(range(0, len(data), 12345)) if 0 <= n < len(data))


def counted(use: Callable[[Region, Blocks], list[str]], region: Region, row: Row) -> None:
    """Loads or stores; every miss has one of the reasons that this can have."""
    for reason in use(region, BLOCKS):
        assert reason in REASONS or reason == ""
        if use is load:
            row.add(reason or "hits")


def test_truncated_file_is_refused_and_left_as_it_is(folder: Path) -> None:
    path = folder / "region"
    whole = make(path)
    row = TALLY.here
    for length in reversed(lengths(whole)):
        os.truncate(path, length)
        row.add("intended")
        row.add("truncated")
        for attempt in (Region.inspect, Region.attach, Region.open_read_only, Region.fsck):
            row.add("openings")
            with pytest.raises((RegionError, MediumUnavailable), match="Nothing was changed"):
                attempt(path)
            row.add("refused")
        assert path.read_bytes() == whole[:length], f"a refused region of {length} bytes was written to"


def test_file_truncated_under_readers_is_a_miss(folder: Path) -> None:
    whole = make(folder / "first")

    def prepare(worker: int, row: Row) -> Callable[[int], None]:
        path = folder / str(worker)

        def at(length: int) -> None:
            path.write_bytes(whole)
            row.add("truncated in use")
            with Region.attach(path, host=0) as here, Region.attach(path, host=1) as there:
                for use in (load, store, load):
                    for region in (here, there):
                        os.truncate(path, length)
                        counted(use, region, row)
                for upkeep in (
                    here.usage,
                    here.counters,
                    here.participants,
                    here.reap,
                    here.scrub,
                    here.heartbeat,
                    lambda: list(here.dump()),
                    lambda: here.evict(0.0, 3),
                    lambda: here.adopt(1, 1 << 40),
                    lambda: there.record(1, 1),
                ):
                    with suppress(MediumUnavailable, RegionError):
                        upkeep()
                here.check()

        return at

    try_all(lengths(whole), prepare)


def test_file_truncated_to_nothing_every_block_is_a_tier_error(folder: Path) -> None:
    make(folder / "region")

    def prepare(worker: int, row: Row) -> Callable[[int], None]:
        def at(length: int) -> None:
            with Region.attach(folder / "region", host=0) as region:
                os.truncate(folder / "region", length)
                row.add("truncated in use")
                assert load(region, BLOCKS) == ["tier-error"] * len(BLOCKS)
                assert store(region, BLOCKS) == ["tier-error"] * len(BLOCKS)
                assert region.lookup(BLOCKS.keys).hit_count == 0
                row.add("tier-error", len(BLOCKS))

        return at

    try_all([0], prepare)


@pytest.mark.parametrize("coherence", ["hardware", "software"])
def test_truncated_and_restored_under_running_readers_and_writers_all_live(
    folder: Path, coherence: Coherence
) -> None:
    """The end goes and comes back, with its old bytes or with zeros, while four processes use both shards."""
    dice = random.Random(seed("test_truncated_and_restored"))
    path, row = folder / "region", TALLY.here
    many.make(path, coherence)
    whole = path.read_bytes()
    indices = range(60)
    misses = TALLY.total("tier-error")
    with users(
        many.user(path, 0, indices, stores=True),
        many.user(path, 1, indices, stores=True),
        many.user(path, 0, indices),
        many.user(path, 1, indices),
    ):
        until = time.monotonic() + SECONDS
        while time.monotonic() < until or TALLY.total("tier-error") == misses:
            length = dice.choice((0, 4096, dice.randrange(len(whole)), dice.randrange(len(whole))))
            os.truncate(path, length)
            row.add("intended")
            row.add("truncated in use")
            time.sleep(dice.choice((0, 0.001, 0.005)))
            with path.open("r+b", buffering=0) as f:
                if dice.random() < 0.8:
                    f.write(whole)
                os.truncate(path, len(whole))
            time.sleep(0.002)
    assert TALLY.total("tier-error") > misses, "nobody met the missing end"


@pytest.mark.parametrize("order", ["before", "between"])
def test_fault_in_somebody_elses_memory_ends_the_process_as_without_us(folder: Path, order: str) -> None:
    """Also with Python's faulthandler, whichever of the two handlers of the signal came first."""
    path, other = folder / "region", folder / "other"
    make(path)
    other.write_bytes(bytes(8192))

    def touch() -> None:
        with (folder / "trace").open("w") as trace, other.open("r+b") as f:
            if order == "before":
                faulthandler.enable(trace)
            with Region.attach(path) as region:
                if order == "between":
                    faulthandler.enable(trace)
                region.lookup(BLOCKS.keys)
                with mmap.mmap(f.fileno(), 0) as m:
                    os.truncate(other, 0)
                    print(m[5000])

    with children() as start:
        assert start(touch, timeout_s=20).wait() == -signal.SIGBUS
    assert "Bus error" in (folder / "trace").read_text()
