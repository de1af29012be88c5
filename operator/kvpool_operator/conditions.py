"""Conditions as Kubernetes has them: what is so, since when, why, what to do about it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

MESSAGE_MAX = 1024

Truth = Literal["True", "False", "Unknown"]


@dataclass(frozen=True, slots=True)
class Condition:
    """One condition of an object. `message`: numbers, then the next step."""

    type: str
    status: Truth
    reason: str
    message: str

    @classmethod
    def of(cls, type: str, true: bool, reason: str, message: str) -> Condition:
        return cls(type, "True" if true else "False", reason, message)


def merged(
    conditions: Iterable[Condition],
    before: Iterable[Mapping[str, Any]],
    *,
    generation: int,
    now: str,
) -> list[dict[str, Any]]:
    """The conditions as they are written; lastTransitionTime moves only when the status does."""
    known = {str(condition.get("type")): condition for condition in before}
    made = []
    for condition in conditions:
        old = known.get(condition.type, {})
        same = old.get("status") == condition.status and old.get("lastTransitionTime")
        message = condition.message
        made.append(
            {
                "type": condition.type,
                "status": condition.status,
                "reason": condition.reason,
                "message": message if len(message) <= MESSAGE_MAX else message[: MESSAGE_MAX - 3] + "...",
                "observedGeneration": generation,
                "lastTransitionTime": old["lastTransitionTime"] if same else now,
            }
        )
    return made


def names(found: Iterable[str], most: int = 3) -> str:
    """Some names for a message: "a, b, c and 4 more"."""
    listed = sorted(found)
    shown = ", ".join(listed[:most])
    return shown if len(listed) <= most else f"{shown} and {len(listed) - most} more"
