"""After real vLLM traffic, everybody who shows hits and tokens shows the same ones."""

from __future__ import annotations

import json
import re
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
# The second engine computes these itself, and so learns how long prompts take; then one that it need not.
LENGTHS = 3 * (100, 2400, 700, 1500, 300, 2000, 1000, 500, 1200, 200, 1800, 400)
LONG_TOKENS = 3000
ALONE = [{"prompts": [{"seed": f"alone {i}", "tokens": n}], "new_tokens": 1} for i, n in enumerate(LENGTHS)]
COLD = [{"prompts": [{"seed": f"cold {i}", "tokens": LONG_TOKENS}], "new_tokens": 1} for i in range(3)]
LONG = {"prompts": [{"seed": "long", "tokens": LONG_TOKENS}], "new_tokens": 1}
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
    steps = [{"prompts": [prompt]} for prompt in PROMPTS]
    for host in (0, 1):  # the first one stores, the second one finds it
        job = {
            "env": {**ONE_PROCESS, "KVPOOL_RUNTIME_DIR": str(tmp_path)},
            "options": {
                "model": models["right"],
                "dtype": "float32",
                "distributed_executor_backend": "uni",
                "max_model_len": 4096,
            },
            "connector": {"pool": str(manifest), "host": host},
            "steps": [*steps, LONG] if host == 0 else [*steps, *ALONE, *COLD, LONG],
        }
        result = driver.run(job)
        assert "error" not in result, result["error"]
        for step in result["steps"]:
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
    assert seen["saved"]["prefillCoverage"] == 100.0, [engine["curve"] for engine in told["engines"]]

    # The second engine: what it says that hits have saved, against what computing as much has taken it.
    *_, cold_1, cold_2, cold_3, hit = (step["seconds"] for step in result["steps"])
    measured = sorted((cold_1, cold_2, cold_3))[1] - hit
    saved_s = seen["saved"]["prefillSeconds"]
    assert measured / 2 < saved_s < measured * 2, f"saved {saved_s} s; measured {measured} s"
