"""The status of a KVPoolNode: pure, from what the daemon knows."""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvpool.report import NamespaceCounts, NamespaceReport, engine_from
from kvpool_operator.nodes.board import Truth

READY = "Ready"
DRAINED = "Drained"
REASON_READY = "Serving"
REASON_NOT_READY = "NotReady"

NAMESPACES_MAX = 32
ENGINES_MAX = 64
BUCKETS_MAX = 64
REASONS_MAX = 32
ENGINE_TIERS_MAX = 16
COUNT_MAX = (1 << 63) - 1  # of an int64: the apiserver refuses the whole status for one that is larger
DESCRIPTION_MAX = 256
DESCRIPTION_FIELDS_MAX = 32
AMOUNTS = (
    ("bytesLoaded", "bytes_loaded"),
    ("bytesStored", "bytes_stored"),
    ("damagedBlocks", "scrub_bad"),
    ("reapedSlots", "reaped"),
)
LATENCIES = (
    ("loadLatency", "load_latency"),
    ("lookupLatency", "lookup_latency"),
    ("storeLatency", "store_latency"),
)
NOTHING = {"blocks": 0, "bytes": 0, "sharedBlocks": 0, "sharedBytes": 0}
EVENTS_MAX = 16
PROBLEMS_MAX = 16
TEXT_MAX = 1024
REFRESH_S = 60.0  # how long a status that does not change is left alone

# Events that a person has to look into.
WARNINGS = ("DamageFound", "MediumError", "CoherenceFailed", "ShardLost")


