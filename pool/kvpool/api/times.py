"""Moments as RFC 3339 text."""

from __future__ import annotations

from datetime import datetime, timezone

_YEAR_9999 = 253_370_764_800


def text(at: float) -> str:
    """A Unix time in UTC, whole seconds."""
    moment = datetime.fromtimestamp(min(max(0.0, at), _YEAR_9999), timezone.utc)
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


def unix(value: object) -> float | None:
    """The Unix time of an RFC 3339 text; None for anything else."""
    if not isinstance(value, str):
        return None
    try:
        moment = datetime.fromisoformat(value.replace("Z", "+00:00"))
    except ValueError:
        return None
    return (moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)).timestamp()
