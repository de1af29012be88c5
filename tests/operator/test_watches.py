"""A watch that tells nothing is found out by the lists, and what it missed is repaired meanwhile."""

from __future__ import annotations

import asyncio
from typing import Any

from kvpool_operator import kinds
from kvpool_operator.__main__ import parser, watched_namespaces
from kvpool_operator.app import Operator
from kvpool_operator.cache import Cache
from kvpool_operator.handlers import slim
from kvpool_operator.kinds import Kind
from kvpool_operator.watches import Watches
from pool_objects import SETTINGS

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


def test_what_is_watched_is_listed_too_the_daemons_namespace_included() -> None:
    given = parser().parse_args(["--image", "x", "--lease-namespace", "own", "--namespace", "team"])
    assert watched_namespaces(given) == ["own", "team"]
    assert watched_namespaces(parser().parse_args(["--image", "x"])) == []

    class Asked(Listing):
        def __init__(self) -> None:
            super().__init__()
            self.where: list[str | None] = []

        async def list(self, kind: Kind, namespace: str | None = None, labels: str = "") -> list[Object]:
            self.where.append(namespace)
            return await super().list(kind, namespace, labels)

    there = Asked()
    operator = Operator(there, SETTINGS, watched_namespaces(given))  # type: ignore[arg-type]
    before = operator.watches.checked_at
    asyncio.run(operator.watches.check())
    assert set(there.where) == {None, "own", "team"}, "None: cluster-scoped kinds"
    told = operator.metrics.registry.get_sample_value("kvpool_operator_watch_check_timestamp_seconds")
    assert told == operator.watches.checked_at >= before > 0, "the alert of a dead watch looks at it"
