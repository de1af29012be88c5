"""The status of a KVPoolNode: pure, from what the daemon knows."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Any

from kvpool_operator.nodes.board import Truth

READY = "Ready"
DRAINED = "Drained"
REASON_READY = "Serving"
REASON_NOT_READY = "NotReady"

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
    }


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
