"""The status API over a cluster's objects: time until it is ready, memory, with changes all the time.

    python tests/bench/status_cluster.py [--pools 1000] [--nodes 5000] [--seconds 30]

The API server is a stand-in that lists and watches (tests/api/fake_cluster.py); the API is the real process.
Exits with 1 when it needs more than 300 MiB.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from api.fake_cluster import FakeCluster, kvpool, kvpoolnode

RSS_MIB_MAX = 300.0
CHANGES_S = 100  # objects that change each second
KUBECONFIG = """
apiVersion: v1
kind: Config
current-context: c
clusters: [{name: c, cluster: {server: "http://127.0.0.1:PORT"}}]
users: [{name: u, user: {token: t}}]
contexts: [{name: c, context: {cluster: c, user: u}}]
"""


def _ask(url: str) -> Any:
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return json.load(answer)
    except OSError:
        return {}


def _status(pid: int, name: str) -> float:
    return int(Path(f"/proc/{pid}/status").read_text().partition(f"{name}:")[2].split()[0]) / 1024


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def measure(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    fake, each = FakeCluster(), given.nodes // given.pools
    for i in range(given.pools):
        fake.put("kvpools", kvpool(f"pool-{i:04}", f"team-{i % 20}"))
        for j in range(each):
            fake.put("kvpoolnodes", kvpoolnode(f"pool-{i:04}", j, f"team-{i % 20}", counted=True))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    async with fake.serve():
        (folder / "kubeconfig").write_text(KUBECONFIG.replace("PORT", str(fake.port)))
        command = [sys.executable, "-m", "kvpool_operator.api", "--auth", "none", "--listen", "127.0.0.1"]
        environment = os.environ | {"KUBECONFIG": str(folder / "kubeconfig")}
        began = time.monotonic()
        process = subprocess.Popen([*command, "--port", str(port)], env=environment)
        try:
            while True:
                health = await asyncio.to_thread(_ask, f"http://127.0.0.1:{port}/readyz")
                if health.get("pools") == given.pools:
                    break
                await asyncio.sleep(0.1)
            ready_s = time.monotonic() - began
            cpu, turn = _cpu_s(process.pid), 0
            end = time.monotonic() + given.seconds
            while time.monotonic() < end:
                for _ in range(CHANGES_S):
                    turn += 1
                    name, space = f"pool-{turn % given.pools:04}", f"team-{turn % given.pools % 20}"
                    fake.put("kvpoolnodes", kvpoolnode(name, 0, space, lookups=50 + turn, counted=True))
                await asyncio.sleep(1)
            return {
                "pools": given.pools,
                "nodes": given.nodes,
                "ready_s": round(ready_s, 1),
                "changes_per_second": CHANGES_S,
                "cpu_share": round((_cpu_s(process.pid) - cpu) / given.seconds, 3),
                "rss_mib": round(_status(process.pid, "VmRSS"), 1),
                "rss_peak_mib": round(_status(process.pid, "VmHWM"), 1),
            }
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(20)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pools", type=int, default=1000)
    parser.add_argument("--nodes", type=int, default=5000)
    parser.add_argument("--seconds", type=float, default=30.0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = asyncio.run(measure(given, Path(folder)))
    print(json.dumps(result, indent=2))
    return 1 if result["rss_peak_mib"] > RSS_MIB_MAX else 0


if __name__ == "__main__":
    sys.exit(main())
