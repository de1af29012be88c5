"""What the watches have told: every object that the operator has to do with, in memory.

A reconcile reads here and asks the API server for nothing. Nobody changes an object that is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kvpool_operator.kinds import NODE, Kind
from kvpool_operator.names import NAMESPACE_LABEL, POOL_LABEL

Object = dict[str, Any]
PoolKey = tuple[str, str]  # namespace, name of a KVPool


def pool_key(kind: Kind, body: Mapping[str, Any]) -> PoolKey | None:
    """The pool that an object belongs to; None for one that belongs to none."""
    metadata = body["metadata"]
    if kind.name == "KVPool":
        return metadata["namespace"], metadata["name"]
    labels = metadata.get("labels") or {}
    namespace = labels.get(NAMESPACE_LABEL)
    pool = labels.get(POOL_LABEL)
    return (namespace, pool) if namespace and pool else None


def version(body: Mapping[str, Any]) -> int:
    """How new an object is. The API server promises an order since 1.35, and has kept it always."""
    text = str(body["metadata"].get("resourceVersion") or 0)
    return int(text) if text.isdecimal() else 0


class Cache:
    """Threads: one event loop only."""

    def __init__(self) -> None:
        self._objects: dict[str, dict[tuple[str, str], Object]] = {}
        self._by_pool: dict[tuple[str, PoolKey], set[tuple[str, str]]] = {}
        self._watched: dict[tuple[str, str, str], int] = {}  # what the watch itself has told, last

    def put(self, kind: Kind, body: Object, *, watched: bool = False) -> None:
        """Keep `body`, unless a newer one is known already."""
        at = _at(body)
        if watched:
            key = (kind.name, *at)
            self._watched[key] = max(version(body), self._watched.get(key, 0))
        known = self._objects.setdefault(kind.name, {})
        old = known.get(at)
        same = old is not None and old["metadata"].get("uid") == body["metadata"].get("uid")
        if same and old is not None and version(old) > version(body):
            return
        if old is not None:
            self._unlink(kind, old)
        known[at] = body
        key_of_pool = pool_key(kind, body)
        if key_of_pool is not None:
            self._by_pool.setdefault((kind.name, key_of_pool), set()).add(at)

    def drop(self, kind: Kind, body: Mapping[str, Any]) -> None:
        """Forget an object, unless another one has its name by now."""
        at = _at(body)
        old = self._objects.get(kind.name, {}).get(at)
        if old is None or old["metadata"].get("uid") != body["metadata"].get("uid"):
            return
        self._unlink(kind, old)
        del self._objects[kind.name][at]
        self._watched.pop((kind.name, *at), None)

    def replace(self, kind: Kind, before: Iterable[Object], listed: Iterable[Object]) -> list[Object]:
        """Take over a whole list; returns what was news: changed, new, or gone without a word.

        `before`: what was known when the list was asked for. What came since then is younger than the list.
        """
        listed = list(listed)
        news = []
        there = {_at(body) for body in listed}
        for body in before:
            if _at(body) not in there:
                self.drop(kind, body)
                news.append(body)
        for body in listed:
            old = self._objects.get(kind.name, {}).get(_at(body))
            if old is None or version(old) < version(body):
                news.append(body)
            self.put(kind, body)
        return news

    def watched(self, kind: Kind, body: Mapping[str, Any]) -> int:
        """The newest version of an object that its watch has told of."""
        return self._watched.get((kind.name, *_at(body)), 0)

    def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        return self._objects.get(kind.name, {}).get((namespace, name))

    def of_pool(self, kind: Kind, key: PoolKey) -> list[Object]:
        """The objects of a kind that belong to a pool, by name."""
        found = self._by_pool.get((kind.name, key), set())
        return [self._objects[kind.name][at] for at in sorted(found)]

    def all(self, kind: Kind) -> list[Object]:
        return list(self._objects.get(kind.name, {}).values())

    def nodes(self, selector: Mapping[str, str]) -> list[Object]:
        """The nodes of the cluster that carry all labels of `selector`."""
        wanted = selector.items()
        return [node for node in self.all(NODE) if wanted <= (node["metadata"].get("labels") or {}).items()]

    def _unlink(self, kind: Kind, body: Object) -> None:
        key = pool_key(kind, body)
        if key is not None:
            self._by_pool.get((kind.name, key), set()).discard(_at(body))


def _at(body: Mapping[str, Any]) -> tuple[str, str]:
    return str(body["metadata"].get("namespace") or ""), str(body["metadata"]["name"])
