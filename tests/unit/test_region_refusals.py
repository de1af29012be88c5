"""Regions: every mistake that a caller or a medium can make gets a sentence that helps."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from children import Child, children
from kvpool.errors import (
    BufferShapeError,
    FencedError,
    FormatVersionError,
    GeometryError,
    KvpoolError,
    MediumUnavailable,
    NamespaceError,
    RegionBusyError,
    RegionError,
    SuperblockError,
)
from kvpool.outcomes import MissReason
from kvpool.region import FORMAT_VERSION, Geometry, Region
from regions import NS, SUPERBLOCK, UNIT, make, patch, snapshot
from strategies import (
    buffers,
    contents,
    keys_of,
    namespace,
    small_geometry,
    wrong_hits,
)

# -- geometry ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("geometry", "message"),
    [
        (Geometry(20000), "capacity 20000 bytes is too small for 1 host.*at least [0-9]+ bytes are needed"),
        (Geometry(1 << 20, hosts=0), "hosts: 0; a region has 1 to 64 hosts"),
        (Geometry(1 << 20, hosts=65), "hosts: 65"),
        (Geometry(1 << 20, participants=0), "participants: 0; a host has 1 to 1024"),
        (Geometry(1 << 20, participants=1025), "participants: 1025"),
        (Geometry(1 << 20, namespaces=0), "namespaces: 0; a shard has 1 to 65535"),
        (Geometry(1 << 20, min_block_bytes=100), "smallest block: 100 bytes; it must be a multiple of 64"),
        (Geometry(1 << 20, min_block_bytes=0), "smallest block: 0 bytes"),
        (
            Geometry(1 << 20, align_bytes=5000),
            "alignment: 5000 bytes; it must be a power of two, 4096 or more",
        ),
        (
            Geometry(1 << 20, extent_bytes=100),
            "extent size 100 bytes holds 0 smallest blocks; it must hold 1",
        ),
        (Geometry(1 << 20, extent_bytes=1 << 30), "too small"),
        (Geometry(-1), "capacity_bytes: -1; it must be 0 to"),
        (Geometry(1 << 64), "capacity_bytes: 18446744073709551616; it must be 0 to"),
        (Geometry(1 << 20, hosts=-1), "hosts: -1; it must be 0 to"),
        (Geometry(1 << 20, coherence="none"), "coherence: 'none'; it must be hardware or software"),  # type: ignore[arg-type]
    ],
)
def test_geometry_that_cannot_be_is_refused_and_no_file_is_left(
    folder: Path, geometry: Geometry, message: str
) -> None:
    with pytest.raises(GeometryError, match=message):
        Region.format(folder / "region", geometry)
    assert snapshot(folder) == {}


def test_geometry_never_has_a_slot_whose_id_is_all_ones() -> None:
    plan = Geometry(1 << 50, min_block_bytes=64, extent_bytes=64 << 20, participants=1, namespaces=1).plan()
    assert (plan["extent_count"], plan["slots_per_extent"]) == (4095, 1 << 20)


def test_capacity_that_geometry_asks_for_is_enough() -> None:
    for hosts, block in ((1, 64), (2, 16384), (64, 4096)):
        with pytest.raises(GeometryError) as refused:
            Geometry(4096, hosts=hosts, min_block_bytes=block).plan()
        need = int(str(refused.value).split("at least ")[1].split(" ")[0])
        assert Geometry(need, hosts=hosts, min_block_bytes=block).plan()["extent_count"]


def test_smallest_regions_of_one_slot_work(folder: Path) -> None:
    for number, block in enumerate((64, 128, 4096)):
        path = folder / f"region{number}"
        Region.format(path, small_geometry(1, block_bytes=block, participants=1, namespaces=1))
        with Region.attach(path) as region:
            assert region.usage().slots_total == 0
            for i in range(20):
                keys = keys_of(namespace(block), [i])
                assert region.store(keys, contents(keys)).stored_count == 1
                out = buffers(keys)
                assert region.load(keys, out).hit_count == 1
                assert [bytes(out[0])] == contents(keys)
            assert region.usage().blocks == region.usage().slots_total == 1
            assert region.check().ok


# -- formatting over what is there -------------------------------------------------------------------------


def test_format_over_a_region_needs_force(folder: Path) -> None:
    path = make(folder / "region")
    before = snapshot(folder)
    with pytest.raises(
        RegionBusyError, match=r"there is a kvpool region already. Nothing was changed. .*--force"
    ):
        make(path)
    assert snapshot(folder) == before
    Region.format(path, small_geometry(4, block_bytes=UNIT), force=True)
    assert Region.inspect(path).extents == 1


def test_format_over_a_foreign_file_needs_force(folder: Path) -> None:
    path = folder / "thesis.txt"
    path.write_text("four years of work")
    with pytest.raises(
        RegionBusyError, match=r"the file exists and is not a kvpool region .18 bytes.. Nothing was changed"
    ):
        make(path)
    assert path.read_text() == "four years of work"


def test_format_with_force_while_somebody_is_attached_is_refused(folder: Path) -> None:
    path = make(folder / "region")
    with Region.attach(path) as region:
        keys = keys_of(NS, [1])
        region.store(keys, contents(keys))
        with pytest.raises(RegionBusyError, match=r"it is in use. Nothing was changed. Stop the pool"):
            Region.format(path, small_geometry(4, block_bytes=UNIT), force=True)
        assert region.lookup(keys).hit_count == 1


def test_format_reports_progress_to_the_end(folder: Path) -> None:
    seen: list[tuple[int, int]] = []
    Region.format(folder / "region", Geometry(100 << 20), progress=lambda *a: seen.append(a))
    assert seen[-1] == (100 << 20, 100 << 20)
    assert seen == sorted(seen)


def test_format_interrupted_by_its_caller_leaves_no_file(folder: Path) -> None:
    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Region.format(folder / "region", Geometry(8 << 20), progress=stop)
    assert snapshot(folder) == {}


# -- media that do not want --------------------------------------------------------------------------------


def test_missing_file_and_folder_are_named(folder: Path) -> None:
    with pytest.raises(MediumUnavailable, match=r"nothing: cannot be opened: No such file.*Create it first"):
        Region.attach(folder / "nothing")
    with pytest.raises(MediumUnavailable, match=r"cannot be created: No such file.*Create the folder first"):
        make(folder / "no" / "region")


def test_folder_or_pipe_instead_of_a_file_is_refused(folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    for call in (Region.inspect, lambda p: make(Path(p))):
        with pytest.raises(
            KvpoolError, match=r"neither a regular file nor a DAX device|cannot be opened: Is a directory"
        ):
            call(folder)
        with pytest.raises(KvpoolError, match="neither a regular file nor a DAX device"):
            call(folder / "pipe")
    with pytest.raises(MediumUnavailable, match="not a DAX device"):
        Region.attach("/dev/null")


def as_another_user(function: Callable[[], object]) -> str:
    """What a call raises for a user who is not root."""

    def run() -> str:
        if os.getuid() == 0:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
        try:
            function()
        except MediumUnavailable as e:
            return str(e)
        return "no error"

    child = Child(run)
    try:
        return str(child.result())
    finally:
        child.end()


def test_no_permission_says_so_and_changes_nothing(folder: Path) -> None:
    path = make(folder / "region")
    folder.chmod(0o755)
    path.chmod(0o000)
    other = folder / "empty"
    other.touch()
    other.chmod(0o000)
    before = path.stat()
    for call in (lambda: Region.attach(path), lambda: Region.inspect(path)):
        assert (
            "cannot be opened: Permission denied. Give this user read and write permission"
            in as_another_user(call)
        )
    message = as_another_user(lambda: make(folder / "new"))
    if os.getuid() == 0:  # the folder is ours and writable otherwise
        assert (
            "cannot be created: Permission denied. Nothing was changed. Give this user permission" in message
        )
    assert "Permission denied. Nothing was changed" in as_another_user(lambda: make(other))
    assert (path.stat().st_mtime_ns, path.stat().st_size) == (before.st_mtime_ns, before.st_size)
    assert not (folder / "new").exists() or os.getuid() != 0


@pytest.fixture
def small_mount(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 1 MiB; needs root."""
    if os.getuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting needs root")
    where = tmp_path / "mount"
    where.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(where)], capture_output=True
    ).returncode:
        pytest.skip("this root may not mount")
    yield where
    subprocess.run(["umount", "-l", str(where)], check=True)


