"""Pods that get a pool by a resource claim, and what the driver has on the nodes, as the tests see it."""

from __future__ import annotations

import json
import time
from typing import Any

from cluster.cluster import Cluster
from kube import Object, wait_for
from pools import Client, KVPool
from release import SHARED

DRIVER = "dra.kvpool.dev"
CXL_FOLDER = f"{SHARED}/cxl"
CDI = "/var/run/cdi"
PLUGIN = f"/var/lib/kubelet/plugins/{DRIVER}"
COMPONENT = "app.kubernetes.io/component=dra"


def claimed(name: str = "cxl", capacity: str = "128Mi", **more: Any) -> Object:
    """A shared tier whose memory a DeviceClass hands out. The nodes are one machine: caches are coherent."""
    source = {"source": {"deviceClass": "cxl-dax"}}
    return {
        "name": name,
        "medium": "CXL",
        "capacity": capacity,
        "shared": True,
        "coherence": "hardware",
        **source,
        **more,
    }


def wait_running(client: Client, seconds: float = 60) -> float:
    """Seconds from the making of the pod's claim to its container running, by the clock of this test."""
    begun = time.monotonic()
    client.start(wait=False)
    kube = client.pool.kube

    def running() -> bool:
        body = kube.get("pod", client.name, client.pool.namespace)
        statuses = body["status"].get("containerStatuses") or []
        assert statuses, body["status"]
        return all("running" in status["state"] for status in statuses)

    wait_for(f"{client.name} runs", seconds, running, every=0.1)
    return time.monotonic() - begun


def pod_claim(client: Client) -> Object:
    """The claim that was made for a client's pod."""
    kube = client.pool.kube
    body = kube.get("pod", client.name, client.pool.namespace)
    (status,) = body["status"]["resourceClaimStatuses"]
    return kube.get("resourceclaim", status["resourceClaimName"], client.pool.namespace)


def tier_claim(pool: KVPool) -> Object:
    """The claim of the pool's one tier of a DeviceClass."""
    (found,) = pool.children("resourceclaims")
    return found


class Node:
    """What the driver has on one node."""

    def __init__(self, own: Cluster, name: str) -> None:
        self._machine = own.machines[name]
        self.name = name

    def cdi(self) -> dict[str, Object]:
        """The CDI devices of the driver by their qualified names, with what each gives."""
        found = {}
        for file in self._list(CDI):
            if file.startswith(DRIVER):
                spec = json.loads(self._machine.run("cat", f"{CDI}/{file}"))
                for device in spec["devices"]:
                    found[f"{spec['kind']}={device['name']}"] = device["containerEdits"]
        return found

    def records(self) -> list[str]:
        return self._list(f"{PLUGIN}/claims")

    def regions(self) -> list[str]:
        return [name for name in self._list(f"{CXL_FOLDER}/regions") if name.endswith(".dax")]

    def mounts_of_regions(self) -> int:
        """Of the machine itself: containers have mounts of their own."""
        return self._machine.run("cat", "/proc/self/mounts").count(CXL_FOLDER)

    def all(self) -> tuple[list[str], list[str], list[str], int]:
        """CDI devices, records, regions, and how many mounts of regions."""
        return sorted(self.cdi()), self.records(), self.regions(), self.mounts_of_regions()

    def _list(self, folder: str) -> list[str]:
        return sorted(self._machine.run("sh", "-c", f"ls {folder} 2>/dev/null || true").split())
