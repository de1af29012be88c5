"""Results of a batch: counts, prefixes and reasons, seen without making an object a key."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvpool.outcomes import (
    CODE_BY_REASON,
    REASON_BY_CODE,
    LoadResult,
    LookupResult,
    MissReason,
    Reasons,
    StoreResult,
)

LAYOUT = Path(__file__).resolve().parents[2] / "pool" / "native" / "layout.h"
NEVER = CODE_BY_REASON[MissReason.NEVER_STORED]
EVICTED = CODE_BY_REASON[MissReason.EVICTED]
NO_SPACE = CODE_BY_REASON[MissReason.NO_SPACE]


def test_codes_are_those_of_the_native_core() -> None:
    (body,) = re.findall(r"enum class Outcome[^{]*\{(.*?)\};", LAYOUT.read_text(), re.S)
    native = {name: int(code) for name, code in re.findall(r"(\w+) = (\d+)", body)}
    assert native.pop("Ok") == 0
    assert native.pop("Present") == 1
    ours = {r.name.title().replace("_", ""): code for r, code in CODE_BY_REASON.items()}
    assert native == ours


def test_reasons_are_stable_words_and_every_code_has_one() -> None:
    assert all(re.fullmatch(r"[a-z]+(-[a-z]+)*", r.value) and str(r) == r.value for r in MissReason)
    assert [REASON_BY_CODE[c] for c in CODE_BY_REASON.values()] == list(CODE_BY_REASON)
    assert set(CODE_BY_REASON) == set(MissReason)


@pytest.mark.parametrize(
    ("codes", "hits", "prefix"),
    [
        (b"", 0, 0),
        (bytes(3), 3, 3),
        (bytes([0, 0, NEVER, 0]), 3, 2),
        (bytes([EVICTED, 0]), 1, 0),
    ],
)
def test_lookup_and_load_count_hits_and_the_usable_prefix(codes: bytes, hits: int, prefix: int) -> None:
    for result in (LookupResult(codes), LoadResult(codes, hits * 10)):
        assert (len(result), result.hit_count, result.prefix_count) == (len(codes), hits, prefix)
        assert [r is None for r in result.reasons] == [c == 0 for c in codes]
    assert LookupResult(codes).found == bytes(c == 0 for c in codes)


def test_store_counts_stored_present_and_declined() -> None:
    result = StoreResult(bytes([0, 1, 1, NO_SPACE]))
    assert (result.stored_count, result.present_count, result.declined_count) == (1, 2, 1)
    assert list(result.reasons) == [None, None, None, MissReason.NO_SPACE]


def test_reasons_are_a_sequence_with_slices() -> None:
    reasons = Reasons(bytes([0, NEVER, EVICTED]))
    assert reasons[1] is MissReason.NEVER_STORED
    assert reasons[-1] is MissReason.EVICTED
    assert list(reasons[1:]) == [MissReason.NEVER_STORED, MissReason.EVICTED]
    assert len(reasons) == 3
    assert "never-stored" in repr(reasons)
    with pytest.raises(IndexError):
        reasons[3]