def test_no_space_left_leaves_the_old_region_as_it_is(small_mount: Path) -> None:
    path = make(small_mount / "region")
    before = snapshot(small_mount)
    with pytest.raises(
        MediumUnavailable,
        match=r"no space left: 4194304 bytes are needed and [0-9]+ are free.*Nothing was changed",
    ):
        Region.format(small_mount / "other", Geometry(4 << 20))
    with pytest.raises(MediumUnavailable, match="no space left"):
        Region.format(path, Geometry(4 << 20), force=True)
    assert snapshot(small_mount) == before


def test_space_that_ends_under_a_sparse_region_is_a_reason_and_not_a_dead_process(small_mount: Path) -> None:
    path = small_mount / "region"
    Region.format(
        path, Geometry(8 << 20, min_block_bytes=16384, participants=2, namespaces=2), preallocate=False
    )
    ns = namespace(16384)
    with Region.attach(path) as region:
        reasons: set[MissReason | None] = set()
        stored = []
        for i in range(200):
            keys = keys_of(ns, [i])
            reasons |= set(region.store(keys, contents(keys)).reasons)
            stored.append(i)
        assert MissReason.TIER_ERROR in reasons
        keys = keys_of(ns, stored)
        out = buffers(keys)
        result = region.load(keys, out)
        assert result.hit_count > 10
        assert not wrong_hits(keys, result.codes, out)


