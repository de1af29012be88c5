"""CXL memory made of files in a folder, for machines that have none: the same rules, without the hardware.

    memories/0xc1.json       a memory: {"sizeBytes": 1073741824, "numaNode": 0, "healthy": true,
                             "problem": "", "poison": [[4096, 64]]}; all but the size may be left out
    regions/UUID.json        how a region is composed; written first and removed last
    regions/UUID.dax         its bytes, sparse
    lock                     held by whoever changes something

Several processes, and several machines, may use one folder: they agree on a region by its UUID.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

from kvpool.cxl.backend import ALIGN_BYTES, Composed, ComposeError, Device, Memory, Wanted
from kvpool.cxl.refusals import Geometry, chosen, fitting_size, refuse_other_geometry, refuse_taken
from kvpool.cxl.users import refuse_blocks, refuse_cut, refuse_mapped


class FileBackend:
    """Memories and regions as files in `folder`, which must exist."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise ComposeError(
                f"{folder}: no such folder; it holds the file-backed CXL memories. "
                f"'file:{folder}?memories=2x1Gi' makes it with two memories of 1 GiB, 0x1 and 0x2."
            )

    @classmethod
    def with_memories(cls, folder: str | Path, count: int, size_bytes: int) -> FileBackend:
        """The backend in `folder`, with `count` memories of that size; what exists stays as it is.

        Raises:  ComposeError when the folder can be neither found nor made.
        """
        try:
            Path(folder).mkdir(exist_ok=True)
        except FileNotFoundError:
            raise ComposeError(
                f"{folder}: no such folder, nor the one around it. Make {Path(folder).parent} first."
            ) from None
        except OSError as error:
            raise ComposeError(f"{folder}: {error.strerror}; it is to hold the CXL memories.") from None
        backend = cls(folder)
        with backend._changing():
            for number in range(1, count + 1):
                path = backend._memory_path(hex(number))
                if not path.exists():
                    _write(path, {"sizeBytes": size_bytes})
        return backend

    # -- the protocol --------------------------------------------------------------------------------------

    def memories(self) -> list[Memory]:
        paths = sorted((self.folder / "memories").glob("*.json"), key=lambda path: _order(path.stem))
        return [_memory(path, f"mem{number}") for number, path in enumerate(paths)]

    def regions(self) -> list[Composed]:
        memories, found = self.memories(), []
        for path in sorted((self.folder / "regions").glob("*.json")):
            recipe = self._recipe(path)
            if recipe is not None:
                found.append(self._composed(recipe, memories))
        return found

    def compose(self, wanted: Wanted) -> Composed:
        with self._changing():
            memories = self.memories()
            recipe = _recipe_for(wanted, memories)
            there = self._recipe(self._recipe_path(wanted.uuid))
            if there is not None:
                refuse_other_geometry(wanted.uuid, recipe.geometry(), there.geometry())
            else:
                refuse_taken(wanted, self.regions())
                _write(self._recipe_path(wanted.uuid), recipe.to_object())
            try:
                self._make_bytes(there or recipe)
            except OSError as error:
                if there is None:
                    self._recipe_path(wanted.uuid).unlink(missing_ok=True)
                raise ComposeError(f"region {wanted.uuid}: {error}. What was begun was taken back.") from None
            return self._composed(there or recipe, memories)

    def resize(self, uuid: UUID, size_bytes: int) -> Composed:
        with self._changing():
            memories = self.memories()
            there = self._recipe(self._recipe_path(uuid))
            if there is None:
                raise ComposeError(f"region {uuid} does not exist; compose it first. Nothing was changed.")
            asked = Wanted(uuid, there.memories, size_bytes, there.granularity_bytes, there.align_bytes)
            recipe = _recipe_for(asked, memories)
            path = self._bytes_path(uuid)
            if recipe.size_bytes < there.size_bytes and path.exists():
                refuse_cut(uuid, str(path), recipe.size_bytes)
                refuse_mapped(str(path))
            try:
                if path.exists():
                    os.truncate(path, recipe.size_bytes)
                _write(self._recipe_path(uuid), recipe.to_object())
                self._make_bytes(recipe)
            except OSError as error:
                with contextlib.suppress(OSError):
                    os.truncate(path, there.size_bytes)
                raise ComposeError(f"region {uuid}: {error}. It keeps its size.") from None
            return self._composed(recipe, memories)

    def destroy(self, uuid: UUID, *, with_blocks: bool = False) -> None:
        with self._changing():
            path = self._bytes_path(uuid)
            if path.exists():
                refuse_mapped(str(path))
                if not with_blocks:
                    refuse_blocks(uuid, str(path))
                path.unlink()
            self._recipe_path(uuid).unlink(missing_ok=True)

    # -- files ---------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """One process at a time changes the folder."""
        try:
            for name in ("memories", "regions"):
                (self.folder / name).mkdir(exist_ok=True)
            lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o660)
        except OSError as error:
            raise ComposeError(f"{self.folder}: {error}. Nothing was changed.") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            # What a process that was killed had begun: nobody else writes now.
            for pattern in ("memories/.*", "regions/.*", "regions/*.new"):
                for begun in self.folder.glob(pattern):
                    begun.unlink(missing_ok=True)
            yield
        finally:
            os.close(lock)

    def _memory_path(self, serial: str) -> Path:
        return self.folder / "memories" / f"{serial}.json"

    def _recipe_path(self, uuid: UUID) -> Path:
        return self.folder / "regions" / f"{uuid}.json"

    def _bytes_path(self, uuid: UUID) -> Path:
        return self.folder / "regions" / f"{uuid}.dax"

    def _recipe(self, path: Path) -> _Recipe | None:
        try:
            return _Recipe.from_object(UUID(path.stem), json.loads(path.read_text()))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ComposeError(
                f"{path} cannot be read ({error!r}): it says how a region is composed. Nothing was changed. "
                "Write it again, or remove it with the .dax file beside it if nobody needs its bytes."
            ) from None

    def _make_bytes(self, recipe: _Recipe) -> None:
        path = self._bytes_path(recipe.uuid)
        if path.exists() and path.stat().st_size >= recipe.size_bytes:
            return
        if path.exists():
            os.truncate(path, recipe.size_bytes)
            return
        began = path.with_suffix(".new")
        try:
            with open(began, "wb") as file:
                file.truncate(recipe.size_bytes)
            os.chmod(began, 0o660)
            os.replace(began, path)
        except OSError:
            began.unlink(missing_ok=True)
            raise

    def _composed(self, recipe: _Recipe, memories: list[Memory]) -> Composed:
        path = self._bytes_path(recipe.uuid)
        device = None
        if path.exists():
            by_serial = {memory.serial: memory for memory in memories}
            parts = [by_serial[serial] for serial in recipe.memories if serial in by_serial]
            nodes = {memory.numa_node for memory in parts}
            poison = _poison(recipe, parts) if len(parts) == len(recipe.memories) else ()
            node = nodes.pop() if len(nodes) == 1 else None
            device = Device(str(path), recipe.size_bytes, recipe.align_bytes, node, poison)
        return Composed(recipe.uuid, recipe.memories, recipe.size_bytes, recipe.granularity_bytes, device)


