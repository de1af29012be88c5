"""Every curl in docs/observability.md works, on a pool of the name that it uses."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("kvpool._native", reason="the compiled part of kvpool is not built")

from children import kill_holders
from kvpool import paths
from kvpool.cli import app

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "observability.md"
MANIFEST = """
apiVersion: kvpool.dev/v1alpha1
kind: KVPool
metadata: {name: prefix-pool}
spec:
  tiers:
  - {name: dram, medium: DRAM, capacity: 8Mi, source: {path: MEDIA/dram}}
"""
CURLS = re.findall(r"^curl .*$", DOCUMENT.read_text(), re.MULTILINE)


@pytest.fixture
def url(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of an API over the pool of the documentation."""
    monkeypatch.setenv("KVPOOL_RUNTIME_DIR", str(folder / "run"))
    (folder / "pool.yaml").write_text(MANIFEST.replace("MEDIA", str(folder)))
    done = CliRunner().invoke(app, ["up", "-f", str(folder / "pool.yaml"), "--api", "0"])
    yield done.stdout.rpartition("status API: ")[2].strip()
    kill_holders([*(folder / "run").glob("*/daemon.h*.lock"), paths.api_lock_path()])


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl on this machine")
@pytest.mark.slow  # make test-api runs it
def test_documented_curls_work(url: str) -> None:
    assert len(CURLS) > 10
    retry = "--retry 5 --retry-all-errors --retry-max-time 20"
    subprocess.run(f"curl -sf {retry} {url}/readyz", shell=True, check=True, capture_output=True, timeout=60)
    for line in CURLS:
        asked = line.replace("http://127.0.0.1:9470", url)
        done = subprocess.run(
            asked + " -w '%{http_code}'", shell=True, capture_output=True, text=True, timeout=30
        )
        assert done.stdout.endswith("200"), f"{line}: {done.stdout[-300:]}"
        if "events" in line:
            assert "event: status" in done.stdout
