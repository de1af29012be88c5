"""What a node's daemon reports and what it is told: pure functions on plain objects."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from kvpool.errors import ManifestError
from kvpool.report import EngineReport, EngineReports, NamespaceCounts, NamespaceReport
from kvpool_operator.nodes.assignment import Adoption, Assignment, forget, recall, remember
from kvpool_operator.nodes.board import Board, Truth
from kvpool_operator.nodes.status import EVENTS_MAX, PROBLEMS_MAX, REFRESH_S, TEXT_MAX, node_status
from kvpool_operator.nodes.web import SERVED_MAX_S, health

NOW = 1_800_000_000.0
Object = dict[str, Any]


def node_object(**spec: Any) -> Object:
    return {
        "metadata": {"name": "p-1", "namespace": "ns", "uid": "u", "generation": 3, "resourceVersion": "9"},
        "spec": {
            "pool": "p",
            "nodeName": "node-b",
            "host": 1,
            "state": "Active",
            "adopt": [{"shard": 0, "epoch": 4}],
            "manifest": {
                "apiVersion": "kvpool.dev/v1alpha1",
                "kind": "KVPool",
                "metadata": {"name": "p", "namespace": "ns"},
                "spec": {
                    "hosts": 2,
                    "tiers": [
                        {
                            "name": "cxl",
                            "medium": "CXL",
                            "capacity": "1Gi",
                            "shared": True,
                            "source": {"path": "/x"},
                        }
                    ],
                },
            },
            **spec,
        },
        "status": {"ready": True},
    }


# --- what it is told ----------------------------------------------------------------------------------------


def test_assignment_is_what_the_object_says() -> None:
    read = Assignment.from_object(node_object(), "p")
    assert (read.name, read.generation, read.host, read.state) == ("p-1", 3, 1, "Active")
    assert read.adopt == (Adoption(0, 4),)
    assert read.pool.tiers[0].name == "cxl"
    assert read == Assignment.from_object(node_object() | {"status": {"ready": False}}, "p")


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"pool": "other"}, "this daemon serves 'p'"),
        ({"host": -1}, "spec.host is -1"),
        ({"host": True}, "spec.host is True"),
        ({"host": 2}, "the pool has 2 host"),
        ({"state": "Gone"}, "expected one of Active, Draining, Removing"),
        ({"adopt": [{"shard": 0}]}, "an epoch from 1"),
        ({"adopt": [{"shard": 0, "epoch": 0}]}, "an epoch from 1"),
        ({"manifest": None}, "KVPoolNode p-1: spec.manifest"),
    ],
)
def test_assignment_that_cannot_be_is_refused_with_its_field(spec: Object, said: str) -> None:
    with pytest.raises(ManifestError) as error:
        Assignment.from_object(node_object(**spec), "p")
    assert said in str(error.value)


def test_assignment_is_kept_for_the_next_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPOOL_RUNTIME_DIR", str(tmp_path))
    assert recall("p") is None
    (tmp_path / "p").mkdir()
    remember("p", node_object())
    kept = recall("p")
    assert kept is not None
    assert Assignment.from_object(kept, "p") == Assignment.from_object(node_object(), "p")
    (tmp_path / "p" / "kvpoolnode.json").write_text('{"spec":')  # torn
    assert recall("p") is None
    forget("p")
    forget("p")


# --- what it reports ----------------------------------------------------------------------------------------


def tier(**more: Any) -> Object:
    return {
        "name": "cxl",
        "medium": "CXL",
        "capacity_bytes": 1 << 30,
        "used_bytes": 5 << 20,
        "blocks": 5,
        "shards": [
            {"host": 0, "used_bytes": 5 << 20, "blocks": 5},
            {"host": 1, "used_bytes": 0, "blocks": 0},
        ],
        "lookups": 100,  # of all hosts
        "hits": 90,
        **more,
    }


TRUTH = Truth(
    ready=True,
    host=1,
    generation=3,
    report={
        "tiers": [tier()],
        "conditions": [
            {"type": "CoherenceVerified", "status": "True", "reason": "Verified", "message": "ok"}
        ],
        "events": [
            {"kind": "ShardAdopted", "subject": "cxl", "message": "got it", "last_at": NOW - 5, "count": 1},
            {"kind": "DamageFound", "subject": "cxl", "message": "bad", "last_at": NOW - 1, "count": 2},
        ],
        "skipped_tiers": {"ssd": "not in this version"},
        "problems": ["chore: slow"],
    },
    own={
        "cxl": {
            "lookups": 10,
            "hits": 7,
            "stored": 4,
            "evictions": 2,
            "misses": {"evicted": 1, "never-stored": 2},
        }
    },
    owners={"cxl": [{"host": 1, "epoch": 4, "settled": True}, {"host": 1, "epoch": 0, "settled": True}]},
)


def status(truth: Truth = TRUTH, before: Object | None = None, now: float = NOW) -> Object:
    return node_status(truth, version="1.2", pod="pod", started_at=NOW - 60, before=before, now=now)


def test_status_counts_what_this_host_did_and_shows_the_whole_region() -> None:
    told = status()
    assert (told["observedGeneration"], told["ready"], told["host"], told["podName"]) == (3, True, 1, "pod")
    assert (told["lookups"], told["hits"], told["misses"]) == (10, 7, {"evicted": 1, "never-stored": 2})
    (only,) = told["tiers"]
    assert only["shards"] == [
        {"shard": 0, "owner": 1, "epoch": 4, "settled": True, "usedBytes": 5 << 20, "blocks": 5},
        {"shard": 1, "owner": 1, "epoch": 0, "settled": True, "usedBytes": 0, "blocks": 0},
    ]
    assert (only["lookups"], only["hits"], only["storedBlocks"], only["evictions"]) == (10, 7, 4, 2)
    assert (only["capacityBytes"], only["usedBytes"], only["blocks"]) == (1 << 30, 5 << 20, 5)
    assert [(e["type"], e["reason"]) for e in told["events"]] == [
        ("Normal", "ShardAdopted"),
        ("Warning", "DamageFound"),
    ]
    assert told["skippedTiers"] == {"ssd": "not in this version"}
    assert told["problems"] == ["chore: slow"]
    assert told["startedAt"] == "2027-01-15T07:59:00Z"


def test_status_of_a_local_tier_has_no_shards() -> None:
    assert "shards" not in status(replace(TRUTH, owners={}))["tiers"][0]


def test_status_that_did_not_change_is_the_same_for_a_minute() -> None:
    first = status()
    assert status(before=first, now=NOW + REFRESH_S - 1) == first
    later = status(before=first, now=NOW + REFRESH_S)
    assert later["updatedAt"] != first["updatedAt"]
    assert {**later, "updatedAt": ""} == {**first, "updatedAt": ""}
    changed = status(replace(TRUTH, ready=False, message="why"), before=first, now=NOW + 1)
    assert changed["updatedAt"] != first["updatedAt"]
    back = status(before=first, now=NOW - 3600)  # a clock that was set back
    assert back["updatedAt"] != first["updatedAt"]


def test_conditions_keep_their_time_until_their_status_changes() -> None:
    first = status()
    later = status(replace(TRUTH, generation=4), before=first, now=NOW + 100)
    assert [c["lastTransitionTime"] for c in later["conditions"]] == [
        c["lastTransitionTime"] for c in first["conditions"]
    ]
    assert {c["observedGeneration"] for c in later["conditions"]} == {4}
    broken = status(replace(TRUTH, ready=False, message="why"), before=first, now=NOW + 100)
    ready, coherent = broken["conditions"]
    assert (ready["status"], ready["reason"], ready["message"]) == ("False", "NotReady", "why")
    assert ready["lastTransitionTime"] != first["conditions"][0]["lastTransitionTime"]
    assert coherent["lastTransitionTime"] == first["conditions"][1]["lastTransitionTime"]


def test_status_is_bounded() -> None:
    events = [TRUTH.report["events"][0] | {"message": "x" * 5000}] * 50
    told = status(replace(TRUTH, problems=("y" * 5000,) * 50, report=TRUTH.report | {"events": events}))
    assert len(told["events"]) == EVENTS_MAX
    assert len(told["problems"]) == PROBLEMS_MAX
    assert max(len(e["message"]) for e in told["events"]) == len(told["problems"][0]) == TEXT_MAX


def test_numbers_of_nonsense_are_what_the_schema_takes() -> None:
    """Engines report what they like; the apiserver refuses a whole status for one number."""
    counts = NamespaceCounts(hits=1 << 62, misses={f"reason-{i}": (1 << 62) + i for i in range(40)})
    said = NamespaceReport("d", {"model": "m", "block_tokens": 1 << 31}, 4096, counts)
    odd = NamespaceReport("e", {"block_tokens": True}, 4096)
    engine = EngineReport("n", 1, 2, "p", "", NOW, None, [f"t{i}" for i in range(40)], {"d": counts})
    reports = asdict(EngineReports([engine], {"d": said, "e": odd}))
    told = status(replace(TRUTH, report=TRUTH.report | {"engines": reports}))
    first, second = (n for n in told["namespaces"] if n["digest"] in "de")
    (shown,) = told["engines"]
    assert first["lookups"] == first["savedTokens"] == shown["lookups"] == (1 << 63) - 1
    assert len(first["misses"]) == len(shown["misses"]) == 32
    assert len(shown["tiers"]) == 16
    assert "blockTokens" not in second


def test_drained_is_a_condition_only_of_a_node_that_is_drained() -> None:
    assert "Drained" not in {c["type"] for c in status()["conditions"]}
    told = status(replace(TRUTH, drained=("True", "HandedOver", "all")))
    assert [(c["status"], c["reason"]) for c in told["conditions"] if c["type"] == "Drained"] == [
        ("True", "HandedOver")
    ]


# --- between the threads ------------------------------------------------------------------------------------


def test_board_tells_what_changed_and_who_is_silent() -> None:
    now = [0.0]
    board = Board(clock=lambda: now[0])
    assert board.silent_s() == (0.0, None)
    wanted = Assignment.from_object(node_object(), "p")
    board.assign(wanted)
    assert board.changed.is_set()
    board.changed.clear()
    board.assign(Assignment.from_object(node_object(), "p"))
    assert not board.changed.is_set()
    board.assign(None, unreadable="wrong")
    assert board.wanted() == (wanted, "wrong")  # what was wanted before stays
    board.assign(None)
    assert board.wanted() == (None, "")
    board.watched()
    now[0] = SERVED_MAX_S
    assert board.silent_s() == (SERVED_MAX_S, SERVED_MAX_S)
    assert health(board) == ""
    now[0] += 1
    assert "not been heard of" in health(board)
    board.beat()
    assert health(board) == ""


def test_map_that_is_empty_is_left_out() -> None:
    """Applied as {} after it had entries it becomes null, and the schema refuses the whole status."""
    told = status(replace(TRUTH, own={}, report={**TRUTH.report, "skipped_tiers": {}}))
    assert "misses" not in told
    assert "skippedTiers" not in told
