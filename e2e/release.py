"""The release under test: where it is installed, with what, and what is told about it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster.cluster import Cluster
from kube import Kube, KubeError, Object, ready, wait_for
from pools import KVPool

ROOT = Path(__file__).resolve().parents[1]
CHART = ROOT / "charts" / "kvpool"
RESULT = ROOT / "e2e.json"
RELEASE, SYSTEM = "kvpool", "kvpool-system"
NAMESPACE = "e2e"
SHARED = "/dev/shm/shared"  # one memory for all nodes of the cluster of e2e/cluster
OPERATOR = "app.kubernetes.io/component=operator"

MakePool = Callable[..., KVPool]


@dataclass
class Target:
    """The cluster under test. `own` is None when it is somebody else's: then no node can be switched off."""

    kube: Kube
    image: str
    own: Cluster | None
    nodes: list[str] = field(default_factory=list)


class Facts:
    """What e2e.json tells."""

    def __init__(self) -> None:
        self.known: Object = {}

    def tell(self, **facts: Any) -> None:
        self.known.update(facts)
        RESULT.write_text(json.dumps(self.known, indent=1) + "\n")


def install(target: Target, *more: str) -> None:
    repository, _, tag = target.image.rpartition(":")
    target.kube.helm(
        "upgrade",
        "--install",
        RELEASE,
        str(CHART),
        "--namespace",
        SYSTEM,
        "--create-namespace",
        "--wait",
        "--timeout=120s",
        f"--set=image.repository={repository},image.tag={tag}",
        *os.environ.get("KVPOOL_E2E_HELM", "").split(),
        *more,
    )


def restarts(kube: Kube) -> dict[str, int]:
    try:
        pods = kube.all("pods", SYSTEM)
    except KubeError:
        return {}
    return {
        pod["metadata"]["name"]: sum(c["restartCount"] for c in pod["status"].get("containerStatuses") or [])
        for pod in pods
    }


def operator_ready(kube: Kube) -> bool:
    pods = kube.all("pods", SYSTEM, OPERATOR)
    assert pods, "no pod of the operator"
    assert all(ready(pod) for pod in pods), [pod["status"].get("conditions") for pod in pods]
    return True


def wait_operator(kube: Kube, seconds: float = 60) -> None:
    wait_for("the operator is Ready", seconds, lambda: operator_ready(kube))
