"""CXL memory made of files in a folder, for machines that have none: the same rules, without the hardware.

    memories/0xc1.json       a memory: {"sizeBytes": 1073741824, "numaNode": 0, "healthy": true,
                             "problem": "", "poison": [[4096, 64]]}; all but the size may be left out
    regions/UUID.json        how a region is composed; written first and removed last
    regions/UUID.dax         its bytes, sparse; never smaller than its recipe says once that is written
    lock                     held by whoever changes something

Several processes, and several machines, may use one folder: they agree on a region by its UUID.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

from kvpool.cxl.backend import GRANULARITY_BYTES, Composed, ComposeError, Device, Memory, Wanted
from kvpool.cxl.described import SIZE_END, Recipe, memory_from, poison_in, serials_in
from kvpool.cxl.refusals import chosen, fitting_size, refuse_other_geometry, refuse_taken
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
        if not 0 < size_bytes < SIZE_END:
            raise ComposeError(
                f"a memory of {size_bytes} bytes cannot be; it has 1 to 2^62. Nothing was made."
            )
        with backend._changing():
            for number in range(1, count + 1):
                path = backend._memory_path(hex(number))
                if not path.exists():
                    _write(path, {"sizeBytes": size_bytes})
        return backend

    # -- the protocol --------------------------------------------------------------------------------------

    def memories(self) -> list[Memory]:
        paths = sorted((self.folder / "memories").glob("*.json"), key=lambda path: _order(path.stem))
        return [memory_from(path, f"mem{number}") for number, path in enumerate(paths)]

    def regions(self) -> list[Composed]:
        memories = self.memories()
        stems = {
            path.stem for kind in ("json", "dax") for path in (self.folder / "regions").glob(f"*.{kind}")
        }
        found = (self._found(uuid, memories) for uuid in sorted(_uuids(stems)))
        return [region for region in found if region is not None]

    def compose(self, wanted: Wanted) -> Composed:
        with self._changing():
            memories = self.memories()
            recipe = _recipe_for(wanted, memories)
            there = self._recipe(wanted.uuid)
            size = self._bytes_size(wanted.uuid)
            if there is not None:
                refuse_other_geometry(wanted.uuid, recipe.geometry(), there.geometry())
            else:
                refuse_taken(wanted, self.regions())
                if size is not None and recipe.size_bytes < size:  # its recipe was lost
                    refuse_cut(wanted.uuid, str(self._bytes_path(wanted.uuid)), recipe.size_bytes)
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
            there = self._recipe(uuid)
            if there is None:
                raise ComposeError(f"region {uuid} does not exist; compose it first. Nothing was changed.")
            asked = Wanted(uuid, there.memories, size_bytes, there.granularity_bytes, there.align_bytes)
            recipe = _recipe_for(asked, memories)
            path, size = self._bytes_path(uuid), self._bytes_size(uuid)
            # The file's own size counts: a crash may have left it larger than its recipe.
            if size is not None and recipe.size_bytes < max(size, there.size_bytes):
                refuse_cut(uuid, str(path), recipe.size_bytes)
                refuse_mapped(str(path))
            try:
                self._make_bytes(recipe)
                _write(self._recipe_path(uuid), recipe.to_object())
                _set_size(path, recipe.size_bytes)
            except (OSError, ComposeError) as error:
                with contextlib.suppress(OSError):
                    _set_size(path, there.size_bytes if size is None else size)
                with contextlib.suppress(ComposeError):
                    _write(self._recipe_path(uuid), there.to_object())
                raise ComposeError(f"region {uuid}: {error}. It keeps its size.") from None
            return self._composed(recipe, memories)

    def destroy(self, uuid: UUID, *, with_blocks: bool = False) -> None:
        with self._changing():
            path = self._bytes_path(uuid)
            if self._recipe_path(uuid).is_dir():
                raise ComposeError(f"{self._recipe_path(uuid)} is a folder; remove it. Nothing was changed.")
            if self._bytes_size(uuid) is not None:
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
            lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o660)
        except OSError as error:
            raise ComposeError(f"{self.folder}: {error}. Nothing was changed.") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            # What a process that was killed had begun: nobody else writes now.
            for pattern in ("memories/.*", "regions/.*", "regions/*.new"):
                for begun in self.folder.glob(pattern):
                    if begun.is_symlink() or begun.is_file():
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

    def _recipe(self, uuid: UUID) -> Recipe | None:
        path = self._recipe_path(uuid)
        try:
            return Recipe.from_file(uuid, path)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise ComposeError(
                f"{path} cannot be read ({error}): it says how a region is composed. Nothing was changed. "
                "Write it again; or destroy the region, if nobody needs its bytes."
            ) from None

    def _bytes_size(self, uuid: UUID) -> int | None:
        """The size of a region's file; None: there is none. Raises: ComposeError for anything but a file."""
        path = self._bytes_path(uuid)
        try:
            found = os.lstat(path)
        except FileNotFoundError:
            return None
        if not stat.S_ISREG(found.st_mode):
            raise ComposeError(
                f"{path} is no regular file, as a region's bytes are. Nothing was changed. Links are not "
                "followed: remove what is there, or put the file itself in its place."
            )
        return found.st_size

    def _make_bytes(self, recipe: Recipe) -> None:
        """A file of at least the recipe's size; a larger one stays as it is."""
        path, size = self._bytes_path(recipe.uuid), self._bytes_size(recipe.uuid)
        if size is not None:
            if size < recipe.size_bytes:
                _set_size(path, recipe.size_bytes)
            return
        began = path.with_suffix(".new")
        try:
            with open(began, "xb") as file:
                file.truncate(recipe.size_bytes)
            os.chmod(began, 0o660)
            os.replace(began, path)
        except OSError:
            began.unlink(missing_ok=True)
            raise

    def _found(self, uuid: UUID, memories: list[Memory]) -> Composed | None:
        """A region as it is, also one that cannot be used; None: it has just gone."""
        size: int | None = None
        try:
            size = self._bytes_size(uuid)
            recipe = self._recipe(uuid)
            if recipe is not None:
                return self._composed(recipe, memories)
            if self._bytes_size(uuid) is None or self._recipe_path(uuid).exists():
                return None
            problem = (
                f"{uuid}.json is missing, so its memories are not known and count as free: compose it with "
                "the same memories in the same order and granularity, or destroy it"
            )
        except ComposeError as error:
            problem = str(error)
        serials = serials_in(self._recipe_path(uuid))
        return Composed(uuid, serials, size or 0, GRANULARITY_BYTES, None, problem)

    def _composed(self, recipe: Recipe, memories: list[Memory]) -> Composed:
        path = self._bytes_path(recipe.uuid)
        device = None
        if path.exists():
            by_serial = {memory.serial: memory for memory in memories}
            parts = [by_serial[serial] for serial in recipe.memories if serial in by_serial]
            nodes = {memory.numa_node for memory in parts}
            poison = poison_in(recipe, parts) if len(parts) == len(recipe.memories) else ()
            node = nodes.pop() if len(nodes) == 1 else None
            device = Device(str(path), recipe.size_bytes, recipe.align_bytes, node, poison)
        return Composed(recipe.uuid, recipe.memories, recipe.size_bytes, recipe.granularity_bytes, device)


