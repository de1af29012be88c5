"""What is to be done so that a pool's regions exist: pure, from the manifest and what was found."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from kvpool.errors import FormatVersionError, GeometryError, KvpoolError, MediumUnavailable, RegionError
from kvpool.paths import is_device_path, region_path
from kvpool.quantity import format_quantity, human_bytes
from kvpool.spec import Coherence, PoolSpec, TierSpec

MAGIC = b"kvpool01"  # layout.h kMagic, as the first bytes of a region


@dataclass(frozen=True, slots=True)
class Shape:
    """What a manifest says about a region. None: the manifest leaves it to the region."""

    capacity_bytes: int
    hosts: int
    coherence: Coherence
    min_block_bytes: int | None = None
    extent_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class ExistingRegion:
    """A valid region that is there already."""

    uuid: str
    shape: Shape  # its capacity is what it was laid out for, the most that it can grow to
    smallest_bytes: int | None = None  # what it can shrink to; None: its capacity cannot be changed
    used_bytes: int | None = None  # the capacity that it has now; None: all

    def fits(self, capacity_bytes: int) -> bool:
        """Whether it can have this capacity."""
        most = self.shape.capacity_bytes
        least = most if self.smallest_bytes is None else self.smallest_bytes
        return least <= capacity_bytes <= most

    def growth(self, capacity_bytes: int) -> int:
        """How many bytes it needs more than it has."""
        has = self.shape.capacity_bytes if self.used_bytes is None else self.used_bytes
        return max(0, capacity_bytes - has)


@dataclass(frozen=True, slots=True)
class Found:
    """What is at a tier's path. All sizes in bytes."""

    kind: Literal["missing", "no-folder", "folder", "file", "device", "other"]
    size_bytes: int = 0  # of the file or device
    allocated_bytes: int = 0  # what the file already takes from its medium
    free_bytes: int = 0  # what the medium can still give
    medium_bytes: int = 0  # what the medium could give if it were empty
    medium_name: str = ""  # for messages: tmpfs, ext4, device
    medium_id: str = ""  # tiers with the same one take their space from the same place
    readable: bool = True
    writable: bool = True
    read_only: bool = False  # the file system, not the permission
    huge_page_bytes: int = 0  # on hugetlbfs
    blank: bool = True  # nothing but zeros where a region or other data would begin
    first_bytes: bytes = b""
    region: ExistingRegion | None = None
    problem: KvpoolError | None = None  # why the region there cannot be read

    @property
    def looks_like_region(self) -> bool:
        """Whether what is there was a region once: a damaged one, or of another version."""
        return self.first_bytes.startswith(MAGIC) or isinstance(self.problem, FormatVersionError)


@dataclass(frozen=True, slots=True)
class Format:
    """Make a region. `on`: nothing is there yet, a blank file, or a device."""

    tier: str
    path: Path
    shape: Shape
    on: Literal["nothing", "file", "device"] = "nothing"


@dataclass(frozen=True, slots=True)
class Keep:
    """The region that is there fits; its blocks stay. `shortage`: why it cannot grow as asked for."""

    tier: str
    path: Path
    uuid: str
    shortage: KvpoolError | None = None


@dataclass(frozen=True, slots=True)
class Await:
    """Host 0 formats shared tiers; wait until it has."""

    tier: str
    path: Path
    shape: Shape


@dataclass(frozen=True, slots=True)
class Skip:
    """An optional tier that cannot be had."""

    tier: str
    reason: str


@dataclass(frozen=True, slots=True)
class Refuse:
    """A tier that cannot be had as declared."""

    tier: str
    error: KvpoolError


Action = Format | Keep | Await | Skip | Refuse


def wanted_shape(spec: PoolSpec, tier: TierSpec) -> Shape:
    """The region that the manifest asks for."""
    return Shape(
        capacity_bytes=tier.capacity_bytes,
        hosts=spec.shards(tier),
        coherence=tier.coherence_mode,
        min_block_bytes=tier.min_block_bytes,
        extent_bytes=tier.extent_bytes,
    )


