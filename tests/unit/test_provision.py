"""Provisioning: what is planned for what is found, and that a failure changes nothing."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvpool import paths
from kvpool.errors import (
    FormatVersionError,
    GeometryError,
    KvpoolError,
    MediumUnavailable,
    RegionBusyError,
    RegionError,
    SuperblockError,
)
from kvpool.provision import plan, provision, real_regions
from kvpool.provision.observe import file_system_of, look_at
from kvpool.provision.plan import (
    Action,
    Await,
    ExistingRegion,
    Format,
    Found,
    Keep,
    Refuse,
    Shape,
    Skip,
    refusals,
    wanted_shape,
)
from kvpool.provision.remove import region_paths, remove
from kvpool.spec import PoolSpec

GIB = 1 << 30
ROOM = {"free_bytes": 64 * GIB, "medium_bytes": 128 * GIB, "medium_name": "tmpfs", "medium_id": "1"}


def spec_of(*tiers: dict[str, Any], **body: Any) -> PoolSpec:
    return PoolSpec.from_object(
        {
            "apiVersion": "kvpool.dev/v1alpha1",
            "kind": "KVPool",
            "metadata": {"name": "p"},
            "spec": {"tiers": list(tiers), **body},
        }
    )


def dram(**fields: Any) -> dict[str, Any]:
    return {"name": "dram", "medium": "DRAM", "capacity": "8Gi", **fields}


def dax(**fields: Any) -> dict[str, Any]:
    given = {
        "name": "cxl",
        "medium": "CXL",
        "capacity": "8Gi",
        "source": {"path": "/dev/dax0.0"},
        "shared": True,
    }
    return given | fields


def missing(**fields: Any) -> Found:
    return Found("missing", **{**ROOM, **fields})


def holding(shape: Shape, **fields: Any) -> Found:
    return Found("file", **{**ROOM, "blank": False, "region": ExistingRegion("u-1", shape), **fields})


def only(actions: list[Action]) -> Action:
    assert len(actions) == 1, actions
    return actions[0]


def refusal(spec: PoolSpec, found: Found, host: int = 0) -> KvpoolError:
    action = only(plan(spec, host, {spec.tiers[0].name: found}))
    assert isinstance(action, Refuse), action
    return action.error


# --- plan ---------------------------------------------------------------------------------------------------


def test_plan_nothing_there_is_formatted() -> None:
    spec = spec_of(dram(minBlockSize="64Ki"))
    assert plan(spec, 0, {"dram": missing()}) == [
        Format(
            "dram",
            Path("/dev/shm/kvpool.p.dram"),
            Shape(8 * GIB, 1, "hardware", 65536),
        )
    ]


def test_plan_fitting_region_is_kept_even_on_a_full_medium() -> None:
    spec = spec_of(dram())
    found = holding(wanted_shape(spec, spec.tiers[0]), free_bytes=0)
    assert plan(spec, 0, {"dram": found}) == [Keep("dram", Path("/dev/shm/kvpool.p.dram"), "u-1")]


def resizable(capacity: int, **fields: Any) -> Found:
    """A region of 8 GiB with room for 1 to 32 GiB."""
    region = ExistingRegion("u-1", Shape(32 * GIB, 1, "hardware"), 1 * GIB, capacity)
    return holding(Shape(32 * GIB, 1, "hardware"), **{"region": region, **fields})


@pytest.mark.parametrize("capacity", ["1Gi", "4Gi", "8Gi", "32Gi"])
def test_plan_another_capacity_within_the_room_is_kept(capacity: str) -> None:
    action = only(plan(spec_of(dram(capacity=capacity)), 0, {"dram": resizable(8 * GIB)}))
    assert action == Keep("dram", Path("/dev/shm/kvpool.p.dram"), "u-1")


@pytest.mark.parametrize("capacity", ["512Mi", "33Gi"])
def test_plan_another_capacity_beyond_the_room_is_refused_with_the_room(capacity: str) -> None:
    error = refusal(spec_of(dram(capacity=capacity)), resizable(8 * GIB))
    assert f"spec.tiers[0].capacity is {capacity}, the region has room for 1Gi to 32Gi" in str(error)
    assert "To keep its blocks write a spec.tiers[0].capacity from 1Gi to 32Gi; to give" in str(error)
    assert "a tier of another name" in str(error)


def test_plan_growth_without_memory_is_said_and_may_wait() -> None:
    actions = plan(spec_of(dram(capacity="16Gi")), 0, {"dram": resizable(8 * GIB, free_bytes=7 * GIB)})
    (keep,) = actions
    assert isinstance(keep, Keep)
    assert "8.0 GiB more than it has now, but only 7.0 GiB are free" in str(keep.shortage)
    assert isinstance(refusals(actions), MediumUnavailable)
    assert refusals([replace(keep, shortage=None)]) is None
    shrinking = plan(spec_of(dram(capacity="4Gi")), 0, {"dram": resizable(8 * GIB, free_bytes=0)})
    assert refusals(shrinking) is None


def test_plan_blank_file_and_device_are_formatted_in_place() -> None:
    file = only(plan(spec_of(dram()), 0, {"dram": Found("file", **ROOM)}))
    device = only(plan(spec_of(dax(shared=False)), 0, {"cxl": Found("device", size_bytes=9 * GIB)}))
    assert isinstance(file, Format)
    assert isinstance(device, Format)
    assert (file.on, device.on) == ("file", "device")


def test_plan_shared_tier_is_formatted_by_host_0_and_awaited_by_others() -> None:
    spec = spec_of(dax(), hosts=2)
    found = {"cxl": Found("device", size_bytes=9 * GIB)}
    assert isinstance(only(plan(spec, 0, found)), Format)
    assert isinstance(only(plan(spec, 1, found)), Await)


@pytest.mark.parametrize(
    ("there", "said"),
    [
        (Shape(4 * GIB, 2, "software", 16384), "spec.tiers[0].capacity is 8Gi, the region has 4Gi"),
        (Shape(8 * GIB, 3, "software", 16384), "spec.hosts is 2, the region has 3"),
        (
            Shape(8 * GIB, 2, "hardware", 16384),
            "spec.tiers[0].coherence is software, the region has hardware",
        ),
        (Shape(8 * GIB, 2, "software", 4096), "spec.tiers[0].minBlockSize is 64Ki, the region has 4Ki"),
        (
            Shape(8 * GIB, 2, "software", 65536, 1 << 20),
            "spec.tiers[0].extentSize is 32Mi, the region has 1Mi",
        ),
    ],
)
def test_plan_region_of_other_sizes_is_refused_with_both_ways_out(there: Shape, said: str) -> None:
    error = refusal(spec_of(dax(minBlockSize="64Ki", extentSize="32Mi"), hosts=2), holding(there))
    assert isinstance(error, GeometryError)
    assert said in str(error)
    assert "Nothing was changed." in str(error)
    assert "To keep its blocks write spec." in str(error)
    assert "kvpool down p --delete" in str(error)


@pytest.mark.parametrize(
    ("tier", "found", "kind", "said"),
    [
        (
            dram(),
            missing(medium_bytes=4 * GIB),
            MediumUnavailable,
            "but the whole medium (tmpfs) has 4.0 GiB",
        ),
        (dram(), missing(free_bytes=GIB), MediumUnavailable, "but only 1.0 GiB are free"),
        (dram(), missing(writable=False), MediumUnavailable, "no permission for new files in /dev/shm"),
        (dram(), missing(read_only=True), MediumUnavailable, "read-only file system"),
        (dram(), Found("no-folder"), MediumUnavailable, "the folder /dev/shm does not exist"),
        (dram(), Found("folder"), MediumUnavailable, "is a folder; expected a file or device"),
        (dram(), Found("other"), MediumUnavailable, "neither a file nor a DAX device"),
        (
            dram(),
            Found("file", **ROOM, writable=False),
            MediumUnavailable,
            "no permission for reading and writing",
        ),
        (
            dram(hugePages=True),
            missing(),
            MediumUnavailable,
            "hugePages is true, but this is no place",
        ),
        (
            dram(capacity="65Mi"),
            missing(huge_page_bytes=2 << 20),
            GeometryError,
            "huge pages of 2Mi. Nothing",
        ),
        (
            dram(),
            missing(huge_page_bytes=1 << 30, free_bytes=0),
            MediumUnavailable,
            "Reserve more huge pages",
        ),
        (dax(), missing(), MediumUnavailable, "no such device"),
        (dax(), Found("device", size_bytes=GIB), MediumUnavailable, "is 8Gi, but the device has 1Gi"),
        (
            dram(),
            Found("file", **ROOM, blank=False, first_bytes=b"PK\3\4", problem=SuperblockError("no magic")),
            RegionError,
            "holds data that is not a kvpool region (it begins with 50 4b 03 04)",
        ),
        (
            dram(),
            Found(
                "file", **ROOM, blank=False, first_bytes=b"kvpool01", problem=SuperblockError("both damaged")
            ),
            SuperblockError,
            "both damaged",
        ),
        (
            dram(),
            Found("file", **ROOM, blank=False, problem=FormatVersionError("format 3, this build reads 1")),
            FormatVersionError,
            "format 3",
        ),
    ],
)
def test_plan_obstacle_is_refused_with_a_reason(
    tier: dict[str, Any], found: Found, kind: type[KvpoolError], said: str
) -> None:
    error = refusal(spec_of(tier), found)
    assert type(error) is kind
    assert said in str(error)


@pytest.mark.parametrize(
    "found",
    [
        Found("device", size_bytes=9 * GIB, blank=False, problem=SuperblockError("no superblock")),
        Found(
            "device",
            size_bytes=9 * GIB,
            blank=False,
            first_bytes=b"kvpool01",
            problem=SuperblockError("erase with 'kvpool format /dev/dax0.0 --capacity SIZE --force'."),
        ),
    ],
)
def test_plan_advice_to_erase_has_all_that_the_manifest_says(found: Found) -> None:
    error = refusal(spec_of(dax(minBlockSize="64Ki", extentSize="32Mi"), hosts=2), found)
    assert (
        "'kvpool format /dev/dax0.0 --capacity 8Gi --hosts 2 --coherence software --min-block-size 64Ki "
        "--extent-size 32Mi --force'" in str(error)
    )
    bare = refusal(spec_of(dax(shared=False)), found)
    assert "'kvpool format /dev/dax0.0 --capacity 8Gi --force'" in str(bare)


def test_plan_region_without_write_permission_is_refused() -> None:
    spec = spec_of(dram())
    error = refusal(spec, holding(wanted_shape(spec, spec.tiers[0]), writable=False))
    assert "no permission" in str(error)


def test_plan_optional_tier_is_skipped_when_unavailable_and_refused_when_wrong() -> None:
    spec = spec_of(dram(), dax(optional=True, shared=False))
    actions = plan(spec, 0, {"dram": missing(), "cxl": missing()})
    assert isinstance(actions[1], Skip)
    assert "no such device" in actions[1].reason
    wrong = holding(Shape(GIB, 1, "hardware", 16384))
    assert isinstance(plan(spec, 0, {"dram": missing(), "cxl": wrong})[1], Refuse)


@pytest.mark.parametrize(
    ("tier", "said"),
    [
        ({"name": "t", "medium": "GPU", "capacity": "1Gi"}, "GPU tiers are not in this version"),
        ({"name": "t", "medium": "SSD", "capacity": "1Gi", "source": {"hostPath": "/a"}}, "SSD tiers"),
        (
            {"name": "t", "medium": "CXL", "capacity": "1Gi", "source": {"deviceClass": "x"}},
            "use source.path",
        ),
    ],
)
def test_plan_tier_of_a_later_version_is_refused_or_skipped_when_optional(
    tier: dict[str, Any], said: str
) -> None:
    tiers = sorted([tier, dram()], key=lambda t: ["GPU", "DRAM", "CXL", "SSD"].index(t["medium"]))
    index = tiers.index(tier)
    refused = plan(spec_of(*tiers), 0, {"dram": missing()})[index]
    assert isinstance(refused, Refuse)
    assert said in str(refused.error)
    assert f"spec.tiers[{index}]" in str(refused.error)
    assert "optional: true" in str(refused.error)
    tiers[index] = tier | {"optional": True}
    assert isinstance(plan(spec_of(*tiers), 0, {"dram": missing()})[index], Skip)


def test_plan_no_tier_left_is_refused() -> None:
    error = only(plan(spec_of({"name": "t", "medium": "GPU", "capacity": "1Gi", "optional": True}), 0, {}))
    assert isinstance(error, Refuse)
    assert "no tier that can be used here" in str(error.error)


def test_plan_host_outside_the_pool_is_refused() -> None:
    error = refusal(spec_of(dax(), hosts=2), Found("device", size_bytes=9 * GIB), host=2)
    assert "spec.hosts is 2, so its hosts are 0 to 1" in str(error)


def test_plan_tiers_that_fit_only_one_by_one_are_refused_together() -> None:
    spec = spec_of(dram(), dram(name="more"))
    found = missing(free_bytes=12 * GIB)
    assert not any(
        isinstance(a, Refuse) for a in plan(spec, 0, {"dram": found, "more": missing(medium_id="2")})
    )
    actions = plan(spec, 0, {"dram": found, "more": found})
    assert isinstance(actions[-1], Refuse)
    assert 'tiers "dram" and "more" need 16.0 GiB together' in str(actions[-1].error)


# --- provision: on real files, with regions that are just a few bytes ---------------------------------------


class FakeRegions:
    """Regions whose superblock is a line of text, filled to their capacity."""

    def __init__(self) -> None:
        self.fail_at: str | None = None
        self.used = False

    def inspect(self, path: Path) -> ExistingRegion:
        head = path.read_bytes()[:200]
        if not head.startswith(b"kvpool01 "):
            raise SuperblockError(f"{path}: no superblock")
        capacity, hosts, coherence = head.split(b"\n")[0].decode().split()[1:]
        mode = "software" if coherence == "software" else "hardware"
        return ExistingRegion("u", Shape(int(capacity), int(hosts), mode, 16384, 1 << 20))

    def check(self, path: Path, shape: Shape) -> None:
        if shape.capacity_bytes < 4096 * shape.hosts:
            raise GeometryError("capacity is too small")

    def ensure_unused(self, path: Path) -> None:
        if self.used:
            raise RegionBusyError(f"region {path}: it is in use")

    def format(self, path: Path, shape: Shape, *, force: bool, progress: Callable[[int, int], None]) -> None:
        with open(path, "xb") as file:
            file.truncate(shape.capacity_bytes)
            progress(shape.capacity_bytes // 2, shape.capacity_bytes)
            if self.fail_at and self.fail_at in str(path):
                raise OSError(errno.ENOSPC, "No space left on device")
            file.seek(0)
            sizes = (shape.capacity_bytes, shape.hosts, shape.coherence)
            file.write(" ".join(["kvpool01", *map(str, sizes)]).encode() + b"\n")
            progress(shape.capacity_bytes, shape.capacity_bytes)


@pytest.fixture
def media(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVPOOL_RUNTIME_DIR", str(tmp_path / "run"))
    (tmp_path / "media").mkdir()
    return tmp_path / "media"


def two_tiers(media: Path, capacity: str = "1Mi") -> PoolSpec:
    return spec_of(
        dram(capacity=capacity, source={"path": str(media / "dram")}),
        dax(capacity="2Mi", source={"path": str(media / "cxl")}),
        hosts=2,
    )


def run(
    spec: PoolSpec, host: int = 0, regions: FakeRegions | None = None, timeout_s: float = 0
) -> list[Action]:
    return provision(
        spec,
        host,
        timeout_s=timeout_s,
        progress=lambda *_: None,
        waiting=lambda _: None,
        regions=regions or FakeRegions(),
    )


def listing(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_provision_twice_makes_then_keeps(media: Path) -> None:
    spec = two_tiers(media)
    assert [type(a) for a in run(spec)] == [Format, Format]
    assert {p.name for p in media.iterdir()} == {"dram", "cxl"}
    before = listing(media)
    assert [type(a) for a in run(spec)] == [Keep, Keep]
    assert listing(media) == before
    assert PoolSpec.from_file(paths.manifest_path("p")) == spec


def test_provision_second_host_shares_the_shared_tier_and_has_its_own_other(media: Path) -> None:
    spec = two_tiers(media)
    run(spec)
    assert [type(a) for a in run(spec, host=1)] == [Format, Keep]
    assert {p.name for p in media.iterdir()} == {"dram", "dram.h1", "cxl"}


def test_provision_second_host_waits_for_host_0(media: Path) -> None:
    spec = two_tiers(media)
    later = threading.Timer(0.4, run, [spec])
    later.start()
    assert [type(a) for a in run(spec, host=1, timeout_s=20)] == [Format, Await]
    later.join()


def test_provision_second_host_alone_says_who_formats(media: Path) -> None:
    with pytest.raises(MediumUnavailable, match=r"kvpool up -f \.\.\. --host 0"):
        run(two_tiers(media), host=1)


def test_provision_other_capacity_changes_nothing(media: Path) -> None:
    run(two_tiers(media))
    before = listing(media.parent)
    with pytest.raises(GeometryError, match="capacity is 3Mi, the region has 1Mi"):
        run(two_tiers(media, capacity="3Mi"))
    assert listing(media.parent) == before


def test_provision_several_obstacles_are_named_at_once_and_change_nothing(media: Path) -> None:
    (media / "dram").mkdir()
    (media / "cxl").write_bytes(b"somebody's")
    before = listing(media.parent)
    with pytest.raises(KvpoolError) as caught:
        run(two_tiers(media))
    assert "is a folder" in str(caught.value)
    assert "holds data that is not a kvpool region" in str(caught.value)
    assert listing(media.parent) == before
    assert not (media.parent / "run").exists()


def test_provision_no_space_in_the_second_tier_takes_the_first_back(media: Path) -> None:
    regions = FakeRegions()
    regions.fail_at = "cxl"
    with pytest.raises(MediumUnavailable, match="no space left"):
        run(two_tiers(media), regions=regions)
    assert listing(media) == {}
    assert not paths.manifest_path("p").exists()


def test_provision_no_space_in_a_blank_file_restores_its_size(media: Path) -> None:
    (media / "cxl").write_bytes(bytes(100))
    regions = FakeRegions()
    regions.fail_at = "cxl"
    with pytest.raises(MediumUnavailable, match="no space left"):
        run(two_tiers(media), regions=regions)
    assert listing(media) == {"cxl": bytes(100)}


def test_provision_blank_file_that_is_in_use_is_left_alone(media: Path) -> None:
    (media / "cxl").write_bytes(bytes(100))
    regions = FakeRegions()
    regions.used = True
    with pytest.raises(RegionBusyError, match="in use"):
        run(two_tiers(media), regions=regions)
    assert listing(media) == {"cxl": bytes(100)}


def test_provision_leftover_of_a_killed_start_is_removed(media: Path) -> None:
    (media / "dram.making").write_bytes(b"half")
    run(two_tiers(media))
    assert {p.name for p in media.iterdir()} == {"dram", "cxl"}


# --- looking and removing -----------------------------------------------------------------------------------


def test_look_at_kinds_of_things(media: Path) -> None:
    inspect = FakeRegions().inspect
    (media / "blank").write_bytes(bytes(5000))
    (media / "data").write_bytes(b"x" * 5000)
    os.symlink(media / "nowhere", media / "dangling")
    kinds = {
        name: look_at(media / name, inspect).kind for name in ("blank", "data", "no", "no/no", "dangling")
    }
    assert kinds == {
        "blank": "file",
        "data": "file",
        "no": "missing",
        "no/no": "no-folder",
        "dangling": "missing",
    }
    assert look_at(media, inspect).kind == "folder"
    assert look_at(Path("/dev/null"), inspect).kind == "other"
    assert look_at(media / "blank", inspect).blank
    assert not look_at(media / "data", inspect).blank
    assert isinstance(look_at(media / "data", inspect).problem, SuperblockError)


def test_look_at_what_cannot_be_read_is_not_taken_for_blank(
    media: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (media / "device").write_bytes(bytes(8192))

    def fails(*_: object) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "pread", fails)
    assert look_at(media / "device", FakeRegions().inspect).blank  # mapped instead
    monkeypatch.setattr("mmap.mmap", fails)
    found = look_at(media / "device", FakeRegions().inspect)
    assert not found.blank
    assert "cannot be read: Input/output error" in str(refusal(spec_of(dram()), found))


def test_file_system_of_longest_mount_wins() -> None:
    mounts = (
        "1 0 8:1 / / rw - ext4 /dev/a rw\n"
        "2 1 0:5 / /dev rw - devtmpfs dev rw\n"
        "3 2 0:6 / /dev/shm rw shared:1 - tmpfs shm rw\n"
        "4 1 0:7 / /mnt/with\\040blank rw - xfs /dev/b rw\n"
    )
    assert file_system_of(Path("/dev/shm/x"), mounts) == "tmpfs"
    assert file_system_of(Path("/dev/shmx"), mounts) == "devtmpfs"
    assert file_system_of(Path("/mnt/with blank/x"), mounts) == "xfs"
    assert file_system_of(Path("/etc/x"), mounts) == "ext4"


def test_remove_takes_regions_and_refuses_other_data(media: Path) -> None:
    spec, inspect = two_tiers(media), FakeRegions().inspect
    run(spec)
    run(spec, host=1)
    ours = region_paths(spec, [0, 1])
    assert [p.name for p in ours] == ["dram", "dram.h1", "cxl"]
    (media / "foreign").write_bytes(b"x")
    with pytest.raises(RegionError, match="Nothing was removed"):
        remove([*ours, media / "foreign"], inspect)
    assert len(listing(media)) == 4
    assert remove([*ours, media / "never-made"], inspect) == ours
    assert set(listing(media)) == {"foreign"}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_look_at_without_permission_says_so(media: Path) -> None:
    # In another process, because the test itself must stay root to clean up.
    os.chmod(media, 0o755)
    for parent in media.parents:
        if parent.stat().st_uid == 0 and parent != Path("/") and parent != Path("/tmp"):
            os.chmod(parent, 0o755)
    (media / "secret").write_bytes(b"x")
    os.chmod(media / "secret", 0o600)
    code = (
        "import os, sys; from pathlib import Path; from kvpool.provision.observe import look_at\n"
        "os.setgid(65534); os.setuid(65534)\n"
        f"a, b = (look_at(Path({str(media)!r}) / n, lambda p: 1 / 0) for n in ('secret', 'new'))\n"
        "print(a.kind, a.readable, a.writable, b.kind, b.writable)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["file", "False", "False", "missing", "False"], done.stderr


def test_file_at_a_devices_place_is_formatted_and_wiped_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a cluster's driver hands out a file: it is mounted there, so it cannot be replaced or removed."""
    region_path = tmp_path / "tier"
    monkeypatch.setenv("KVPOOL_RUNTIME_DIR", str(tmp_path / "run"))
    region_path.write_bytes(b"")
    os.truncate(region_path, 64 << 20)
    for module in ("kvpool.provision.observe", "kvpool.provision.remove", "kvpool.region", "kvpool.paths"):
        monkeypatch.setattr(sys.modules[module], "is_device_path", lambda path: path == region_path)
    before = region_path.stat()
    spec = spec_of(dram(capacity="16Mi", source={"path": str(region_path)}))
    provision(spec, 0, timeout_s=10, progress=lambda *_: None, waiting=lambda _: None)
    after = region_path.stat()
    assert (after.st_ino, after.st_size) == (before.st_ino, before.st_size)
    assert look_at(region_path, real_regions().inspect).region is not None
    assert remove([region_path], real_regions().inspect) == [region_path]
    assert region_path.stat().st_ino == before.st_ino
    assert look_at(region_path, real_regions().inspect).blank
