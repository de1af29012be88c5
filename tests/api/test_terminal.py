"""`kvpool top` and `kubectl kvpool`."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("kubernetes", reason="the operator extra is not installed")

from api.fake_cluster import FakeCluster, kvpool, kvpoolnode
from kvpool.cli import app
from kvpool_operator import plugin

KUBECONFIG = """
apiVersion: v1
kind: Config
current-context: here
clusters: [{name: c, cluster: {server: "http://127.0.0.1:PORT"}}]
users: [{name: u, user: {token: t}}]
contexts:
- {name: here, context: {cluster: c, user: u, namespace: team}}
- {name: bare, context: {cluster: c, user: u}}
"""
Plugin = Callable[..., int]


@pytest.fixture
def fake() -> Iterator[FakeCluster]:
    """A cluster with two pools, served by a thread."""
    made, ready, ending = FakeCluster(), threading.Event(), threading.Event()
    made.put("kvpools", kvpool("p", lookups=1000, hits=974))
    made.put("kvpools", kvpool("q", "other"))
    for i in (0, 1):
        made.put("kvpoolnodes", kvpoolnode("p", i))

    async def serve() -> None:
        async with made.serve():
            ready.set()
            while not ending.is_set():
                await asyncio.sleep(0.02)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    assert ready.wait(10)
    yield made
    ending.set()
    thread.join(10)


@pytest.fixture
def run(fake: FakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plugin:
    path = tmp_path / "kubeconfig"
    path.write_text(KUBECONFIG.replace("PORT", str(fake.port)))
    monkeypatch.setenv("KUBECONFIG", str(path))
    return lambda *arguments: plugin.main(arguments)


def test_plugin_is_installed_under_the_name_that_kubectl_looks_for() -> None:
    (script,) = entry_points(group="console_scripts", name="kubectl-kvpool")
    assert script.value == "kvpool_operator.plugin:main"


def test_plugin_status_of_the_contexts_namespace_or_all(
    run: Plugin, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("status") == 0
    said = capsys.readouterr().out
    assert "97.4%" in said
    assert "other" not in said
    assert run("status", "-A") == 0
    assert "other" in capsys.readouterr().out
    assert run("status", "--context", "bare") == 0
    assert capsys.readouterr().out == "no pools\n"


def test_plugin_status_of_one_pool_has_nodes_conditions_events(
    run: Plugin, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("status", "p") == 0
    said = capsys.readouterr().out
    assert "worker-1  Active  yes" in said
    assert "Ready: True (AllNodesReady): 2 of 2 nodes serve the pool." in said
    assert "DamageFound" in said
    assert run("status", "p", "-o", "json") == 0
    (shown,) = json.loads(capsys.readouterr().out)["pools"]
    assert (shown["hitRate"], len(shown["nodeList"])) == (97.4, 2)


def test_plugin_explain_says_reason_and_what_to_do(run: Plugin, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("explain", "q", "-n", "other") == 0
    said = capsys.readouterr().out
    assert "80.0% of 100 looked-up blocks were served" in said
    assert "What to do: The working set is larger than the pool" in said


def test_plugin_says_which_engines_differ_and_what_was_saved(
    fake: FakeCluster, run: Plugin, capsys: pytest.CaptureFixture[str]
) -> None:
    for i in (0, 1):
        fake.put("kvpoolnodes", kvpoolnode("p", i, counted=True))
    assert run("explain", "p") == 0
    said = capsys.readouterr().out
    assert "cannot use the 5 blocks of" in said
    assert "start both engines with the same --block-size" in said
    assert run("explain", "p", "--engine", "vllm-1-0/1") == 0
    assert "80.0% of 50 looked-up blocks were served" in capsys.readouterr().out
    assert run("explain", "p", "--engine", "nobody") == 1
    assert "vllm-0-0/1" in capsys.readouterr().err
    assert run("status", "p") == 0
    said = capsys.readouterr().out
    assert "vllm-1-0/1" in said
    assert "some-model-8b-instruct" in said
    assert "tokens, 0.8 s" in said
    assert run("top", "--rounds", "1") == 0
    assert "tokens, 0.8 s" in capsys.readouterr().out


def test_plugin_writes_out_control_characters(
    fake: FakeCluster, run: Plugin, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever engines and nodes said got into the objects."""
    evil = "\x1b]0;evil\x07\nproblem: fake"
    said = json.dumps(kvpoolnode("p", 1, counted=True))
    for text in ("some-model-8b-instruct", "vllm-1-0", "the disk is on fire", "1 block", "worker-1"):
        assert text in said
        said = said.replace(text, text + json.dumps(evil)[1:-1])
    fake.put("kvpoolnodes", json.loads(said))
    for command in (["status", "p"], ["explain", "p"], ["top", "--rounds", "1"]):
        assert run(*command) == 0
        shown = capsys.readouterr().out
        assert not {"\x1b", "\x07"} & set(shown)
        assert "\nproblem: fake" not in shown
        assert command[0] != "status" or "\\x1b]0;evil\\x07\\nproblem: fake" in shown


def test_plugin_top_shows_rates_from_the_second_look_on(
    run: Plugin, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("top", "-A", "--interval", "0.05", "--rounds", "2") == 0
    said = capsys.readouterr().out
    assert said.count("LOOKUPS/S") == 2


def test_plugin_failures_are_a_sentence_and_1(
    run: Plugin, fake: FakeCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("status", "nope") == 1
    assert 'no pool "nope" in namespace "team"' in capsys.readouterr().err
    fake.refuse = 403
    assert run("status") == 1
    assert "refused for the test (403)" in capsys.readouterr().err
    with pytest.raises(SystemExit) as wrong:
        run("nothing")
    assert wrong.value.code == 2


def test_top_without_pools_is_an_empty_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPOOL_RUNTIME_DIR", str(tmp_path))
    done = CliRunner().invoke(app, ["top", "--rounds", "1"])
    assert (done.exit_code, done.output.split()[:2]) == (0, ["POOL", "STATE"])
