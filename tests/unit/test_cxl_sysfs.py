"""Regions through sysfs, on a kernel in memory that refuses what the real one does; e2e/guest has that."""

from __future__ import annotations

import os
from pathlib import Path
from uuid import UUID

import pytest

from cxl_kernel import MIB, FakeKernel, FakeMemory, FakeNamespace, FakeRegion
from kvpool.cxl import ComposeError, RegionInUse, Wanted
from kvpool.cxl.decoders import NO_UUID
from kvpool.cxl.namespaces import label_of, namespace_uuid
from kvpool.cxl.sysfs import SysfsBackend
from kvpool.region import Geometry, Region

UUID_A = UUID("11111111-2222-4333-8444-555555555555")
UUID_B = UUID("66666666-7777-4888-9999-aaaaaaaaaaaa")


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeKernel:
    monkeypatch.setenv("KVPOOL_RUNTIME_DIR", str(tmp_path / "run"))
    return FakeKernel(tmp_path, FakeMemory("0xc1"), FakeMemory("0xc2"))


@pytest.fixture
def backend(kernel: FakeKernel) -> SysfsBackend:
    return SysfsBackend(kernel)


def wanted(size: int = 256 * MIB, *memories: str, uuid: UUID = UUID_A, **rest: int) -> Wanted:
    return Wanted(uuid, memories or ("0xc1",), size, **rest)


def is_as_it_was(kernel: FakeKernel) -> bool:
    return not kernel.regions and not any(m.dpa_bytes or m.region for m in kernel.memories.values())


def test_memories_have_serial_size_and_health(kernel: FakeKernel, backend: SysfsBackend) -> None:
    kernel.memories["mem1"].bound = False
    kernel.cxl_list = (
        '[{"memdev": "mem0", "health": {"media_not_ready": true, "hw_replacement_needed": false}}]'
    )
    first, second = backend.memories()
    assert (first.serial, first.size_bytes, first.kind, first.numa_node) == ("0xc1", 512 * MIB, "pmem", None)
    assert first.problem == "it says media_not_ready"
    assert not second.healthy
    assert "cxl_mem is not bound" in second.problem


def test_memories_poison_is_what_the_tool_lists(kernel: FakeKernel, backend: SysfsBackend) -> None:
    kernel.cxl_list = '[{"memdev": "mem0", "media_errors": [{"offset": 4096, "length": 64}]}]'
    assert backend.memories()[0].poison == ((4096, 64),)


@pytest.mark.parametrize("said", ["", "{", '[{"x": 1}]', "[1]"])
def test_memories_without_a_word_of_the_tool_are_healthy(
    kernel: FakeKernel, backend: SysfsBackend, said: str
) -> None:
    kernel.cxl_list = said
    assert all(memory.healthy for memory in backend.memories())


def test_compose_makes_region_and_device(kernel: FakeKernel, backend: SysfsBackend) -> None:
    composed = backend.compose(wanted(256 * MIB))
    assert composed.device is not None
    assert composed.device.size_bytes == 254 * MIB
    assert composed.device.numa_node == 1
    assert (composed.memories, composed.size_bytes) == (("0xc1",), 256 * MIB)
    assert backend.regions() == [composed]
    (label,) = kernel.labels
    assert label.uuid == str(namespace_uuid(UUID_A))
    assert label.label == "kvpool 1x256 256Mi"


def test_compose_again_changes_nothing(kernel: FakeKernel, backend: SysfsBackend) -> None:
    composed = backend.compose(wanted())
    kernel.changes.clear()
    assert backend.compose(wanted(100 * MIB)) == composed
    assert kernel.changes == []


def test_compose_interleaves_memories_in_the_order_asked_for(
    kernel: FakeKernel, backend: SysfsBackend
) -> None:
    composed = backend.compose(wanted(257 * MIB, "0xc2", "0xc1", granularity_bytes=4096))
    assert composed.memories == ("0xc2", "0xc1")
    assert (composed.size_bytes, composed.granularity_bytes) == (512 * MIB, 4096)
    assert kernel.regions["region0"].targets == {0: "decoder3.0", 1: "decoder2.0"}