def test_read_only_medium_says_so(small_mount: Path) -> None:
    path = make(small_mount / "region")
    (small_mount / "empty").touch()
    subprocess.run(["mount", "-o", "remount,ro", str(small_mount)], check=True)
    before = snapshot(small_mount)
    with pytest.raises(
        MediumUnavailable,
        match=r"cannot be opened: Read-only file system. The filesystem is mounted read-only",
    ):
        Region.attach(path)
    for name in ("new", "empty"):
        with pytest.raises(
            MediumUnavailable,
            match=r"Read-only file system. Nothing was changed. The filesystem is read-only",
        ):
            make(small_mount / name)
    with Region.open_read_only(path) as region:
        assert region.check().ok
    assert snapshot(small_mount) == before


def limited(path: Path, force: bool) -> str:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    try:
        Region.format(path, Geometry(4 << 20), force=force)
    except MediumUnavailable as e:
        return str(e)
    return "no error"


def test_file_size_limit_says_so_and_the_old_region_stays(folder: Path) -> None:
    path = make(folder / "region")
    before = snapshot(folder)
    with children() as start:
        for target, force in ((folder / "new", False), (path, True)):
            message = start(limited, target, force).result()
            assert "cannot get 4194304 bytes: File too large. Nothing was changed" in message
            assert "ulimit -f" in message
    assert snapshot(folder) == before


# -- regions that are not what they should be --------------------------------------------------------------


def test_not_a_region_is_refused(folder: Path) -> None:
    for content in (b"", b"x" * 100, bytes(1 << 20), os.urandom(1 << 16)):
        (folder / "file").write_bytes(content)
        with pytest.raises(
            SuperblockError, match=r"no kvpool region here .no superblock.. Nothing was changed. Make one"
        ):
            Region.attach(folder / "file")
        assert (folder / "file").read_bytes() == content


def test_other_format_version_is_refused_and_named(folder: Path) -> None:
    path = make(folder / "region")
    for copy in (0, SUPERBLOCK):
        patch(path, copy + 8, (9).to_bytes(4, "little"))
    before = snapshot(folder)
    for call in (Region.attach, Region.inspect, Region.fsck):
        with pytest.raises(
            FormatVersionError, match=f"format 9, this build reads {FORMAT_VERSION}. Nothing was changed"
        ):
            call(path)
    with pytest.raises(RegionBusyError, match="already"):
        make(path)
    assert snapshot(folder) == before


