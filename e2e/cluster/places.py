"""Names, versions and folders of one cluster.

Everything is derived from the cluster's name, so that clusters of different names can run beside each other.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

NAME_VARIABLE = "KVPOOL_CLUSTER"  # the cluster's name
CACHE_VARIABLE = "KVPOOL_CACHE_DIR"  # programs, images and Go's caches, kept between runs
ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent

CONTROL_PLANE_IP = "172.30.0.1"  # inside the cluster's own network namespace
SERVICE_RANGE = "10.96.0.0/16"
DNS_IP = "10.96.0.10"


class ClusterError(Exception):
    """The cluster cannot do what was asked; the message says what to do."""


@dataclass(frozen=True)
class Places:
    """Where one cluster keeps things."""

    name: str = field(default_factory=lambda: os.environ.get(NAME_VARIABLE) or "kvpool-e2e")
    nodes: int = field(default_factory=lambda: int(os.environ.get("KVPOOL_CLUSTER_NODES") or 2))
    cache: Path = field(
        default_factory=lambda: Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "kvpool")
    )

    @property
    def state(self) -> Path:
        """Everything of this cluster that lies on a disk; gone after `down`."""
        return Path(os.environ.get("KVPOOL_CLUSTER_DIR") or "/var/lib") / self.name

    @property
    def shared(self) -> Path:
        """The memory that all nodes have in common: each node sees it as /dev/shm/shared."""
        return Path("/dev/shm") / self.name

    @property
    def pki(self) -> Path:
        return self.state / "pki"

    @property
    def kubeconfig(self) -> Path:
        return self.state / "admin.kubeconfig"

    @property
    def programs(self) -> Path:
        return self.cache / "cluster" / "bin"

    @property
    def images(self) -> Path:
        return self.cache / "cluster" / "images"

    @property
    def machines(self) -> list[str]:
        return ["cp", *self.node_names]

    @property
    def node_names(self) -> list[str]:
        return [f"n{i}" for i in range(self.nodes)]

    def netns(self, machine: str) -> str:
        return self.name if machine == "cp" else f"{self.name}-{machine}"

    def address(self, machine: str) -> str:
        return CONTROL_PLANE_IP if machine == "cp" else f"172.30.0.{10 + int(machine[1:])}"

    def pods(self, machine: str) -> str:
        return f"10.244.{int(machine[1:])}.0/24"

    def inside(self, *command: str | Path) -> list[str]:
        """The command line that runs a command where the cluster's addresses answer."""
        return ["ip", "netns", "exec", self.name, *map(str, command)]


_begun = time.monotonic()


def say(text: str) -> None:
    print(f"[{time.monotonic() - _begun:6.1f} s] {text}", flush=True)


def wait_until(what: str, seconds: float, ready: Callable[[], bool], every: float = 0.25) -> None:
    """Ask again and again, telling what is waited for when it takes long."""
    begun = told = time.monotonic()
    while not ready():
        now = time.monotonic()
        if now - begun > seconds:
            raise ClusterError(f"{what}: not so after {seconds:.0f} s")
        if now - told > 20:
            told = now
            say(f"still waiting: {what}")
        time.sleep(every)
