"""Operators as processes, beside the API of a test."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

from kube.apiserver import ApiServer, free_ports
from kube.nodes import until

IMAGE = "localhost/kvpool:test"
SYSTEM = "kvpool-system"
REQUESTS = r'kvpool_operator_api_requests_total\{method="(\w+)",resource="(\w+)"\} (\S+)'
WRITES = ("POST", "PUT", "PATCH", "DELETE")


@dataclass
class OperatorProcess:
    """`python -m kvpool_operator`, with its log."""

    api: ApiServer
    folder: Path
    name: str = "operator-0"
    arguments: tuple[str, ...] = ()
    process: subprocess.Popen[bytes] | None = None
    ports: list[int] = field(default_factory=list)

    def start(self) -> OperatorProcess:
        self.ports = free_ports(2)
        command = [sys.executable, "-m", "kvpool_operator", "--image", IMAGE, "--lease-namespace", SYSTEM]
        command += [
            "--health-port",
            str(self.ports[0]),
            "--metrics-port",
            str(self.ports[1]),
            *self.arguments,
        ]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                env={**os.environ, "KUBECONFIG": str(self.api.kubeconfig), "POD_NAME": self.name},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        until(lambda: self.get("readyz") == "ok\n", what=f"{self.name} is ready")
        return self

    @property
    def log(self) -> Path:
        return self.folder / f"{self.name}.log"

    def get(self, path: str) -> str:
        port = self.ports[1] if path == "metrics" else self.ports[0]
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}", timeout=10) as answer:
                return str(answer.read().decode())
        except urllib.error.HTTPError as error:
            return error.read().decode()
        except OSError:
            return ""

    @property
    def leads(self) -> bool:
        return "kvpool_operator_leader 1.0" in self.get("metrics")

    def writes(self) -> int:
        """Requests that write, the lease's left out."""
        found = 0.0
        for line in self.get("metrics").splitlines():
            match = re.fullmatch(
                r'kvpool_operator_api_requests_total\{method="(\w+)",resource="(\w+)"\} (\S+)', line
            )
            if match and match[1] in WRITES and match[2] != "leases":
                found += float(match[3])
        return int(found)

    def rss_bytes(self) -> int:
        assert self.process is not None
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.findall(r"VmRSS:\s+(\d+) kB", text)[0]) << 10

    def stop(self, number: int = signal.SIGTERM, timeout_s: float = 30.0) -> int:
        if self.process is None:
            return 0
        self.process.send_signal(number)
        try:
            return self.process.wait(timeout_s)
        finally:
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait()
            self.process = None


def release(api: ApiServer, *more: str, namespace: str = SYSTEM) -> None:
    """What the chart's job does before an operator is removed: none leads in `namespace` afterwards."""
    command = [sys.executable, "-m", "kvpool_operator", "--image", IMAGE, "--lease-namespace", namespace]
    environment = {**os.environ, "KUBECONFIG": str(api.kubeconfig)}
    subprocess.run([*command, "--release", *more], env=environment, check=True, timeout=60)


def waited(began: float) -> float:
    return round(time.monotonic() - began, 1)
