"""A watch that tells nothing is found out by the lists, and what it missed is repaired meanwhile."""

from __future__ import annotations

import asyncio
from typing import Any

from kvpool_operator import kinds
from kvpool_operator.cache import Cache
from kvpool_operator.handlers import slim
from kvpool_operator.kinds import Kind
from kvpool_operator.watches import Watches

Object = dict[str, Any]


class Listing:
    """The part of a cluster that is listed."""

    def __init__(self) -> None:
        self.objects: list[Object] = []

    async def list(self, kind: Kind, namespace: str | None = None, labels: str = "") -> list[Object]:
        return [body for body in self.objects if kind is kinds.NODE]


def node(name: str, version: int) -> Object:
    return {"metadata": {"name": name, "uid": name, "resourceVersion": str(version)}}


def test_a_watch_that_has_not_told_by_the_second_list_is_dead_until_it_does() -> None:
    there, cache, changed = Listing(), Cache(), []
    watches = Watches(
        there,  # type: ignore[arg-type]
        cache,
        [(kinds.NODE, "")],
        lambda kind, body: changed.append(body["metadata"]["name"]),
        slim,
    )
    there.objects = [node("a", 5)]
    asyncio.run(watches.check())
    assert watches.dead == "", "it may be on its way"
    assert changed == ["a"], "the list repairs what the watch has missed"
    asyncio.run(watches.check())
    assert "Node a" in watches.dead
    cache.put(kinds.NODE, slim(kinds.NODE, node("a", 5)), watched=True)
    asyncio.run(watches.check())
    asyncio.run(watches.check())
    assert watches.dead == ""


def test_an_object_that_is_gone_by_the_second_list_proves_nothing() -> None:
    there, cache = Listing(), Cache()
    watches = Watches(there, cache, [(kinds.NODE, "")], lambda *_: None, slim)  # type: ignore[arg-type]
    there.objects = [node("a", 5)]
    asyncio.run(watches.check())
    cache.drop(kinds.NODE, slim(kinds.NODE, node("a", 5)))
    there.objects = []
    asyncio.run(watches.check())
    assert watches.dead == ""


def test_of_a_node_only_what_is_needed_is_kept() -> None:
    body = {
        "metadata": {"name": "a", "labels": {"x": "y"}, "managedFields": [1], "annotations": {"big": "x"}},
        "spec": {"unschedulable": True, "podCIDR": "10.0.0.0/24"},
        "status": {"images": ["..."], "conditions": [{"type": "Ready", "status": "True"}, {"type": "Disk"}]},
    }
    assert slim(kinds.NODE, body) == {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": "a", "labels": {"x": "y"}, "annotations": {}},
        "spec": {"unschedulable": True},
        "status": {"conditions": [{"type": "Ready", "status": "True"}]},
    }
