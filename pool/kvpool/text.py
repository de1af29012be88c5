"""Text that others wrote: made fit to be kept, sent and shown. Whoever may write it may write anything."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

TEXT_MAX = 1024  # characters of one text
FIELDS_MAX = 64  # of one description
NAME_MAX = 128  # characters of a field's name
INTEGER_MAX = 1 << 63

# C0, DEL, C1, and what turns or breaks lines: a terminal obeys the first, and people misread the others.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def valid(text: str, limit: int = TEXT_MAX) -> str:
    """The text, cut to `limit` characters, without what UTF-8 cannot have: paths of other bytes have that."""
    return text[:limit].encode(errors="replace").decode()


def flat(said: Mapping[Any, object]) -> dict[str, object]:
    """A description with nothing in it but bounded texts and numbers; all else is left out."""
    kept: dict[str, object] = {}
    for name, value in said.items():
        if len(kept) == FIELDS_MAX:
            break
        if not isinstance(name, str) or len(name) > NAME_MAX:
            continue
        if isinstance(value, str):
            value = valid(value)
        elif isinstance(value, float):
            if not math.isfinite(value):
                continue
        elif value is not None and not (isinstance(value, int) and -INTEGER_MAX <= value < INTEGER_MAX):
            continue
        kept[valid(name)] = value
    return kept


def printable(text: str) -> str:
    """The text with its control characters written out: a terminal obeys them, wherever they come from."""
    return _CONTROL.sub(lambda found: found.group().encode("unicode_escape").decode(), text)
