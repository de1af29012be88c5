"""What a claim says to the driver beside its requests: opaque parameters, checked."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from kvpool.cxl.backend import ALIGN_BYTES, GRANULARITY_BYTES
from kvpool.quantity import parse_quantity, shown

API_VERSION = "dra.kvpool.dev/v1alpha1"
REGION, POOL = "RegionParameters", "PoolParameters"

Role = Literal["engine", "reader"]
Policy = Literal["Retain", "Delete"]

ROLES: tuple[Role, ...] = ("engine", "reader")
POLICIES: tuple[Policy, ...] = ("Retain", "Delete")
GRANULARITIES = tuple(256 << shift for shift in range(7))  # of CXL 2.0
ALIGNMENTS = (4096, 2 << 20, 1 << 30)
LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")


class Refused(Exception):
    """Why a claim is not prepared: one sentence for its user, said in the pod's events and on the claim."""


class NotYet(Refused):
    """What is missing comes by itself."""


@dataclass(frozen=True, slots=True)
class TierRef:
    """The tier of a KVPool that a region is for."""

    namespace: str
    pool: str
    tier: str


@dataclass(frozen=True, slots=True)
class RegionParameters:
    """A region of CXL memory, composed of the whole memories that the claim got."""

    size_bytes: int = 0  # at least; 0: whatever the memories give
    granularity_bytes: int = GRANULARITY_BYTES
    align_bytes: int = ALIGN_BYTES
    policy: Policy = "Retain"
    tier: TierRef | None = None  # only in claims that the operator made


@dataclass(frozen=True, slots=True)
class PoolParameters:
    """How a pod uses a pool."""

    role: Role = "engine"


def parse(document: Any) -> RegionParameters | PoolParameters:
    """The parameters in a claim. Raises: Refused, with the field and what it takes."""
    if not isinstance(document, Mapping):
        raise Refused(
            f"parameters: {shown(document)} is no object; write apiVersion: {API_VERSION}, kind: ..."
        )
    version, kind = document.get("apiVersion"), document.get("kind")
    if version != API_VERSION or kind not in (REGION, POOL):
        raise Refused(
            f"parameters: {shown(version)}, kind {shown(kind)} is not known; expected apiVersion: "
            f"{API_VERSION}, kind: {REGION} or {POOL}."
        )
    return _pool(document) if kind == POOL else _region(document)


def _pool(document: Mapping[str, Any]) -> PoolParameters:
    _only(document, "", ("role",))
    role = _one_of(document.get("role", "engine"), "role", ROLES)
    return PoolParameters(cast(Role, role))


def _region(document: Mapping[str, Any]) -> RegionParameters:
    _only(document, "", ("size", "granularity", "align", "deletionPolicy", "pool"))
    granularity = _size(document.get("granularity", GRANULARITY_BYTES), "granularity")
    align = _size(document.get("align", ALIGN_BYTES), "align")
    if granularity not in GRANULARITIES:
        raise Refused(
            f"parameters.granularity: {granularity}; it is one of {', '.join(map(str, GRANULARITIES))}."
        )
    if align not in ALIGNMENTS:
        raise Refused(f"parameters.align: {align}; it is 4Ki, 2Mi or 1Gi.")
    policy = _one_of(document.get("deletionPolicy", "Retain"), "deletionPolicy", POLICIES)
    return RegionParameters(
        _size(document["size"], "size") if "size" in document else 0,
        granularity,
        align,
        cast(Policy, policy),
        _tier(document["pool"]) if "pool" in document else None,
    )


def _tier(document: Any) -> TierRef:
    if not isinstance(document, Mapping):
        raise Refused(
            f"parameters.pool: {shown(document)}; write pool: {{namespace: ..., name: ..., tier: ...}}."
        )
    _only(document, "pool.", ("namespace", "name", "tier"), every=True)
    found = [document[key] for key in ("namespace", "name", "tier")]
    for key, text in zip(("namespace", "name", "tier"), found, strict=True):
        if not isinstance(text, str) or not LABEL.fullmatch(text):
            raise Refused(f"parameters.pool.{key}: {shown(text)} is no name of that kind.")
    return TierRef(*found)


def _only(document: Mapping[str, Any], at: str, known: tuple[str, ...], *, every: bool = False) -> None:
    more = [key for key in document if key not in (*known, *(() if at else ("apiVersion", "kind")))]
    if more:
        raise Refused(f"parameters.{at}{shown(more[0])} is not known; there are {', '.join(known)}.")
    missing = [key for key in known if key not in document]
    if every and missing:
        raise Refused(f"parameters.{at}{missing[0]} is missing.")


def _one_of(value: Any, name: str, words: tuple[str, ...]) -> str:
    if value not in words:
        raise Refused(f"parameters.{name}: {shown(value)}; it is {' or '.join(words)}.")
    return str(value)


def _size(value: Any, name: str) -> int:
    try:
        return parse_quantity(value)
    except ValueError as error:
        raise Refused(f"parameters.{name}: {error}") from None
