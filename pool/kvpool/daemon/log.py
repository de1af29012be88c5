"""What the daemon logs: state changes, one line each, to standard error."""

from __future__ import annotations

import logging
import sys
import time


def log_to_stderr(level: int = logging.INFO) -> None:
    """Log lines as `time level event key=value ...`, in UTC."""
    handler = logging.StreamHandler(sys.stderr)
    formatter = logging.Formatter("%(asctime)s.%(msecs)03dZ %(levelname)s %(message)s", "%Y-%m-%dT%H:%M:%S")
    formatter.converter = time.gmtime
    handler.setFormatter(formatter)
    logger = logging.getLogger("kvpool")
    logger.handlers[:] = [handler]
    logger.setLevel(level)
    logger.propagate = False
