"""demo.json, as the last `make demo` of this checkout left it: its shape, and what must hold on any machine.

How fast the hits are is not judged here: a busy machine would make the verdict. The demo prints the ratios.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engine

RESULT = Path(__file__).resolve().parents[2] / "demo.json"
BLOCK_TOKENS_MAX = 128  # a prompt's last, partly filled block is never shared


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    if not RESULT.exists():
        pytest.skip("no demo.json in this checkout: run 'make demo' or 'SMALL=1 make demo' first")
    loaded: dict[str, Any] = json.loads(RESULT.read_text())
    return loaded


def test_rows_have_every_time_and_count(result: dict[str, Any]) -> None:
    times = ("ttft_cold_s", "ttft_local_prefix_hit_s", "ttft_hit_same_host_s", "ttft_hit_cross_host_s")
    assert len(result["rows"]) >= 2
    for row in result["rows"]:
        assert all(row[name] > 0 for name in times), row
        assert isinstance(row["sharing_gap"], float)
        assert row["prompt_tokens"] >= 512


def test_second_engine_takes_nearly_all_shareable_tokens_from_the_pool(result: dict[str, Any]) -> None:
    for row in result["rows"]:
        shareable = row.get("shareable_tokens", row["prompt_tokens"] - BLOCK_TOKENS_MAX)
        assert row["external_hit_tokens"] >= 0.95 * shareable, row


def test_tokens_are_those_without_a_pool(result: dict[str, Any]) -> None:
    assert [row["tokens_equal"] for row in result["rows"]] == [True] * len(result["rows"])


def test_every_lookup_is_a_hit_or_a_miss_with_a_reason(result: dict[str, Any]) -> None:
    pool = result["pool"]
    assert pool["hits"] > 0
    assert pool["lookups"] == pool["hits"] + sum(pool["misses"].values())
    assert pool["hit_rate"] == pytest.approx(pool["hits"] / pool["lookups"])
