"""Server-sent events of a pool: live counters, changes of state."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

from fastapi import APIRouter, Response
from fastapi.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from kvpool.api.pools import ERRORS, ServiceOf, StatusOf
from kvpool.api.status import Key
from kvpool.api.streams import Reader, Streams

BEAT_S = 10.0  # a comment when nothing happens: proxies close what is silent, and readers notice a dead API
RETRY_MS = 3000

EXAMPLE = """\
retry: 3000

id: 7
event: status
data: {"pool": {"name": "prefix-pool", "lookups": 1000, "hits": 974}, "interval": {"seconds": 2.0}}

event: condition
data: {"type": "Degraded", "from": "False", "to": "True", "reason": "Problems", "message": "...", "at": "..."}

event: event
data: {"reason": "DamageFound", "tier": "dram", "message": "...", "at": "2026-01-31T08:00:00Z"}

event: gone
data: {}
"""

router = APIRouter(prefix="/v1/pools", tags=["pools"])


class EventStream(Response):
    """The answer that goes on until the reader or the pool goes away."""

    media_type = "text/event-stream"

    def __init__(self, streams: Streams, key: Key, reader: Reader) -> None:
        super().__init__(media_type=self.media_type)
        self._streams, self._key, self._reader = streams, key, reader
        del self.headers["content-length"]
        self.headers["x-accel-buffering"] = "no"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reader = self._reader
        reader.task = asyncio.current_task()
        leaving = asyncio.ensure_future(_left(receive))
        leaving.add_done_callback(lambda _: reader.wake())
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for piece in self._pieces(leaving):
                reader.sending_since = time.monotonic()
                await send({"type": "http.response.body", "body": piece, "more_body": True})
                reader.sending_since = None
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except OSError:
            pass
        except asyncio.CancelledError:
            if reader.sending_since is None:
                raise
            # Who takes nothing is not waited for.
        finally:
            leaving.cancel()
            self._streams.remove(self._key, self._reader)

    async def _pieces(self, leaving: asyncio.Future[None]) -> AsyncIterator[bytes]:
        yield b"retry: %d\n\n" % RETRY_MS
        reader = self._reader
        while True:
            await reader.wait(BEAT_S)
            if leaving.done() or self._streams.closing:
                return
            yield b"".join(reader.take()) or b": beat\n\n"
            if reader.gone:
                return


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


@router.get(
    "/{namespace}/{name}/events",
    response_class=PlainTextResponse,
    summary="Live counters and changes of state, as server-sent events",
    description=(
        "`status`: the pool, and what happened since the event before. `condition`: a condition changed. "
        "`event`: something that a person should know. `gone`: the pool is no more. A reader that is slower "
        "than the news gets the newest status and the latest changes; nothing is kept for it. An EventSource "
        "reconnects by itself and begins with what is known then."
    ),
    responses={
        **ERRORS,
        200: {
            "description": "a stream without an end",
            "content": {"text/event-stream": {"schema": {"type": "string"}, "example": EXAMPLE}},
        },
    },
)
async def get_events(service: ServiceOf, status: StatusOf) -> Response:
    streams = service.streams
    return EventStream(streams, status.key, streams.add(status))
