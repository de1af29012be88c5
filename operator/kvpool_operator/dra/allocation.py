"""What a claim was given of this driver's devices. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvpool_operator.dra.parameters import POOL, PoolParameters, Refused, RegionParameters, parse
from kvpool_operator.names import DRIVER

UID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
# Names of device pools: those of CXL memories and those of KVPools must never be taken for each other.
MEMORY_PREFIX, POOL_PREFIX = "memory/", "pool/"


@dataclass(frozen=True, slots=True)
class ClaimRef:
    """A claim as the kubelet names it."""

    namespace: str
    name: str
    uid: str

    @property
    def where(self) -> str:
        return f"claim {self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class Result:
    """One device of this driver that a claim was given."""

    request: str  # with the alternative that was taken, like cxl/new-2
    pool: str
    device: str


@dataclass(frozen=True, slots=True)
class Allocation:
    """All of this driver's devices in a claim: the seat of one KVPool, or the memories of one region."""

    results: tuple[Result, ...]
    parameters: PoolParameters | RegionParameters

    @property
    def pool(self) -> PoolRef:
        """The KVPool that a seat belongs to. Raises: Refused."""
        return PoolRef.from_device_pool(self.results[0].pool)

    @property
    def serials(self) -> tuple[str, ...]:
        """The memories of a region, in the order of interleaving: the same on each node."""
        found = (result.pool.removeprefix(MEMORY_PREFIX) for result in self.results)
        return tuple(sorted(found, key=serial_order))


@dataclass(frozen=True, slots=True)
class PoolRef:
    """The KVPool of a seat, with its uid: one that was made anew is another one."""

    namespace: str
    name: str
    uid: str

    @property
    def device_pool(self) -> str:
        return f"{POOL_PREFIX}{self.namespace}/{self.name}/{self.uid}"

    @classmethod
    def from_device_pool(cls, text: str) -> PoolRef:
        parts = text.removeprefix(POOL_PREFIX).split("/")
        if not text.startswith(POOL_PREFIX) or len(parts) != 3:
            raise Refused(f"device pool {text} is no KVPool's.")
        return cls(*parts)


def serial_order(serial: str) -> tuple[int, str]:
    """Serial numbers are numbers; what is none comes last."""
    try:
        return int(serial, 0), serial
    except ValueError:
        return 1 << 64, serial


def allocation_of(ref: ClaimRef, claim: Mapping[str, Any] | None) -> Allocation:
    """What the claim that the kubelet means was given.

    Raises:  Refused when it is gone or another one, has nothing of this driver, asks for more than one thing,
             or says something that its device does not take.
    """
    if claim is None or claim["metadata"].get("uid") != ref.uid:
        raise Refused(
            f"{ref.where} is gone, or was made anew meanwhile; delete the pod, and it gets the new one."
        )
    allocated = ((claim.get("status") or {}).get("allocation") or {}).get("devices") or {}
    results = tuple(
        Result(str(result["request"]), str(result["pool"]), str(result["device"]))
        for result in allocated.get("results") or []
        if result["driver"] == DRIVER
    )
    if not results:
        raise Refused(f"{ref.where} was given no device of {DRIVER}.")
    requests = {result.request.partition("/")[0] for result in results}
    if len(requests) > 1:
        raise Refused(
            f"{ref.where} has the requests {', '.join(sorted(requests))} for {DRIVER}; one claim "
            "is for one pool or one "
            "region. Write a claim for each."
        )
    of_pools = {result.pool.startswith(POOL_PREFIX) for result in results}
    if len(of_pools) > 1 or (of_pools == {True} and len(results) > 1):
        raise Refused(f"{ref.where} asks for more than one seat; a pod needs one (count: 1).")
    documents = [
        config["opaque"].get("parameters")
        for config in allocated.get("config") or []
        if (config.get("opaque") or {}).get("driver") == DRIVER
        and (not config.get("requests") or requests & {r.partition("/")[0] for r in config["requests"]})
    ]
    # Those of the class come first, and the claim's own have the last word.
    parameters = [parse(document) for document in documents]
    wants_pool = of_pools == {True}
    for given in parameters:
        if isinstance(given, PoolParameters) != wants_pool:
            raise Refused(
                f"{ref.where}: kind {POOL} is for claims of a KVPool, RegionParameters for CXL memory."
            )
    default: PoolParameters | RegionParameters = PoolParameters() if wants_pool else RegionParameters()
    return Allocation(results, parameters[-1] if parameters else default)