def in_this_version(tier: TierSpec) -> str | None:
    """None when `tier` can be provisioned here, else why not."""
    if tier.medium in ("GPU", "SSD"):
        return f"{tier.medium} tiers are not in this version of kvpool"
    if tier.source and tier.source.device_class:
        return "source.deviceClass is for Kubernetes, where a driver hands out such memory; use source.path"
    return None


def plan(spec: PoolSpec, host: int, found: Mapping[str, Found]) -> list[Action]:
    """One action a tier, in order. `found` has an entry for each tier that is in this version."""
    if host >= spec.hosts:
        numbers = "its only host is 0" if spec.hosts == 1 else f"its hosts are 0 to {spec.hosts - 1}"
        error = GeometryError(
            f'host {host} is not in pool "{spec.name}": spec.hosts is {spec.hosts}, so {numbers}. '
            "Nothing was changed. Use another --host, or raise spec.hosts (this needs new regions)."
        )
        return [Refuse(spec.tiers[0].name, error)]
    actions = [_tier_action(spec, index, host, found) for index in range(len(spec.tiers))]
    if all(isinstance(action, Skip) for action in actions):
        reasons = " ".join(f'Tier "{a.tier}": {a.reason}.' for a in actions if isinstance(a, Skip))
        error = GeometryError(f'pool "{spec.name}" has no tier that can be used here. {reasons}')
        return [Refuse(spec.tiers[0].name, error)]
    return [*actions, *_too_much_together(actions, found)]


def format_obstacle(path: Path, shape: Shape, here: Found, *, force: bool) -> KvpoolError | None:
    """Why no region of that shape can be made at `path`. With `force`, what is there is no reason."""
    if here.region is not None and not force:
        return RegionError(
            f"{path}: there is a kvpool region already. Nothing was changed. "
            "Erase it with --force; all of its blocks are lost then."
        )
    empty = replace(here, blank=True, region=None, problem=None) if force else here
    return _obstacle(f"region {path}", path, shape, empty, capacity_name="the capacity", formats=True)


def refusals(actions: Sequence[Action]) -> KvpoolError | None:
    """All that is refused, as one error; None when nothing is."""
    errors = [action.error for action in actions if isinstance(action, Refuse)]
    errors += [action.shortage for action in actions if isinstance(action, Keep) and action.shortage]
    if len(errors) <= 1:
        return errors[0] if errors else None
    return type(errors[0])("\n".join(str(error) for error in errors))


def _tier_action(spec: PoolSpec, index: int, host: int, found: Mapping[str, Found]) -> Action:
    tier = spec.tiers[index]
    missing = in_this_version(tier)
    if missing:
        advice = "Take the tier out, or set optional: true to start without it."
        error = MediumUnavailable(
            f'spec.tiers[{index}] "{tier.name}": {missing}. Nothing was changed. {advice}'
        )
        return Skip(tier.name, missing) if tier.optional else Refuse(tier.name, error)
    path, wanted, here = region_path(spec, tier, host), wanted_shape(spec, tier), found[tier.name]
    if here.region:
        differences = list(_differences(index, wanted, here.region))
        if differences:
            return Refuse(tier.name, GeometryError(_misfit(spec, tier, path, differences)))
        if here.writable:
            fits = here.region.growth(wanted.capacity_bytes) <= here.free_bytes
            shortage = None if fits else _no_room(index, tier, path, wanted, here)
            return Keep(tier.name, path, here.region.uuid, shortage)
    name, capacity = f'tier "{tier.name}": {path}', f"spec.tiers[{index}].capacity"
    formats = host == 0 or not tier.shared
    problem = _obstacle(name, path, wanted, here, capacity_name=capacity, formats=formats)
    if problem is None and tier.huge_pages and not here.huge_page_bytes:
        problem = MediumUnavailable(
            f"{name}: hugePages is true, but this is no place for huge pages. Nothing was changed. "
            "Write a source.path on a hugetlbfs mount, or hugePages: false."
        )
    if problem is None:
        if tier.shared and host != 0:
            return Await(tier.name, path, wanted)
        on: Literal["nothing", "file", "device"] = "nothing"
        if here.kind in ("file", "device"):
            on = here.kind
        return Format(tier.name, path, wanted, on)
    # An optional tier may be missing; data that is in the way, or a wrong size, is a mistake all the same.
    if tier.optional and isinstance(problem, MediumUnavailable):
        return Skip(tier.name, str(problem))
    return Refuse(tier.name, problem)


