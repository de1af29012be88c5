"""A region's capacity changes while it is in use: what fits stays, the rest is evicted, memory follows."""

from __future__ import annotations

import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from children import children
from kvpool.errors import GeometryError, MediumUnavailable
from kvpool.geometry import Geometry
from kvpool.keys import KeyBatch
from kvpool.outcomes import MissReason
from kvpool.provision.observe import room_bytes
from kvpool.region import Region
from strategies import namespace

UNIT = 16384
MIB = 1 << 20
NS = namespace(UNIT)


def keys(first: int, count: int) -> KeyBatch:
    return KeyBatch.from_hashes(NS, [n.to_bytes(32, "big") for n in range(first, first + count)])


def content(first: int, count: int) -> list[bytes]:
    return [n.to_bytes(8, "little") * (UNIT // 8) for n in range(first, first + count)]


def make(path: Path, capacity: int = 16 * MIB, room: int = 64 * MIB, **more: object) -> Path:
    geometry = Geometry(capacity, min_block_bytes=UNIT, extent_bytes=MIB, **more)  # type: ignore[arg-type]
    Region.format(path, geometry.with_room(path, room))
    return path


def resize(region: Region, capacity: int) -> None:
    for _ in range(1000):
        if region.resize(capacity).done:
            return
    raise AssertionError("it does not come to an end")


def fill(region: Region, first: int, count: int) -> None:
    result = region.store(keys(first, count), content(first, count))
    assert all(reason is None for reason in result.reasons)


def served(region: Region, first: int, count: int) -> int:
    out = [bytearray(UNIT) for _ in range(count)]
    result = region.load(keys(first, count), out)
    for reason, got, expected in zip(result.reasons, out, content(first, count), strict=True):
        assert reason is not None or got == expected
    return result.hit_count


def memory(path: Path) -> int:
    return path.stat().st_blocks * 512


@pytest.mark.parametrize("coherence", ["hardware", "software"])
def test_room_to_grow_takes_no_memory_and_few_blocks(folder: Path, coherence: str) -> None:
    plain, roomy = folder / "plain", make(folder / "roomy", coherence=coherence)
    Region.format(plain, Geometry(16 * MIB, min_block_bytes=UNIT))
    assert Region.inspect(roomy).capacity_bytes == 64 * MIB
    assert memory(roomy) <= 16 * MIB
    with Region.attach(plain) as a, Region.attach(roomy) as b:
        assert b.capacity_bytes == 16 * MIB
        assert b.usage().capacity_bytes >= 0.95 * a.usage().capacity_bytes
        fill(b, 0, 2000)
        assert b.usage().used_bytes <= 16 * MIB
    assert memory(roomy) <= 16 * MIB


@pytest.mark.parametrize("coherence", ["hardware", "software"])
def test_grow_keeps_all_and_holds_more(folder: Path, coherence: str) -> None:
    path = make(folder / "r", coherence=coherence)
    with Region.attach(path, role="daemon") as daemon, Region.attach(path) as engine:
        fill(engine, 0, 700)
        resize(daemon, 64 * MIB)
        assert daemon.capacity_bytes == engine.capacity_bytes == 64 * MIB
        assert memory(path) > 60 * MIB
        fill(engine, 1000, 2000)
        assert served(engine, 0, 700) == 700
        assert served(engine, 1000, 2000) == 2000
        assert engine.check().ok


@pytest.mark.parametrize("coherence", ["hardware", "software"])
def test_shrink_evicts_and_gives_memory_back(folder: Path, coherence: str) -> None:
    path = make(folder / "r", 64 * MIB, 64 * MIB, coherence=coherence)
    with Region.attach(path, role="daemon") as daemon, Region.attach(path) as engine:
        fill(engine, 0, 3500)
        resize(daemon, 16 * MIB)
        assert memory(path) <= 17 * MIB  # slot headers stay
        left = served(engine, 0, 3500)
        assert 0 < left <= 16 * MIB // UNIT
        fill(engine, 10000, 3000)
        assert engine.usage().used_bytes <= 16 * MIB
        assert served(engine, 10000, 3000) > 700
        assert engine.check().ok
        assert served(daemon, 0, 3500) == served(engine, 0, 3500)
        assert memory(path) <= 17 * MIB


def test_shrink_and_grow_again_and_again(folder: Path) -> None:
    path = make(folder / "r")
    with Region.attach(path, role="daemon") as daemon, Region.attach(path) as engine:
        for round_, size in enumerate([64, 8, 32, 16, 64, 8]):
            resize(daemon, size * MIB)
            fill(engine, round_ * 10000, 1000)
            assert engine.usage().used_bytes <= size * MIB
            assert memory(path) <= (size + 1) * MIB
            assert served(engine, round_ * 10000, 1000) > 0
        assert engine.check().ok


def room_with_a_limit_of_files(path: Path, limit: int) -> int:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    return room_bytes(path, 8 * MIB)


def test_room_is_what_a_file_may_have(folder: Path) -> None:
    with children() as start:
        sizes = [start(room_with_a_limit_of_files, folder / "r", size * MIB).result() for size in (4, 20, 64)]
    assert sizes == [8 * MIB, 20 * MIB, 32 * MIB]
    assert room_bytes(folder / "r", 4 << 40) == 15 << 40
    assert room_bytes(folder / "r", 20 << 40) == 20 << 40


def test_capacity_outlives_processes_without_a_daemon(folder: Path) -> None:
    path = make(folder / "r")
    with Region.attach(path, role="daemon") as daemon:
        resize(daemon, 32 * MIB)
    with Region.attach(path) as engine:
        assert engine.capacity_bytes == 32 * MIB
        fill(engine, 0, 5000)
        assert engine.usage().used_bytes <= 32 * MIB
    with Region.open_read_only(path) as looked:
        assert looked.capacity_bytes == 32 * MIB


@pytest.mark.parametrize("capacity", [0, 4096, 65 * MIB, 2**62])
def test_capacity_that_cannot_be_is_refused_with_those_that_can(folder: Path, capacity: int) -> None:
    path = make(folder / "r")
    with (
        Region.attach(path, role="daemon") as daemon,
        pytest.raises(GeometryError, match="Write a capacity between"),
    ):
        daemon.resize(capacity)


@pytest.fixture
def small_medium(tmp_path: Path) -> Iterator[Path]:
    """A memory file system of 32 MiB."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", str(tmp_path)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("needs the right to mount a file system")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def test_grow_without_memory_is_an_error_of_the_daemon_and_of_nobody_else(small_medium: Path) -> None:
    path = make(small_medium / "r")
    with Region.attach(path, role="daemon") as daemon, Region.attach(path) as engine:
        fill(engine, 0, 700)
        with pytest.raises(MediumUnavailable, match="no memory to grow"):
            resize(daemon, 64 * MIB)
        reached = daemon.capacity_bytes
        assert 24 * MIB < reached <= 32 * MIB
        fill(engine, 1000, 3000)
        assert engine.usage().used_bytes <= reached
        assert engine.check().ok
        resize(daemon, 16 * MIB)
        assert engine.capacity_bytes == 16 * MIB


def test_closed_host_stores_nothing_new_and_serves_on(folder: Path) -> None:
    path = make(folder / "r", hosts=2)
    with Region.attach(path, role="daemon") as daemon, Region.attach(path) as engine:
        fill(engine, 0, 10)
        daemon.set_closed(True)
        codes = engine.store(keys(0, 20), content(0, 20))
        assert (codes.present_count, set(codes.reasons[10:])) == (10, {MissReason.FENCED})
        assert served(engine, 0, 10) == 10
        with Region.attach(path, host=1) as other:
            assert served(other, 0, 10) == 10
            fill(other, 100, 10)
        daemon.set_closed(False)
        fill(engine, 0, 20)


def test_a_shared_region_shrinks_and_grows_by_shard(folder: Path) -> None:
    path = make(folder / "r", 64 * MIB, 64 * MIB, hosts=2, coherence="software")
    with (
        Region.attach(path, role="daemon") as first,
        Region.attach(path, host=1, role="daemon") as second,
    ):
        fill(first, 0, 1000)
        fill(second, 5000, 1000)
        resize(first, 32 * MIB)
        assert served(second, 5000, 1000) == 1000
        assert first.usage().hosts[0].capacity_bytes < first.usage().hosts[1].capacity_bytes
        left = served(first, 0, 1000)
        assert served(second, 0, 1000) == left
        resize(second, 32 * MIB)
        assert memory(path) <= 34 * MIB
        # Whoever adopts a shard flushes what is there, and fills no holes.
        second.adopt(0, 1)
        assert memory(path) <= 34 * MIB
        assert served(second, 0, 1000) == left
        assert first.resize(64 * MIB).done is False  # it is not its own any more
        assert first.check().ok
