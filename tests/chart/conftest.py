"""The generator of charts/, which is a program and no package, for the tests of what it writes."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def generate() -> ModuleType:
    path = ROOT / "charts" / "generate.py"
    spec = importlib.util.spec_from_file_location("charts_generate", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["charts_generate"] = module
    spec.loader.exec_module(module)
    return module