def _changes_of_a_compose(tmp_path: Path) -> int:
    kernel = FakeKernel(tmp_path, FakeMemory("0xc1"), FakeMemory("0xc2"))
    SysfsBackend(kernel).compose(wanted(512 * MIB, "0xc1", "0xc2"))
    return len(kernel.changes)


def test_compose_takes_everything_back_at_whichever_step_it_fails(
    tmp_path: Path, kernel: FakeKernel, backend: SysfsBackend
) -> None:
    steps = _changes_of_a_compose(tmp_path)
    assert steps == 14
    for step in range(1, steps + 1):
        kernel.changes.clear()
        kernel.fail_at = step
        with pytest.raises(ComposeError, match="injected error"):
            backend.compose(wanted(512 * MIB, "0xc1", "0xc2"))
        assert is_as_it_was(kernel), f"after step {step}"
    kernel.fail_at = 0
    assert backend.compose(wanted(512 * MIB, "0xc1", "0xc2")).device is not None


def test_compose_completes_what_a_crash_left_at_whichever_step(
    tmp_path: Path, kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Dies(BaseException):
        pass

    class Dying(SysfsBackend):
        """Nothing is taken back: as when its process is killed."""

        def __init__(self) -> None:
            super().__init__(kernel)
            monkeypatch.setattr(self._decoders, "remove_quietly", lambda region: None)
            monkeypatch.setattr(self._decoders, "_release", lambda decoder: None)

    change = kernel._change

    def dying(what: str) -> None:
        try:
            change(what)
        except OSError:
            raise Dies from None

    for step in range(2, _changes_of_a_compose(tmp_path) + 1):
        kernel.changes.clear()
        kernel.fail_at = step
        monkeypatch.setattr(kernel, "_change", dying)
        with pytest.raises(Dies):
            Dying().compose(wanted(512 * MIB, "0xc1", "0xc2"))
        monkeypatch.setattr(kernel, "_change", change)
        kernel.fail_at = 0
        backend = SysfsBackend(kernel)
        (left,) = backend.regions()
        assert left.device is None
        assert backend.compose(wanted(512 * MIB, "0xc1", "0xc2")).device is not None
        for region in backend.regions():
            backend.destroy(region.uuid)
        assert is_as_it_was(kernel), f"after step {step}"


def test_region_without_a_uuid_is_an_orphan_that_can_be_destroyed(
    kernel: FakeKernel, backend: SysfsBackend
) -> None:
    kernel.regions["region0"] = FakeRegion()
    (orphan,) = backend.regions()
    assert (orphan.uuid, orphan.device) == (NO_UUID, None)
    assert backend.compose(wanted()).device is not None
    backend.destroy(NO_UUID)
    assert len(backend.regions()) == 1
    with pytest.raises(ComposeError, match="a UUID of its own"):
        backend.compose(wanted(uuid=NO_UUID))


def test_compose_of_what_cannot_be_is_refused_and_changes_nothing(
    kernel: FakeKernel, backend: SysfsBackend
) -> None:
    for asked, words in (
        (wanted(MIB, "0xc9"), "there is no memory 0xc9 here; there are: 0xc1, 0xc2"),
        (wanted(513 * MIB), "give at most 512Mi"),
        (wanted(MIB, granularity_bytes=32768), "granularity 32768"),
        (wanted(MIB, "0xc1", "0xc1"), "different ones"),
    ):
        with pytest.raises(ComposeError, match=words):
            backend.compose(asked)
    kernel.memories["mem0"].kind = "ram"
    with pytest.raises(ComposeError, match="0xc1 is volatile"):
        backend.compose(wanted())
    assert kernel.changes == []


def test_compose_with_a_memory_of_another_region_is_refused(
    kernel: FakeKernel, backend: SysfsBackend
) -> None:
    backend.compose(wanted())
    kernel.changes.clear()
    with pytest.raises(ComposeError, match=f"memory 0xc1 is in region {UUID_A} already"):
        backend.compose(wanted(uuid=UUID_B))
    assert kernel.changes == []


def test_compose_of_a_region_with_another_geometry_is_refused(
    kernel: FakeKernel, backend: SysfsBackend
) -> None:
    backend.compose(wanted())
    kernel.changes.clear()
    for asked in (wanted(512 * MIB), wanted(MIB, "0xc2"), wanted(granularity_bytes=512)):
        with pytest.raises(ComposeError, match="exists with another geometry"):
            backend.compose(asked)
    assert kernel.changes == []


def test_compose_after_a_reboot_finds_its_namespace(kernel: FakeKernel, backend: SysfsBackend) -> None:
    before = backend.compose(wanted())
    reboot(kernel)
    assert backend.regions() == []
    kernel.changes.clear()
    assert backend.compose(wanted()) == before
    assert "create-namespace" not in kernel.changes


def test_compose_after_a_reboot_with_another_geometry_is_refused_by_the_label(
    kernel: FakeKernel, backend: SysfsBackend
) -> None:
    backend.compose(wanted(512 * MIB))
    reboot(kernel)
    with pytest.raises(ComposeError, match=r"1 way\(s\) of granularity 256, 512Mi; wanted is .* 512, 512Mi"):
        backend.compose(wanted(512 * MIB, granularity_bytes=512))
    with pytest.raises(ComposeError, match=r"1 way\(s\) of granularity 256, 512Mi; wanted is .* 256, 256Mi"):
        backend.compose(wanted(256 * MIB))
    assert is_as_it_was(kernel)
    assert len(kernel.labels) == 1


def test_compose_over_labels_of_another_region_is_refused(kernel: FakeKernel, backend: SysfsBackend) -> None:
    backend.compose(wanted(512 * MIB, uuid=UUID_B))
    reboot(kernel)
    with pytest.raises(ComposeError, match="a namespace that is not this region's"):
        backend.compose(wanted())
    with pytest.raises(ComposeError, match="is of another region"):
        backend.compose(wanted(512 * MIB))
    assert is_as_it_was(kernel)
    assert len(kernel.labels) == 1


def test_compose_with_lost_labels_makes_the_same_namespace_again(
    kernel: FakeKernel, backend: SysfsBackend
) -> None:
    backend.compose(wanted())
    (before,) = kernel.labels
    reboot(kernel)
    kernel.labels.clear()
    backend.compose(wanted())
    assert kernel.labels == [before]


def test_compose_with_a_damaged_info_block_makes_its_own_namespace_again(
    kernel: FakeKernel, backend: SysfsBackend
) -> None:
    ours = FakeNamespace(str(namespace_uuid(UUID_A)), label_of(1, 256, 256 * MIB), 256 * MIB, enabled=False)
    kernel.labels.append(ours)
    assert backend.compose(wanted()).device is not None
    assert kernel.changes[-2:] == ["destroy-namespace", "create-namespace"]


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        ([FakeNamespace("u1", "", 128 * MIB), FakeNamespace("u2", "", 128 * MIB)], "it has 2 namespaces"),
        ([FakeNamespace("u1", "", 256 * MIB, mode="memory")], "in mode memory, and may hold data"),
        ([FakeNamespace("u1", "", 256 * MIB, mode="raw")], "in mode raw, and may hold data"),
        ([FakeNamespace("u1", "", 256 * MIB, enabled=False)], "has no device, and is not kvpool's own"),
    ],
)
def test_compose_over_somebody_elses_namespace_is_refused(
    kernel: FakeKernel, backend: SysfsBackend, labels: list[FakeNamespace], words: str
) -> None:
    kernel.labels = list(labels)
    with pytest.raises(ComposeError, match=words):
        backend.compose(wanted())
    assert kernel.labels == labels
    assert is_as_it_was(kernel)


