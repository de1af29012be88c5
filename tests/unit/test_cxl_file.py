"""CXL memory made of files: the same rules as with hardware, for several processes at once."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
from pathlib import Path
from uuid import UUID

import pytest

from kvpool import cxl
from kvpool.cxl import ComposeError, RegionInUse, Wanted
from kvpool.cxl.file import FileBackend
from kvpool.cxl.users import refuse_participants
from kvpool.region import Geometry, Region

UUID_A = UUID("11111111-2222-4333-8444-555555555555")
UUID_B = UUID("66666666-7777-4888-9999-aaaaaaaaaaaa")
MIB = 1 << 20


@pytest.fixture
def backend(tmp_path: Path) -> FileBackend:
    return FileBackend.with_memories(tmp_path, 2, 64 * MIB)


def wanted(size: int = 32 * MIB, *memories: str, uuid: UUID = UUID_A, **rest: int) -> Wanted:
    return Wanted(uuid, memories or ("0x1",), size, **rest)


def test_memories_made_from_a_number_are_listed_in_the_order_of_their_serials(backend: FileBackend) -> None:
    FileBackend.with_memories(backend.folder, 11, 32 * MIB)
    found = backend.memories()
    assert [memory.serial for memory in found] == [hex(n) for n in range(1, 12)]
    assert [memory.size_bytes for memory in found] == [64 * MIB] * 2 + [32 * MIB] * 9


def test_compose_makes_the_region_once_and_finds_it_again(backend: FileBackend) -> None:
    made = backend.compose(wanted())
    assert made.device is not None
    _write_at_start(made.device.path, b"bytes that stay")
    again = FileBackend(backend.folder).compose(wanted())
    assert again == made
    assert backend.regions() == [made]
    assert Path(made.device.path).read_bytes()[:15] == b"bytes that stay"
    assert made.size_bytes == os.path.getsize(made.device.path) == 32 * MIB


def test_compose_rounds_the_size_up_to_what_mappings_need(backend: FileBackend) -> None:
    assert backend.compose(wanted(32 * MIB + 1)).size_bytes == 34 * MIB


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (wanted(32 * MIB, "0x9"), "there is no memory 0x9 here; there are: 0x1, 0x2"),
        (wanted(65 * MIB), "give at most 64Mi"),
        (wanted(0), "it is more than 0"),
        (wanted(MIB, granularity_bytes=300), "granularity 300"),
        (wanted(MIB, align_bytes=8192), "align 8192"),
        (wanted(MIB, "0x1", "0x1"), "different ones"),
        (wanted(MIB, uuid=UUID(int=0)), "the nil UUID stands for those that have none"),
    ],
)
def test_compose_of_what_cannot_be_is_refused_and_changes_nothing(
    backend: FileBackend, asked: Wanted, words: str
) -> None:
    with pytest.raises(ComposeError, match=words):
        backend.compose(asked)
    assert list((backend.folder / "regions").iterdir()) == []


def test_compose_with_a_memory_of_another_region_is_refused(backend: FileBackend) -> None:
    backend.compose(wanted())
    with pytest.raises(ComposeError, match=f"memory 0x1 is in region {UUID_A} already"):
        backend.compose(wanted(MIB, "0x2", "0x1", uuid=UUID_B))
    assert len(backend.regions()) == 1


def test_compose_of_a_region_with_another_geometry_is_refused(backend: FileBackend) -> None:
    backend.compose(wanted())
    for asked in (wanted(48 * MIB), wanted(32 * MIB, "0x2"), wanted(32 * MIB, granularity_bytes=512)):
        with pytest.raises(ComposeError, match="exists with another geometry"):
            backend.compose(asked)


def test_compose_with_an_ill_memory_is_refused_with_its_problem(backend: FileBackend) -> None:
    (backend.folder / "memories/0x1.json").write_text('{"sizeBytes": 1, "healthy": false, "problem": "hot"}')
    (backend.folder / "memories/0x3.json").write_text("{")
    with pytest.raises(ComposeError, match="memory 0x1 is ill: hot"):
        backend.compose(wanted())
    with pytest.raises(ComposeError, match=r"0x3\.json cannot be read"):
        backend.compose(wanted(MIB, "0x3"))


def test_region_composed_in_part_is_listed_and_completed_by_the_next_compose(backend: FileBackend) -> None:
    made = backend.compose(wanted())
    assert made.device is not None
    Path(made.device.path).unlink()
    (left,) = FileBackend(backend.folder).regions()
    assert left.device is None
    assert backend.compose(wanted()) == made


def test_compose_that_fails_takes_back_what_it_began(
    backend: FileBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: str, mode: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "chmod", fail)
    with pytest.raises(ComposeError, match="No space left on device"):
        backend.compose(wanted())
    monkeypatch.undo()
    assert backend.regions() == []
    assert list((backend.folder / "regions").iterdir()) == []


def test_resize_keeps_the_bytes_and_shrinks_only_what_is_free(backend: FileBackend) -> None:
    path = _formatted(backend, 32 * MIB)
    grown = backend.resize(UUID_A, 64 * MIB)
    assert grown.device is not None
    assert grown.device.size_bytes == os.path.getsize(path) == 64 * MIB
    assert Region.inspect(path).capacity_bytes == 32 * MIB
    assert backend.resize(UUID_A, 32 * MIB).size_bytes == 32 * MIB
    with pytest.raises(RegionInUse, match="reaches beyond 16Mi"):
        backend.resize(UUID_A, 16 * MIB)
    with pytest.raises(ComposeError, match="at most 64Mi"):
        backend.resize(UUID_A, 128 * MIB)
    with pytest.raises(ComposeError, match="does not exist"):
        backend.resize(UUID_B, MIB)
    assert Region.inspect(path).capacity_bytes == 32 * MIB


def test_destroy_refuses_a_kvpool_region_unless_told_twice(backend: FileBackend) -> None:
    path = _formatted(backend, 32 * MIB)
    with pytest.raises(RegionInUse, match="holds a kvpool region"):
        backend.destroy(UUID_A)
    assert os.path.exists(path)
    backend.destroy(UUID_A, with_blocks=True)
    assert backend.regions() == []
    backend.destroy(UUID_A)


def test_destroy_of_a_damaged_superblock_is_no_valid_one(backend: FileBackend) -> None:
    made = backend.compose(wanted())
    assert made.device is not None
    _write_at_start(made.device.path, b"something else")
    backend.destroy(UUID_A)
    assert backend.regions() == []


def test_destroy_refuses_what_a_process_maps(backend: FileBackend) -> None:
    made = backend.compose(wanted())
    assert made.device is not None
    refused = pytest.raises(RegionInUse, match=f"is mapped by process {os.getpid()}")
    with open(made.device.path, "r+b") as file, mmap.mmap(file.fileno(), MIB), refused:
        backend.destroy(UUID_A, with_blocks=True)
    backend.destroy(UUID_A)


def test_destroy_refuses_what_a_participant_uses(backend: FileBackend) -> None:
    path = _formatted(backend, 32 * MIB)
    with Region.attach(path), pytest.raises(RegionInUse):
        backend.destroy(UUID_A, with_blocks=True)
    backend.destroy(UUID_A, with_blocks=True)


def test_lock_of_a_pods_process_in_its_pools_folder_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVPOOL_RUNTIME_DIR", str(tmp_path))
    locks = [tmp_path / folder / "dev-dax0.0" for folder in ("locks", "pool-a/locks")]
    for lock in locks:
        lock.parent.mkdir(parents=True)
        lock.touch()
    monkeypatch.setattr("kvpool.region.default_lock_path", lambda path: str(locks[0]))
    region = str(tmp_path / "region")
    Region.format(region, Geometry(capacity_bytes=16 * MIB))
    refuse_participants(region)
    with Region.attach(region, lock_path=locks[1]), pytest.raises(RegionInUse):
        refuse_participants(region)


def test_poison_of_interleaved_memories_is_seen_where_the_region_has_it(backend: FileBackend) -> None:
    described = {"sizeBytes": 64 * MIB, "numaNode": 2, "poison": [[200, 100]]}
    (backend.folder / "memories/0x2.json").write_text(json.dumps(described))
    composed = backend.compose(wanted(MIB, "0x1", "0x2"))
    assert composed.device is not None
    assert composed.device.poison == ((256 + 200, 56), (768, 44))
    assert composed.device.numa_node is None


def test_many_processes_compose_the_same_region_at_once(backend: FileBackend) -> None:
    code = (
        "import sys; from uuid import UUID; from kvpool.cxl import Wanted, open_backend\n"
        f"backend = open_backend('file:{backend.folder}')\n"
        f"print(backend.compose(Wanted(UUID('{UUID_A}'), ('0x1',), 1 << 24)).device.path)"
    )
    running = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(4)
    ]
    paths = {process.communicate(timeout=60)[0].strip() for process in running}
    assert paths == {str(backend.folder / "regions" / f"{UUID_A}.dax")}
    assert len(backend.regions()) == 1


def test_open_backend_takes_a_folder_with_memories_to_make(tmp_path: Path) -> None:
    backend = cxl.open_backend(f"file:{tmp_path}?memories=2x1Gi")
    assert [memory.size_bytes for memory in backend.memories()] == [1 << 30] * 2
    assert len(cxl.open_backend(f"file:{tmp_path}").memories()) == 2


def test_open_backend_makes_the_folder_for_its_memories_but_not_its_parents(tmp_path: Path) -> None:
    assert len(cxl.open_backend(f"file:{tmp_path}/new?memories=2x64Mi").memories()) == 2
    with pytest.raises(ComposeError, match=f"Make {tmp_path}/no first"):
        cxl.open_backend(f"file:{tmp_path}/no/such?memories=2x64Mi")
    (tmp_path / "file").touch()
    with pytest.raises(ComposeError, match="File exists"):
        cxl.open_backend(f"file:{tmp_path}/file?memories=2x64Mi")


@pytest.mark.parametrize(
    "text", ["", "file:", "file:relative", "nvme:/x", "file:/tmp?memories=x", "file:/no/such"]
)
def test_open_backend_says_what_it_expects(text: str) -> None:
    with pytest.raises(ComposeError, match=r"expected sysfs|no such folder"):
        cxl.open_backend(text)


def _write_at_start(path: str, text: bytes) -> None:
    with open(path, "r+b") as file:
        file.write(text)


def _formatted(backend: FileBackend, size: int) -> str:
    composed = backend.compose(wanted(size))
    assert composed.device is not None
    Region.format(composed.device.path, Geometry(capacity_bytes=size), force=True)
    return composed.device.path


def test_what_a_killed_process_had_begun_is_gone_after_the_next_change(backend: FileBackend) -> None:
    backend.compose(wanted())
    left = [backend.folder / "regions" / name for name in (f".{UUID_B}.json.77", f"{UUID_B}.new")]
    left.append(backend.folder / "memories" / ".0x3.json.77")
    for path in left:
        path.write_text("half")
    backend.destroy(UUID_A)
    assert not any(path.exists() for path in left)
    assert len(backend.memories()) == 2