def _recipe_for(wanted: Wanted, memories: list[Memory]) -> Recipe:
    """The recipe for what is wanted. Raises: ComposeError when it cannot be had."""
    parts = chosen(wanted, memories)
    step = math.lcm(wanted.align_bytes, wanted.granularity_bytes * len(parts))
    size = fitting_size(wanted, parts, step)
    if size >= SIZE_END:
        raise ComposeError(f"region {wanted.uuid}: no file has {size} bytes. Nothing was changed.")
    return Recipe(wanted.uuid, wanted.memories, size, wanted.granularity_bytes, wanted.align_bytes)


def _uuids(stems: set[str]) -> list[UUID]:
    """Those of the names that are a region's, written as this backend writes them."""
    found = []
    for stem in stems:
        with contextlib.suppress(ValueError):
            if str(UUID(stem)) == stem:
                found.append(UUID(stem))
    return found


def _set_size(path: Path, size_bytes: int) -> None:
    """Of the file itself, never of what a link leads to."""
    fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        os.ftruncate(fd, size_bytes)
    finally:
        os.close(fd)


def _order(serial: str) -> tuple[int, str]:
    try:
        return int(serial, 0), serial
    except ValueError:
        return 1 << 64, serial


def _write(path: Path, described: dict[str, Any]) -> None:
    """Written beside and renamed: readers never see half of it."""
    began = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with began.open("w") as file:
            file.write(json.dumps(described) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(began, path)
    except OSError as error:
        began.unlink(missing_ok=True)
        raise ComposeError(f"{path}: {error}. Nothing was changed.") from None
