"""Why is my hit rate what it is: the weightiest reason comes first, with what to do."""

from __future__ import annotations

from typing import Any

import pytest

from kvpool.explain import MEANINGS, explain
from kvpool.outcomes import MissReason
from kvpool.report import Counters, NamespaceUsage


def namespace(digest: str, blocks: int, **fields: Any) -> NamespaceUsage:
    description: dict[str, object] = {
        "model": "m",
        "dtype": "bfloat16",
        "tp_rank": 0,
        "block_tokens": 16,
        **fields,
    }
    return NamespaceUsage(digest * 8, description, block_bytes=4096, blocks=blocks, bytes=blocks * 4096)


def counters(hits: int, stored: int = 100, declined: dict[str, int] | None = None, **misses: int) -> Counters:
    named = {reason.replace("_", "-"): count for reason, count in misses.items()}
    lookups = hits + sum(misses.values())
    return Counters(lookups=lookups, hits=hits, misses=named, stored=stored, declined=declined or {})


@pytest.mark.parametrize("reason", list(MissReason))
def test_every_reason_has_a_meaning_and_advice(reason: MissReason) -> None:
    meaning, advice = MEANINGS[reason.value]
    assert meaning[0].islower()
    assert meaning[-1] != "."
    assert advice[0].isupper()
    assert advice[-1] == "."


@pytest.mark.parametrize(
    ("given", "namespaces", "headline", "advice"),
    [
        (Counters(), [], "No engine has used this pool yet", "the connector"),
        (Counters(stored=5), [], "Nothing was looked up yet; 5 blocks were stored", "twice"),
        (counters(0, stored=0, never_stored=9), [], "nothing was ever stored", "may store"),
        (
            counters(0, stored=0, declined={"no-space": 4}, never_stored=9),
            [],
            "Stores were declined: no slot could be freed",
            "extentSize",
        ),
        (counters(95, evicted=5), [], "95.0% of 100 looked-up blocks were served. That is good.", "capacity"),
        (
            counters(10, evicted=80, never_stored=10),
            [],
            "Main reason (80% of all): the blocks were stored, then",
            "add",
        ),
        (counters(10, never_stored=90), [namespace("a", 9)], "nobody had stored", "same tokens"),
        (
            counters(10, declined={"quota": 50}, never_stored=90),
            [namespace("a", 9)],
            "Stores were declined: the tenant's quota",
            "Raise the tenant's quota",
        ),
        (counters(0, failed_checksum=7), [namespace("a", 9)], "a stored block was damaged", "kvpool scrub"),
        (counters(0, something_new=7), [namespace("a", 9)], "something-new", ""),
    ],
)
def test_explain_headline_and_advice(
    given: Counters, namespaces: list[NamespaceUsage], headline: str, advice: str
) -> None:
    explanation = explain(given, namespaces)
    assert headline in explanation.headline
    assert advice in explanation.advice


def test_explain_reasons_are_sorted_by_weight_with_their_share() -> None:
    explanation = explain(counters(50, evicted=10, never_stored=30, tier_error=10, quota=0), [])
    assert [(r.reason, r.count, r.share) for r in explanation.misses] == [
        ("never-stored", 30, 0.3),
        ("evicted", 10, 0.1),
        ("tier-error", 10, 0.1),
    ]


@pytest.mark.parametrize("blocks", [0, 80])
def test_explain_engine_with_another_dtype_is_told_which_field_differs(blocks: int) -> None:
    # With blocks = 80 the second engine stored its own after its misses: the usual way to notice nothing.
    spaces = [namespace("a", 90), namespace("b", blocks, dtype="float32")]
    explanation = explain(counters(0, never_stored=90), spaces)
    (difference,) = explanation.namespaces
    assert (difference.namespace, difference.nearest) == ("b" * 8, "a" * 8)
    (field,) = difference.differences
    assert (field.field, field.here, field.there) == ("dtype", "float32", "bfloat16")
    assert "Two engines differ" in explanation.headline
    assert "--dtype" in explanation.advice


def test_explain_wrong_namespace_says_what_to_make_equal() -> None:
    spaces = [namespace("a", 90), namespace("b", 0, block_tokens=32, block_bytes=9, hash_scheme="x")]
    explanation = explain(counters(0, wrong_namespace=90), spaces)
    assert explanation.advice.startswith(
        "Make equal: block_tokens (start both engines with the same --block-size)"
    )
    assert "PYTHONHASHSEED" in explanation.advice
    assert "block_bytes" not in explanation.advice


def test_explain_ranks_and_other_models_are_no_difference() -> None:
    spaces = [
        namespace("a", 90),
        namespace("b", 80, tp_rank=1),
        namespace("c", 70, model="other"),
        namespace("a", 5),  # the same namespace in another shard
    ]
    assert explain(counters(0, never_stored=9), spaces).namespaces == ()


def test_explain_two_ranks_with_the_same_difference_are_told_once() -> None:
    spaces = [
        namespace("a", 90),
        namespace("b", 90, tp_rank=1),
        namespace("c", 9, dtype="float32"),
        namespace("d", 9, dtype="float32", tp_rank=1),
    ]
    assert len(explain(counters(0, never_stored=9), spaces).namespaces) == 1