def _no_room(index: int, tier: TierSpec, path: Path, wanted: Shape, here: Found) -> KvpoolError:
    assert here.region is not None
    more, free = here.region.growth(wanted.capacity_bytes), human_bytes(here.free_bytes)
    capacity = format_quantity(wanted.capacity_bytes)
    return MediumUnavailable(
        f'tier "{tier.name}": {path}: spec.tiers[{index}].capacity is {capacity}, '
        f"which is {human_bytes(more)} more than it has now, but only {free} are free on the medium "
        f"({here.medium_name}). Nothing was changed. Lower the capacity, or free some space."
    )


@dataclass(frozen=True, slots=True)
class _Difference:
    field: str  # of the manifest
    wanted: str  # what it says
    there: str  # what the region has
    write: str = ""  # what to say instead; else what the region has

    @property
    def way_back(self) -> str:
        return self.write or f"{self.field}: {self.there}"


def _differences(index: int, wanted: Shape, region: ExistingRegion) -> Iterator[_Difference]:
    there = region.shape
    if not region.fits(wanted.capacity_bytes):
        room, capacity, write = format_quantity(there.capacity_bytes), f"spec.tiers[{index}].capacity", ""
        if region.smallest_bytes is not None and region.smallest_bytes < there.capacity_bytes:
            least = format_quantity(region.smallest_bytes)
            write = f"a {capacity} from {least} to {room}"
            room = f"room for {least} to {room}"
        yield _Difference(capacity, format_quantity(wanted.capacity_bytes), room, write)
    if wanted.hosts != there.hosts:
        yield _Difference("spec.hosts", str(wanted.hosts), str(there.hosts))
    if wanted.coherence != there.coherence:
        yield _Difference(f"spec.tiers[{index}].coherence", wanted.coherence, there.coherence)
    for name, asked, has in (
        ("minBlockSize", wanted.min_block_bytes, there.min_block_bytes),
        ("extentSize", wanted.extent_bytes, there.extent_bytes),
    ):
        if asked is not None and has is not None and asked != has:
            yield _Difference(f"spec.tiers[{index}].{name}", format_quantity(asked), format_quantity(has))


def _misfit(spec: PoolSpec, tier: TierSpec, path: Path, differences: list[_Difference]) -> str:
    said = ", ".join(f"{d.field} is {d.wanted}, the region has {d.there}" for d in differences)
    back = ", ".join(d.way_back for d in differences)
    return (
        f'tier "{tier.name}": the region {path} was made with other sizes: {said}. Nothing was changed. '
        f"To keep its blocks write {back}; to give them up, run 'kvpool down {spec.name} --delete' first, "
        "or write a tier of another name in its place."
    )


def format_command(path: Path, shape: Shape) -> str:
    """What a person types to make a region of that shape over whatever is there."""
    parts = [f"kvpool format {path} --capacity {format_quantity(shape.capacity_bytes)}"]
    if shape.hosts != 1:
        parts.append(f"--hosts {shape.hosts}")
    if shape.coherence != "hardware":
        parts.append(f"--coherence {shape.coherence}")
    if shape.min_block_bytes is not None:
        parts.append(f"--min-block-size {format_quantity(shape.min_block_bytes)}")
    if shape.extent_bytes is not None:
        parts.append(f"--extent-size {format_quantity(shape.extent_bytes)}")
    return " ".join([*parts, "--force"])


