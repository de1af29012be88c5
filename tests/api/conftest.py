"""Fixtures of the status API's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the api extra is not installed")

from fastapi.testclient import TestClient

from api.statuses import Clock, StillSource
from kvpool.api.app import create_app
from kvpool.api.service import Service
from strategies import region_folder

Ask = Callable[..., TestClient]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def serve(clock: Clock) -> Iterator[Ask]:
    """Serves a source in this process; what the service is made of may be given."""
    clients: list[TestClient] = []

    def start(source: StillSource, **service: Any) -> TestClient:
        app = create_app(Service(source, clock=clock, **service))
        client = TestClient(app, base_url="http://localhost")
        client.__enter__()
        clients.append(client)
        return client

    yield start
    for client in clients:
        client.__exit__(None, None, None)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder in memory for region files."""
    with region_folder() as path:
        yield path
