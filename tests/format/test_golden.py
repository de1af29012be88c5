"""Regions that older builds wrote are readable: every block, byte for byte."""

from __future__ import annotations

import lzma
from pathlib import Path

import pytest

from format.blocks import Blocks, load, store
from format.golden_content import EVICTED_1, FOLDER, INTERRUPTED_1, LARGE, SMALL, STORED_1, STRANGER_1
from format.layout_file import SECTIONS, RegionBytes
from kvpool.errors import FencedError
from kvpool.region import FORMAT_VERSION, Region


def unpacked(tmp_path: Path, boot_id: bytes | None) -> Path:
    """The region as it was written, or as if its hosts had written it in that boot (zeros: none)."""
    data = bytearray(lzma.decompress((FOLDER / "format-1.region.xz").read_bytes()))
    if boot_id is not None:
        offset, size = SECTIONS["shard header"]["boot_id"]
        known = RegionBytes(data)
        for host in range(known.sb["host_count"]):
            at = known.shard(host).start + offset
            if any(data[at : at + size]):
                data[at : at + size] = boot_id
    path = tmp_path / "region"
    path.write_bytes(data)
    return path


@pytest.fixture
def golden_1(tmp_path: Path) -> Path:
    return unpacked(tmp_path, bytes(16))


def test_golden_1_of_another_boot_is_refused_to_engines_and_a_daemon_keeps_its_blocks(tmp_path: Path) -> None:
    path = unpacked(tmp_path, b"another boot....")
    before = path.read_bytes()
    with pytest.raises(FencedError, match="in another boot"):
        Region.attach(path, host=0)
    assert path.read_bytes() == before
    with Region.attach(path, host=0, role="daemon"), Region.attach(path, host=0) as region:
        for blocks in STORED_1[0]:
            assert load(region, blocks) == [""] * len(blocks)


def test_golden_exists_for_the_format_that_this_build_writes() -> None:
    assert (FOLDER / f"format-{FORMAT_VERSION}.region.xz").exists(), (
        "make it: cd tests && python -m format.make_golden"
    )


def test_golden_1_superblock_says_what_it_was_formatted_with(golden_1: Path) -> None:
    info = Region.inspect(golden_1)
    assert (info.format_version, info.capacity_bytes, info.hosts, info.coherence) == (
        1,
        1 << 20,
        4,
        "software",
    )
    assert (info.min_block_bytes, info.participants, info.namespaces, info.superblock_copies_ok) == (
        256,
        3,
        4,
        2,
    )


def test_golden_1_header_lines_hold_the_keys_where_the_layout_says(golden_1: Path) -> None:
    """Also the keys themselves are pinned: a change of how keys are derived would orphan every block."""
    stored = RegionBytes(golden_1.read_bytes()).stored
    keys = {
        host: {b.keys.packed[i * 32 : i * 32 + 32] for b in batches for i in range(len(b))}
        for host, batches in STORED_1.items()
    }
    for host, its in keys.items():
        assert its == {key for key, (where, _, _) in stored.items() if where == host}


@pytest.mark.parametrize("host", [0, 1, 2, 3])
def test_golden_1_every_block_loads_on_every_host(golden_1: Path, host: int) -> None:
    with Region.attach(golden_1, host=host) as region:
        for batches in STORED_1.values():
            for blocks in batches:
                assert load(region, blocks) == [""] * len(blocks)
        reasons = load(region, EVICTED_1)
        if host == 1:  # the ghosts lie in its buckets; other hosts only know what they saw being evicted
            assert reasons == ["evicted", "evicted"]
        assert set(reasons) <= {"evicted", "never-stored"}
        assert load(region, INTERRUPTED_1) == ["never-stored"]
        assert load(region, STRANGER_1) == ["never-stored"]
        known = {n.digest: n.blocks for n in region.namespaces()}
        assert known == {LARGE.digest.hex(): 13, SMALL.digest.hex(): 30}


def test_golden_1_interrupted_store_is_reaped_then_fsck_is_clean(golden_1: Path) -> None:
    assert any("died without being reaped" in p for p in Region.fsck(golden_1).problems)
    with Region.attach(golden_1, host=2):
        pass
    assert Region.fsck(golden_1).problems == []


def test_golden_1_takes_new_blocks_and_keeps_its_shard_owner(golden_1: Path) -> None:
    new = Blocks(LARGE, ("new",))
    with Region.attach(golden_1, host=1) as adopter, Region.attach(golden_1, host=0) as other:
        assert adopter.usage().hosts[3].epoch == 7
        assert store(other, new) == [""]
        assert load(adopter, new) == [""]
    with Region.attach(golden_1, host=3) as fenced_off:
        assert store(fenced_off, Blocks(LARGE, ("from the old owner",))) == ["fenced"]
