"""`kvpool up` serves the status API on loopback, `kvpool down` ends it with the last daemon."""

from __future__ import annotations

import json
import socket
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from typer.testing import CliRunner, Result

pytest.importorskip("kvpool._native", reason="the compiled part of kvpool is not built")

from children import kill_holders
from kvpool import paths
from kvpool.api import server
from kvpool.api.app import create_app
from kvpool.api.service import Service
from kvpool.cli import api, app
from kvpool.daemon.lock import holder

MANIFEST = """
apiVersion: kvpool.dev/v1alpha1
kind: KVPool
metadata: {name: NAME}
spec:
  tiers:
  - {name: dram, medium: DRAM, capacity: 8Mi, source: {path: MEDIA/NAME}}
"""

Run = Callable[..., Result]
TOKEN = "a-token-that-is-long-enough"


@pytest.fixture
def run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """Runs a command; NAME.yaml in an argument is the manifest of the pool NAME."""
    monkeypatch.setenv("KVPOOL_RUNTIME_DIR", str(folder / "run"))
    for name in ("one", "two"):
        text = MANIFEST.replace("MEDIA", str(folder)).replace("NAME", name)
        (folder / f"{name}.yaml").write_text(text)

    def call(*arguments: str) -> Result:
        return CliRunner().invoke(app, [str(folder / a) if a.endswith(".yaml") else a for a in arguments])

    yield call
    kill_holders([*(folder / "run").glob("*/daemon.h*.lock"), paths.api_lock_path()])


def asked(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=20) as answer:
        return json.load(answer)


def up(run: Run, *arguments: str) -> Any:
    done = run("up", *arguments, "-o", "json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


@pytest.mark.slow  # make test-api runs it
def test_up_serves_all_pools_until_the_last_is_down(run: Run) -> None:
    url = up(run, "-f", "one.yaml", "--api", "0")["api"]
    assert url.startswith("http://127.0.0.1:")
    pid = holder(paths.api_lock_path())
    assert up(run, "-f", "two.yaml", "--api", "0")["api"] == url
    assert holder(paths.api_lock_path()) == pid
    seen = asked(url + "/v1/pools/local/one")
    assert (seen["name"], seen["nodes"]["ready"]) == ("one", 1)
    assert run("down", "one").exit_code == 0
    assert holder(paths.api_lock_path()) == pid
    assert run("down", "two").exit_code == 0
    assert holder(paths.api_lock_path()) is None


@pytest.mark.slow  # make test-api runs it
def test_up_port_taken_is_a_note_and_the_pool_is_up(run: Run) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        done = run("up", "-f", "one.yaml", "--api", str(other.getsockname()[1]))
    assert done.exit_code == 0
    assert "no status API: the status API cannot listen on 127.0.0.1" in done.stderr
    assert "Choose another with --api." in done.stderr
    assert "is ready" in done.stdout


def test_up_without_api_starts_none(run: Run) -> None:
    assert up(run, "-f", "one.yaml", "--no-api")["api"] is None
    assert holder(paths.api_lock_path()) is None


def test_up_packages_missing_is_a_note_or_an_error_when_asked(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "NEEDED", ("fastapi", "no_such_package"))
    refused = run("up", "-f", "one.yaml", "--api", "0")
    assert refused.exit_code == 1
    assert "needs no_such_package: pip install '.[api]'" in refused.stderr
    assert not paths.pool_names()  # refused before anything was made
    monkeypatch.setenv(api.PORT_ENV, "")
    done = run("up", "-f", "one.yaml")
    assert done.exit_code == 0
    assert "--no-api" in done.stderr


@pytest.mark.parametrize(("value", "port"), [("off", None), ("9999", 9999), ("", 9470)])
def test_environment_says_where(monkeypatch: pytest.MonkeyPatch, value: str, port: int | None) -> None:
    monkeypatch.setenv(api.PORT_ENV, value)
    found = api.wanted(None, False)
    assert (found.port if found else None) == port
    assert api.wanted(1234, False) == api.Wanted(1234, asked=True)


def test_api_command_elsewhere_without_token_is_refused(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVPOOL_API_TOKEN", raising=False)
    done = run("api", "--listen", "0.0.0.0", "--port", "0")
    assert done.exit_code == 1
    assert "KVPOOL_API_TOKEN" in done.stderr


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Service, socket.socket]]:
    """What `kvpool api` would serve, instead of serving it until Ctrl-C."""
    found: list[tuple[Service, socket.socket]] = []

    def keep(service: Service, listener: socket.socket, proxies: str = "") -> None:
        found.append((service, listener))
        listener.close()

    monkeypatch.setattr(server, "serve", keep)
    return found


@pytest.mark.parametrize(("listen", "code"), [("0.0.0.0", 401), ("127.0.0.1", 200)])
def test_metrics_need_the_token_where_other_machines_can_ask(
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    served: list[tuple[Service, socket.socket]],
    listen: str,
    code: int,
) -> None:
    monkeypatch.setenv("KVPOOL_API_TOKEN", TOKEN)
    assert run("api", "--listen", listen, "--port", "0").exit_code == 0
    with TestClient(create_app(served[0][0]), base_url="http://localhost") as client:
        assert client.get("/metrics").status_code == code
        assert client.get("/metrics", headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 200
        assert client.get("/v1/pools").status_code == 401
        assert client.get("/healthz").status_code == 200


def test_api_command_takes_the_port_of_the_environment(
    run: Run, monkeypatch: pytest.MonkeyPatch, served: list[tuple[Service, socket.socket]]
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setenv(api.PORT_ENV, str(port))
    done = run("api", "--allow-host", "pools.example")
    assert done.stderr.splitlines()[-1] == f"status API: http://127.0.0.1:{port}"
    assert served[0][0].hosts is not None
    assert "pools.example" in served[0][0].hosts
    assert "localhost" in served[0][0].hosts
    monkeypatch.setenv(api.PORT_ENV, "99999")
    assert run("api").exit_code == 2
    assert run("api", "--port", "0").exit_code == 0


@pytest.mark.parametrize(("arguments", "named"), [(("--redis", "foo"), "--redis"), ((), "KVPOOL_API_REDIS")])
def test_api_command_says_who_gave_a_bad_url_and_no_url_of_its_own(
    run: Run, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], named: str
) -> None:
    pytest.importorskip("redis")
    monkeypatch.setenv("KVPOOL_API_REDIS", "bar")
    done = run("api", "--port", "0", *arguments)
    assert done.exit_code == 2
    assert f"error: {named} is no URL of a Redis" in done.stderr
    assert "status API: http" not in done.stderr


def test_up_with_and_without_api_is_refused(run: Run) -> None:
    done = run("up", "-f", "one.yaml", "--api", "1", "--no-api")
    assert (done.exit_code, paths.pool_names()) == (2, [])
    assert "--api and --no-api contradict each other" in done.stderr


def test_up_on_another_port_says_where_the_api_runs(run: Run) -> None:
    url = up(run, "-f", "one.yaml", "--api", "0")["api"]
    done = run("up", "-f", "one.yaml", "--api", "1")
    assert done.exit_code == 0
    assert f"the status API already runs at {url}" in done.stderr
    assert "already runs" not in run("up", "-f", "one.yaml", "--api", "0").stderr
