"""A CXL region in the kernel: read, made step by step, taken back.

A region is made below a root decoder (a window of physical addresses), gets a UUID, a geometry and one
endpoint decoder of each memory, and is committed and bound to its driver at last. The kernel forgets it at
every boot: whoever wants it makes it again, with the same UUID. Nothing here writes the memory's bytes.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from uuid import UUID

from kvpool.cxl.backend import ComposeError, Memory, Wanted
from kvpool.cxl.kernel import Kernel

DEVICES = "bus/cxl/devices"
DRIVER = "bus/cxl/drivers/cxl_region"
SIZE_STEP_BYTES = 256 << 20  # a way's share of a region is a whole number of these (CXL 2.0, 8.2.5.12)
NO_UUID = UUID(int=0)  # of a region that a crash left before it got one
_PROBE_S = 10.0  # a memory attaches to its ports after its driver was loaded


@dataclass(frozen=True, slots=True)
class KernelRegion:
    """A region as sysfs has it."""

    name: str  # region0
    root: str  # its root decoder, decoder0.0
    uuid: UUID
    size_bytes: int
    granularity_bytes: int
    ways: int
    decoders: tuple[str, ...]  # of its memories, as far as they are attached
    committed: bool
    bound: bool

    @property
    def complete(self) -> bool:
        return self.committed and self.bound


class Decoders:
    """The regions, root decoders and endpoint decoders of this machine."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel

    def regions(self) -> list[KernelRegion]:
        roots = [name for name in self._kernel.names(DEVICES) if self._is_root(name)]
        found = []
        for root in roots:
            children = self._kernel.names(f"{DEVICES}/{root}")
            found += [self._region(root, name) for name in children if _is_region(name)]
        return found

    def endpoint_of(self, memory: str) -> str:
        """The endpoint port of a memory like mem0. Raises: ComposeError when it has none."""
        endpoints: list[str] = []

        def attached() -> bool:
            ports = [name for name in self._kernel.names(DEVICES) if name.startswith("endpoint")]
            endpoints[:] = [
                port for port in ports if self._kernel.target(f"{DEVICES}/{port}/uport") == memory
            ]
            return bool(endpoints)

        if not self._kernel.wait(attached, _PROBE_S):
            raise ComposeError(
                f"memory {memory} has no port: the kernel found no way from a CXL host bridge to it. "
                "'cxl list -BPEM' and dmesg say more; the modules cxl_acpi, cxl_port and cxl_mem are needed."
            )
        return endpoints[0]

    def memory_of(self, decoder: str) -> str:
        """The memory, like mem0, that an endpoint's decoder belongs to."""
        endpoint = f"endpoint{decoder.removeprefix('decoder').partition('.')[0]}"
        return self._kernel.target(f"{DEVICES}/{endpoint}/uport")

    def make(self, wanted: Wanted, memories: list[Memory], size_bytes: int) -> KernelRegion:
        """The region, new, in the first root decoder that takes it.

        Raises:  ComposeError, or PermissionError; what was begun was taken back.
        """
        roots = self._roots(len(memories))
        refused: list[str] = []
        for root in roots:
            try:
                return self._make_in(root, wanted, memories, size_bytes)
            except PermissionError:
                raise
            except OSError as error:
                refused.append(f"{root}: {error.strerror or error}")
        why = "; ".join(refused) or "no root decoder takes persistent memory ('cxl list -D' lists them)"
        raise ComposeError(
            f"region {wanted.uuid}: the kernel refused it: {why}. What was begun was taken back. "
            "dmesg may say more."
        )

    def remove(self, region: KernelRegion) -> None:
        """The region is gone, its decoders are free; the bytes stay. Raises: OSError."""
        kernel, path = self._kernel, f"{DEVICES}/{region.name}"
        if region.bound:
            kernel.write(f"{DRIVER}/unbind", region.name)
        if region.committed:
            kernel.write(f"{path}/commit", "0")
        for position, decoder in enumerate(region.decoders):
            kernel.write(f"{path}/target{position}", "")
            kernel.write(f"{DEVICES}/{decoder}/dpa_size", "0")
        kernel.write(f"{DEVICES}/{region.root}/delete_region", region.name)

    def remove_quietly(self, region: KernelRegion) -> None:
        """As much of `remove` as works, for taking back what failed: the first error is told already."""
        with contextlib.suppress(OSError):
            self.remove(self._region(region.root, region.name))

    # -- steps ---------------------------------------------------------------------------------------------

    def _make_in(self, root: str, wanted: Wanted, memories: list[Memory], size_bytes: int) -> KernelRegion:
        kernel = self._kernel
        creates = f"{DEVICES}/{root}/create_pmem_region"
        name = kernel.read(creates)
        kernel.write(creates, name)
        used: list[str] = []
        path = f"{DEVICES}/{name}"
        try:
            kernel.write(f"{path}/uuid", str(wanted.uuid))
            kernel.write(f"{path}/interleave_granularity", str(wanted.granularity_bytes))
            kernel.write(f"{path}/interleave_ways", str(len(memories)))
            kernel.write(f"{path}/size", str(size_bytes))
            for position, memory in enumerate(memories):
                decoder = self._free_decoder(memory)
                used.append(decoder)
                kernel.write(f"{DEVICES}/{decoder}/mode", "pmem")
                kernel.write(f"{DEVICES}/{decoder}/dpa_size", str(size_bytes // len(memories)))
                kernel.write(f"{path}/target{position}", decoder)
            kernel.write(f"{path}/commit", "1")
            kernel.write(f"{DRIVER}/bind", name)
        except BaseException:
            self.remove_quietly(self._region(root, name))
            for decoder in used:  # one that has memory and is in no region yet
                self._release(decoder)
            raise
        return self._region(root, name)

    def _free_decoder(self, memory: Memory) -> str:
        """A decoder of the memory's endpoint that is in no region. Raises: ComposeError."""
        endpoint = self.endpoint_of(memory.name)
        number = endpoint.removeprefix("endpoint")
        for name in self._kernel.names(f"{DEVICES}/{endpoint}"):
            if name.startswith(f"decoder{number}.") and not self._kernel.text(f"{DEVICES}/{name}/region"):
                self._release(name)  # a crash may have left it with memory and without a region
                return name
        raise ComposeError(
            f"memory {memory.serial} ({memory.name}) has no free decoder: all are in "
            "regions. Destroy one first."
        )

    def _release(self, decoder: str) -> None:
        path = f"{DEVICES}/{decoder}"
        with contextlib.suppress(OSError):
            if not self._kernel.text(f"{path}/region") and self._kernel.number(f"{path}/dpa_size"):
                self._kernel.write(f"{path}/dpa_size", "0")

    def _roots(self, ways: int) -> list[str]:
        """Root decoders for persistent memory, those over fewest host bridges first."""
        fitting = []
        for name in self._kernel.names(DEVICES):
            spread = self._kernel.number(f"{DEVICES}/{name}/interleave_ways", 1)
            able = self._is_root(name) and self._kernel.number(f"{DEVICES}/{name}/cap_pmem") == 1
            if able and spread <= ways:
                fitting.append((spread, name))
        return [name for _, name in sorted(fitting, key=lambda root: root[0])]

    def _is_root(self, name: str) -> bool:
        return name.startswith("decoder") and self._kernel.has(f"{DEVICES}/{name}/create_pmem_region")

    def _region(self, root: str, name: str) -> KernelRegion:
        kernel, path = self._kernel, f"{DEVICES}/{name}"
        try:
            uuid = UUID(kernel.text(f"{path}/uuid"))
        except ValueError:
            uuid = NO_UUID
        ways = kernel.number(f"{path}/interleave_ways")
        targets = [kernel.text(f"{path}/target{position}") for position in range(ways)]
        return KernelRegion(
            name,
            root,
            uuid,
            kernel.number(f"{path}/size"),
            kernel.number(f"{path}/interleave_granularity"),
            ways,
            tuple(target for target in targets if target),
            kernel.number(f"{path}/commit") == 1,
            bool(kernel.target(f"{path}/driver")),
        )


def _is_region(name: str) -> bool:
    return name.startswith("region") and name.removeprefix("region").isdecimal()
