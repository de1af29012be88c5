"""The history in a real Redis: shared by replicas, outliving them; memory while it is gone."""

from __future__ import annotations

import asyncio
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from api.conftest import Ask
from api.statuses import NOW, Clock, StillSource, pool
from kvpool.api import shared_history
from kvpool.api.history import COARSE, FINE, Row
from kvpool.api.shared_history import RedisHistory
from kvpool.api.status import Key

KEY = Key("team", "p")
needs_redis = pytest.mark.skipif(
    shutil.which("redis-server") is None, reason="no redis-server on this machine"
)
Start = Callable[[], subprocess.Popen[bytes]]


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        number: int = free.getsockname()[1]
        return number


@pytest.fixture
def start(port: int, tmp_path: Path) -> Iterator[Start]:
    """Starts a Redis that keeps nothing on disk."""
    processes: list[subprocess.Popen[bytes]] = []

    def call() -> subprocess.Popen[bytes]:
        options = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        with (tmp_path / "redis.log").open("ab") as log:
            process = subprocess.Popen(
                ["redis-server", *options, "--dir", str(tmp_path)], stdout=log, stderr=log
            )
        processes.append(process)
        client = redis.Redis(port=port, socket_timeout=1)
        deadline = time.monotonic() + 20
        while True:
            try:
                client.ping()
                break
            except redis.exceptions.ConnectionError:
                assert time.monotonic() < deadline, (tmp_path / "redis.log").read_text()
                time.sleep(0.02)
        client.close()
        return process

    yield call
    for process in processes:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait()


def row(i: int, lookups: int = 10, hits: int = 5) -> Row:
    return Row(NOW + 10 * i, lookups=lookups, hits=hits, used_bytes=i)


def url(port: int) -> str:
    return f"redis://127.0.0.1:{port}/0"


@needs_redis
def test_replicas_share_rows_and_a_new_one_has_the_past(start: Start, port: int, clock: Clock) -> None:
    async def run() -> None:
        a, b = RedisHistory(url(port), clock), RedisHistory(url(port), clock)
        for i in range(30):
            clock.now = NOW + 10 * (i + 1)
            await a.append([(KEY, row(i))])
            await b.append([(KEY, row(i, lookups=11))])  # the same interval, measured a little later
        await a.close()
        seen = await b.rows(KEY, FINE, NOW + 100)
        assert [(r.at - NOW, r.lookups) for r in seen] == [(10 * i, 10) for i in range(10, 30)]
        await b.close()
        fresh = RedisHistory(url(port), clock)
        assert (len(await fresh.rows(KEY, FINE, 0)), fresh.store, fresh.notice) == (30, "redis", "")
        assert await fresh.rows(Key("team", "other"), FINE, 0) == []
        await fresh.close()

    start()
    asyncio.run(run())


@needs_redis
def test_coarse_rows_are_made_of_what_all_replicas_wrote(start: Start, port: int, clock: Clock) -> None:
    async def run() -> None:
        steps = 2 * COARSE.step_s // 10
        late = None
        for i in range(steps + 4):
            clock.now = NOW + 10 * (i + 1)
            if i == steps // 2:
                late = RedisHistory(url(port), clock)  # started in the middle: knows half of it
            for history in (first, late):
                if history is not None:
                    await history.append([(KEY, row(i))])
        assert late is not None
        found = await late.rows(KEY, COARSE, NOW)
        assert [(r.at - NOW, r.lookups) for r in found] == [(0, 900), (900, 900), (1800, 40)]
        await first.close()
        await late.close()

    start()
    first = RedisHistory(url(port), clock)
    asyncio.run(run())


@needs_redis
def test_rows_expire_by_themselves(start: Start, port: int, clock: Clock) -> None:
    async def run() -> None:
        history = RedisHistory(url(port), clock)
        await history.append([(KEY, row(0))])
        client = redis.Redis(port=port)
        names = list(client.scan_iter("kvpool:history:*"))
        assert len(names) == 1
        assert 0 < client.ttl(names[0]) <= FINE.keep_s * 2
        client.close()
        await history.close()

    start()
    asyncio.run(run())


@needs_redis
def test_redis_gone_memory_goes_on_and_says_so_then_hands_over(
    start: Start, port: int, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        history = RedisHistory(url(port), clock)
        await history.append([(KEY, row(0))])
        process.kill()
        process.wait()
        for i in range(1, 4):
            clock.now = NOW + 10 * i
            await history.append([(KEY, row(i))])
        assert history.store == "memory"
        assert "does not answer" in history.notice
        assert [r.at - NOW for r in await history.rows(KEY, FINE, 0)] == [0, 10, 20, 30]
        start()
        clock.now += 10
        await history.append([(KEY, row(4))])
        assert (history.store, history.notice) == ("redis", "")
        other = RedisHistory(url(port), clock)
        # The row of before is lost with Redis itself; those of meanwhile were kept for it.
        assert [r.at - NOW for r in await other.rows(KEY, FINE, 0)] == [10, 20, 30, 40]
        await other.close()
        await history.close()

    process = start()
    asyncio.run(run())


@needs_redis
def test_redis_that_hangs_delays_for_two_seconds_once(
    start: Start, port: int, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_history, "ANSWER_S", 0.2)

    async def run() -> None:
        history = RedisHistory(url(port), clock)
        await history.append([(KEY, row(0))])
        process.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        assert len(await history.rows(KEY, FINE, 0)) == 1
        for _ in range(50):
            await history.rows(KEY, FINE, 0)  # not asked again for a while
        assert time.monotonic() - began < 3
        assert history.store == "memory"
        await history.close()

    process = start()
    asyncio.run(run())


def test_no_redis_at_all_api_serves_and_tells(serve: Ask, port: int, clock: Clock) -> None:
    history = RedisHistory(f"redis://:secret@127.0.0.1:{port}/0", clock)
    client = serve(StillSource(pool()), history=history)
    answer = client.get("/v1/pools/team/p/history").json()
    assert (answer["store"], answer["points"]) == ("memory", [])
    assert f"Redis at redis://127.0.0.1:{port} does not answer" in answer["notice"]
    ready = client.get("/readyz")
    assert (ready.status_code, ready.json()["history"]) == (200, "memory")
    assert "secret" not in ready.text
