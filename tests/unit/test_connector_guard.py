"""A pool that raises costs hits and one line in the log, never an exception in the engine."""

from __future__ import annotations

import logging

import pytest

from kvpool import MissReason
from kvpool_connector.guard import LOG_INTERVAL_S, GuardedPool


class BrokenPool:
    def __init__(self) -> None:
        self.broken = True

    def lookup(self, keys: object) -> str:
        if self.broken:
            raise RuntimeError("no such tier")
        return "found"

    def record_misses(self, reason: MissReason, count: int, namespace: object) -> None:
        raise RuntimeError("no such tier")

    def close(self) -> None:
        raise RuntimeError("no such tier")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_failure_is_none_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    pool, clock = BrokenPool(), Clock()
    guard = GuardedPool(pool, clock=clock)  # type: ignore[arg-type]
    with caplog.at_level(logging.INFO, logger="vllm.kvpool"):
        for _ in range(50):
            assert guard.lookup(None) is None  # type: ignore[arg-type]
        guard.record_misses(MissReason.EVICTED, 3)
        assert [record.levelname for record in caplog.records] == ["ERROR"]
        assert "no such tier" in caplog.text
        pool.broken = False
        assert guard.lookup(None) == "found"  # type: ignore[arg-type]
        assert [record.levelname for record in caplog.records] == ["ERROR", "INFO"]


def test_pool_that_comes_and_goes_does_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    pool, clock = BrokenPool(), Clock()
    guard = GuardedPool(pool, clock=clock)  # type: ignore[arg-type]
    with caplog.at_level(logging.ERROR, logger="vllm.kvpool"):
        for _ in range(20):
            pool.broken = not pool.broken
            guard.lookup(None)  # type: ignore[arg-type]
        assert len(caplog.records) == 1
        clock.now += LOG_INTERVAL_S
        pool.broken = True
        guard.lookup(None)  # type: ignore[arg-type]
        pool.broken = False
        guard.lookup(None)  # type: ignore[arg-type]
        pool.broken = True
        guard.lookup(None)  # type: ignore[arg-type]
        assert len(caplog.records) == 2


def test_close_of_a_broken_pool_is_quiet() -> None:
    GuardedPool(BrokenPool()).close()  # type: ignore[arg-type]
