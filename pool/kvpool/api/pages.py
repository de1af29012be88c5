"""Pages of a sorted list: a page begins after a key, so that what comes or goes meanwhile shifts nothing."""

from __future__ import annotations

import base64
import binascii
import bisect
import json
from collections.abc import Sequence

from kvpool.api.problem import ApiError

LIMIT, LIMIT_MAX = 100, 500
TOKEN_MAX = 1024


def token(key: Sequence[str]) -> str:
    """The token that continues after `key`."""
    return base64.urlsafe_b64encode(json.dumps(list(key)).encode()).decode().rstrip("=")


def after(given: str | None, parts: int) -> tuple[str, ...] | None:
    """The key in a token that has so many parts; None for the first page. Raises: ApiError."""
    if not given:
        return None
    try:
        padded = given + "=" * (-len(given) % 4)
        key = json.loads(base64.b64decode(padded.encode("ascii"), altchars=b"-_", validate=True))
    except (ValueError, binascii.Error, RecursionError):
        key = None
    if not isinstance(key, list) or len(key) != parts or not all(isinstance(part, str) for part in key):
        raise ApiError(400, "continue: this is no token of this list; take the `next` of the page before")
    return tuple(key)


def page(
    keys: Sequence[tuple[str, ...]], start: tuple[str, ...] | None, limit: int
) -> tuple[slice, str | None]:
    """Which of the sorted keys are on the page, and the token of the next one."""
    first = 0 if start is None else bisect.bisect_right(keys, start)
    last = first + limit
    return slice(first, last), token(keys[last - 1]) if last < len(keys) else None
