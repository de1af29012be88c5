"""CXL memory made of files, after a crash and with files that somebody else has written: nothing is lost."""

from __future__ import annotations

import json
import os
from pathlib import Path
from uuid import UUID

import pytest

from kvpool.cxl import Composed, ComposeError, RegionInUse, Wanted
from kvpool.cxl.file import FileBackend
from kvpool.region import Geometry, Region

UUID_A = UUID("11111111-2222-4333-8444-555555555555")
UUID_B = UUID("66666666-7777-4888-9999-aaaaaaaaaaaa")
MIB = 1 << 20


@pytest.fixture
def backend(tmp_path: Path) -> FileBackend:
    return FileBackend.with_memories(tmp_path, 2, 64 * MIB)


def wanted(size: int, *memories: str, uuid: UUID = UUID_A) -> Wanted:
    return Wanted(uuid, memories or ("0x1",), size)


def bytes_of(backend: FileBackend) -> Path:
    return backend.folder / "regions" / f"{UUID_A}.dax"


def recipe_of(backend: FileBackend) -> Path:
    return backend.folder / "regions" / f"{UUID_A}.json"


def formatted(backend: FileBackend, size: int) -> Path:
    backend.compose(wanted(size))
    Region.format(str(bytes_of(backend)), Geometry(capacity_bytes=size), force=True)
    return bytes_of(backend)


def only(backend: FileBackend) -> Composed:
    (found,) = backend.regions()
    return found


# --- a file that is larger than its recipe ------------------------------------------------------------------


def test_resize_never_cuts_a_kvpool_region_that_its_recipe_does_not_know_of(backend: FileBackend) -> None:
    path = formatted(backend, 64 * MIB)
    described = json.loads(recipe_of(backend).read_text())
    recipe_of(backend).write_text(json.dumps({**described, "sizeBytes": 32 * MIB}))
    for size in (40 * MIB, 32 * MIB, 16 * MIB):
        with pytest.raises(RegionInUse, match="reaches beyond"):
            backend.resize(UUID_A, size)
    assert path.stat().st_size == 64 * MIB
    assert Region.inspect(path).capacity_bytes == 64 * MIB
    assert backend.resize(UUID_A, 64 * MIB).size_bytes == 64 * MIB
    assert Region.inspect(path).capacity_bytes == 64 * MIB


