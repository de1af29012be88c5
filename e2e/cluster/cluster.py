"""The cluster as a whole: up, down, images onto nodes, faults."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

from . import pki, services
from .machine import Machine
from .places import ClusterError, Places, say, wait_until


class Cluster:
    """One cluster by its name. Every method finds what an earlier process brought up."""

    def __init__(self, places: Places | None = None) -> None:
        self.places = places or Places()
        remembered = self.places.state / "nodes"
        if remembered.exists() and places is None:
            self.places = Places(nodes=int(remembered.read_text()))
        self.gates = os.environ.get("KVPOOL_CLUSTER_GATES") or ""
        self.machines = {name: Machine(self.places, name) for name in self.places.machines}

    # --- up and down ----------------------------------------------------------------------------------------

    def up(self, images: Sequence[Path] = ()) -> None:
        """Bring everything up; what was left by an earlier run ends first.

        The state of a cluster that was stopped (or whose machine died) is taken up again.
        """
        self.stop()
        begun = time.time()
        places = self.places
        places.state.mkdir(parents=True, exist_ok=True)
        places.shared.mkdir(exist_ok=True)
        places.shared.chmod(0o1777)
        (places.state / "nodes").write_text(str(places.nodes))
        pki.make(places)
        self.power_on("cp", start=("etcd", "apiserver"))
        for node in places.node_names:
            self.power_on(node, start=("containerd",))
        with ThreadPoolExecutor(1) as other:
            loading = other.submit(self.load, images)
            wait_until("the apiserver answers", 120, self._api_ready)
            self.start("cp", "controller-manager", "scheduler")
            loading.result()
        for node in places.node_names:
            self.start(node, "kubelet", "proxy")
        self.kubectl("apply", "--server-side", "-f", "-", text=services.CLUSTER_DNS)
        self.start("cp", "coredns")
        wait_until("all nodes are Ready", 120, lambda: self._nodes_ready(since=begun))
        wait_until("service accounts are made", 60, self._has_service_account)
        say(f"cluster {places.name}: {places.nodes} nodes after {time.time() - begun:.0f} s")

    def stop(self) -> None:
        """End all processes, by recorded pid; files stay, so that `up` takes the cluster up again."""
        for machine in reversed(self.machines.values()):
            machine.off()
        # What a run with more nodes left.
        for folder in self.places.state.glob("n*/pid"):
            if folder.parent.name not in self.machines:
                Machine(self.places, folder.parent.name).off()

    def down(self) -> None:
        """End everything and remove every trace but the caches."""
        if not self.places.state.exists():
            return
        self.stop()
        shutil.rmtree(self.places.state)
        shutil.rmtree(self.places.shared, ignore_errors=True)
        netns = Path("/run/netns")
        if netns.is_dir() and not any(netns.iterdir()):  # the mount that `ip netns add` leaves
            subprocess.run(["umount", netns], check=False, stderr=subprocess.DEVNULL)
            with contextlib.suppress(OSError):
                netns.rmdir()

    def is_up(self) -> bool:
        return all(machine.is_on() for machine in self.machines.values()) and self._api_ready()

    # --- machines and services ------------------------------------------------------------------------------

    def power_on(self, name: str, start: Sequence[str] | None = None) -> None:
        """Boot a machine, with all of its services unless some are named."""
        known = services.of_machine(self.places, name, self.gates)
        self.machines[name].on(known)
        self.start(name, *(known if start is None else start))

    def power_off(self, name: str) -> None:
        """Pull the plug: all containers of the node die with it."""
        self.machines[name].off()

    def start(self, name: str, *wanted: str) -> None:
        known = services.of_machine(self.places, name, self.gates)
        for service in wanted:
            if service == "kubelet":  # it ends at once when containerd does not answer yet
                self._wait_for_containerd(name)
            self.machines[name].start(service, known[service])

    def stop_service(self, name: str, service: str, signal: str = "TERM") -> None:
        self.machines[name].stop(service, signal)

    def restart_service(self, name: str, service: str, signal: str = "KILL") -> None:
        self.stop_service(name, service, signal)
        self.start(name, service)

    def cut_network(self, name: str) -> None:
        self.machines[name].cable("down")

    def join_network(self, name: str) -> None:
        self.machines[name].cable("up")

    # --- images ---------------------------------------------------------------------------------------------

    def load(self, archives: Sequence[Path], nodes: Sequence[str] | None = None) -> None:
        """Import oci-archives into the nodes' containerd, on all nodes at once."""

        def load_all(node: str) -> None:
            self._wait_for_containerd(node)
            for archive in archives:
                command = self.machines[node].command(
                    "/opt/cluster/ctr", "-n", "k8s.io", "images", "import", "-"
                )
                with archive.open("rb") as file:
                    done = subprocess.run(command, stdin=file, capture_output=True, text=True, check=False)
                if done.returncode:
                    raise ClusterError(f"loading {archive} into {node} failed:\n{done.stderr[-1000:]}")

        wanted = self.places.node_names if nodes is None else nodes
        with ThreadPoolExecutor(len(wanted)) as pool:
            list(pool.map(load_all, wanted))

    def _wait_for_containerd(self, node: str) -> None:
        command = self.machines[node].command("/opt/cluster/ctr", "version")
        wait_until(f"containerd of {node} answers", 60, lambda: _succeeds(command), every=0.1)

    # --- questions ------------------------------------------------------------------------------------------

    def kubectl(self, *arguments: str, text: str = "") -> str:
        kubectl = (self.places.programs / "kubectl", "--kubeconfig", self.places.kubeconfig)
        command = self.places.inside(*kubectl, *arguments)
        done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ClusterError(f"kubectl {' '.join(arguments)} failed:\n{done.stderr.strip()}")
        return done.stdout

    def _api_ready(self) -> bool:
        try:
            return self.kubectl("get", "--raw", "/readyz") == "ok"
        except ClusterError:
            if not self.machines["cp"].runs("apiserver"):
                log = (self.places.state / "cp/log/apiserver.log").read_text()[-1500:]
                raise ClusterError(f"the apiserver has ended; the end of its log:\n{log}") from None
            return False

    def _nodes_ready(self, since: float) -> bool:
        """Ready, and said so since then: a cluster that is taken up again remembers its nodes as Ready."""
        nodes = {node["metadata"]["name"]: node for node in self._items("nodes")}
        return all(_ready_since(nodes.get(name), since) for name in self.places.node_names)

    def _has_service_account(self) -> bool:
        return any(
            item["metadata"]["namespace"] == "default" for item in self._items("serviceaccounts", "-A")
        )

    def _items(self, *what: str) -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = json.loads(self.kubectl("get", *what, "-o", "json"))["items"]
        return items


def _succeeds(command: Sequence[str]) -> bool:
    return subprocess.run(command, check=False, capture_output=True).returncode == 0


def _ready_since(node: dict[str, Any] | None, since: float) -> bool:
    for condition in (node or {}).get("status", {}).get("conditions", []):
        if condition["type"] == "Ready" and condition["status"] == "True":
            heard = datetime.fromisoformat(condition["lastHeartbeatTime"].replace("Z", "+00:00"))
            return heard.timestamp() >= int(since)
    return False
