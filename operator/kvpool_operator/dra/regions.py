"""Regions of CXL memory for claims: which one, how large, and where a container sees it. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import PurePosixPath
from uuid import UUID, uuid5

from kvpool.cxl import Composed, Memory, Wanted
from kvpool.quantity import format_quantity
from kvpool_operator.dra.allocation import Allocation, ClaimRef
from kvpool_operator.dra.cdi import Mount, Node
from kvpool_operator.dra.parameters import NotYet, Refused, RegionParameters, TierRef
from kvpool_operator.manifest import tier_device
from kvpool_operator.names import DEVICE_DIR, region_uuid

_CLAIMS = UUID("6d0a8d3e-3f0c-5f57-9a40-0f6f8b1f7c11")
_DAX = re.compile(r"/dev/dax[0-9]+\.[0-9]+")
_CXL_STEP_BYTES = 256 << 20  # of host memory decoders; smaller memories exist only as files


def uuid_of(ref: ClaimRef, tier: TierRef | None) -> UUID:
    """The region's identity, which every node works out alike: of its tier, or else of its claim."""
    return region_uuid(tier.namespace, tier.pool, tier.tier) if tier else uuid5(_CLAIMS, ref.uid)


def container_path(ref: ClaimRef, tier: TierRef | None) -> str:
    """Where containers see the region: the same on every node."""
    return tier_device(tier.pool, tier.tier) if tier else f"{DEVICE_DIR}/{ref.name}"


def wanted(
    ref: ClaimRef,
    allocation: Allocation,
    parameters: RegionParameters,
    memories: Sequence[Memory],
    regions: Sequence[Composed],
) -> Wanted:
    """The region for a claim: of all of its memories, and as it is when it exists already.

    Raises:  Refused when a memory is not here or not as large as was asked for, or when the region lies on
             other memories.
    """
    uuid = uuid_of(ref, parameters.tier)
    serials = allocation.serials
    sizes = {memory.serial: memory.size_bytes for memory in memories}
    missing = [serial for serial in serials if serial not in sizes]
    if missing:
        raise Refused(
            f"{ref.where}: this node sees no CXL memory {', '.join(missing)}; it sees "
            f"{', '.join(sizes) or 'none'}. Look at the machine's 'cxl list', or at the driver's --backend."
        )
    ways = len(serials)
    total = whole_bytes(min(sizes[serial] for serial in serials), ways, parameters)
    if parameters.size_bytes > total:
        raise Refused(
            f"{ref.where}: parameters.size is {format_quantity(parameters.size_bytes)}, and its memories "
            f"({', '.join(serials)}) give {format_quantity(total)}. Ask for less, or for more memories."
        )
    there = next((region for region in regions if region.uuid == uuid), None)
    if there is None or there.problem:  # composing it tells whether it can be had
        return Wanted(uuid, serials, total, parameters.granularity_bytes, parameters.align_bytes)
    if set(there.memories) != set(serials):
        raise Refused(
            f"{ref.where}: region {uuid} lies on {', '.join(there.memories)}, and the claim was given "
            f"{', '.join(serials)}. Delete the claim, so that it gets those; it is made again by itself."
        )
    align = there.device.align_bytes if there.device else parameters.align_bytes
    return Wanted(uuid, there.memories, there.size_bytes, there.granularity_bytes, align)


def whole_bytes(least_bytes: int, ways: int, parameters: RegionParameters) -> int:
    """What `ways` whole memories give to a region, in steps that decoders and mappings can have."""
    step = math.lcm(parameters.align_bytes, parameters.granularity_bytes * ways)
    if least_bytes >= _CXL_STEP_BYTES:
        step = math.lcm(step, _CXL_STEP_BYTES * ways)
    return least_bytes * ways // step * step


def placed(composed: Composed, at: str, *, read_only: bool = False) -> Mount | Node:
    """How a container gets a composed region. Raises: Refused when it is there in part only."""
    if composed.device is None:
        raise NotYet(
            f"region {composed.uuid} has no device here yet; it is tried again. 'kvpool cxl list' "
            "shows what is missing."
        )
    path = composed.device.path
    if is_dax(path):
        return Node(path, at, read_only)
    return Mount(path, at, read_only)


def is_dax(path: str) -> bool:
    """Whether a path is a DAX device's, and nothing else's."""
    return _DAX.fullmatch(path) is not None and str(PurePosixPath(path)) == path
