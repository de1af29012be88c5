"""The kernel's CXL and NVDIMM devices in memory: what sysfs answers, and what it refuses."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from kvpool.cxl.backend import ComposeError
from kvpool.cxl.kernel import Kernel, natural

MIB = 1 << 20


@dataclass
class FakeMemory:
    serial: str
    size_bytes: int = 512 * MIB
    kind: str = "pmem"
    bound: bool = True
    dpa_bytes: int = 0  # of its one decoder
    mode: str = ""
    region: str = ""


@dataclass
class FakeRegion:
    uuid: str = ""
    ways: int = 0
    granularity: int = 0
    size_bytes: int = 0
    targets: dict[int, str] = field(default_factory=dict)
    committed: bool = False
    bound: bool = False


@dataclass
class FakeNamespace:
    uuid: str
    label: str
    size_bytes: int
    mode: str = "dax"
    enabled: bool = True


class FakeKernel(Kernel):
    """One root decoder, memories mem0, mem1, ..., each with one decoder, on endpoints 2, 3, ..."""

    def __init__(self, devices: Path, *memories: FakeMemory) -> None:
        super().__init__("/nowhere")
        self.devices = devices  # the folder in which DAX devices are sparse files
        self.memories = {f"mem{number}": memory for number, memory in enumerate(memories)}
        self.regions: dict[str, FakeRegion] = {}
        self.namespaces: dict[str, FakeNamespace] = {}  # while their region is bound
        self.labels: list[FakeNamespace] = []  # in the label storage: they outlive the region
        self.removed: list[FakeNamespace] = []  # which the tool goes on to list
        self.changes: list[str] = []
        self.fail_at = 0  # which change fails; 0: none
        self.badblocks = ""
        self.cxl_list = "[]"

    # -- what sysfs shows ----------------------------------------------------------------------------------

    def files(self) -> dict[str, str]:
        cxl, nd, dax = "bus/cxl/devices", "bus/nd/devices", "bus/dax/devices"
        new = next(n for n in range(9) if f"region{n}" not in self.regions)
        found = {
            f"{cxl}/decoder0.0/create_pmem_region": f"region{new}",
            f"{cxl}/decoder0.0/cap_pmem": "1",
            f"{cxl}/decoder0.0/interleave_ways": "1",
            f"{nd}/ndbus0/wait_probe": "1",
        }
        for number, (name, memory) in enumerate(self.memories.items(), start=2):
            path, decoder = f"{cxl}/{name}", f"{cxl}/endpoint{number}/decoder{number}.0"
            found |= {f"{path}/serial": memory.serial, f"{path}/numa_node": "-1"}
            for kind in ("pmem", "ram"):
                found[f"{path}/{kind}/size"] = hex(memory.size_bytes if kind == memory.kind else 0)
            for place in (decoder, f"{cxl}/decoder{number}.0"):
                found |= {f"{place}/dpa_size": hex(memory.dpa_bytes), f"{place}/region": memory.region}
                found |= {f"{place}/mode": memory.mode}
        for name, region in self.regions.items():
            for path in (f"{cxl}/{name}", f"{cxl}/decoder0.0/{name}"):
                found |= {
                    f"{path}/uuid": region.uuid,
                    f"{path}/interleave_ways": str(region.ways),
                    f"{path}/interleave_granularity": str(region.granularity),
                    f"{path}/size": hex(region.size_bytes),
                    f"{path}/commit": str(int(region.committed)),
                }
                found |= {f"{path}/target{p}": region.targets.get(p, "") for p in range(region.ways)}
            if region.bound:
                found |= {f"{nd}/{name}/badblocks": self.badblocks, f"{nd}/{name}/resource": "0x270000000"}
                free = max(0, region.size_bytes - sum(label.size_bytes for label in self.labels))
                found |= {
                    f"{nd}/{name}/available_size": str(free),
                    f"{nd}/{name}/size": str(region.size_bytes),
                }
                found |= {f"{nd}/{name}/mapping0": f"nmem0,0,{region.size_bytes},0"}
        for name, namespace in self.namespaces.items():
            path = f"{nd}/{name}"
            found |= {f"{path}/uuid": namespace.uuid, f"{path}/alt_name": namespace.label}
            found |= {f"{path}/size": str(namespace.size_bytes), f"{path}/mode": namespace.mode}
            if namespace.enabled:
                device = f"{dax}/dax{name.removeprefix('namespace')}"
                found |= {
                    f"{device}/size": str(namespace.size_bytes - 2 * MIB),
                    f"{device}/align": str(2 * MIB),
                }
                found |= {f"{device}/numa_node": "1", f"{device}/resource": "0x270200000"}
        return found

    def read(self, path: str) -> str:
        try:
            return self.files()[path].strip()
        except KeyError:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", path) from None

    def has(self, path: str) -> bool:
        return any(file == path or file.startswith(f"{path}/") for file in self.files())

    def names(self, folder: str) -> list[str]:
        under = {
            file[len(folder) + 1 :].split("/")[0] for file in self.files() if file.startswith(f"{folder}/")
        }
        return sorted(under, key=natural)

    def target(self, path: str) -> str:
        *_, device, link = path.split("/")
        if link == "uport":
            return f"mem{int(device.removeprefix('endpoint')) - 2}"
        if device in self.memories:
            return "cxl_mem" if self.memories[device].bound else ""
        return "cxl_region" if device in self.regions and self.regions[device].bound else ""

    def device(self, name: str) -> str:
        path = self.devices / name
        path.touch()
        os.truncate(path, self.number(f"bus/dax/devices/{name}/size"))
        return str(path)

    def wait(self, happened: Callable[[], bool], seconds: float) -> bool:
        return happened()

    # -- what changes it -----------------------------------------------------------------------------------

    def _change(self, what: str) -> None:
        self.changes.append(what)
        if len(self.changes) == self.fail_at:
            raise OSError(errno.EIO, f"injected error: {what}")

    def write(self, path: str, text: str) -> None:
        *_, device, attribute = path.split("/")
        self._change(f"{attribute} {text}")
        if attribute == "create_pmem_region":
            self.regions[text] = FakeRegion()
        elif attribute == "delete_region":
            self._refuse(bool(self.regions[text].bound or self.regions[text].targets))
            del self.regions[text]
        elif attribute == "bind":
            self._refuse(not self.regions[text].committed)
            self.regions[text].bound = True
            self._probe(text)
        elif attribute == "unbind":
            self.regions[text].bound = False
            self.namespaces.clear()
        elif device in self.regions:
            self._write_region(device, attribute, text)
        else:
            self._write_decoder(self._memory(device), attribute, text)

    def _write_region(self, name: str, attribute: str, text: str) -> None:
        region = self.regions[name]
        if attribute == "commit":
            whole = len(region.targets) == region.ways
            self._refuse(region.bound or (text == "1" and not whole))
            region.committed = text == "1"
        elif attribute.startswith("target"):
            self._refuse(region.committed)
            position = int(attribute.removeprefix("target"))
            if text:
                memory = self._memory(text)
                self._refuse(memory.dpa_bytes != region.size_bytes // region.ways or bool(memory.region))
                region.targets[position], memory.region = text, name
            else:
                self._memory(region.targets.pop(position)).region = ""
        elif attribute == "size":
            self._refuse(int(text) % (256 * MIB * region.ways) != 0)
            region.size_bytes = int(text)
        else:
            names = {"interleave_ways": "ways", "interleave_granularity": "granularity"}
            setattr(region, names.get(attribute, attribute), text if attribute == "uuid" else int(text))

    def _write_decoder(self, memory: FakeMemory, attribute: str, text: str) -> None:
        self._refuse(bool(memory.region) or (attribute == "dpa_size" and int(text) > memory.size_bytes))
        if attribute == "dpa_size":
            memory.dpa_bytes = int(text)
        else:
            memory.mode = text

    def _memory(self, decoder: str) -> FakeMemory:
        return self.memories[f"mem{int(decoder.removeprefix('decoder').split('.')[0]) - 2}"]

    def _refuse(self, when: bool) -> None:
        if when:
            raise OSError(errno.EBUSY, "Device or resource busy")

    def _probe(self, region: str) -> None:
        number = region.removeprefix("region")
        size = self.regions[region].size_bytes
        fitting = [label for label in self.labels if label.size_bytes <= size]  # others are not shown
        self.namespaces = {f"namespace{number}.{i}": label for i, label in enumerate(fitting)}

    def run(self, *command: str) -> str:
        if command[0] == "cxl":
            if "-L" in command:
                raise ComposeError("cxl: unknown option")
            return self.cxl_list
        if command[1] == "read-labels":
            return json.dumps(
                [{"label": [{"uuid": n.uuid, "name": n.label} for n in self.removed + self.labels]}]
            )
        self._change(command[1])
        if command[1] == "destroy-namespace":
            self.removed.append(self.namespaces.pop(command[-1]))
            self.labels.remove(self.removed[-1])
            return ""
        options = dict(zip(command[2::2], command[3::2], strict=True))
        assert options["-M"] == "mem"
        region = self.regions[options["-r"]]
        if sum(label.size_bytes for label in self.labels) >= region.size_bytes:
            raise ComposeError("ndctl create-namespace: no space")
        self.labels.append(FakeNamespace(options["-u"], options["-n"], region.size_bytes))
        self._probe(options["-r"])
        return ""
