"""The status of a pool tells what its nodes told, no more."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kvpool.report import percent
from kvpool_operator.assign import Assignment, Claim, Member
from kvpool_operator.names import CONDITIONS, REASONS
from kvpool_operator.status import Observed, binary, invalid_status, status
from pool_objects import node_status, pool, pool_node

Object = dict[str, Any]
NOW, LATER = "2026-01-01T00:00:00Z", "2026-01-01T00:01:00Z"


def seen(*nodes: Object, **more: Any) -> Observed:
    members = [Member(i, node["spec"]["nodeName"]) for i, node in enumerate(nodes)]
    return Observed(nodes=nodes, **{"assignment": Assignment(members=members), **more})


def conditions(made: Object) -> dict[str, tuple[str, str]]:
    for condition in made["conditions"]:
        assert condition["reason"] in REASONS[condition["type"]]
    return {c["type"]: (c["status"], c["reason"]) for c in made["conditions"]}


def tier(name: str, **numbers: Any) -> Object:
    return {"name": name, "medium": "DRAM", "capacityBytes": 64 << 20, "usedBytes": 0, "blocks": 0, **numbers}


def verified(**more: Any) -> Object:
    tiers = [tier("dram"), tier("cxl")]
    return node_status(tiers=tiers, conditions=[{"type": "CoherenceVerified", "status": "True"}], **more)


def test_a_pool_whose_nodes_all_serve_is_ready_and_nothing_else() -> None:
    made = status(pool(), seen(pool_node(0, "a", verified()), pool_node(1, "b", verified())), {}, NOW)
    assert conditions(made) == {
        "Ready": ("True", "AllNodesReady"),
        "Progressing": ("False", "Settled"),
        "Degraded": ("False", "AsDeclared"),
        "Draining": ("False", "NotDraining"),
        "CoherenceVerified": ("True", "Verified"),
    }
    assert made["nodesReady"] == "2/2"


def test_a_node_that_said_nothing_makes_the_pool_neither_ready_nor_healthy() -> None:
    made = status(pool(), seen(pool_node(0, "a", verified()), pool_node(1, "b")), {}, NOW)
    assert conditions(made)["Ready"] == ("False", "NodesNotReady")
    assert conditions(made)["Degraded"] == ("Unknown", "NodesNotReady")
    assert conditions(made)["CoherenceVerified"] == ("Unknown", "NotTested")
    assert "b" in made["conditions"][0]["message"]


def test_a_node_that_kubernetes_does_not_hear_of_is_not_ready_whatever_it_told_last() -> None:
    nodes = pool_node(0, "a", verified()), pool_node(1, "b", verified())
    made = status(pool(), seen(*nodes, away=frozenset({"b", "elsewhere"})), {}, NOW)
    assert conditions(made)["Ready"] == ("False", "NodesNotReady")
    assert made["nodesReady"] == "1/2"
    assert "does not hear of b:" in made["conditions"][0]["message"]


def test_a_node_that_is_ready_with_an_older_spec_is_not_ready() -> None:
    old = pool_node(0, "a", verified())
    old["metadata"]["generation"] = 2
    made = status(pool(), seen(old), {}, NOW)
    assert conditions(made)["Ready"] == ("False", "NodesNotReady")
    assert conditions(made)["Progressing"] == ("True", "RollingOut")


def test_what_a_node_misses_is_said_with_its_reason() -> None:
    told = verified(skippedTiers={"cxl": "no such device."})
    made = status(pool(), seen(pool_node(0, "a", told)), {}, NOW)
    degraded = made["conditions"][2]
    assert (degraded["status"], degraded["reason"]) == ("True", "TierMissing")
    assert degraded["message"].startswith("1 of 1 nodes have no tier cxl (a): no such device. ")


def test_shards_in_other_hands_and_nodes_without_a_place_are_shortcomings() -> None:
    members = [Member(0, "a", claims=(Claim(1, 3),))]
    watched = seen(pool_node(0, "a", verified()), assignment=Assignment(members, homeless=["z"]))
    message = status(pool(), watched, {}, NOW)["conditions"][2]["message"]
    assert "1 nodes have no place" in message
    assert "a looks after shard 1" in message


def test_no_nodes_and_a_wrong_coherence_say_what_to_do() -> None:
    assert conditions(status(pool(), seen(), {}, NOW))["Ready"] == ("False", "NoNodes")
    wrong = verified()
    wrong["conditions"][0] = {"type": "CoherenceVerified", "status": "False", "message": "write software."}
    made = status(pool(), seen(pool_node(0, "a", wrong)), {}, NOW)
    assert conditions(made)["CoherenceVerified"] == ("False", "TestFailed")
    assert made["conditions"][4]["message"] == "a: write software."


def test_shared_tiers_count_once_local_ones_for_every_node() -> None:
    first = verified(updatedAt="2026-01-01T00:00:01Z", lookups=10, hits=9, misses={"evicted": 1})
    second = verified(updatedAt="2026-01-01T00:00:02Z", lookups=30, hits=30)
    first["tiers"][1] |= {"usedBytes": 5, "lookups": 4, "hits": 3}
    second["tiers"][1] |= {"usedBytes": 7, "lookups": 1, "hits": 1}
    made = status(pool(), seen(pool_node(0, "a", first), pool_node(1, "b", second)), {}, NOW)
    dram, cxl = made["tiers"]
    assert dram["capacityBytes"] == 128 << 20
    assert (cxl["capacityBytes"], cxl["usedBytes"], cxl["lookups"], cxl["hits"]) == (64 << 20, 7, 5, 4)
    assert cxl["hitRate"] == "10.0"  # of all that the pool looked up
    assert (made["lookups"], made["hits"], made["misses"], made["hitRate"]) == (
        40,
        39,
        {"evicted": 1},
        "97.5",
    )


def test_a_condition_keeps_its_time_until_it_changes() -> None:
    watched = seen(pool_node(0, "a", verified()))
    first = status(pool(), watched, {}, NOW)
    assert status(pool(), watched, first, LATER) == first
    changed = status(pool(), seen(pool_node(0, "a")), first, LATER)
    times = {c["type"]: c["lastTransitionTime"] for c in changed["conditions"]}
    assert times["Ready"] == LATER
    assert times["Draining"] == NOW


def test_paused_failed_and_deleted_pools_say_so() -> None:
    watched = seen(pool_node(0, "a", verified()))
    assert conditions(status(pool(paused=True), watched, {}, NOW))["Progressing"] == ("False", "Paused")
    failed = seen(pool_node(0, "a", verified()), error="DaemonSet x: forbidden")
    assert conditions(status(pool(), failed, {}, NOW))["Progressing"] == ("False", "ApplyFailed")
    gone = seen(pool_node(0, "a", verified()), deleting=True)
    assert conditions(status(pool(), gone, {}, NOW))["Ready"] == ("False", "Deleting")


def test_an_invalid_spec_keeps_what_was_counted() -> None:
    before = status(pool(), seen(pool_node(0, "a", verified(lookups=3, hits=3))), {}, NOW)
    made = invalid_status("spec.hosts: wrong.", 2, before, LATER)
    assert conditions(made)["Ready"] == ("False", "InvalidSpec")
    assert made["hits"] == 3
    assert made["conditions"][0]["message"] == "spec.hosts: wrong. Nothing was changed; correct the spec."
    assert [c["type"] for c in made["conditions"]] == list(CONDITIONS)


@given(st.integers(0, 10**15), st.integers(0, 10**15))
def test_a_hit_rate_says_100_only_when_every_lookup_hit(a: int, b: int) -> None:
    hits, lookups = min(a, b), max(a, b)
    text = percent(hits, lookups)
    assert (text == "100.0") == (hits == lookups > 0)
    assert 0.0 <= float(text) <= 100.0


def test_sizes_fit_a_column() -> None:
    sizes = (0, 1 << 20, 64 << 30, 1288490189, 700 << 20, (700 << 30) + 5, 3 << 50)
    assert [binary(size) for size in sizes] == ["0", "1Mi", "64Gi", "1.2Gi", "700Mi", "700Gi", "3Pi"]
