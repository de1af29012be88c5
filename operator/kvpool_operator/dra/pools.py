"""What a claim for a KVPool gives to a container: the pool's folder, its tiers, its environment. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvpool.cxl import Composed
from kvpool.errors import ManifestError
from kvpool_operator.dra.allocation import ClaimRef, PoolRef
from kvpool_operator.dra.cdi import Given, Mount, Node
from kvpool_operator.dra.parameters import NotYet, Refused, Role
from kvpool_operator.dra.regions import is_dax, placed
from kvpool_operator.inject import environment
from kvpool_operator.manifest import HUGE_MOUNT, PoolObject, placed_path
from kvpool_operator.names import region_uuid


def usable_pool(ref: ClaimRef, wanted: PoolRef, body: Mapping[str, Any] | None) -> PoolObject:
    """The KVPool that a claim may have. Raises: Refused."""
    name = f"KVPool {wanted.namespace}/{wanted.name}"
    if ref.namespace != wanted.namespace:  # whatever its selector says: a namespace has its own pools only
        raise Refused(f"{ref.where} asks for {name}: a claim gets pools of its own namespace only.")
    if body is None or body["metadata"].get("uid") != wanted.uid:
        raise Refused(f"{ref.where}: {name} is gone, or was made anew; delete the pod and its claim.")
    if body["metadata"].get("deletionTimestamp"):
        raise Refused(f"{ref.where}: {name} is being deleted.")
    try:
        return PoolObject.from_object(body)
    except ManifestError as error:
        raise Refused(f"{ref.where}: {name} is not valid: {error}") from None


def given(ref: ClaimRef, pool: PoolObject, role: Role, regions: Sequence[Composed], group_id: int) -> Given:
    """Everything of the pool on this node; read-write only for who stores blocks.

    Raises:  Refused for a tier that is not here (yet), or lies on something that no pod may have.
    """
    read_only = role == "reader"
    found: list[Mount | Node] = [Mount(pool.node_folder, pool.folder, read_only)]
    if pool.huge:
        found.append(Mount(pool.huge_folder, f"{HUGE_MOUNT}/{pool.name}", read_only))
    devices = {tier.name for tier in pool.devices}
    for tier in pool.placed:
        path = placed_path(tier)
        if tier.name not in devices:
            found.append(Mount(path, path, read_only))
        elif is_dax(path):
            found.append(Node(path, path, read_only))
        else:
            raise Refused(
                f"{ref.where}: tier {tier.name} of KVPool {pool.name} lies on {path}; a pod is "
                "given DAX devices "
                "(/dev/dax0.0) and nothing else of /dev."
            )
    here = {region.uuid: region for region in regions}
    for tier in pool.claimed:
        region = here.get(region_uuid(pool.namespace, pool.name, tier.name))
        if region is None:
            raise NotYet(
                f"{ref.where}: the region of tier {tier.name} of KVPool {pool.name} is not on "
                "this node yet. The pool's "
                "daemon here has it made ('kubectl get kvpn'); the pod is tried again by itself."
            )
        found.append(placed(region, pool.claimed_path(tier.name), read_only=read_only))
    return Given(
        mounts=tuple(place for place in found if isinstance(place, Mount)),
        nodes=tuple(place for place in found if isinstance(place, Node)),
        environment=tuple(environment(pool).items()),
        group_id=group_id,
    )
