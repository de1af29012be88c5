"""The namespace that makes a region of persistent memory a DAX device: found, made, removed.

Its label lies in the memory's label storage (LSA), its info block in the first 2 MiB of the region, which the
device leaves out. Hosts that share a memory may have a label storage each: all make the namespace with the
same UUID, mode and place of its page structures (`-M mem`: in each host's own RAM, never in shared memory),
so the device begins at the same byte everywhere, and making it writes the info block and nothing else.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from typing import Any
from uuid import UUID, uuid5

from kvpool.cxl.backend import ComposeError, Device
from kvpool.cxl.kernel import Kernel
from kvpool.quantity import format_quantity

ND = "bus/nd/devices"
DAX = "bus/dax/devices"
NAME_PREFIX = "kvpool"  # of the label's name, which says the geometry: kvpool 1x256 512Mi
SECTOR_BYTES = 512  # of the kernel's lists of bad blocks
OVERHEAD_BYTES = 2 << 20  # at the head of the region, for the info block
_PROBE_S = 20.0


@dataclass(frozen=True, slots=True)
class Namespace:
    """A namespace of a region, as sysfs has it."""

    name: str  # namespace0.0
    uuid: str
    label: str  # its name in the label
    size_bytes: int
    mode: str  # dax, memory (fsdax), raw, safe (btt)


def namespace_uuid(region: UUID) -> UUID:
    """The namespace's UUID, from the region's: every host that makes it anew makes the same one."""
    return uuid5(region, "kvpool namespace")


def label_of(ways: int, granularity_bytes: int, size_bytes: int) -> str:
    """What the label remembers of the region's geometry when the machine is off."""
    return f"{NAME_PREFIX} {ways}x{granularity_bytes} {format_quantity(size_bytes)}"


