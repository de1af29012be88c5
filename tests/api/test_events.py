"""The event streams: what is sent, and that a slow reader costs nobody anything."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from api.conftest import Ask
from api.statuses import NOW, Clock, StillSource, pool
from kvpool.api import model
from kvpool.api.app import create_app
from kvpool.api.problem import ApiError
from kvpool.api.service import Service
from kvpool.api.status import Key
from kvpool.api.streams import CHANGES_MAX, Reader

KEY = Key("team", "p")


def parsed(pieces: list[bytes]) -> list[tuple[str, Any]]:
    found = []
    for piece in b"".join(pieces).decode().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in piece.splitlines() if ": " in line)
        if "event" in fields:
            found.append((fields["event"], json.loads(fields["data"])))
    return found


def test_reader_begins_with_what_is_known_then_gets_amounts() -> None:
    service = Service(StillSource(pool()), clock=Clock())
    reader = service.streams.add(service.board.get(KEY))  # type: ignore[arg-type]
    ((kind, first),) = parsed(reader.take())
    assert (kind, first["pool"]["lookups"], first["interval"]["lookups"]) == ("status", 100, 0)
    service.board.put(pool(lookups=160, hits=110, observed_at=NOW + 2))
    ((_, second),) = parsed(reader.take())
    assert second["interval"] == {
        "seconds": 2.0,
        "lookups": 60,
        "hits": 30,
        "hitRate": 50.0,
        "evictions": 0,
        "bytesLoaded": 0,
        "bytesStored": 0,
    }


def test_reader_that_is_slow_gets_the_newest_and_nothing_piles_up() -> None:
    service = Service(StillSource(pool()), clock=Clock())
    reader = service.streams.add(service.board.get(KEY))  # type: ignore[arg-type]
    for i in range(1000):
        shown = pool(lookups=101 + i).pool
        flipped = model.Condition(type="Ready", status="True" if i % 2 else "False", reason="x")
        service.board.put(pool(pool=shown.model_copy(update={"conditions": [flipped]})))
    events = parsed(reader.take())
    assert len(events) == CHANGES_MAX + 1
    assert events[-1][1]["pool"]["lookups"] == 1100
    assert reader.take() == []


def test_change_of_condition_new_event_and_end_are_told() -> None:
    service = Service(StillSource(pool()), clock=Clock())
    reader = service.streams.add(service.board.get(KEY))  # type: ignore[arg-type]
    reader.take()
    now = pool()
    degraded = model.Condition(type="Degraded", status="True", reason="Problems", message="a tier is missing")
    shown = now.pool.model_copy(update={"conditions": [*now.pool.conditions, degraded]})
    damage = model.Event(reason="DamageFound", tier="dram", message="1 block", at="2026-01-31T08:00:00Z")
    service.board.put(replace(now, pool=shown, events=[damage]))
    told = parsed(reader.take())
    assert [kind for kind, _ in told] == ["condition", "event", "status"]
    assert (told[0][1]["from"], told[0][1]["to"], told[0][1]["reason"]) == (None, "True", "Problems")
    service.board.remove(KEY)
    assert parsed(reader.take()) == [("gone", {})]
    assert reader.gone


def test_too_many_streams_are_refused_and_room_comes_back() -> None:
    service = Service(StillSource(pool()), clock=Clock(), streams_max=2)
    status = service.board.get(KEY)
    assert status is not None
    readers = [service.streams.add(status) for _ in range(2)]
    with pytest.raises(ApiError, match="as many event streams"):
        service.streams.add(status)
    service.streams.remove(KEY, readers[0])
    service.streams.remove(KEY, readers[0])  # twice is once
    assert isinstance(service.streams.add(status), Reader)


def test_stream_over_asgi_reader_that_takes_nothing_delays_no_other() -> None:
    async def run() -> tuple[list[int], int, int]:
        service = Service(StillSource(pool()), clock=Clock())
        app = create_app(service)
        got: dict[str, list[bytes]] = {"slow": [], "quick": []}
        leave = asyncio.Event()

        async def receive() -> dict[str, Any]:
            await leave.wait()
            return {"type": "http.disconnect"}

        def sender(name: str) -> Any:
            async def send(message: dict[str, Any]) -> None:
                if name == "slow" and message["type"] == "http.response.body":
                    await asyncio.Event().wait()
                got[name].append(message.get("body", b""))

            return send

        scope = {
            "type": "http",
            "method": "GET",
            "path": "/v1/pools/team/p/events",
            "raw_path": b"",
            "query_string": b"",
            "headers": [],
            "client": ("127.0.0.1", 1),
        }
        tasks = [asyncio.create_task(app(dict(scope), receive, sender(name))) for name in got]
        while not parsed(got["quick"]):
            await asyncio.sleep(0.005)
        for i in range(20):
            service.board.put(pool(lookups=200 + i))
            await asyncio.sleep(0.005)
        while b'"lookups":219' not in got["quick"][-1]:
            await asyncio.sleep(0.005)
        open_before = len(service.streams)
        leave.set()
        tasks[0].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        seen = [data["pool"]["lookups"] for _, data in parsed(got["quick"])]
        return seen, open_before, len(service.streams)

    quick, before, after = asyncio.run(run())
    assert quick == sorted(quick)
    assert (quick[0], quick[-1]) == (100, 219)
    assert len(quick) > 2  # some may be joined when the machine is busy
    assert (before, after) == (2, 0)


def test_events_of_unknown_pool_is_404(serve: Ask) -> None:
    assert serve(StillSource()).get("/v1/pools/team/p/events").status_code == 404
