"""Where guests and what they boot from lie."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
CACHE = Path(os.environ.get("KVPOOL_CACHE_DIR") or Path.home() / ".cache" / "kvpool") / "guest"


class GuestError(Exception):
    """A guest cannot do what was asked; the message says what to do."""
