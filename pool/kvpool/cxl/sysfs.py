"""This machine's CXL memory: regions through the kernel's sysfs, namespaces through ndctl."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from typing import Any
from uuid import UUID

from kvpool.cxl.backend import Composed, ComposeError, Device, Memory, Wanted
from kvpool.cxl.decoders import DEVICES, NO_UUID, SIZE_STEP_BYTES, Decoders, KernelRegion
from kvpool.cxl.kernel import Kernel
from kvpool.cxl.namespaces import OVERHEAD_BYTES, Namespaces, label_of
from kvpool.cxl.refusals import Geometry, chosen, fitting_size, refuse_other_geometry, refuse_taken
from kvpool.cxl.users import refuse_blocks, refuse_cut, refuse_mapped
from kvpool.paths import runtime_dir

_BROKEN = ("hw_replacement_needed", "media_not_ready", "media_persistence_lost", "media_data_lost")


class SysfsBackend:
    """The CXL memories that the kernel of this machine sees. Needs root."""

    def __init__(self, kernel: Kernel | None = None) -> None:
        self._kernel = kernel or Kernel()
        self._decoders = Decoders(self._kernel)
        self._namespaces = Namespaces(self._kernel)

    # -- the protocol --------------------------------------------------------------------------------------

    def memories(self) -> list[Memory]:
        names = [name for name in self._kernel.names(DEVICES) if name.startswith("mem")]
        described = self._described() if names else {}
        found = [self._memory(name, described.get(name, {})) for name in names]
        return sorted(found, key=lambda memory: (int(memory.serial, 0), memory.name))

    def regions(self) -> list[Composed]:
        return [self._composed(region) for region in self._decoders.regions()]

    def compose(self, wanted: Wanted) -> Composed:
        with self._changing():
            memories = self.memories()
            parts = chosen(wanted, memories)
            for memory in parts:
                if memory.kind != "pmem":
                    raise ComposeError(
                        f"region {wanted.uuid}: memory {memory.serial} is volatile, and volatile regions "
                        "have no UUID to agree on. Nothing was changed. Choose persistent memories."
                    )
            size = fitting_size(wanted, parts, SIZE_STEP_BYTES * len(parts))
            there = self._named(wanted.uuid)
            if there is None:
                refuse_taken(wanted, self.regions())
                return self._make(wanted, parts, size)
            if there.complete:
                asked = Geometry(wanted.memories, size, wanted.granularity_bytes, wanted.align_bytes)
                refuse_other_geometry(wanted.uuid, asked, self._geometry(there))
                with self._explained(wanted.uuid):
                    self._make_device(there, wanted.align_bytes)
                return self._composed(there)
            # A crash left it in part: nobody has used it yet, and making it again touches no bytes.
            with self._explained(wanted.uuid):
                self._decoders.remove(there)
            return self._make(wanted, parts, size)

    def resize(self, uuid: UUID, size_bytes: int) -> Composed:
        with self._changing():
            there = self._named(uuid)
            if there is None or not there.complete:
                raise ComposeError(f"region {uuid} does not exist; compose it first. Nothing was changed.")
            old = self._geometry(there)
            align = old.align_bytes or 2 << 20
            wanted = Wanted(uuid, old.memories, size_bytes, old.granularity_bytes, align)
            parts = chosen(wanted, self.memories())
            size = fitting_size(wanted, parts, SIZE_STEP_BYTES * len(parts))
            if size == there.size_bytes:
                return self._composed(there)
            device = self._namespaces.device(there.name)
            if device is not None:
                refuse_mapped(device.path)
                if size < there.size_bytes:
                    refuse_cut(uuid, device.path, size - OVERHEAD_BYTES)
            # The kernel cannot change a region that has a namespace. Making both again leaves the bytes as
            # they are: the same memories in the same order, and page structures that lie elsewhere.
            before = Wanted(uuid, old.memories, there.size_bytes, old.granularity_bytes, align)
            with self._explained(uuid):
                self._take_down(there)
            try:
                return self._make(wanted, parts, size)
            except ComposeError as error:
                self._make(before, parts, there.size_bytes)
                raise ComposeError(f"{error} The region has its old size again.") from None

    def destroy(self, uuid: UUID, *, with_blocks: bool = False) -> None:
        with self._changing():
            for there in [region for region in self._decoders.regions() if region.uuid == uuid]:
                device = self._namespaces.device(there.name)
                if device is not None:
                    refuse_mapped(device.path)
                    if not with_blocks:
                        refuse_blocks(uuid, device.path)
                with self._explained(uuid):
                    self._take_down(there)

    # -- regions -------------------------------------------------------------------------------------------

    def _make(self, wanted: Wanted, parts: list[Memory], size_bytes: int) -> Composed:
        """The region and its device, new; when one fails, neither is there."""
        with self._explained(wanted.uuid):
            region = self._decoders.make(wanted, parts, size_bytes)
            try:
                self._make_device(region, wanted.align_bytes)
            except BaseException:
                self._decoders.remove_quietly(region)
                raise
        return self._composed(region)

    def _make_device(self, region: KernelRegion, align_bytes: int) -> Device:
        label = label_of(region.ways, region.granularity_bytes, region.size_bytes)
        return self._namespaces.make(region.name, region.uuid, label, align_bytes)

    def _take_down(self, region: KernelRegion) -> None:
        if region.bound:
            self._namespaces.remove(region.name)
        self._decoders.remove(region)

    def _named(self, uuid: UUID) -> KernelRegion | None:
        if uuid == NO_UUID:
            raise ComposeError("a region needs a UUID of its own; 0 stands for those that have none yet.")
        return next((region for region in self._decoders.regions() if region.uuid == uuid), None)

    def _composed(self, region: KernelRegion) -> Composed:
        geometry = self._geometry(region)
        device = self._namespaces.device(region.name) if region.complete else None
        return Composed(region.uuid, geometry.memories, region.size_bytes, region.granularity_bytes, device)

    def _geometry(self, region: KernelRegion) -> Geometry:
        names = [self._decoders.memory_of(decoder) for decoder in region.decoders]
        serials = tuple(self._kernel.text(f"{DEVICES}/{name}/serial") for name in names)
        device = self._namespaces.device(region.name)
        align = device.align_bytes if device else None
        return Geometry(serials, region.size_bytes, region.granularity_bytes, align)

    # -- memories ------------------------------------------------------------------------------------------

    def _memory(self, name: str, described: dict[str, Any]) -> Memory:
        path = f"{DEVICES}/{name}"
        pmem, ram = (self._kernel.number(f"{path}/{kind}/size") for kind in ("pmem", "ram"))
        node = self._kernel.number(f"{path}/numa_node", -1)
        problem = ""
        if not self._kernel.target(f"{path}/driver"):
            problem = "its driver cxl_mem is not bound; dmesg says why"
        health = described.get("health", {})
        broken = [word for word in _BROKEN if health.get(word)]
        if broken:
            problem = f"it says {', '.join(broken)}"
        poison = [(int(row["offset"]), int(row["length"])) for row in described.get("media_errors", ())]
        return Memory(
            serial=self._kernel.text(f"{path}/serial") or "0x0",
            name=name,
            size_bytes=pmem or ram,
            kind="pmem" if pmem else "ram",
            numa_node=None if node < 0 else node,
            healthy=not problem,
            problem=problem,
            poison=tuple(poison),
        )

    def _described(self) -> dict[str, dict[str, Any]]:
        """What the memories say of themselves, by name: health, and poison where the kernel can list it.

        Nothing where there is no `cxl` tool; a memory is then taken for healthy.
        """
        can_list_poison = any(
            self._kernel.has(f"{DEVICES}/{name}/trigger_poison_list") for name in self._kernel.names(DEVICES)
        )
        for options in (["-L"], []) if can_list_poison else ([],):  # -L came later
            with contextlib.suppress(ComposeError, ValueError, KeyError, TypeError):
                rows = json.loads(self._kernel.run("cxl", "list", "-M", "-H", *options) or "[]")
                return {str(row["memdev"]): row for row in rows}
        return {}

    # -- one at a time -------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """One process of this machine at a time changes regions."""
        if not self._kernel.has(DEVICES):
            raise ComposeError(
                "this machine has no CXL bus (/sys/bus/cxl). Load the modules cxl_acpi, cxl_pci, cxl_mem and "
                "cxl_pmem, or use the backend file:/FOLDER."
            )
        folder = runtime_dir()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = os.open(folder / "cxl.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ComposeError(
                f"{folder}/cxl.lock: {error.strerror}. Composing regions needs root."
            ) from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)

    @contextlib.contextmanager
    def _explained(self, uuid: UUID) -> Iterator[None]:
        """An error of the kernel as one that names the region."""
        try:
            yield
        except PermissionError as error:
            raise ComposeError(f"region {uuid}: {error.strerror}. Composing regions needs root.") from None
        except OSError as error:
            raise ComposeError(
                f"region {uuid}: the kernel refused it: {error.strerror}. dmesg may say more."
            ) from None
