"""A port in front of another one that can be cut: an API that is away."""

from __future__ import annotations

import asyncio
import threading
from types import TracebackType


class Relay:
    """Passes connections on to `to` while it is not cut; cutting it ends those that are open."""

    def __init__(self, to: int) -> None:
        self._to = to
        self.port = 0
        self._open: set[asyncio.StreamWriter] = set()
        self._connected = True
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Relay:
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cut()
        self._loop.call_soon_threadsafe(self._ending.set)
        self._thread.join()

    def cut(self) -> None:
        self._set(False)

    def connect(self) -> None:
        self._set(True)

    def _set(self, connected: bool) -> None:
        def change() -> None:
            self._connected = connected
            for writer in list(self._open) if not connected else []:
                writer.transport.abort()

        self._loop.call_soon_threadsafe(change)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        self._ending = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._ending.wait()
        server.close()
        while self._tasks:
            await asyncio.wait(self._tasks)
        await asyncio.sleep(0)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self._connected:
            writer.transport.abort()
            return
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._to)
        for source, target in ((reader, up_writer), (up_reader, writer)):
            self._open.add(target)
            task = asyncio.create_task(self._pump(source, target))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        try:
            while piece := await source.read(65536):
                target.write(piece)
                await target.drain()
        except OSError:
            pass
        finally:
            self._open.discard(target)
            target.transport.abort()
