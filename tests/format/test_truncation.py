"""A region that lost its end: refused when it is attached, a miss when it happens under a reader."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import pytest

from format.blocks import Blocks, load, namespace, store
from format.isolation import Progress, isolated
from format.layout_file import RegionBytes
from kvpool.errors import MediumUnavailable, RegionError
from kvpool.region import Geometry, Region

SPACE = namespace("truncated", 4096)
BLOCKS = Blocks(SPACE, tuple(f"block {i}" for i in range(40)))


@pytest.fixture
def region_file(tmp_path: Path) -> Path:
    path = tmp_path / "region"
    Region.format(
        path,
        Geometry(
            512 << 10,
            hosts=2,
            extent_bytes=64 << 10,
            min_block_bytes=4096,
            participants=2,
            namespaces=2,
            align_bytes=4096,
        ),
    )
    with Region.attach(path, host=0) as region:
        assert store(region, BLOCKS) == [""] * len(BLOCKS)
    return path


def lengths(path: Path) -> list[int]:
    """Around every place where something ends, and evenly between."""
    data = path.read_bytes()
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


def test_truncated_file_is_refused_and_left_as_it_is(region_file: Path) -> None:
    whole = region_file.read_bytes()
    for length in reversed(lengths(region_file)):
        os.truncate(region_file, length)
        for attempt in (Region.inspect, Region.attach, Region.open_read_only, Region.fsck):
            with pytest.raises((RegionError, MediumUnavailable), match="Nothing was changed"):
                attempt(region_file)
        assert region_file.read_bytes() == whole[:length], (
            f"a refused region of {length} bytes was written to"
        )


def test_file_truncated_under_readers_is_a_miss(region_file: Path) -> None:
    whole, all_lengths = region_file.read_bytes(), lengths(region_file)

    def body(progress: Progress) -> None:
        for length in all_lengths:
            region_file.write_bytes(whole)
            with Region.attach(region_file, host=0) as here, Region.attach(region_file, host=1) as there:
                for step, use in (("load", load), ("store", store)):
                    for region in (here, there):
                        progress.at(f"{step} with {length} of {len(whole)} bytes left")
                        os.truncate(region_file, length)
                        for reason in use(region, BLOCKS):
                            # Behind the end: zeros up to the end of the page, SIGBUS beyond.
                            assert reason in (
                                "",
                                "tier-error",
                                "never-stored",
                                "failed-checksum",
                                "evicted",
                                "wrong-namespace",
                                "changed-while-reading",
                                "no-space",
                            )
                progress.at(f"upkeep with {length} of {len(whole)} bytes left")
                for upkeep in (
                    here.usage,
                    here.counters,
                    here.participants,
                    here.reap,
                    here.scrub,
                    here.heartbeat,
                    lambda r=here: r.evict(0.0, 3),
                ):
                    with suppress(MediumUnavailable):
                        upkeep()
                here.check()
                progress.at(f"close with {length} of {len(whole)} bytes left")

    isolated(body)


def test_file_truncated_to_nothing_every_block_is_a_tier_error(region_file: Path) -> None:
    def body(progress: Progress) -> None:
        progress.at("loading from a file of 0 bytes")
        with Region.attach(region_file, host=0) as region:
            os.truncate(region_file, 0)
            assert load(region, BLOCKS) == ["tier-error"] * len(BLOCKS)
            assert store(region, BLOCKS) == ["tier-error"] * len(BLOCKS)
            assert region.lookup(BLOCKS.keys).hit_count == 0

    isolated(body)