@dataclass(frozen=True, slots=True)
class _Recipe:
    """How a region is composed."""

    uuid: UUID
    memories: tuple[str, ...]
    size_bytes: int
    granularity_bytes: int
    align_bytes: int

    def to_object(self) -> dict[str, Any]:
        return {
            "memories": list(self.memories),
            "sizeBytes": self.size_bytes,
            "granularityBytes": self.granularity_bytes,
            "alignBytes": self.align_bytes,
        }

    def geometry(self) -> Geometry:
        return Geometry(self.memories, self.size_bytes, self.granularity_bytes, self.align_bytes)

    @classmethod
    def from_object(cls, uuid: UUID, d: dict[str, Any]) -> _Recipe:
        return cls(
            uuid,
            tuple(str(serial) for serial in d["memories"]),
            int(d["sizeBytes"]),
            int(d["granularityBytes"]),
            int(d.get("alignBytes", ALIGN_BYTES)),
        )


def _recipe_for(wanted: Wanted, memories: list[Memory]) -> _Recipe:
    """The recipe for what is wanted. Raises: ComposeError when it cannot be had."""
    parts = chosen(wanted, memories)
    step = math.lcm(wanted.align_bytes, wanted.granularity_bytes * len(parts))
    size = fitting_size(wanted, parts, step)
    return _Recipe(wanted.uuid, wanted.memories, size, wanted.granularity_bytes, wanted.align_bytes)


def _poison(recipe: _Recipe, parts: list[Memory]) -> tuple[tuple[int, int], ...]:
    """The memories' bad ranges as ranges of the region, through the interleaving."""
    granule, ways, found = recipe.granularity_bytes, len(parts), []
    for way, memory in enumerate(parts):
        for first, length in memory.poison:
            at, end = first, first + length
            while at < end:
                step = end - at if ways == 1 else min(granule - at % granule, end - at)
                place = at if ways == 1 else (at // granule * ways + way) * granule + at % granule
                if place < recipe.size_bytes:
                    found.append((place, min(step, recipe.size_bytes - place)))
                at += step
    return tuple(sorted(found))


def _memory(path: Path, name: str) -> Memory:
    """What the file of a memory says; a file that cannot be used is an ill memory, not an error."""
    try:
        d = json.loads(path.read_text())
        node = d.get("numaNode")
        return Memory(
            serial=path.stem,
            name=name,
            size_bytes=int(d["sizeBytes"]),
            numa_node=None if node is None else int(node),
            healthy=bool(d.get("healthy", True)),
            problem=str(d.get("problem", "")),
            poison=tuple((int(first), int(length)) for first, length in d.get("poison", ())),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return Memory(path.stem, name, 0, healthy=False, problem=f"{path.name} cannot be read: {error!r}")


def _order(serial: str) -> tuple[int, str]:
    try:
        return int(serial, 0), serial
    except ValueError:
        return 1 << 64, serial


def _write(path: Path, described: dict[str, Any]) -> None:
    """Written beside and renamed: readers never see half of it."""
    began = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        began.write_text(json.dumps(described) + "\n")
        os.replace(began, path)
    except OSError as error:
        began.unlink(missing_ok=True)
        raise ComposeError(f"{path}: {error}. Nothing was changed.") from None
