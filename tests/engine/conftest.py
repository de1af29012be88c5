"""Real vLLM engines for tests: a driver process in the engine's environment, a region, and a tiny model."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kvpool import Geometry, Region

ROOT = Path(__file__).resolve().parents[2]
HOSTS = 2
CAPACITY_BYTES = 128 << 20


def _demo_module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "demo" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def engine_python() -> Path:
    """The Python of the engine's environment, with this checkout's kvpool."""
    environment = _demo_module("environment")
    found: Path | None = environment.find_engine_python()
    if found is None:
        pytest.skip(
            f"no engine environment: run 'make demo' once (it makes {environment.cache_folder()}), "
            f"or set {environment.PYTHON_VARIABLE} to the Python of one with vLLM and kvpool"
        )
    if environment.PYTHON_VARIABLE not in os.environ:
        environment.make_engine_environment(print)  # the checkout's kvpool may be newer than what is in there
    return found


class Driver:
    """Runs engines one after another, each in a process of its own (driver.py)."""

    def __init__(self, python: Path, log: Path) -> None:
        self.log = log
        reader, writer = os.pipe()
        with log.open("w") as out:
            self._process = subprocess.Popen(
                [python, Path(__file__).with_name("driver.py"), str(writer)],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=out,
                pass_fds=(writer,),
                cwd=log.parent,
            )
        os.close(writer)
        self._answers = os.fdopen(reader, "rb")
        assert self._answers.readline() == b"ready\n", self.tail()

    def run(self, job: dict[str, Any]) -> dict[str, Any]:
        """The job's result; `error` in it when the engine did not come up."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job).encode() + b"\n")
        self._process.stdin.flush()
        line = self._answers.readline()
        assert line, f"the driver ended:\n{self.tail()}"
        result: dict[str, Any] = json.loads(line)
        return result

    def tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-40:])

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._answers.close()


@pytest.fixture(scope="session")
def driver(engine_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    running = Driver(engine_python, tmp_path_factory.mktemp("driver") / "engines.log")
    yield running
    running.close()


@pytest.fixture(scope="session")
def models(engine_python: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Two models of the same name and shape with different weights."""
    folder = tmp_path_factory.mktemp("models")
    made = {}
    for name, seed in (("right", 0), ("other", 1)):
        path = folder / name / "tiny"
        command = [engine_python, ROOT / "demo" / "model.py", path, "--shape", "tiny", "--seed", str(seed)]
        subprocess.run(command, check=True, capture_output=True, env=os.environ | {"HF_HUB_OFFLINE": "1"})
        made[name] = str(path)
    return made


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A pool of two hosts on one shared tier, without daemons: engines must do without."""
    region = Path("/dev/shm") / f"kvpool-test-engine.{os.getpid()}"
    region.unlink(missing_ok=True)
    Region.format(region, Geometry(capacity_bytes=CAPACITY_BYTES, hosts=HOSTS))
    path = tmp_path_factory.mktemp("pool") / "pool.yaml"
    path.write_text(
        f"""
apiVersion: kvpool.dev/v1alpha1
kind: KVPool
metadata: {{name: engine-test}}
spec:
  hosts: {HOSTS}
  tiers:
  - name: cxl
    medium: CXL
    capacity: {CAPACITY_BYTES // 2**20}Mi
    shared: true
    coherence: hardware
    source: {{path: {region}}}
"""
    )
    yield path
    region.unlink(missing_ok=True)
