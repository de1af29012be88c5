"""A real Prometheus scrapes API, daemon and operator: every panel of the Grafana dashboard has data.

Every alert rule can be evaluated, and each exposition keeps Prometheus' conventions.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("kvpool._native", reason="the compiled part of kvpool is not built")
pytest.importorskip("kubernetes", reason="the operator extra is not installed")

from prometheus_client import start_http_server

from kvpool import KeyBatch, Namespace, Pool
from kvpool.spec import PoolSpec
from kvpool.view import look
from kvpool_operator.metrics import Metrics
from kvpool_operator.nodes.board import Board, Truth
from kvpool_operator.nodes.metrics import registry
from strategies import region_folder

ROOT = Path(__file__).resolve().parents[2]
FILES = ROOT / "charts" / "kvpool" / "files"
PROMETHEUS, PROMTOOL = shutil.which("prometheus"), shutil.which("promtool")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PROMETHEUS is None, reason="no prometheus; .ci/system --api installs it"),
]
MANIFEST = """
apiVersion: kvpool.dev/v1alpha1
kind: KVPool
metadata: {name: prefix-pool}
spec:
  tiers:
  - {name: dram, medium: DRAM, capacity: 8Mi, source: {path: MEDIA/dram}}
"""
CONFIG = """
global: {scrape_interval: 1s, evaluation_interval: 1s}
rule_files: ["ALERTS"]
scrape_configs:
- job_name: api
  honor_labels: true
  static_configs: [{targets: ["API"]}]
- job_name: daemon
  static_configs: [{targets: ["DAEMON"], labels: {namespace: team, node: worker-1}}]
- job_name: operator
  static_configs: [{targets: ["OPERATOR"], labels: {namespace: kvpool-system}}]
