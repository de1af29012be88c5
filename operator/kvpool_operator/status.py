"""The truth about a pool: from what was declared and what was seen to its .status. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvpool.quantity import format_quantity
from kvpool.report import percent
from kvpool_operator.assign import Assignment
from kvpool_operator.conditions import Condition, merged, names
from kvpool_operator.manifest import PoolObject
from kvpool_operator.names import (
    ALL_NODES_READY,
    APPLY_FAILED,
    AS_DECLARED,
    COHERENCE_VERIFIED,
    CONDITIONS,
    DEGRADED,
    DELETING,
    DRAINING,
    INVALID_SPEC,
    NO_NODES,
    NODE_CORDONED,
    NODE_GONE,
    NODE_PROBLEM,
    NODES_NOT_READY,
    NOT_DRAINING,
    NOT_SHARED,
    NOT_TESTED,
    PAUSED,
    PROGRESSING,
    READY,
    ROLLING_OUT,
    SETTLED,
    SHARDS_ADOPTED,
    TEST_FAILED,
    TIER_MISSING,
    TOO_MANY_NODES,
    VERIFIED,
)

Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Observed:
    """What was seen of a pool at one moment."""

    nodes: Sequence[Mapping[str, Any]] = ()  # its KVPoolNodes
    daemon_set: Mapping[str, Any] | None = None
    assignment: Assignment = field(default_factory=Assignment)
    error: str = ""  # why not everything could be applied
    deleting: bool = False
    away: frozenset[str] = frozenset()  # nodes that Kubernetes does not hear of: what they told last is old


def status(pool: PoolObject, seen: Observed, before: Mapping[str, Any], now: str) -> Object:
    """The status to write; equal to `before` when nothing changed.

    `now` is RFC 3339, and only goes into conditions whose status changed.
    """
    members = {f"{pool.name}-{m.index}" for m in seen.assignment.members}
    nodes = [node for node in seen.nodes if node["metadata"]["name"] in members]
    ready = [node for node in nodes if _is_ready(node, seen.away)]
    waiting = [node for node in nodes if not _is_ready(node, seen.away)]
    desired = len(seen.assignment.members)
    behind = _out_of_date(seen.daemon_set)
    conditions = [
        _ready(desired, ready, waiting, seen),
        _progressing(pool, desired, behind, nodes, seen),
        _degraded(pool, nodes, seen),
        _draining(seen),
        _coherence(pool, nodes),
    ]
    tiers = [_tier(tier.name, tier.medium, tier.shared, nodes) for tier in pool.spec.tiers]
    lookups, hits = _sum(nodes, "lookups"), _sum(nodes, "hits")
    made: Object = {
        "observedGeneration": pool.generation,
        "conditions": merged(conditions, before.get("conditions") or [], generation=pool.generation, now=now),
        "nodes": {"desired": desired, "ready": len(ready), "outOfDate": behind},
        "nodesReady": f"{len(ready)}/{desired}",
        "tiers": tiers,
        "capacity": binary(sum(tier["capacityBytes"] for tier in tiers)),
        "used": binary(sum(tier["usedBytes"] for tier in tiers)),
        "blocks": sum(tier["blocks"] for tier in tiers),
        "lookups": lookups,
        "hits": hits,
    }
    if misses := _misses(nodes):  # applied as {}, it would become null when the last entry goes
        made["misses"] = misses
    if lookups:
        made["hitRate"] = percent(hits, lookups)
    return made


def invalid_status(message: str, generation: int, before: Mapping[str, Any], now: str) -> Object:
    """The status of a pool whose spec breaks a rule: what was counted stays, nothing is changed."""
    said = f"{message} Nothing was changed; correct the spec."
    conditions = [
        Condition(READY, "False", INVALID_SPEC, said),
        Condition(PROGRESSING, "False", INVALID_SPEC, said),
        Condition(DEGRADED, "Unknown", INVALID_SPEC, said),
    ]
    kept = {c["type"]: c for c in before.get("conditions") or [] if c["type"] in CONDITIONS}
    others = [
        Condition(name, kept[name]["status"], kept[name]["reason"], kept[name]["message"])
        for name in (DRAINING, COHERENCE_VERIFIED)
        if name in kept
    ]
    return {
        **before,
        "observedGeneration": generation,
        "conditions": merged(
            [*conditions, *others], before.get("conditions") or [], generation=generation, now=now
        ),
    }


def binary(count_bytes: int) -> str:
    """A size for a column: 64Gi, 1.2Gi, 512Mi."""
    exact = format_quantity(count_bytes) if count_bytes else "0"
    if len(exact) <= 5 and exact.endswith("i"):
        return exact
    amount = float(count_bytes)
    for unit in ("", "Ki", "Mi", "Gi", "Ti"):
        if amount < 1024:
            return f"{amount:.0f}{unit}" if amount >= 100 or not unit else f"{amount:.1f}{unit}"
        amount /= 1024
    return f"{amount:.1f}Pi"


def _is_ready(node: Mapping[str, Any], away: frozenset[str]) -> bool:
    """Ready, and with what is wanted now."""
    if node["spec"]["nodeName"] in away:
        return False
    told = node.get("status") or {}
    wanted = node["metadata"].get("generation", 0)
    return bool(told.get("ready")) and told.get("observedGeneration", 0) >= wanted


def _out_of_date(daemon_set: Mapping[str, Any] | None) -> int:
    told = (daemon_set or {}).get("status") or {}
    return max(0, int(told.get("desiredNumberScheduled", 0)) - int(told.get("updatedNumberScheduled", 0)))


def _ready(
    desired: int, ready: list[Mapping[str, Any]], waiting: list[Mapping[str, Any]], seen: Observed
) -> Condition:
    if seen.deleting:
        return Condition(READY, "False", DELETING, "The pool is being deleted.")
    if not desired:
        message = "0 nodes match spec.nodeSelector. Label a node so that it matches, or change the selector."
        return Condition(READY, "False", NO_NODES, message)
    if len(ready) == desired:
        return Condition(READY, "True", ALL_NODES_READY, f"{desired} of {desired} nodes serve the pool.")
    away = sorted({node["spec"]["nodeName"] for node in waiting} & seen.away)
    waiting = [node for node in waiting if node["spec"]["nodeName"] not in away]
    silent = [node["spec"]["nodeName"] for node in waiting if not (node.get("status") or {}).get("message")]
    told = [
        f"{node['spec']['nodeName']}: {node['status']['message']}"
        for node in waiting
        if (node.get("status") or {}).get("message")
    ]
    message = f"{len(ready)} of {desired} nodes serve the pool."
    if told:
        message += f" {' '.join(told[:3])}"
    if away:
        message += f" Kubernetes does not hear of {names(away)}: see 'kubectl describe node'."
    if silent:
        message += f" Nothing was heard yet from {names(silent)}: see its daemon's pod."
    return Condition(READY, "False", NODES_NOT_READY, message)


def _progressing(
    pool: PoolObject, desired: int, behind: int, nodes: Sequence[Mapping[str, Any]], seen: Observed
) -> Condition:
    if seen.deleting:
        return Condition(PROGRESSING, "True", DELETING, "Nodes remove what they have of the pool.")
    if pool.raw.get("paused"):
        message = "spec.paused is true: nothing is changed until it is false."
        return Condition(PROGRESSING, "False", PAUSED, message)
    if seen.error:
        return Condition(PROGRESSING, "False", APPLY_FAILED, seen.error)
    late = [
        node["spec"]["nodeName"]
        for node in nodes
        if (node.get("status") or {}).get("observedGeneration", 0) < node["metadata"].get("generation", 0)
    ]
    if behind or late or len(nodes) < desired:
        parts = [
            f"{behind} daemons of an older version are replaced one by one." if behind else "",
            f"{names(late)} {'has' if len(late) == 1 else 'have'} not taken over the last change yet."
            if late
            else "",
            f"{desired - len(nodes)} nodes are being added." if len(nodes) < desired else "",
        ]
        return Condition(PROGRESSING, "True", ROLLING_OUT, " ".join(part for part in parts if part))
    return Condition(PROGRESSING, "False", SETTLED, "Everything is as declared.")


def _degraded(pool: PoolObject, nodes: Sequence[Mapping[str, Any]], seen: Observed) -> Condition:
    found = list(_shortcomings(pool, nodes, seen))
    if not found:
        silent = [node["spec"]["nodeName"] for node in nodes if not (node.get("status") or {}).get("tiers")]
        if silent:
            return Condition(DEGRADED, "Unknown", NODES_NOT_READY, f"Not told yet by {names(silent)}.")
        return Condition(DEGRADED, "False", AS_DECLARED, "Every node has every tier.")
    return Condition(DEGRADED, "True", found[0][0], " ".join(message for _, message in found))


def _shortcomings(
    pool: PoolObject, nodes: Sequence[Mapping[str, Any]], seen: Observed
) -> Iterable[tuple[str, str]]:
    skipped: dict[str, list[tuple[str, str]]] = {}
    for node in nodes:
        for tier, reason in ((node.get("status") or {}).get("skippedTiers") or {}).items():
            skipped.setdefault(tier, []).append((node["spec"]["nodeName"], reason))
    for tier, where in sorted(skipped.items()):
        on = names(node for node, _ in where)
        yield (
            TIER_MISSING,
            f"{len(where)} of {len(nodes)} nodes have no tier {tier} ({on}): {where[0][1].rstrip('.')}. "
            "Their other tiers serve.",
        )
    if seen.assignment.homeless:
        yield (
            TOO_MANY_NODES,
            f"{len(seen.assignment.homeless)} nodes have no place in the shared tiers, which are made for "
            f"spec.hosts = {pool.spec.hosts} ({names(seen.assignment.homeless)}). Narrow spec.nodeSelector, "
            "or make a pool with more hosts.",
        )
    for node in nodes:
        problems = (node.get("status") or {}).get("problems") or []
        if problems:
            yield NODE_PROBLEM, f"{node['spec']['nodeName']}: {problems[0]}"
    for member in seen.assignment.members:
        others = [claim.shard for claim in member.claims if claim.shard != member.index]
        if others:
            shards = ", ".join(str(shard) for shard in others)
            yield (
                SHARDS_ADOPTED,
                f"{member.node} looks after shard {shards} of a node that is away; its blocks are served, "
                "and nothing new is stored there.",
            )


def _draining(seen: Observed) -> Condition:
    if seen.deleting:
        return Condition(DRAINING, "True", DELETING, "The pool is being deleted.")
    drained = seen.assignment
    if drained.cordoned:
        message = (
            f"{names(drained.cordoned)} {_are(drained.cordoned)} cordoned: nothing new is stored from there, "
            "and other nodes look after the shards. Uncordon to take it back."
        )
        return Condition(DRAINING, "True", NODE_CORDONED, message)
    if drained.gone:
        message = f"{names(drained.gone)} {_are(drained.gone)} gone; the shards wait for a ready node."
        return Condition(DRAINING, "True", NODE_GONE, message)
    return Condition(DRAINING, "False", NOT_DRAINING, "No node gives its blocks away.")


def _are(found: Sequence[str]) -> str:
    return "is" if len(found) == 1 else "are"


def _coherence(pool: PoolObject, nodes: Sequence[Mapping[str, Any]]) -> Condition:
    if not pool.shared:
        return Condition(COHERENCE_VERIFIED, "True", NOT_SHARED, "No tier is shared between nodes.")
    verdicts = []
    for node in nodes:
        for condition in (node.get("status") or {}).get("conditions") or []:
            if condition.get("type") == COHERENCE_VERIFIED:
                verdicts.append((node["spec"]["nodeName"], condition))
    for node_name, verdict in verdicts:
        if verdict["status"] == "False":
            message = f"{node_name}: {verdict.get('message', '')}"
            return Condition(COHERENCE_VERIFIED, "False", TEST_FAILED, message)
    proved = [name for name, verdict in verdicts if verdict["status"] == "True"]
    if verdicts and len(proved) == len(nodes):
        message = f"{len(proved)} of {len(nodes)} nodes saw each other's stores as declared."
        return Condition(COHERENCE_VERIFIED, "True", VERIFIED, message)
    message = f"{len(proved)} of {len(nodes)} nodes have tested it so far; a test needs two nodes that serve."
    return Condition(COHERENCE_VERIFIED, "Unknown", NOT_TESTED, message)


def _tier(name: str, medium: str, shared: bool, nodes: Sequence[Mapping[str, Any]]) -> Object:
    """The numbers of a tier. A shared one is the same region everywhere, so its size counts once.

    Its rate is of all that the pool looked up: a miss is counted once for the pool, and not in each tier.
    """
    told = []
    for node in nodes:
        report = node.get("status") or {}
        told += [
            (str(report.get("updatedAt", "")), tier)
            for tier in report.get("tiers") or []
            if tier["name"] == name
        ]
    sizes = [max(told, key=lambda pair: pair[0])[1]] if shared and told else [tier for _, tier in told]
    lookups, hits = (sum(int(tier.get(key, 0)) for _, tier in told) for key in ("lookups", "hits"))
    made: Object = {
        "name": name,
        "medium": medium,
        "capacityBytes": sum(int(tier.get("capacityBytes", 0)) for tier in sizes),
        "usedBytes": sum(int(tier.get("usedBytes", 0)) for tier in sizes),
        "blocks": sum(int(tier.get("blocks", 0)) for tier in sizes),
        "evictions": sum(int(tier.get("evictions", 0)) for _, tier in told),
        "lookups": lookups,
        "hits": hits,
    }
    if of_all := _sum(nodes, "lookups"):
        made["hitRate"] = percent(min(hits, of_all), of_all)
    return made


def _sum(nodes: Iterable[Mapping[str, Any]], key: str) -> int:
    return sum(int((node.get("status") or {}).get(key, 0)) for node in nodes)


def _misses(nodes: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for node in nodes:
        total.update((node.get("status") or {}).get("misses") or {})
    return dict(sorted(total.items()))