def test_damaged_superblock_second_copy_is_used(folder: Path) -> None:
    path = make(folder / "region")
    keys = keys_of(NS, [1])
    with Region.attach(path) as region:
        region.store(keys, contents(keys))
    for copy in (0, SUPERBLOCK):
        whole = path.read_bytes()
        patch(path, copy, os.urandom(SUPERBLOCK))
        with Region.attach(path) as region:
            assert region.info.superblock_copies_ok == 1
            assert region.load(keys, buffers(keys)).hit_count == 1
            assert any("only one of two copies" in p for p in region.check().problems)
        path.write_bytes(whole)


def test_both_superblocks_damaged_is_refused_with_what_to_do(folder: Path) -> None:
    path = make(folder / "region")
    for copy in (0, SUPERBLOCK):
        patch(path, copy + 100, b"damage")
    before = snapshot(folder)
    with pytest.raises(
        SuperblockError, match=r"both copies of the superblock are damaged .*Nothing was changed.*--force"
    ):
        Region.attach(path)
    assert snapshot(folder) == before
    Region.format(path, small_geometry(4, block_bytes=UNIT), force=True)
    Region.attach(path).close()


def test_region_larger_than_its_medium_is_refused(folder: Path) -> None:
    path = make(folder / "region")
    size = path.stat().st_size
    os.truncate(path, size - 4096)
    with pytest.raises(
        GeometryError, match=f"formatted for {size} bytes but the medium has only {size - 4096} now"
    ):
        Region.attach(path)


# -- mistakes of callers -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "message"),
    [(2, r"host 2 does not exist; .* 2 host\(s\), 0 to 1"), (-1, "host -1"), (1 << 40, "host")],
)
def test_host_out_of_range_is_refused(folder: Path, host: int, message: str) -> None:
    path = make(folder / "region", hosts=2)
    with pytest.raises(GeometryError, match=message):
        Region.attach(path, host=host)


def test_arguments_that_cannot_be_are_refused_with_a_sentence(folder: Path) -> None:
    path = make(folder / "region")
    with pytest.raises(KvpoolError, match="role 'boss' does not exist; expected one of engine, daemon, tool"):
        Region.attach(path, role="boss")  # type: ignore[arg-type]
    with Region.attach(path) as region:
        for fraction, most in ((-0.1, 1), (1.5, 1), (float("nan"), 1), (0.5, -1)):
            with pytest.raises(KvpoolError, match="expected a fraction 0 to 1, and 0 or more blocks"):
                region.evict(fraction, most)
        for start, limit in ((-1, None), (0, -1)):
            with pytest.raises(KvpoolError, match="expected 0 or more"):
                region.scrub(start=start, limit=limit)
        assert region.scrub(start=10**9).next_slot == 0
        with pytest.raises(GeometryError, match="host 1 does not exist"):
            region.adopt(1, 1)
        for epoch in (0, -1, 1 << 63):
            with pytest.raises(FencedError, match=r"epoch .* cannot be"):
                region.adopt(0, epoch)


def test_adoption_with_an_epoch_that_is_not_higher_is_refused(folder: Path) -> None:
    path = make(folder / "region", hosts=2)
    with Region.attach(path, host=1) as region:
        region.adopt(0, 5)
        for epoch in (4, 5):
            with pytest.raises(
                FencedError, match=r"already claimed with epoch 5 by host 1; epoch . is not higher"
            ):
                region.adopt(0, epoch)


def test_all_participant_entries_taken_is_refused_and_one_that_leaves_makes_room(folder: Path) -> None:
    path = make(folder / "region", participants=2)
    with Region.attach(path) as a:
        with (
            Region.attach(path),
            pytest.raises(
                RegionBusyError, match=r"all 2 participant entries of host 0 are in use. Close some engines"
            ),
        ):
            Region.attach(path)
        with Region.attach(path) as c:
            assert c.participant != a.participant


