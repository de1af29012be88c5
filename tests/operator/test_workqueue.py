"""Keys: each once, never two at a time, failures ever more rarely."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from kvpool_operator.workqueue import Again, Queue


def run(scene: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(scene(), 20))  # type: ignore[arg-type]


async def during(queue: Queue[str], scene: Awaitable[None], workers: int = 4) -> None:
    working = asyncio.ensure_future(queue.run(workers))
    try:
        await scene
    finally:
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def test_a_key_added_while_it_runs_runs_again_afterwards_and_never_beside_itself() -> None:
    runs: list[str] = []
    busy: set[str] = set()
    gate = asyncio.Event()

    async def work(key: str) -> None:
        assert key not in busy
        busy.add(key)
        runs.append(key)
        await gate.wait()
        busy.discard(key)

    queue = Queue(work)

    async def scene() -> None:
        for _ in range(10):
            queue.add("a")
        await until(lambda: runs == ["a"])
        for _ in range(10):
            queue.add("a")
        queue.add("b")
        await until(lambda: runs == ["a", "b"])
        gate.set()
        await until(lambda: sorted(runs) == ["a", "a", "b"])
        await asyncio.sleep(0.05)
        assert len(runs) == 3

    run(lambda: during(queue, scene()))


def test_a_failure_is_told_and_tried_again_and_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpool_operator.workqueue.BACKOFF_S_MAX", 0.01)
    runs: list[str] = []
    told: list[str] = []

    async def work(key: str) -> None:
        runs.append(key)
        if key == "bad" and runs.count("bad") < 4:
            raise ValueError("no")

    queue = Queue(work, lambda key, error: told.append(f"{key} {error}"))

    async def scene() -> None:
        queue.add("bad")
        queue.add("good")
        await until(lambda: runs.count("bad") == 4)
        assert told == ["bad no"] * 3
        assert runs.count("good") == 1

    run(lambda: during(queue, scene(), workers=1))


def test_again_is_no_failure_and_an_earlier_wish_wins() -> None:
    runs: list[float] = []
    told: list[str] = []

    async def work(_: str) -> None:
        runs.append(asyncio.get_running_loop().time())
        if len(runs) == 1:
            raise Again(30.0)

    queue = Queue(work, lambda key, _: told.append(key))

    async def scene() -> None:
        queue.add("a")
        await until(lambda: len(runs) == 1)
        await asyncio.sleep(0.01)
        queue.add("a", after_s=0.05)
        await until(lambda: len(runs) == 2)
        assert runs[1] - runs[0] < 10
        assert told == []

    run(lambda: during(queue, scene()))
