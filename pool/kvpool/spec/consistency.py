"""Rules over several fields of a manifest, which no schema can say."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Sequence

from kvpool import rules
from kvpool.quantity import format_quantity, shown
from kvpool.spec.cluster import Daemon, Toleration, amount
from kvpool.spec.mistakes import FieldPath
from kvpool.spec.tier import Eviction, TierSpec

Found = Iterator[tuple[FieldPath, str]]
# With their index: tiers that are wrong by themselves are left out, and the rules still apply to the others.
Tiers = Sequence[tuple[int, TierSpec]]


def cross_problems(hosts: int, tiers: Tiers) -> Found:
    """Every breach of a rule over several fields."""
    for index, tier in tiers:
        at: FieldPath = ("spec", "tiers", index)
        yield from _source_problems(at, tier)
        yield from _size_problems(at, tier, hosts)
        yield from _medium_problems(at, tier)
    yield from _between_tiers(tiers)
    if hosts > 1 and tiers and not any(tier.shared for _, tier in tiers):
        yield ("spec", "hosts"), rules.HOSTS_SHARED


def _source_problems(at: FieldPath, tier: TierSpec) -> Found:
    source = tier.source
    given = source.model_dump(by_alias=True, exclude_none=True) if source else {}
    here = (*at, "source")
    if source and len(given) != 1:
        yield here, f"has {' and '.join(given) or 'nothing'}; {rules.SOURCE_ONE_OF}"
        return
    for name in ("path", "hostPath"):
        path = given.get(name)
        if path is not None and not _is_plain(path):
            yield (*here, name), f"{shown(path)} cannot be used; {rules.PATH_ABSOLUTE}"
        elif path is not None and not _fits_the_kernel(path):
            yield (*here, name), f"{shown(path)} cannot be used; {rules.PATH_SIZE}"
    if tier.medium == "CXL":
        if not given:
            yield here, f"{rules.MISSING}; {rules.SOURCE_CXL}"
        elif "hostPath" in given:
            yield (*here, "hostPath"), rules.SOURCE_HOST_PATH
    elif tier.medium == "SSD":
        if not given or "deviceClass" in given:
            yield here, f"{rules.MISSING if not given else 'has deviceClass'}; {rules.SOURCE_SSD}"
    elif given and tier.medium == "GPU":
        yield here, rules.SOURCE_GPU
    elif given and "path" not in given:
        yield here, f"has {next(iter(given))}; {rules.SOURCE_DRAM}"


def _is_plain(path: str) -> bool:
    # normpath leaves two leading slashes, which POSIX lets mean something else.
    return path.startswith("/") and path[1:2] not in ("", "/") and posixpath.normpath(path) == path


def _fits_the_kernel(path: str) -> bool:
    raw = path.encode(errors="surrogatepass")
    short = len(raw) <= rules.PATH_MAX and all(len(p) <= rules.PATH_PART_MAX for p in raw.split(b"/"))
    return short and b"\0" not in raw


def _size_problems(at: FieldPath, tier: TierSpec, hosts: int) -> Found:
    if tier.capacity_bytes < rules.CAPACITY_MIN_BYTES:
        yield (*at, "capacity"), f"{tier.capacity_bytes} bytes is too small; {rules.CAPACITY_MIN}"
        return
    path = tier.source.path if tier.source else None
    if (
        tier.medium == "CXL"
        and path
        and path.startswith(rules.DAX_PREFIX)
        and tier.capacity_bytes % rules.DAX_STEP_BYTES
    ):
        yield (*at, "capacity"), f"{format_quantity(tier.capacity_bytes)} does not fit; {rules.DAX_SIZE}"
    share = tier.capacity_bytes // (hosts if tier.shared else 1)
    extent, block = tier.extent_bytes, tier.min_block_bytes
    if extent is not None and extent > share:
        yield (*at, "extentSize"), f"{format_quantity(extent)} is too large; {rules.EXTENT_SIZE}"
    fits = block is None or rules.BLOCK_MIN_BYTES <= block <= (extent or share)
    if block is not None and (not fits or block % rules.BLOCK_STEP_BYTES):
        yield (*at, "minBlockSize"), f"{format_quantity(block)} does not fit; {rules.BLOCK_SIZE}"


def _medium_problems(at: FieldPath, tier: TierSpec) -> Found:
    if tier.shared and tier.medium in ("GPU", "SSD"):
        yield (*at, "shared"), rules.SHARED_MEDIUM
    if tier.coherence and tier.medium in ("GPU", "SSD"):
        yield (*at, "coherence"), rules.COHERENCE_MEDIUM
    if tier.huge_pages and tier.medium != "DRAM":
        yield (*at, "hugePages"), rules.HUGE_PAGES_MEDIUM


def _between_tiers(tiers: Tiers) -> Found:
    names: dict[str, int] = {}
    paths: dict[str, int] = {}
    slowest: tuple[int, TierSpec] | None = None
    for index, tier in tiers:
        at: FieldPath = ("spec", "tiers", index)
        if tier.name in names:
            other = f"tiers[{names[tier.name]}]"
            yield (*at, "name"), f'"{tier.name}" is the name of {other} too; {rules.TIERS_UNIQUE_NAMES}'
        names.setdefault(tier.name, index)
        path = tier.source.path if tier.source else None
        if path in paths:
            other = f"tiers[{paths[path]}]"
            yield (*at, "source", "path"), f"{path} is used by {other} too; {rules.TIERS_UNIQUE_PATHS}"
        if path is not None:
            paths.setdefault(path, index)
        if slowest and rules.MEDIA.index(tier.medium) < rules.MEDIA.index(slowest[1].medium):
            behind = f"{slowest[1].medium} tier tiers[{slowest[0]}]"
            yield (*at, "medium"), f"{tier.medium} stands after the {behind}; {rules.TIERS_ORDER}"
        else:
            slowest = (index, tier)


def eviction_problems(eviction: Eviction) -> Found:
    """The low watermark has to be below the high one."""
    if eviction.low_watermark >= eviction.high_watermark:
        given = f"low {eviction.low_watermark}, high {eviction.high_watermark}"
        yield ("spec", "eviction"), f"{given}; {rules.WATERMARKS}"


def toleration_problems(index: int, toleration: Toleration) -> Found:
    """What Kubernetes would refuse in the pods, long after the manifest was accepted."""
    at: FieldPath = ("spec", "tolerations", index)
    exists = toleration.operator == "Exists"
    if exists and toleration.value:
        yield at, f"has value {shown(toleration.value)}; {rules.TOLERATION_EXISTS}"
    if not toleration.key and not exists:
        yield at, f"has no key; {rules.TOLERATION_KEY}"
    if toleration.toleration_seconds is not None and toleration.effect != "NoExecute":
        yield at, f"effect is {toleration.effect or 'not given'}; {rules.TOLERATION_SECONDS}"


def resource_problems(daemon: Daemon) -> Found:
    """A pod that asks for more than it may use is never made."""
    resources = daemon.resources
    if resources is None or not resources.requests or not resources.limits:
        return
    for name, asked in resources.requests.items():
        limit = resources.limits.get(name)
        if limit is not None and amount(asked) > amount(limit):
            at: FieldPath = ("spec", "daemon", "resources")
            yield at, f"{name} {asked} is more than {limit}; {rules.REQUEST_LIMIT}"
