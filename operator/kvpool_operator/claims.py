"""What the DRA driver is asked for on behalf of a pool: one builder a kind, pure, with fixed names."""

from __future__ import annotations

import json
from typing import Any

from kvpool.quantity import format_quantity
from kvpool.spec import TierSpec
from kvpool_operator import kinds
from kvpool_operator.dra.allocation import PoolRef
from kvpool_operator.manifest import PoolObject, Settings
from kvpool_operator.names import (
    DRIVER,
    NO_REGION,
    POLICY_ANNOTATION,
    POOL_CLASS,
    POOL_REQUEST,
    outside,
    region_uuid,
)
from kvpool_operator.objects import Object, beside, within

SEATS = 128  # of a pool: what one ResourceSlice can have
# How many memories a region may interleave: the fewest that are large enough are taken.
WAYS = (1, 2, 4, 8)
PARAMETERS_VERSION = f"{DRIVER}/v1alpha1"
OS_LABEL = "kubernetes.io/os"


def not_to_be_had(pool: PoolObject, settings: Settings) -> str:
    """Why a pool with claimed tiers cannot be served; empty when it can."""
    for index, tier in enumerate(pool.spec.tiers):
        if not (tier.source and tier.source.device_class):
            continue
        if not settings.driver:
            return (
                f"spec.tiers[{index}].source.deviceClass needs the DRA driver, which is not installed: set "
                "dra.enabled=true in the chart, or write source.path."
            )
        if not tier.shared:
            return (
                f"spec.tiers[{index}].source.deviceClass: such memory is one region for all "
                "nodes; add a tier of "
                "another name with shared: true in its place."
            )
    return ""


def pool_slice(pool: PoolObject) -> Object:
    """The pool as devices: equal seats, one for each claim, on all nodes that serve the pool."""
    attributes = {
        "type": {"string": "pool"},
        "namespace": {"string": pool.namespace},
        "pool": {"string": pool.name},
    }
    labels = {OS_LABEL: "linux", **(pool.raw.get("nodeSelector") or {})}
    terms = [{"key": key, "operator": "In", "values": [value]} for key, value in sorted(labels.items())]
    spec = {
        "driver": DRIVER,
        # The uid keeps a pool that was made anew apart, whose generations begin again.
        "pool": {
            "name": PoolRef(pool.namespace, pool.name, pool.uid).device_pool,
            "generation": pool.generation,
            "resourceSliceCount": 1,
        },
        "nodeSelector": {"nodeSelectorTerms": [{"matchExpressions": terms}]},
        "devices": [
            {"name": f"seat-{seat:03}", "attributes": {**attributes, "seat": {"int": seat}}}
            for seat in range(SEATS)
        ],
    }
    return beside(pool, kinds.RESOURCE_SLICE, "", spec=spec)


def claim_template(pool: PoolObject) -> Object:
    """What engines' pods name to get the pool: `resourceClaimTemplateName: kvpool-NAME`."""
    chosen = " && ".join(
        [
            f'device.driver == "{DRIVER}"',
            f'device.attributes["{DRIVER}"].namespace == {json.dumps(pool.namespace)}',
            f'device.attributes["{DRIVER}"].pool == {json.dumps(pool.name)}',
        ]
    )
    request = {
        "name": POOL_REQUEST,
        "exactly": {"deviceClassName": POOL_CLASS, "selectors": [{"cel": {"expression": chosen}}]},
    }
    config = _config({"kind": "PoolParameters", "role": "engine"})
    return within(
        pool,
        kinds.RESOURCE_CLAIM_TEMPLATE,
        spec={"spec": {"devices": {"requests": [request], "config": [config]}}},
    )


def region_claims(pool: PoolObject, settings: Settings) -> list[Object]:
    """One claim for each tier of a DeviceClass; all daemons of the pool share it."""
    return [_region_claim(pool, tier, settings) for tier in pool.claimed]


def region_claim_name(pool: PoolObject, tier: TierSpec) -> str:
    return outside(pool.namespace, pool.name, tier.name)


def _region_claim(pool: PoolObject, tier: TierSpec, settings: Settings) -> Object:
    assert tier.source is not None
    uuid = str(region_uuid(pool.namespace, pool.name, tier.name))
    ours = f'device.attributes["{DRIVER}"]'
    size = tier.capacity_bytes
    alternatives = []
    # A region that is there already first: of a pool that was retained, or whose claim was lost.
    for ways in WAYS:
        kept = f'{ours}.region == "{uuid}" && {ours}.ways == {ways}'
        alternatives.append(_alternative(f"kept-{ways}", tier, ways, kept))
    for ways in WAYS:
        least = format_quantity(-(-size // ways))
        large = f'device.capacity["{DRIVER}"].memory.compareTo(quantity("{least}")) >= 0'
        alternatives.append(
            _alternative(f"new-{ways}", tier, ways, f'{ours}.region == "{NO_REGION}" && {large}')
        )
    parameters = {
        "kind": "RegionParameters",
        "size": format_quantity(size),
        "deletionPolicy": pool.spec.deletion_policy,
        "pool": {"namespace": pool.namespace, "name": pool.name, "tier": tier.name},
    }
    made = beside(
        pool,
        kinds.RESOURCE_CLAIM,
        settings.namespace,
        region_claim_name(pool, tier),
        spec={
            "devices": {
                "requests": [{"name": "region", "firstAvailable": alternatives}],
                "config": [_config(parameters)],
            }
        },
    )
    # A claim's spec never changes, and a pool's policy may: the driver reads it here.
    made["metadata"]["annotations"] = {POLICY_ANNOTATION: pool.spec.deletion_policy}
    return made


def _alternative(name: str, tier: TierSpec, count: int, chosen: str) -> dict[str, Any]:
    assert tier.source is not None
    expression = f'device.driver == "{DRIVER}" && {chosen}'
    return {
        "name": name,
        "deviceClassName": tier.source.device_class,
        "count": count,
        "selectors": [{"cel": {"expression": expression}}],
    }


def _config(parameters: dict[str, Any]) -> Object:
    return {"opaque": {"driver": DRIVER, "parameters": {"apiVersion": PARAMETERS_VERSION, **parameters}}}
