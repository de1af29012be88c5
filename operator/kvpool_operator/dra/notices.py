"""What a claim's status says of its devices, so that its user sees there why a pod does not start."""

from __future__ import annotations

import datetime
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from kvpool_operator import kinds
from kvpool_operator.client import UNREACHABLE, ApiError, Cluster
from kvpool_operator.dra.allocation import ClaimRef
from kvpool_operator.names import DRIVER

log = logging.getLogger("kvpool.dra")
Object = dict[str, Any]

READY, PREPARED, REFUSED = "Ready", "Prepared", "Refused"
MESSAGE_MAX = 4096
TRIES = 5


def condition(node: str, problem: str, at: datetime.datetime) -> Object:
    """The devices' condition. Pure."""
    return {
        "type": READY,
        "status": "False" if problem else "True",
        "reason": REFUSED if problem else PREPARED,
        "message": f"node {node}: {problem or 'given to its pods'}"[:MESSAGE_MAX],
        "lastTransitionTime": at.strftime("%Y-%m-%dT%H:%M:%SZ"),
    }


def told(claim: Mapping[str, Any], said: Mapping[str, Any]) -> bool:
    """Whether each device of ours says this already, whenever it began to."""
    status = claim.get("status") or {}
    known = [
        {key: value for key, value in found.items() if key in ("status", "reason", "message")}
        for device in status.get("devices") or []
        if device["driver"] == DRIVER
        for found in device.get("conditions") or []
        if found["type"] == READY
    ]
    wanted = {key: said[key] for key in ("status", "reason", "message")}
    return len(known) == len(_devices(claim)) and all(found == wanted for found in known)


def patch(claim: Mapping[str, Any], said: Object) -> Object:
    """What changes in exactly this version of the claim; other drivers' devices stay. Pure.

    The allocation is not part of it, and yet the API takes it for changed when its opaque parameters were
    stored with their keys in another order than its own; then the pod's events have to do.
    """
    others = [d for d in (claim.get("status") or {}).get("devices") or [] if d["driver"] != DRIVER]
    devices = [{"driver": DRIVER, **device, "conditions": [said]} for device in _devices(claim)]
    return {
        "metadata": {
            "uid": claim["metadata"]["uid"],
            "resourceVersion": claim["metadata"]["resourceVersion"],
        },
        "status": {"devices": [*others, *devices]},
    }


def _devices(claim: Mapping[str, Any]) -> Sequence[Object]:
    allocated = ((claim.get("status") or {}).get("allocation") or {}).get("devices") or {}
    return [
        {"pool": result["pool"], "device": result["device"]}
        for result in allocated.get("results") or []
        if result["driver"] == DRIVER
    ]


async def tell(cluster: Cluster, ref: ClaimRef, node: str, problem: str) -> None:
    """Write it, if it is news. What goes wrong here keeps no pod from starting."""
    said = condition(node, problem, datetime.datetime.now(datetime.timezone.utc))
    try:
        for left in reversed(range(TRIES)):
            claim = await cluster.get(kinds.RESOURCE_CLAIM, ref.namespace, ref.name)
            if claim is None or claim["metadata"].get("uid") != ref.uid or not _devices(claim):
                return
            if told(claim, said):
                return
            try:
                change = patch(claim, said)
                await cluster.merge(kinds.RESOURCE_CLAIM, ref.namespace, ref.name, change, "status")
                return
            except ApiError as error:
                if error.code != 409 or not left:  # somebody else wrote meanwhile
                    raise
    except (*UNREACHABLE, ApiError) as error:
        log.warning("status_failed claim=%s/%s error=%r", ref.namespace, ref.name, str(error))