class Namespaces:
    """The namespaces and DAX devices of the regions of this machine, by the region's name (region0)."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel

    def found(self, region: str) -> list[Namespace]:
        """Those that take space, once the kernel has looked at all labels."""
        number = region.removeprefix("region")
        self._settle(region)
        rows = []
        for name in self._kernel.names(ND):
            if name.startswith(f"namespace{number}."):
                path = f"{ND}/{name}"
                size = self._kernel.number(f"{path}/size")
                if size:
                    uuid, label, mode = (
                        self._kernel.text(f"{path}/{k}") for k in ("uuid", "alt_name", "mode")
                    )
                    rows.append(Namespace(name, uuid, label, size, mode))
        return rows

    def device(self, region: str, *, wait_s: float = 0.0) -> Device | None:
        """The region's DAX device; None when there is none."""
        number = region.removeprefix("region")
        found: list[str] = []

        def appeared() -> bool:
            found[:] = [name for name in self._kernel.names(DAX) if name.startswith(f"dax{number}.")]
            return any(self._kernel.number(f"{DAX}/{name}/size") for name in found)

        if not self._kernel.wait(appeared, wait_s):
            return None
        path = f"{DAX}/{found[0]}"
        node = self._kernel.number(f"{path}/numa_node", -1)
        return Device(
            path=self._kernel.device(found[0]),
            size_bytes=self._kernel.number(f"{path}/size"),
            align_bytes=self._kernel.number(f"{path}/align", 2 << 20),
            numa_node=None if node < 0 else node,
            poison=self._poison(region, path),
        )

    def make(self, region: str, uuid: UUID, label: str, align_bytes: int) -> Device:
        """The region's DAX device, made where it is not there yet.

        Raises:  ComposeError, also when what lies in the region is not the one namespace that is wanted.
        """
        if not self._kernel.wait(lambda: self._kernel.has(f"{ND}/{region}"), _PROBE_S):
            raise ComposeError(
                f"region {uuid}: the kernel made no NVDIMM region of {region}. The modules cxl_pmem, "
                "libnvdimm and nd_pmem are needed; dmesg may say more."
            )
        there = self.found(region)
        if len(there) > 1:
            listed = ", ".join(f"{n.name} ({n.mode}, {format_quantity(n.size_bytes)})" for n in there)
            raise ComposeError(
                f"region {uuid}: it has {len(there)} namespaces, and kvpool's takes a region by itself: "
                f"{listed}. "
                "Nothing was changed. Remove those that nobody needs: 'ndctl destroy-namespace -f NAME'."
            )
        if there:
            self._check(uuid, there[0], label)
            device = self.device(region, wait_s=1.0)
            if device is not None:
                return device
            if there[0].uuid != str(namespace_uuid(uuid)):
                raise ComposeError(
                    f"region {uuid}: {there[0].name} has no device, and is not kvpool's own. Nothing "
                    f"was changed. Enable it with 'ndctl enable-namespace {there[0].name}', or remove it."
                )
            # Ours, but its info block is damaged: it says nothing that we do not know.
            self._kernel.run("ndctl", "destroy-namespace", "-f", there[0].name)
        else:
            self._refuse_labels(region, uuid, label)
        self._create(region, uuid, label, align_bytes)
        device = self.device(region, wait_s=_PROBE_S)
        if device is None:
            raise ComposeError(
                f"region {uuid}: its namespace is there, but no DAX device came of it. The modules "
                "device_dax and dax_pmem are needed; dmesg may say more."
            )
        return device

    def remove(self, region: str) -> None:
        """Every namespace of the region. Raises: ComposeError."""
        for namespace in self.found(region):
            self._kernel.run("ndctl", "destroy-namespace", "-f", namespace.name)

    def _create(self, region: str, uuid: UUID, label: str, align_bytes: int) -> None:
        command = ["ndctl", "create-namespace", "-r", region, "-m", "devdax", "-M", "mem"]
        options = ["-a", str(align_bytes), "-u", str(namespace_uuid(uuid)), "-n", label]
        self._kernel.run(*command, *options)

    def _refuse_labels(self, region: str, uuid: UUID, label: str) -> None:
        """Raises: ComposeError when labels take space that the kernel does not show as a namespace."""
        path = f"{ND}/{region}"
        if self._kernel.number(f"{path}/available_size") == self._kernel.number(f"{path}/size"):
            return
        # Labels that were removed are listed too: what is told is a hint, that something is there is certain.
        for dimm in self._dimms(region):
            remedy = f"ndctl init-labels -f {dimm}"
            for row in self._labels(dimm):
                if str(row.get("uuid")) == str(namespace_uuid(uuid)):
                    self._refuse_geometry(uuid, str(row.get("name")), label, remedy)
        listed = ", ".join(f"'ndctl read-labels -j {dimm}'" for dimm in self._dimms(region))
        raise ComposeError(
            f"region {uuid}: the labels of its memories hold a namespace that is not this region's, or of "
            f"another geometry: {listed} shows it. Nothing was changed. Compose that region; or, if nobody "
            "needs its bytes, remove the labels of each: 'ndctl init-labels -f NAME'."
        )

    def _dimms(self, region: str) -> list[str]:
        """The NVDIMMs, as ndctl names them, of a region's memories."""
        path = f"{ND}/{region}"
        mappings = [
            self._kernel.text(f"{path}/{name}") for name in self._kernel.names(path) if _is_mapping(name)
        ]
        return [mapping.partition(",")[0] for mapping in mappings if mapping]

    def _labels(self, dimm: str) -> list[dict[str, Any]]:
        with contextlib.suppress(ValueError, LookupError, TypeError):
            return list(json.loads(self._kernel.run("ndctl", "read-labels", "-j", dimm) or "[]")[0]["label"])
        return []

    def _check(self, uuid: UUID, there: Namespace, label: str) -> None:
        unchanged = "Nothing was changed."
        ours = there.uuid == str(namespace_uuid(uuid))
        if there.mode != "dax" and not (there.mode == "raw" and ours):
            raise ComposeError(
                f"region {uuid}: {there.name} is in mode {there.mode}, and may hold data. {unchanged} "
                f"If nobody needs it: 'ndctl destroy-namespace -f {there.name}'."
            )
        if there.label.startswith(f"{NAME_PREFIX} ") and not ours:
            raise ComposeError(
                f"region {uuid}: {there.name} in it is of another region ({there.label}, {there.uuid}), "
                f"and may hold blocks. {unchanged} Compose that region, or, if nobody needs its bytes: "
                f"'ndctl destroy-namespace -f {there.name}'."
            )
        self._refuse_geometry(uuid, there.label, label, f"ndctl destroy-namespace -f {there.name}")

    def _refuse_geometry(self, uuid: UUID, there: str, label: str, remedy: str) -> None:
        if there.startswith(f"{NAME_PREFIX} ") and there != label:
            raise ComposeError(
                f"region {uuid}: it was made with another geometry: {_geometry(there)}; wanted is "
                f"{_geometry(label)}. Nothing was changed. Its bytes have a meaning in that one only: ask "
                f"for it, or, if nobody needs them, remove the label: '{remedy}'."
            )

    def _settle(self, region: str) -> None:
        """Until the kernel has looked at the labels: reading this attribute waits for it."""
        for bus in self._kernel.names(ND):
            if bus.startswith("ndbus"):
                self._kernel.text(f"{ND}/{bus}/wait_probe")

    def _poison(self, region: str, device: str) -> tuple[tuple[int, int], ...]:
        """The bad blocks that the kernel knows of, as bytes of the device."""
        base = self._kernel.number(f"{ND}/{region}/resource", -1)
        begins = self._kernel.number(f"{device}/resource", -1)
        size = self._kernel.number(f"{device}/size")
        offset = begins - base if 0 <= base <= begins else OVERHEAD_BYTES
        found = []
        for line in self._kernel.text(f"{ND}/{region}/badblocks").splitlines():
            sector, _, count = line.partition(" ")
            if sector.isdecimal() and count.strip().isdecimal():
                first, end = int(sector) * SECTOR_BYTES, (int(sector) + int(count)) * SECTOR_BYTES
                first, end = max(0, first - offset), min(size, end - offset)
                if first < end:
                    found.append((first, end - first))
        return tuple(found)


def _is_mapping(name: str) -> bool:
    return name.startswith("mapping") and name.removeprefix("mapping").isdecimal()


def _geometry(label: str) -> str:
    """`kvpool 2x256 512Mi` in words."""
    _, _, rest = label.partition(" ")
    shape, _, size = rest.partition(" ")
    ways, _, granularity = shape.partition("x")
    return f"{ways} way(s) of granularity {granularity}, {size}"