"""
SCRAPES_S = 25  # long enough for rates over some scrapes
# What a panel's variables stand for in Grafana.
VARIABLES = {"$__rate_interval": "10s", "$__range": "1m", "$namespace": ".*", "$pool": ".*"}


class Places(NamedTuple):
    """Where to ask."""

    prometheus: str
    expositions: dict[str, str]  # job -> URL of its metrics


def _get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=20) as answer:
        return bytes(answer.read())


@contextmanager
def _running(*command: str, env: dict[str, str] | None = None) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def _traffic(pool: Pool, chance: random.Random) -> None:
    space = Namespace(
        model="m",
        weights="w",
        dtype="float16",
        kv_layout="flat",
        block_tokens=16,
        block_bytes=65536,
        hash_scheme="sha256",
    )
    hashes = [chance.randrange(200).to_bytes(32, "big") for _ in range(16)]
    keys = KeyBatch.from_hashes(space, hashes)
    pool.load(keys, [bytearray(65536) for _ in hashes])
    pool.store(keys, [bytes(65536)] * 16)


@contextmanager
def _served(folder: Path, board: Board) -> Iterator[str]:
    """The URL of the API over a pool with traffic, and the board of a node's daemon that tells the same."""
    (folder / "pool.yaml").write_text(MANIFEST.replace("MEDIA", str(folder)))
    kvpool = [sys.executable, "-m", "kvpool"]
    up = subprocess.run(
        [*kvpool, "up", "-f", str(folder / "pool.yaml"), "--api", "0"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    ending = threading.Event()

    def use() -> None:
        chance, spec = random.Random(1), PoolSpec.from_file(folder / "pool.yaml")
        with Pool.open("prefix-pool") as pool:
            while not ending.wait(0.05):
                _traffic(pool, chance)
                report = json.loads((folder / "run" / "prefix-pool" / "report.h0.json").read_text())
                own = {tier.name: asdict(tier.counters) for tier in look(spec).tiers}
                board.tell(Truth(ready=True, report=report, own=own))
                board.watched()

    thread = threading.Thread(target=use)
    thread.start()
    try:
        yield up.stdout.rpartition("status API: ")[2].strip()
    finally:
        ending.set()
        thread.join(20)
        subprocess.run(
            [*kvpool, "down", "prefix-pool", "--delete", "--force"], capture_output=True, check=True
        )


def _operator_metrics() -> Metrics:
    made = Metrics()
    made.leader.set(1)
    made.queue.set(0)
    made.watch_age.set_to_current_time()
    made.reconciles.labels(result="done").inc()
    return made


def _listen(registry_of_it: Any, closing: ExitStack) -> str:
    server, thread = start_http_server(0, addr="127.0.0.1", registry=registry_of_it)
    closing.callback(thread.join)
    closing.callback(server.server_close)
    closing.callback(server.shutdown)
    return f"127.0.0.1:{server.server_port}"


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _until(done: Callable[[], bool], within_s: float, what: str) -> None:
    deadline = time.monotonic() + within_s
    while not done():
        assert time.monotonic() < deadline, f"{what} did not happen within {within_s:g} s"
        time.sleep(0.2)


def _answers(url: str) -> bool:
    try:
        return bool(_get(url))
    except OSError:
        return False


@pytest.fixture(scope="module")
def places() -> Iterator[Places]:
    with ExitStack() as closing:
        folder = closing.enter_context(region_folder())
        patched = pytest.MonkeyPatch()
        closing.callback(patched.undo)
        patched.setenv("KVPOOL_RUNTIME_DIR", str(folder / "run"))
        board, operator = Board(), _operator_metrics()
        api = closing.enter_context(_served(folder, board)).removeprefix("http://")
        targets = {
            "api": api,
            "daemon": _listen(registry(board, "prefix-pool", "1"), closing),
            "operator": _listen(operator.registry, closing),
        }
        config = CONFIG.replace("ALERTS", str(FILES / "alerts.yaml"))
        for job, target in targets.items():
            config = config.replace(job.upper(), target)
        (folder / "prometheus.yml").write_text(config)
        port = _free_port()
        command = [
            str(PROMETHEUS),
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'tsdb'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ]
        closing.enter_context(_running(*command, env=dict(os.environ)))
        url = f"http://127.0.0.1:{port}"
        _until(lambda: _answers(f"{url}/-/ready"), 60, "Prometheus' start")
        time.sleep(SCRAPES_S)
        operator.reconciles.labels(result="done").inc()
        yield Places(url, {job: f"http://{target}/metrics" for job, target in targets.items()})


def _asked(places: Places, path: str, **parameters: str) -> Any:
    answer = json.loads(_get(f"{places.prometheus}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"))
    assert answer["status"] == "success"
    return answer["data"]


def test_every_target_is_scraped(places: Places) -> None:
    targets = _asked(places, "targets")["activeTargets"]
    assert {t["labels"]["job"]: (t["health"], t["lastError"]) for t in targets} == dict.fromkeys(
        ("api", "daemon", "operator"), ("up", "")
    )


def test_every_panel_of_the_dashboard_has_data(places: Places) -> None:
    panels = json.loads((FILES / "dashboard.json").read_text())["panels"]
    empty = []
    for panel in panels:
        for target in panel.get("targets", ()):
            expression = target["expr"]
            for name, value in VARIABLES.items():
                expression = expression.replace(name, value)
            assert "$" not in expression
            if not _asked(places, "query", query=expression)["result"]:
                empty.append((panel["title"], expression))
    assert not empty
    hit_rate = _asked(places, "query", query="kvpool_pool_hit_ratio")["result"]
    assert 0.1 < float(hit_rate[0]["value"][1]) < 1


def test_every_alert_rule_is_evaluated_and_none_fires(places: Places) -> None:
    groups = _asked(places, "rules", type="alert")["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert len(rules) == len(re.findall(r"- alert:", (FILES / "alerts.yaml").read_text()))
    assert {(rule["health"], rule.get("lastError", "")) for rule in rules} == {("ok", "")}
    assert not [rule["name"] for rule in rules if rule["state"] == "firing"]


@pytest.mark.parametrize("job", ["api", "daemon", "operator"])
def test_exposition_keeps_the_conventions(places: Places, job: str) -> None:
    text = _get(places.expositions[job])
    done = subprocess.run([str(PROMTOOL), "check", "metrics"], input=text, capture_output=True, timeout=60)
    # Of the client library, and not of ours: its own process and Python metrics.
    said = [line for line in done.stderr.decode().splitlines() if line.startswith("kvpool")]
    assert not said
    assert done.returncode in (0, 3), done.stderr.decode()