def test_medium_that_fails_after_a_refused_attach_is_still_only_a_miss(folder: Path) -> None:
    """The refusal is an exception out of guarded code; the guard must not stay behind."""
    path = make(folder / "region", participants=1)

    def run() -> list[MissReason | None]:
        keys = keys_of(NS, [1])
        with Region.attach(path) as region:
            region.store(keys, contents(keys))
            with pytest.raises(RegionBusyError):
                Region.attach(path)
            os.truncate(path, 0)
            return list(region.load(keys, buffers(keys)).reasons)

    with children() as start:
        assert start(run).result() == [MissReason.TIER_ERROR]


def test_closed_region_raises_and_closing_twice_is_fine(folder: Path) -> None:
    region = Region.attach(make(folder / "region"))
    region.close()
    region.close()
    keys = keys_of(NS, [1])
    for call in (
        lambda: region.lookup(keys),
        lambda: region.load(keys, buffers(keys)),
        lambda: region.store(keys, contents(keys)),
        region.usage,
        region.counters,
        region.check,
        region.reap,
        region.heartbeat,
        region.scrub,
        region.participants,
        lambda: region.evict(0.0, 1),
        lambda: list(region.dump()),
        lambda: region.participant,
        lambda: region.adopt(0, 1),
    ):
        with pytest.raises(RegionError, match=r"it was closed. Attach again"):
            call()


def test_region_dropped_without_closing_leaves_its_entry(folder: Path) -> None:
    path = make(folder / "region", participants=1)
    region = Region.attach(path)
    del region
    Region.attach(path).close()


def test_process_that_ends_without_closing_leaves_its_entry(folder: Path) -> None:
    path = make(folder / "region", participants=1)
    code = f"from kvpool.region import Region; r = Region.attach({str(path)!r})"
    subprocess.run([sys.executable, "-c", code], check=True)
    with Region.attach(path) as region:
        assert region.participants()[0].generation == 2
        assert Region.fsck(path).ok


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ([bytearray(UNIT)], "1 buffers for 2 keys"),
        (
            [bytearray(UNIT), bytearray(UNIT - 1)],
            "block 1 has 1023 bytes, the namespace's blocks have 1024 bytes",
        ),
        ([bytearray(UNIT), bytes(UNIT)], "block 1: the buffer is read-only"),
        ([bytearray(UNIT), memoryview(bytearray(2 * UNIT))[::2]], "block 1: the buffer is not contiguous"),
    ],
)
def test_buffers_that_do_not_fit_are_refused_before_anything_is_copied(
    folder: Path, out: list[object], message: str
) -> None:
    with Region.attach(make(folder / "region")) as region:
        keys = keys_of(NS, [0, 1])
        region.store(keys, contents(keys))
        with pytest.raises(BufferShapeError, match=message):
            region.load(keys, out)
        assert bytes(out[0]) == bytes(UNIT)  # type: ignore[arg-type]
        if "read-only" not in message:
            with pytest.raises(BufferShapeError, match=message):
                region.store(keys_of(NS, [5, 6]), out)
            assert region.lookup(keys_of(NS, [5, 6])).hit_count == 0


def test_block_larger_than_an_extent_is_refused_with_what_to_set(folder: Path) -> None:
    with Region.attach(make(folder / "region")) as region:
        keys = keys_of(namespace(1 << 20), [1])
        with pytest.raises(
            NamespaceError, match=r"a block of 1048576 bytes is larger than an extent .*extentSize"
        ):
            region.store(keys, contents(keys))
        assert region.load(keys, buffers(keys)).reasons[0] is MissReason.NEVER_STORED


def test_same_hashes_in_another_namespace_are_not_found(folder: Path) -> None:
    with Region.attach(make(folder / "region")) as region:
        keys = keys_of(NS, range(4))
        region.store(keys, contents(keys))
        other = keys_of(namespace(UNIT, weights="0" * 64), range(4))
        assert region.lookup(other).hit_count == 0
        assert region.load(other, buffers(other)).hit_count == 0
