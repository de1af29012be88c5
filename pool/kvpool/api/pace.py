"""Long work in the event loop, done in pieces: requests are answered between two of them."""

from __future__ import annotations

import asyncio
import time

# A request takes some ten turns of the loop. Work that only yields would add a piece to each of those turns;
# work that rests as long as it worked leaves most turns free.
WORK_S = 0.003
REST_S = 0.003


class Pace:
    """Of one piece of work: call `turn` between its steps."""

    def __init__(self) -> None:
        self._since = time.monotonic()

    async def turn(self) -> None:
        """Rests when the loop was held for long enough."""
        if time.monotonic() - self._since < WORK_S:
            return
        await asyncio.sleep(REST_S)
        self._since = time.monotonic()
