"""`fsck --repair` of each thing that can be wrong: named by fsck, put right, and no right block lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from format.layout_file import LINE_BYTES, SECTIONS, RegionBytes
from kvpool.region import Region
from regions import NS, SUPERBLOCK, UNIT, make, patch
from strategies import buffers, contents, keys_of, region_folder, wrong_hits

KEYS = keys_of(NS, range(6))
EXTENT_SLOTS = 4

Damage = Callable[[Path, RegionBytes], None]


@pytest.fixture
def path() -> Iterator[Path]:
    """A region of four extents of four slots, with six blocks."""
    with region_folder() as folder:
        made = make(folder / "region")
        with Region.attach(made) as region:
            assert region.store(KEYS, contents(KEYS)).stored_count == len(KEYS)
        yield made


def hits(path: Path) -> int:
    with Region.attach(path) as region:
        out = buffers(KEYS)
        result = region.load(KEYS, out)
        assert not wrong_hits(KEYS, result.codes, out)
        return result.hit_count


def shard(b: RegionBytes, field: str) -> int:
    return b.shard(0).start + b.sb[field]


def put(path: Path, at: int, value: int) -> None:
    patch(path, at, value.to_bytes(8, "little"))


def word(path: Path, at: int) -> int:
    return int.from_bytes(path.read_bytes()[at : at + 8], "little")


def slot_header(b: RegionBytes, extent: int, slot: int) -> int:
    return shard(b, "extents_offset") + extent * b.sb["extent_bytes"] + slot * LINE_BYTES


def descriptor(b: RegionBytes, extent: int) -> int:
    return shard(b, "extent_descriptors_offset") + extent * LINE_BYTES


def entries(path: Path, b: RegionBytes) -> list[int]:
    """Where the bucket entries lie that are not empty."""
    start = shard(b, "buckets_offset")
    return [at for at in range(start, start + b.sb["bucket_count"] * LINE_BYTES, 8) if word(path, at)]


def first_superblock(path: Path, b: RegionBytes) -> None:
    patch(path, 100, b"junk")


def second_superblock(path: Path, b: RegionBytes) -> None:
    patch(path, b.sb["align_bytes"], bytes(SUPERBLOCK))


def namespace_bit(path: Path, b: RegionBytes) -> None:
    at = shard(b, "namespaces_offset") + SECTIONS["namespace row"]["digest"][0]
    put(path, at, word(path, at) ^ 1 << 17)


def namespace_checksum_bit(path: Path, b: RegionBytes) -> None:
    at = shard(b, "namespaces_offset") + SECTIONS["namespace row"]["checksum"][0]
    put(path, at, word(path, at) ^ 1)


def namespace_state(path: Path, b: RegionBytes) -> None:
    at = shard(b, "namespaces_offset")
    put(path, at, word(path, at) ^ 1 << 63 | 1 << 62)  # stable to writing


def extent_size(path: Path, b: RegionBytes) -> None:
    put(path, descriptor(b, 0) + 8, 17)


def extent_size_of_another_namespace(path: Path, b: RegionBytes) -> None:
    put(path, descriptor(b, 0) + 8, 2 * UNIT)
    put(path, descriptor(b, 0) + 16, EXTENT_SLOTS // 2)


def extent_unassigned(path: Path, b: RegionBytes) -> None:
    put(path, descriptor(b, 0), word(path, descriptor(b, 0)) & ~(3 << 62))


def extent_lent(path: Path, b: RegionBytes) -> None:
    put(path, descriptor(b, 0), word(path, descriptor(b, 0)) | 3 << 62)


def entry_lost(path: Path, b: RegionBytes) -> None:
    put(path, entries(path, b)[0], 0)


def entry_tag_flipped(path: Path, b: RegionBytes) -> None:
    at = entries(path, b)[0]
    put(path, at, word(path, at) ^ 1 << 50)


def entry_of_no_slot(path: Path, b: RegionBytes) -> None:
    at = entries(path, b)[0]
    put(path, at, word(path, at) | 0xFFF << 20)


def log_tail(path: Path, b: RegionBytes) -> None:
    put(path, shard(b, "log_tail_offset"), 5 << 20 | 3)


def log_record(path: Path, b: RegionBytes) -> None:
    put(path, shard(b, "log_ring_offset") + 8 * (b.sb["log_record_count"] - 1), 1 << 60)


def free_slot_being_written(path: Path, b: RegionBytes) -> None:
    at = slot_header(b, 1, EXTENT_SLOTS - 1)
    assert word(path, at) >> 62 == 0
    put(path, at, word(path, at) | 1 << 62 | 5 << 14 | 3)


def unassigned_slot_not_free(path: Path, b: RegionBytes) -> None:
    put(path, slot_header(b, 3, 1), 1 << 62 | 9 << 24 | 5 << 14)


def free_slot_lent(path: Path, b: RegionBytes) -> None:
    at = slot_header(b, 1, EXTENT_SLOTS - 1)
    put(path, at, word(path, at) | 3 << 62)


def own_claim(path: Path, b: RegionBytes) -> None:
    put(path, shard(b, "claims_offset"), 1 << 40)


@pytest.mark.parametrize(
    "damage",
    [
        first_superblock,
        second_superblock,
        namespace_bit,
        namespace_checksum_bit,
        namespace_state,
        extent_size,
        extent_size_of_another_namespace,
        extent_unassigned,
        extent_lent,
        entry_lost,
        entry_tag_flipped,
        entry_of_no_slot,
        log_tail,
        log_record,
        free_slot_being_written,
        unassigned_slot_not_free,
        free_slot_lent,
        own_claim,
    ],
)
def test_damage_beside_the_blocks_is_named_then_repaired_and_every_block_stays(
    path: Path, damage: Damage
) -> None:
    damage(path, RegionBytes(path.read_bytes()))
    assert Region.fsck(path).problems
    with Region.attach(path, role="tool") as region:
        report = region.repair()
        assert (report.left, report.blocks_dropped) == ([], 0)
        assert region.repair().done == []
    after = Region.fsck(path)
    assert after.ok, after.problems
    assert Region.inspect(path).superblock_copies_ok == 2
    assert hits(path) == len(KEYS)
    more = keys_of(NS, range(100, 110))
    with Region.attach(path) as region:
        assert region.store(more, contents(more)).stored_count == len(more)


@pytest.mark.parametrize("where", ["header", "payload"])
def test_damaged_block_is_dropped_and_the_others_stay(path: Path, where: str) -> None:
    b = RegionBytes(path.read_bytes())
    at = slot_header(b, 0, 0) + 20
    if where == "payload":
        at = shard(b, "extents_offset") + b.sb["extent_payload_offset"] + 100
    put(path, at, word(path, at) ^ 1)
    with Region.attach(path, role="tool") as region:
        report = region.repair()
        assert (report.left, report.blocks_dropped) == ([], 1)
        assert report.done == ["1 damaged blocks dropped; they are misses"]
    assert Region.fsck(path).ok
    assert hits(path) == len(KEYS) - 1


def test_repair_of_a_sound_region_does_nothing(path: Path) -> None:
    with Region.attach(path, role="tool") as region:
        report = region.repair()
    assert (report.done, report.left, report.blocks_checked) == ([], [], len(KEYS))
    assert hits(path) == len(KEYS)


def test_repair_leaves_a_shard_that_another_host_claims_and_says_so(tmp_path: Path) -> None:
    path = make(tmp_path / "region", hosts=2)
    b = RegionBytes(path.read_bytes())
    claim = b.shard(1).start + b.sb["claims_offset"]  # of host 1 on shard 0, not settled
    for field in ("epoch", "epoch_copy"):
        put(path, claim + SECTIONS["claim line and acknowledgement line, one a host"][field][0], 7)
    with Region.attach(path, role="tool") as region:
        (left,) = region.repair().left
    assert "claimed by host 1 with epoch 7 and not taken over" in left
    with Region.attach(path, role="tool") as region:
        region.adopt(0, 8)
    with Region.attach(path, host=1, role="tool") as region:  # its line was written without its checksum here
        assert region.repair().done == ["1 claim lines with a wrong copy put right"]
    assert Region.fsck(path).ok


def test_appends_after_the_tail_was_damaged_go_by_what_most_records_say(path: Path) -> None:
    """One more record is damaged, and says the highest lap there can be."""
    b = RegionBytes(path.read_bytes())
    ring, records = shard(b, "log_ring_offset"), b.sb["log_record_count"]
    with Region.attach(path) as region:
        keys = keys_of(NS, range(100, 100 + 3 * records))
        for i in range(len(keys)):
            region.store(keys[i : i + 1], contents(keys[i : i + 1]))
        tail = word(path, shard(b, "log_tail_offset"))
        assert tail > 3 * records
        put(path, shard(b, "log_tail_offset"), tail ^ 1 << 14)
        put(path, ring + (tail + 40) % records * 8, (1 << 64) - 1)
        assert region.store(KEYS, contents(KEYS)).stored_count
        assert tail < word(path, shard(b, "log_tail_offset")) < tail + 4 * len(KEYS)
        (problem,) = region.check().problems
        assert "1 damaged records" in problem
        region.repair()
        assert region.check().ok
