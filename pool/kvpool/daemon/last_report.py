"""What a host's daemon said last about its pool: a help, and no source of truth."""

from __future__ import annotations

import json
from typing import Any

from kvpool import paths

_KEYS = {"node_name", "started_at", "updated_at", "scrub", "problems"}
_YEAR_9999 = 253_370_764_800


def last_report(name: str, host: int) -> dict[str, Any] | None:
    """The report of the pool's daemon on `host`, running or not; None when there is none of this version."""
    try:
        report = json.loads(paths.report_path(name, host).read_text())
        whole = isinstance(report, dict) and report.keys() >= _KEYS and 0 <= report["updated_at"] < _YEAR_9999
        return report if whole and isinstance(report["problems"], list) else None
    except (OSError, ValueError, TypeError, RecursionError):
        return None
