"""The generator of charts/, and helm, for the tests of the chart."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts" / "kvpool"
Object = dict[str, Any]
Files = dict[str, str]
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the CRDs are long


@pytest.fixture(scope="session")
def generate() -> ModuleType:
    """charts/generate.py, which is a program and no package."""
    path = ROOT / "charts" / "generate.py"
    spec = importlib.util.spec_from_file_location("charts_generate", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["charts_generate"] = module
    spec.loader.exec_module(module)
    return module


class HelmRefused(Exception):
    """Helm's own message."""


class Helm:
    """The chart as helm sees it, rendered without a cluster."""

    def __init__(self, folder: Path) -> None:
        worker = Path(__file__).with_name("helm_worker.py")
        self._process = subprocess.Popen(
            [sys.executable, str(worker), str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def _ask(self, **request: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "helm ended"
        said = json.loads(line)
        if "error" in said:
            raise HelmRefused(said["error"])
        return said["result"]

    @cache  # noqa: B019  # one Helm lives as long as the session
    def _files(self, values: str, name: str, namespace: str) -> dict[str, str]:
        rendered: dict[str, str] = self._ask(
            do="render", values=json.loads(values), name=name, namespace=namespace
        )
        return rendered

    def files(self, values: Object | None = None, *, name: str = "kvpool", namespace: str = "sys") -> Files:
        """Every template with what it renders to. Raises: HelmRefused."""
        return self._files(json.dumps(values or {}), name, namespace)

    def objects(self, values: Object | None = None, **more: str) -> list[Object]:
        """All objects that would be installed, hooks included. Raises: HelmRefused."""
        texts = [text for path, text in sorted(self.files(values, **more).items()) if path.endswith(".yaml")]
        return [body for text in texts for body in yaml.load_all(text, LOADER) if body]

    def lint(self, values: Object | None = None) -> list[Object]:
        """What helm lint has to say, mere advice left out."""
        found = self._ask(do="lint", values=values)
        return [message for message in found["messages"] if message["severity"] != 1]

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=10)
        self._process.stdout.close()


@pytest.fixture(scope="session")
def helm() -> Iterator[Helm]:
    if importlib.util.find_spec("helm_python") is None:
        pytest.skip("no helm_python here; 'make setup' installs it")
    helm = Helm(CHART)
    yield helm
    helm.close()