def test_poison_of_the_device_comes_from_the_kernels_bad_blocks(
    kernel: FakeKernel, backend: SysfsBackend
) -> None:
    kernel.badblocks = (
        "0 8\n4092 8\n4104 1\n"  # sectors of the region, whose first 2 MiB are not the device's
    )
    composed = backend.compose(wanted())
    assert composed.device is not None
    assert composed.device.poison == ((0, 4 * 512), (8 * 512, 512))


def test_resize_makes_region_and_namespace_again_with_the_same_names(
    kernel: FakeKernel, backend: SysfsBackend
) -> None:
    composed = backend.compose(wanted())
    assert composed.device is not None
    Region.format(composed.device.path, Geometry(capacity_bytes=128 * MIB), force=True)
    grown = backend.resize(UUID_A, 300 * MIB)
    assert grown.device is not None
    assert grown.device.size_bytes == 510 * MIB
    assert Region.inspect(grown.device.path).capacity_bytes == 128 * MIB
    assert kernel.labels[0].label == "kvpool 1x256 512Mi"
    assert backend.resize(UUID_A, 256 * MIB).size_bytes == 256 * MIB


def test_resize_that_cannot_be_is_refused_and_changes_nothing(
    kernel: FakeKernel, backend: SysfsBackend
) -> None:
    with pytest.raises(ComposeError, match="does not exist"):
        backend.resize(UUID_A, MIB)
    composed = backend.compose(wanted(512 * MIB))
    assert composed.device is not None
    Region.format(composed.device.path, Geometry(capacity_bytes=300 * MIB), force=True)
    kernel.changes.clear()
    with pytest.raises(RegionInUse, match="reaches beyond 254Mi"):
        backend.resize(UUID_A, 256 * MIB)
    with pytest.raises(ComposeError, match="at most 512Mi"):
        backend.resize(UUID_A, 1024 * MIB)
    assert kernel.changes == []


