"""Tensors in every supported layout, cut into blocks and put together again, in the engine's environment."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.engine


def test_blocks_of_every_layout_come_back_equal(engine_python: Path, manifest: Path) -> None:
    script = Path(__file__).with_name("check_pages.py")
    done = subprocess.run([engine_python, script, manifest], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "checked", done.stderr
