"""The benchmark runs to its end: all its parts, with the smallest input, and with a figure for each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.reference import compiler
from bench.run import PARTS, run


@pytest.mark.skipif(compiler() is None, reason="the benchmark's yardsticks need a C compiler")
def test_bench_tiny_gives_every_figure(tmp_path: Path) -> None:
    output = tmp_path / "bench.json"
    run("tiny", list(PARTS), tmp_path, output, quiet=True)
    report = json.loads(output.read_text())
    assert {r["name"] for r in report["results"]} == {
        "load",
        "store",
        "store-with-eviction",
        "load-beside-damaged",
        "lookup-vs-access",
        "lookup-vs-dict",
        "attach",
    }
    assert all(r["ratio_median"] > 0 and r["rounds"] >= 2 for r in report["results"])
    assert {"cpu", "cores", "memory", "copy_kernel", "cache_instructions"} <= set(report["machine"])
