"""After real vLLM traffic, everybody who shows hits and tokens shows the same ones."""

from __future__ import annotations

import json
import re
import statistics
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

pytest.importorskip("fastapi", reason="the api extra is not installed")

from fastapi.testclient import TestClient

from kvpool.api.app import create_app
from kvpool.api.local import LocalSource
from kvpool.api.service import Service
from kvpool.cli import app

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]

BLOCK_TOKENS = 32
PROMPTS = [{"seed": f"agreement {i}", "tokens": 150 + 64 * i} for i in range(3)]
# What an engine computes itself, and so learns how long prompts take; then one that it need not compute.
SHORT_TOKENS, LONG_TOKENS = 100, 3000
LENGTHS = 4 * (SHORT_TOKENS, 2400, 700, LONG_TOKENS, 1500, 300)
LONG = {"prompts": [{"seed": "long", "tokens": LONG_TOKENS}], "new_tokens": 1}
TRIES = 3
ONE_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


def test_api_status_metrics_connector_and_engine_agree(
    driver: Any, models: dict[str, str], manifest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: dict[str, float] = {}
    # The pool as `kvpool up` would know it on this machine.
    name = "engine-test"
    monkeypatch.setenv("KVPOOL_RUNTIME_DIR", str(tmp_path))
    (tmp_path / name).mkdir()
    (tmp_path / name / "pool.yaml").write_text(manifest.read_text())
    steps = [*({"prompts": [prompt]} for prompt in PROMPTS), LONG]

    def run(host: int, steps: list[Any]) -> list[dict[str, Any]]:
        job = {
            "env": {**ONE_PROCESS, "KVPOOL_RUNTIME_DIR": str(tmp_path)},
            "options": {
                "model": models["right"],
                "dtype": "float32",
                "distributed_executor_backend": "uni",
                "max_model_len": 4096,
            },
            "connector": {"pool": str(manifest), "host": host},
            "steps": steps,
        }
        result = driver.run(job)
        assert "error" not in result, result["error"]
        done: list[dict[str, Any]] = result["steps"]
        return done

    for host in (0, 1):  # the first one stores, the second one finds it
        for step in run(host, steps):
            for what, amount in step["counts"].items():
                counts[what] = counts.get(what, 0) + amount
    told = json.loads(CliRunner().invoke(app, ["status", name, "-o", "json"]).stdout)["pools"][0]
    with TestClient(create_app(Service(LocalSource())), base_url="http://localhost") as client:
        while client.get("/readyz").status_code != 200:
            time.sleep(0.1)
        seen = client.get(f"/v1/pools/local/{name}").json()
        explained = client.get(f"/v1/pools/local/{name}/explain").json()
        engines = client.get(f"/v1/pools/local/{name}/misses").json()["engines"]
        (space,) = client.get(f"/v1/pools/local/{name}/namespaces").json()["items"]
        metrics = client.get("/metrics").text

    lengths = [*(prompt["tokens"] for prompt in PROMPTS), LONG_TOKENS]
    expected = sum((tokens - 1) // BLOCK_TOKENS for tokens in lengths)  # type: ignore[operator]
    assert counts["kvpool_hit_blocks"] == expected
    assert counts["external_prefix_cache_hits"] == expected * BLOCK_TOKENS
    assert counts["kvpool_requested_blocks"] == told["lookups"] == seen["lookups"] == explained["lookups"]
    assert told["hits"] == seen["hits"] == explained["hits"] == expected
    assert seen["hitRate"] == round(100 * told["hit_rate"], 1)
    assert seen["saved"]["tokens"] == counts["external_prefix_cache_hits"]
    in_metrics = {
        name: int(v) for name, v in re.findall(r"^(kvpool_pool_\w+)\{[^}]*\} (\d+)$", metrics, re.M)
    }
    assert in_metrics["kvpool_pool_hits_total"] == expected
    assert in_metrics["kvpool_pool_lookups_total"] == told["lookups"]
    assert in_metrics["kvpool_pool_saved_tokens_total"] == expected * BLOCK_TOKENS

    # What the engines counted themselves, by engine and by namespace.
    assert len(engines) == 2
    assert sum(engine["lookups"] for engine in engines) == told["lookups"] == space["lookups"]
    assert sorted(engine["hits"] for engine in engines) == [0, expected]
    assert space["hits"] == expected
    assert space["savedTokens"] == expected * BLOCK_TOKENS
    assert seen["saved"]["exact"]
    assert seen["saved"]["prefillSeconds"] is None
    assert "different lengths" in seen["saved"]["prefillNote"]

    # What a hit has saved in seconds, against what computing as much took the same engine: both on a machine
    # that may do other things, so once of three times they have to be of one size. A wrong unit is not.
    said = []
    for attempt in range(TRIES):
        before = _counted(name)
        alone = [
            {"prompts": [{"seed": f"alone {attempt} {i}", "tokens": n}], "new_tokens": 1}
            for i, n in enumerate(LENGTHS)
        ]
        *learned, _ = run(1, [*alone, LONG])
        after = _counted(name)
        assert after["hits"] - before["hits"] == (LONG_TOKENS - 1) // BLOCK_TOKENS
        took = {
            n: [step["seconds"] for step, of in zip(learned, LENGTHS, strict=True) if of == n]
            for n in LENGTHS
        }
        measured = statistics.median(took[LONG_TOKENS]) - statistics.median(took[SHORT_TOKENS])
        saved = (after["saved_us"] - before["saved_us"]) / 1e6
        said.append(f"saved {saved:.3f} s, computing took {measured:.3f} s")
        if after["timed_hits"] > before["timed_hits"] and measured / 4 < saved < measured * 4:
            return
    raise AssertionError(said)


def _counted(name: str) -> dict[str, int]:
    """What all engines together have counted."""
    told = json.loads(CliRunner().invoke(app, ["status", name, "-o", "json"]).stdout)["pools"][0]
    counts: dict[str, int] = told["namespaces"][0]["counts"]
    return counts
