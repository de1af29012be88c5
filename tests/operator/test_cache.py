"""What watches tell is kept, the newest version of each object; what is as it shall be is not written."""

from __future__ import annotations

from typing import Any

import pytest

from kvpool_operator import kinds
from kvpool_operator.cache import Cache
from kvpool_operator.compare import contains, is_applied, marked
from kvpool_operator.names import NAMESPACE_LABEL, POOL_LABEL

Object = dict[str, Any]


def config_map(name: str = "m", version: int = 1, uid: str = "u", pool: str = "p") -> Object:
    labels = {POOL_LABEL: pool, NAMESPACE_LABEL: "n"}
    metadata = {"name": name, "namespace": "n", "uid": uid, "resourceVersion": str(version), "labels": labels}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata}


def test_an_older_version_does_not_replace_a_newer_one() -> None:
    cache = Cache()
    cache.put(kinds.CONFIG_MAP, config_map(version=5))
    cache.put(kinds.CONFIG_MAP, config_map(version=4))
    found = cache.get(kinds.CONFIG_MAP, "n", "m")
    assert found is not None
    assert found["metadata"]["resourceVersion"] == "5"


def test_an_object_that_was_made_anew_is_taken_and_the_end_of_the_old_one_ignored() -> None:
    cache = Cache()
    cache.put(kinds.CONFIG_MAP, config_map(version=9, uid="old"))
    cache.put(kinds.CONFIG_MAP, config_map(version=3, uid="new"))
    cache.drop(kinds.CONFIG_MAP, config_map(version=10, uid="old"))
    assert cache.of_pool(kinds.CONFIG_MAP, ("n", "p"))[0]["metadata"]["uid"] == "new"


def test_an_object_that_changes_its_pool_is_found_there_only() -> None:
    cache = Cache()
    cache.put(kinds.CONFIG_MAP, config_map(version=1))
    cache.put(kinds.CONFIG_MAP, config_map(version=2, pool="q"))
    assert cache.of_pool(kinds.CONFIG_MAP, ("n", "p")) == []
    assert len(cache.of_pool(kinds.CONFIG_MAP, ("n", "q"))) == 1


def test_a_list_tells_what_the_watch_has_missed() -> None:
    cache = Cache()
    for name in "abc":
        cache.put(kinds.CONFIG_MAP, config_map(name))
    before = cache.all(kinds.CONFIG_MAP)
    news = cache.replace(kinds.CONFIG_MAP, before, [config_map("a"), config_map("b", 2), config_map("d")])
    assert sorted(body["metadata"]["name"] for body in news) == ["b", "c", "d"]
    assert cache.get(kinds.CONFIG_MAP, "n", "c") is None


def test_an_object_that_came_while_the_list_was_on_its_way_stays() -> None:
    cache = Cache()
    cache.put(kinds.CONFIG_MAP, config_map("old", 1))
    before = cache.all(kinds.CONFIG_MAP)
    cache.put(kinds.CONFIG_MAP, config_map("new", 7), watched=True)
    news = cache.replace(kinds.CONFIG_MAP, before, [config_map("old", 1)])
    assert news == []
    assert cache.get(kinds.CONFIG_MAP, "n", "new") is not None


def test_a_field_that_is_not_wanted_any_more_makes_a_difference() -> None:
    with_both = marked({**config_map(), "data": {"a": "1", "b": "2"}})
    with_one = marked({**config_map(), "data": {"a": "1"}})
    assert is_applied(with_both, with_both)
    assert not is_applied(with_one, with_both)


@pytest.mark.parametrize(
    ("live", "wanted", "same"),
    [
        ({"a": 1, "default": 2}, {"a": 1}, True),
        ({"m": "1Gi"}, {"m": "1024Mi"}, True),
        ({"m": "500m"}, {"m": "0.5"}, True),
        ({"m": "1Gi"}, {"m": "1G"}, False),
        ({}, {"storageClassName": ""}, True),
        ({"l": [{"a": 1, "x": 0}]}, {"l": [{"a": 1}]}, True),
        ({"l": [1, 2]}, {"l": [1]}, False),
        ({"l": None}, {"l": []}, True),
        ({"a": {"b": 1}}, {"a": {"b": 2}}, False),
        ({"a": "text"}, {"a": {"b": 2}}, False),
    ],
)
def test_what_is_wanted_is_there_or_not(live: Any, wanted: Any, same: bool) -> None:
    assert contains(live, wanted) is same