def _obstacle(
    name: str, path: Path, wanted: Shape, here: Found, *, capacity_name: str, formats: bool
) -> KvpoolError | None:
    """Why a region cannot be made or used at `path`, None when it can."""
    unchanged, erase = "Nothing was changed.", f"'{format_command(path, wanted)}'"
    if here.kind == "no-folder":
        return MediumUnavailable(
            f"{name}: the folder {path.parent} does not exist. {unchanged} Make or mount it."
        )
    if here.kind == "folder":
        return MediumUnavailable(
            f"{name} is a folder; expected a file or device. {unchanged} Write {path}/NAME."
        )
    if here.kind == "other":
        return MediumUnavailable(
            f"{name} is neither a file nor a DAX device. {unchanged} Write another source.path."
        )
    if here.kind == "missing" and is_device_path(path):
        return MediumUnavailable(
            f"{name}: no such device. {unchanged} 'daxctl list' shows those of this machine; "
            "a device in another mode is switched with 'daxctl reconfigure-device --mode=devdax'."
        )
    if here.read_only:
        return MediumUnavailable(
            f"{name} lies on a read-only file system. {unchanged} Remount it for writing."
        )
    if not here.writable or not here.readable:
        what = "reading and writing" if here.kind != "missing" else f"new files in {path.parent}"
        return MediumUnavailable(f"{name}: no permission for {what}. {unchanged} Give it to this user.")
    if isinstance(here.problem, MediumUnavailable) or (here.problem and here.looks_like_region):
        said = str(here.problem).replace(f"'kvpool format {path} --capacity SIZE --force'", erase)
        return type(here.problem)(f"{name.partition(':')[0]}: {said}")
    if here.kind in ("file", "device") and not here.blank and here.region is None:
        begins = f" (it begins with {here.first_bytes[:8].hex(' ')})" if here.first_bytes else ""
        return RegionError(
            f"{name} holds data that is not a kvpool region{begins}. {unchanged} "
            f"If nobody needs it, erase it with {erase}."
        )
    return _too_small(name, capacity_name, wanted, here) if formats else None


def _too_small(name: str, capacity_name: str, wanted: Shape, here: Found) -> KvpoolError | None:
    capacity = wanted.capacity_bytes
    asked = f"{name}: {capacity_name} is {format_quantity(capacity)}"
    lower = "Nothing was changed. Lower the capacity, or use a larger medium."
    if here.huge_page_bytes:
        lower = (
            "Nothing was changed. Reserve more huge pages (sysctl vm.nr_hugepages), or lower the capacity."
        )
    if here.kind == "device":
        if capacity > here.size_bytes:
            return MediumUnavailable(
                f"{asked}, but the device has {format_quantity(here.size_bytes)}. {lower}"
            )
        return None
    page = here.huge_page_bytes
    if page and capacity % page:
        fitting = format_quantity(-(-capacity // page) * page)
        return GeometryError(
            f"{asked}, which is not a whole number of huge pages of {format_quantity(page)}. "
            f"Nothing was changed. Write {fitting}."
        )
    if capacity > here.medium_bytes:
        has = human_bytes(here.medium_bytes)
        return MediumUnavailable(f"{asked}, but the whole medium ({here.medium_name}) has {has}. {lower}")
    if capacity - here.allocated_bytes > here.free_bytes:
        has = human_bytes(here.free_bytes)
        lower = lower.replace("or use a larger medium", "or free some space")
        return MediumUnavailable(
            f"{asked}, but only {has} are free on the medium ({here.medium_name}). {lower}"
        )
    return None


def _too_much_together(actions: Sequence[Action], found: Mapping[str, Found]) -> Iterator[Refuse]:
    """Tiers that fit one by one, but not all on the medium that they share."""
    sharing: dict[str, list[Format]] = {}
    for action in actions:
        if isinstance(action, Format) and found[action.tier].kind != "device":
            sharing.setdefault(found[action.tier].medium_id, []).append(action)
    for formats in sharing.values():
        needed = sum(f.shape.capacity_bytes - found[f.tier].allocated_bytes for f in formats)
        free = max(found[f.tier].free_bytes for f in formats)
        if needed > free and len(formats) > 1:
            names = " and ".join(f'"{f.tier}"' for f in formats)
            medium = found[formats[0].tier].medium_name
            error = MediumUnavailable(
                f"tiers {names} need {human_bytes(needed)} together, but the medium that they share "
                f"({medium}) has {human_bytes(free)} free. Nothing was changed. Lower their capacities."
            )
            yield Refuse(formats[0].tier, error)