def test_resize_that_fails_gives_the_old_size_back(kernel: FakeKernel, backend: SysfsBackend) -> None:
    before = backend.compose(wanted())
    kernel.changes.clear()
    kernel.fail_at = 7 + 3  # seven changes take the old one down
    with pytest.raises(ComposeError, match="The region has its old size again"):
        backend.resize(UUID_A, 512 * MIB)
    assert backend.regions() == [before]


def test_destroy_refuses_a_kvpool_region_unless_told_twice(kernel: FakeKernel, backend: SysfsBackend) -> None:
    composed = backend.compose(wanted())
    assert composed.device is not None
    Region.format(composed.device.path, Geometry(capacity_bytes=64 * MIB), force=True)
    with pytest.raises(RegionInUse, match="holds a kvpool region"):
        backend.destroy(UUID_A)
    with Region.attach(composed.device.path), pytest.raises(RegionInUse, match="mapped by process"):
        backend.destroy(UUID_A, with_blocks=True)
    assert backend.regions() == [composed]
    backend.destroy(UUID_A, with_blocks=True)
    assert is_as_it_was(kernel)
    assert kernel.labels == []
    backend.destroy(UUID_A)


def test_compose_without_root_says_so(
    kernel: FakeKernel, backend: SysfsBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(path: str, text: str) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(kernel, "write", denied)
    with pytest.raises(ComposeError, match="needs root"):
        backend.compose(wanted())


def test_machine_without_cxl_has_nothing_and_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvpool.cxl.kernel import Kernel

    backend = SysfsBackend(Kernel(tmp_path / "sys"))
    assert backend.memories() == []
    assert backend.regions() == []
    with pytest.raises(ComposeError, match="has no CXL bus"):
        backend.compose(wanted())


def test_tool_that_is_missing_or_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvpool.cxl.kernel import Kernel

    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ComposeError, match="ndctl is not installed here"):
        Kernel().run("ndctl", "list")
    tool = tmp_path / "ndctl"
    tool.write_text("#!/bin/sh\necho 'no such region' >&2\nexit 3\n")
    os.chmod(tool, 0o755)
    with pytest.raises(ComposeError, match="ndctl list: exit code 3: no such region"):
        Kernel().run("ndctl", "list")


def reboot(kernel: FakeKernel) -> None:
    """The kernel forgets regions; labels and bytes stay."""
    kernel.regions.clear()
    kernel.namespaces.clear()
    for memory in kernel.memories.values():
        memory.dpa_bytes, memory.region, memory.mode = 0, "", ""
