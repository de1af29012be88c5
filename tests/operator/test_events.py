"""Events about pools: each said once, and said again when it could not be posted."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvpool_operator.client import ApiError
from kvpool_operator.events import Events

POOL = {
    "apiVersion": "kvpool.dev/v1alpha1",
    "kind": "KVPool",
    "metadata": {"name": "p", "namespace": "n", "uid": "u", "resourceVersion": "1"},
}


class Posting:
    """The part of a cluster that takes events; the answers are given."""

    def __init__(self, *answers: int) -> None:
        self.answers = list(answers)
        self.posted: list[str] = []

    async def create(self, body: dict[str, Any], kind: object) -> None:
        code = self.answers.pop(0) if self.answers else 201
        if code != 201:
            raise ApiError("POST events", code, "refused")
        self.posted.append(body["metadata"]["name"])


@pytest.mark.parametrize(
    ("answers", "posted"),
    [((), 1), ((409,), 0), ((503,), 1), ((403, 500), 1)],
    ids=["once", "there already", "API server was away", "twice in vain"],
)
def test_said_once_and_again_only_when_it_was_not_posted(answers: tuple[int, ...], posted: int) -> None:
    cluster = Posting(*answers)
    events = Events(cluster)  # type: ignore[arg-type]
    for _ in range(5):
        asyncio.run(events.say(POOL, "NodeAdded", "node a is a member now"))
    assert len(cluster.posted) == posted
