"""The chart's alert rules in promtool: they load, each fires when it should, none when all is well."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "charts" / "kvpool" / "files" / "alerts.yaml"
PROMTOOL = shutil.which("promtool")
pytestmark = pytest.mark.skipif(PROMTOOL is None, reason="no promtool; .ci/system --api installs it")


def promtool(*arguments: str) -> str:
    done = subprocess.run(
        [str(PROMTOOL), *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_rules_are_valid() -> None:
    assert "SUCCESS" in promtool("check", "rules", str(RULES))


@pytest.mark.slow
def test_each_rule_fires_and_none_without_a_reason(tmp_path: Path) -> None:
    names = re.findall(r"- alert: (\w+)", RULES.read_text())
    assert len(names) == len(set(names)) >= 10
    expected = ", ".join(f"""{{labels: '{{alertname="{name}"}}', value: 1}}""" for name in names)
    text = (Path(__file__).parent / "alerts.yaml").read_text()
    (tmp_path / "test.yaml").write_text(text.replace("RULES", str(RULES)).replace("EXPECTED", expected))
    assert "SUCCESS" in promtool("test", "rules", str(tmp_path / "test.yaml"))