def test_resize_that_fails_keeps_file_and_recipe(
    backend: FileBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = formatted(backend, 32 * MIB)
    os.truncate(path, 48 * MIB)
    before = recipe_of(backend).read_text()

    def fail(source: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    for size in (64 * MIB, 34 * MIB):
        with pytest.raises(ComposeError, match="No space left on device"):
            backend.resize(UUID_A, size)
    monkeypatch.undo()
    assert (path.stat().st_size, recipe_of(backend).read_text()) == (48 * MIB, before)


# --- a recipe that was lost ---------------------------------------------------------------------------------


def test_bytes_without_a_recipe_are_listed_and_adopted_by_the_next_compose(backend: FileBackend) -> None:
    path = formatted(backend, 32 * MIB)
    recipe_of(backend).unlink()
    left = only(backend)
    assert (left.uuid, left.memories, left.size_bytes, left.device) == (UUID_A, (), 32 * MIB, None)
    assert "its memories are not known" in left.problem
    with pytest.raises(RegionInUse, match="reaches beyond 16Mi"):
        backend.compose(wanted(16 * MIB))
    assert not recipe_of(backend).exists()
    with pytest.raises(RegionInUse, match="holds a kvpool region"):
        backend.destroy(UUID_A)
    adopted = backend.compose(wanted(64 * MIB))
    assert adopted.device is not None
    assert path.stat().st_size == adopted.device.size_bytes == 64 * MIB
    assert Region.inspect(path).capacity_bytes == 32 * MIB
    assert only(backend) == adopted


def test_bytes_without_a_recipe_can_be_destroyed(backend: FileBackend) -> None:
    backend.compose(wanted(32 * MIB))
    recipe_of(backend).unlink()
    backend.destroy(UUID_A)
    assert backend.regions() == []
    assert not bytes_of(backend).exists()


# --- files that say something impossible --------------------------------------------------------------------

DEEP = "[" * 100_000


@pytest.mark.parametrize(
    "text",
    [
        '{"sizeBytes": 1e999}',
        '{"sizeBytes": Infinity}',
        '{"sizeBytes": true}',
        '{"sizeBytes": "67108864"}',
        '{"sizeBytes": 0}',
        '{"sizeBytes": -1}',
        '{"sizeBytes": 4611686018427387904}',
        f'{{"sizeBytes": {"9" * 5000}}}',
        DEEP,
        '{"sizeBytes": 1, "numaNode": ' + DEEP,
        "[1]",
        "\0",
        '{"sizeBytes": 1, "numaNode": 1e999}',
        '{"sizeBytes": 1, "healthy": "no"}',
        '{"sizeBytes": 1, "problem": 5}',
        '{"sizeBytes": 1, "poison": 5}',
        '{"sizeBytes": 1, "poison": [5]}',
        '{"sizeBytes": 1, "poison": [[0, 1e999]]}',
        '{"sizeBytes": 1, "poison": [[-4096, 64]]}',
        json.dumps({"sizeBytes": 1, "poison": [[0, 1]] * 1025}),
        " " * (1 << 21),
    ],
)
def test_memory_that_cannot_be_is_ill_and_not_composed(backend: FileBackend, text: str) -> None:
    (backend.folder / "memories/0x1.json").write_text(text)
    ill, well = backend.memories()
    assert (ill.serial, ill.healthy, ill.size_bytes) == ("0x1", False, 0)
    assert "0x1.json cannot be read" in ill.problem
    assert well.healthy
    with pytest.raises(ComposeError, match=r"0x1 is ill: 0x1\.json cannot be read"):
        backend.compose(wanted(MIB, "0x2", "0x1"))
    assert backend.regions() == []
    assert backend.compose(wanted(MIB, "0x2")).device is not None


def test_memory_that_is_no_file_is_ill(backend: FileBackend) -> None:
    (backend.folder / "memories/0x3.json").mkdir()
    os.mkfifo(backend.folder / "memories/0x4.json")
    assert [memory.healthy for memory in backend.memories()] == [True, True, False, False]


def test_poison_is_cut_to_its_memory_and_costs_no_time(backend: FileBackend) -> None:
    described = {"sizeBytes": 64 * MIB, "poison": [[60 * MIB, 1 << 60], [1 << 50, 4096], [128, 64], [0, 0]]}
    (backend.folder / "memories/0x1.json").write_text(json.dumps(described))
    assert backend.memories()[0].poison == ((128, 64), (60 * MIB, 4 * MIB))
    device = backend.compose(wanted(128 * MIB, "0x2", "0x1")).device
    assert device is not None
    # The first place is one of memory 0x1, and so is the last.
    assert device.poison == ((256 + 128, 64), (120 * MIB + 256, 8 * MIB - 256))


@pytest.mark.parametrize(
    "text",
    [
        '{"memories": ["0x1"], "sizeBytes": 1e999, "granularityBytes": 256}',
        '{"memories": ["0x1"], "sizeBytes": 9223372036854775808, "granularityBytes": 256}',
        '{"memories": ["0x1"], "sizeBytes": -5, "granularityBytes": 256}',
        '{"memories": ["0x1", "0x2"], "sizeBytes": 16777216, "granularityBytes": 0}',
        '{"memories": ["0x1"], "sizeBytes": 16777216, "granularityBytes": 300}',
        '{"memories": ["0x1"], "sizeBytes": 16777216, "granularityBytes": 256, "alignBytes": 3}',
        '{"memories": ["0x1", "0x1"], "sizeBytes": 16777216, "granularityBytes": 256}',
        '{"memories": 5}',
        DEEP,
        "null",
        "",
    ],
)
def test_recipe_that_cannot_be_is_listed_refused_and_in_nobodys_way(backend: FileBackend, text: str) -> None:
    path = formatted(backend, 32 * MIB)
    recipe_of(backend).write_text(text)
    bad = only(backend)
    assert (bad.uuid, bad.size_bytes, bad.device) == (UUID_A, 32 * MIB, None)
    assert f"{UUID_A}.json cannot be read" in bad.problem
    for act in (lambda: backend.compose(wanted(32 * MIB)), lambda: backend.resize(UUID_A, 64 * MIB)):
        with pytest.raises(ComposeError, match="cannot be read"):
            act()
    if "0x2" not in bad.memories:
        assert backend.compose(wanted(MIB, "0x2", uuid=UUID_B)).device is not None
    with pytest.raises(RegionInUse, match="holds a kvpool region"):
        backend.destroy(UUID_A)
    assert (path.stat().st_size, recipe_of(backend).read_text()) == (32 * MIB, text)
    backend.destroy(UUID_A, with_blocks=True)
    assert UUID_A not in [region.uuid for region in backend.regions()]
    assert backend.compose(wanted(32 * MIB)).device is not None


def test_memories_that_a_bad_recipe_names_are_not_given_away(backend: FileBackend) -> None:
    backend.compose(wanted(MIB))
    recipe_of(backend).write_text('{"memories": ["0x1"], "sizeBytes": -5}')
    with pytest.raises(ComposeError, match=f"memory 0x1 is in region {UUID_A} already"):
        backend.compose(wanted(MIB, uuid=UUID_B))


def test_folders_and_names_that_are_not_ours_are_in_nobodys_way(backend: FileBackend) -> None:
    made = backend.compose(wanted(MIB))
    regions = backend.folder / "regions"
    (regions / ".snapshot").mkdir()
    (regions / "notes.json").write_text("{}")
    (regions / f"{str(UUID_B).upper()}.dax").write_text("")
    (regions / f"{UUID_B}.json").mkdir()
    assert [(region.uuid, bool(region.problem)) for region in backend.regions()] == [
        (UUID_A, False),
        (UUID_B, True),
    ]
    with pytest.raises(ComposeError, match="is a folder"):
        backend.destroy(UUID_B)
    with pytest.raises(ComposeError, match="cannot be read"):
        backend.compose(wanted(MIB, "0x2", uuid=UUID_B))
    assert backend.compose(wanted(MIB)) == made


@pytest.mark.parametrize("size", [1 << 62, 1 << 63, 1 << 80])
def test_sizes_that_no_file_has_are_refused_and_leave_nothing(backend: FileBackend, size: int) -> None:
    (backend.folder / "memories/0x1.json").write_text(f'{{"sizeBytes": {(1 << 62) - 1}}}')
    (backend.folder / "memories/0x2.json").write_text(f'{{"sizeBytes": {(1 << 62) - 1}}}')
    with pytest.raises(ComposeError):
        backend.compose(wanted(size, "0x1", "0x2"))
    assert list((backend.folder / "regions").iterdir()) == []
    with pytest.raises(ComposeError):
        FileBackend.with_memories(backend.folder, 3, size)
    assert len(backend.memories()) == 2


# --- something else in the place of a region's bytes --------------------------------------------------------


@pytest.mark.parametrize("kind", ["link", "dangling", "folder"])
def test_bytes_that_are_no_file_are_refused_and_not_followed(backend: FileBackend, kind: str) -> None:
    target, path = backend.folder / "target", bytes_of(backend)
    backend.compose(wanted(MIB))
    path.unlink()
    if kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(target)
    if kind == "link":
        target.write_bytes(b"x" * 4096)
    for lost in (False, True):
        if lost:
            recipe_of(backend).unlink()
        for act in (
            lambda: backend.compose(wanted(MIB)),
            lambda: backend.destroy(UUID_A, with_blocks=True),
        ):
            with pytest.raises(ComposeError, match="no regular file"):
                act()
        assert "no regular file" in only(backend).problem
        assert only(backend).memories == (() if lost else ("0x1",))
        assert recipe_of(backend).exists() != lost
    assert target.exists() == (kind == "link")
    assert kind != "link" or target.read_bytes() == b"x" * 4096