def rfc3339(unix_s: float) -> str:
    return datetime.datetime.fromtimestamp(unix_s, datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def node_status(
    truth: Truth,
    *,
    version: str,
    pod: str,
    started_at: float,
    before: Mapping[str, Any] | None,
    now: float,
) -> dict[str, Any]:
    """The whole status; `before` is the one that was written last, from which it takes times over.

    It equals `before` when nothing has changed and that one is younger than a minute.
    """
    status: dict[str, Any] = {
        "observedGeneration": truth.generation,
        "ready": truth.ready,
        "message": _text(truth.message),
        "version": version,
        "podName": pod,
        "startedAt": rfc3339(started_at),
        "host": truth.host,
        "removed": truth.removed,
        "conditions": _conditions(truth, (before or {}).get("conditions") or (), now),
        **_numbers(truth),
        **_unless_empty(
            "skippedTiers",
            {name: _text(why) for name, why in truth.report.get("skipped_tiers", {}).items()},
        ),
        "events": _events(truth.report),
        "problems": [_text(p) for p in (*truth.problems, *truth.report.get("problems", ()))][:PROBLEMS_MAX],
    }
    told_at = _unix((before or {}).get("updatedAt"))
    same = before is not None and {**before, "updatedAt": ""} == {**status, "updatedAt": ""}
    status["updatedAt"] = rfc3339(told_at if same and 0 <= now - told_at < REFRESH_S else now)
    return status


def _numbers(truth: Truth) -> dict[str, Any]:
    tiers = [_tier(tier, truth) for tier in truth.report.get("tiers", ())]
    misses: dict[str, int] = {}
    for own in truth.own.values():
        for reason, count in own.get("misses", {}).items():
            misses[reason] = misses.get(reason, 0) + count
    return {
        "tiers": tiers,
        "lookups": sum(tier["lookups"] for tier in tiers),
        "hits": sum(tier["hits"] for tier in tiers),
        **_unless_empty("misses", dict(sorted(misses.items()))),
        **_traffic(list(truth.own.values())),
        "namespaces": _namespaces(truth.report),
        "engines": _engines(truth.report),
    }


def _traffic(own: list[dict[str, Any]]) -> dict[str, Any]:
    """What this node's processes moved, and how long it took."""
    declined: dict[str, int] = {}
    for counters in own:
        for reason, count in counters.get("declined", {}).items():
            declined[reason] = declined.get(reason, 0) + count
    return {
        **{name: sum(int(counters.get(key, 0)) for counters in own) for name, key in AMOUNTS},
        **_unless_empty("declined", dict(sorted(declined.items()))),
        **{name: _histogram([counters.get(key, []) for counters in own]) for name, key in LATENCIES},
    }


def _histogram(counts: list[list[int]]) -> list[int]:
    """Calls by duration, without the empty end."""
    total = [sum(column) for column in itertools.zip_longest(*counts, fillvalue=0)][:BUCKETS_MAX]
    while total and not total[-1]:
        total.pop()
    return total


def _namespaces(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What engines of this node use, and what its tiers hold; those that matter most when there are many.

    A shared tier is the same region on every node: what it holds is told apart, and must not be added up.
    """
    told = {
        digest: NamespaceReport(**{**said, "counts": NamespaceCounts(**said["counts"])})
        for digest, said in report.get("engines", {}).get("namespaces", {}).items()
        if digest
    }
    held: dict[str, dict[str, Any]] = {}
    for tier in report.get("tiers", ()):
        kinds = ("sharedBlocks", "sharedBytes") if tier.get("host") is None else ("blocks", "bytes")
        for n in tier.get("namespaces", ()):
            entry = held.setdefault(
                n["digest"], {"description": {}, "blockBytes": n["block_bytes"], **NOTHING}
            )
            entry["description"] = entry["description"] or n["description"]
            for kind, key in zip(kinds, ("blocks", "bytes"), strict=True):
                entry[kind] += n[key]
    found = []
    for digest in told.keys() | held.keys():
        said = told.get(digest, NamespaceReport(digest, {}, 0))
        has = held.get(digest, {"description": {}, "blockBytes": said.block_bytes, **NOTHING})
        found.append(_namespace(replace(said, description=said.description or has["description"]), has))
    found.sort(key=lambda n: (-n["lookups"], -n["blocks"] - n["sharedBlocks"], n["digest"]))
    return sorted(found[:NAMESPACES_MAX], key=lambda n: str(n["digest"]))


def _namespace(said: NamespaceReport, has: Mapping[str, Any]) -> dict[str, Any]:
    counts = said.counts
    description = {
        str(name)[:63]: str(value)[:DESCRIPTION_MAX]
        for name, value in list(said.description.items())[:DESCRIPTION_FIELDS_MAX]
    }
    tokens = said.description.get("block_tokens")
    return {
        "digest": said.digest,
        "model": str(said.description.get("model", ""))[:DESCRIPTION_MAX],
        **({"blockTokens": tokens} if isinstance(tokens, int) and not isinstance(tokens, bool) else {}),
        "blockBytes": has["blockBytes"],
        **{name: has[name] for name in NOTHING},
        "lookups": _count(counts.lookups),
        "hits": _count(counts.hits),
        **_unless_empty("misses", _reasons(counts.misses)),
        "savedTokens": _count(said.saved_tokens or 0),
        "savedPrefillMilliseconds": _count(said.saved_ms or 0),
        "timedHits": _count(counts.timed_hits),
        "tenant": said.keyed,
        **_unless_empty("description", dict(sorted(description.items()))),
    }


def _engines(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The engines of this node by name, those that live first. A name stands once."""
    reports = [engine_from(said) for said in report.get("engines", {}).get("engines", ())]
    reports.sort(key=lambda e: (e.ended_at is not None, -(e.ended_at or 0.0), -e.started_at, e.name))
    found: dict[str, dict[str, Any]] = {}
    for engine in reports:
        total = engine.total
        found.setdefault(
            engine.shown,
            {
                "name": engine.shown,
                **({"podName": engine.pod} if engine.pod else {}),
                "live": engine.ended_at is None,
                "startedAt": rfc3339(engine.started_at),
                **({} if engine.ended_at is None else {"endedAt": rfc3339(engine.ended_at)}),
                "tiers": engine.tiers[:ENGINE_TIERS_MAX],
                "namespaces": sorted(digest[:12] for digest in engine.namespaces if digest)[:NAMESPACES_MAX],
                "lookups": _count(total.lookups),
                "hits": _count(total.hits),
                **_unless_empty("misses", _reasons(total.misses)),
            },
        )
    return sorted(list(found.values())[:ENGINES_MAX], key=lambda engine: str(engine["name"]))


def _count(number: int) -> int:
    return min(number, COUNT_MAX)


def _reasons(counts: Mapping[str, int]) -> dict[str, int]:
    """The weightiest, by name."""
    weightiest = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:REASONS_MAX]
    return {reason: _count(count) for reason, count in sorted(weightiest)}


def _unless_empty(name: str, entries: dict[str, Any]) -> dict[str, Any]:
    """A map that has lost its last entry is left out.

    Applied as {}, it becomes null in the apiserver's merge, and the schema refuses the whole status.
    """
    return {name: entries} if entries else {}


def _tier(tier: Mapping[str, Any], truth: Truth) -> dict[str, Any]:
    name, own = str(tier["name"]), truth.own.get(str(tier["name"]), {})
    told: dict[str, Any] = {
        "name": name,
        "medium": tier["medium"],
        "capacityBytes": tier["capacity_bytes"],
        "usedBytes": tier["used_bytes"],
        "blocks": tier["blocks"],
        "evictions": own.get("evictions", 0),
        "lookups": own.get("lookups", 0),
        "hits": own.get("hits", 0),
        "storedBlocks": own.get("stored", 0),
    }
    owners = truth.owners.get(name)
    if owners is not None:
        held = {shard["host"]: shard for shard in tier.get("shards", ())}
        told["shards"] = [
            {
                "shard": number,
                "owner": owner["host"],
                "epoch": owner["epoch"],
                "settled": owner["settled"],
                "usedBytes": held.get(number, {}).get("used_bytes", 0),
                "blocks": held.get(number, {}).get("blocks", 0),
            }
            for number, owner in enumerate(owners)
        ]
    return told


def _events(report: Mapping[str, Any]) -> list[dict[str, str]]:
    return [
        {
            "type": "Warning" if event["kind"] in WARNINGS else "Normal",
            "reason": event["kind"],
            "tier": event["subject"],
            "message": _text(event["message"]),
            "at": rfc3339(event["last_at"]),
        }
        for event in report.get("events", ())[-EVENTS_MAX:]
    ]


def _conditions(truth: Truth, before: Any, now: float) -> list[dict[str, Any]]:
    wanted = [
        (
            READY,
            "True" if truth.ready else "False",
            REASON_READY if truth.ready else REASON_NOT_READY,
            truth.message,
        ),
        *((c["type"], c["status"], c["reason"], c["message"]) for c in truth.report.get("conditions", ())),
    ]
    if truth.drained is not None:
        wanted.append((DRAINED, *truth.drained))
    known = {condition.get("type"): condition for condition in before}
    return [
        {
            "type": kind,
            "status": status,
            "reason": reason,
            "message": _text(message),
            "observedGeneration": truth.generation,
            "lastTransitionTime": known[kind]["lastTransitionTime"]
            if known.get(kind, {}).get("status") == status and known[kind].get("lastTransitionTime")
            else rfc3339(now),
        }
        for kind, status, reason, message in wanted
    ]


def _text(text: object) -> str:
    said = str(text)
    return said if len(said) <= TEXT_MAX else said[: TEXT_MAX - 3] + "..."


def _unix(text: object) -> float:
    try:
        return datetime.datetime.fromisoformat(str(text).replace("Z", "+00:00")).timestamp()
    except ValueError:
        return 0.0
