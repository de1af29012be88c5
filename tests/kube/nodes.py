"""Daemons of nodes as processes, and the KVPoolNodes that they follow."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kube.apiserver import ApiServer, free_ports

ROOT = Path(__file__).resolve().parents[2]
GROUP = "/apis/kvpool.dev/v1alpha1"
START_S = 60.0

# Until the project's own are there: what the daemon reads and writes, unchecked.
MINIMAL_CRD = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": "kvpoolnodes.kvpool.dev"},
    "spec": {
        "group": "kvpool.dev",
        "scope": "Namespaced",
        "names": {
            "plural": "kvpoolnodes",
            "singular": "kvpoolnode",
            "kind": "KVPoolNode",
            "shortNames": ["kvpn"],
        },
        "versions": [
            {
                "name": "v1alpha1",
                "served": True,
                "storage": True,
                "subresources": {"status": {}},
                "schema": {
                    "openAPIV3Schema": {
                        "type": "object",
                        "properties": {
                            "spec": {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
                            "status": {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
                        },
                    }
                },
            }
        ],
    },
}


def until(found: Callable[[], Any], timeout_s: float = START_S, what: str = "it") -> Any:
    """What `found` returns, once that is true."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = found()
        if value:
            return value
        assert time.monotonic() < deadline, f"{what} did not happen within {timeout_s:g} s"
        time.sleep(0.1)


def dram(name: str, folder: Path, capacity: str = "16Mi", **more: Any) -> dict[str, Any]:
    source = {"path": str(folder / f"{name}.region")}
    return {
        "name": name,
        "medium": "DRAM",
        "capacity": capacity,
        "minBlockSize": "4Ki",
        "source": source,
        **more,
    }


def manifest(pool: str, tiers: list[dict[str, Any]], **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "kvpool.dev/v1alpha1",
        "kind": "KVPool",
        "metadata": {"name": pool},
        "spec": {"tiers": tiers, **spec},
    }


@dataclass
class Node:
    """One node of a pool: its runtime folder, its daemon, its KVPoolNode."""

    api: ApiServer
    namespace: str
    pool: str
    runtime: Path
    name: str = "node-a"
    host: int = 0
    port: int = 0
    process: subprocess.Popen[bytes] | None = None
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def object_name(self) -> str:
        return f"{self.pool}-{self.host}"

    @property
    def path(self) -> str:
        return f"{GROUP}/namespaces/{self.namespace}/kvpoolnodes/{self.object_name}"

    @property
    def folder(self) -> Path:
        return self.runtime / self.pool

    @property
    def log(self) -> Path:
        return self.runtime / f"{self.name}.log"

    # -- the object --------------------------------------------------------------------------------------

    def assign(
        self, tiers: list[dict[str, Any]], *, state: str = "Active", adopt: Any = (), **spec: Any
    ) -> None:
        """Write the KVPoolNode as the operator would."""
        body = {
            "apiVersion": "kvpool.dev/v1alpha1",
            "kind": "KVPoolNode",
            "metadata": {
                "name": self.object_name,
                "labels": {"kvpool.dev/pool": self.pool, "kvpool.dev/node": self.name},
            },
            "spec": {
                "pool": self.pool,
                "nodeName": self.name,
                "host": self.host,
                "state": state,
                "adopt": list(adopt),
                "manifest": manifest(self.pool, tiers, **spec),
            },
        }
        answer = self.api.apply(self.path, body, manager="kvpool-operator")
        assert answer.ok, answer.message

    def unassign(self) -> None:
        self.api.request("DELETE", self.path)

    def object(self) -> dict[str, Any]:
        answer = self.api.request("GET", self.path)
        return answer.body if answer.ok else {}

    def status(self) -> dict[str, Any]:
        return self.object().get("status") or {}

    def observed(self) -> dict[str, Any]:
        """The status, if it is about the newest spec; else empty."""
        found = self.object()
        status = found.get("status") or {}
        return (
            status if status.get("observedGeneration") == found.get("metadata", {}).get("generation") else {}
        )

    def ready(self) -> dict[str, Any]:
        """The status once this spec is served."""

        def look() -> dict[str, Any]:
            status = self.observed()
            return status if status.get("ready") else {}

        return until(look, what=f"{self.object_name} ready")

    # -- the process -------------------------------------------------------------------------------------

    def start(self) -> None:
        (self.port,) = free_ports(1)
        environment = {
            **os.environ,
            "KUBECONFIG": str(self.api.kubeconfig),
            "KVPOOL_RUNTIME_DIR": str(self.runtime),
            "KVPOOL_POOL": self.pool,
            "NODE_NAME": self.name,
            "POD_NAME": f"pod-on-{self.name}",
            "KVPOOL_NAMESPACE": self.namespace,
            "KVPOOL_NODE_NAME": self.name,
            **self.environment,
        }
        environment.pop("KVPOOL_HOST", None)
        with self.log.open("ab") as log:
            command = [sys.executable, "-m", "kvpool_operator.node", "--port", str(self.port)]
            self.process = subprocess.Popen(
                [*command, "--address", "127.0.0.1"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
            )

    def stop(self, number: int = signal.SIGTERM) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        code = self.process.wait(timeout=30)
        self.process = None
        return code

    def end(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def http(self, path: str) -> tuple[int, str]:
        """0 while nobody answers."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError:
            return 0, ""
