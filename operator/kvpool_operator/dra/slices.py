"""The CXL memories of a node as ResourceSlices: one for each memory, whichever nodes see it.

A memory that several nodes see is one device to the scheduler: it is handed out once, and its claim can be
used on each of them. Every node adds itself to the slice and takes itself off again, and those that are gone;
the last one removes it. All of them belong to the DeviceClass, and go with it when the driver is uninstalled.
The operator makes those of KVPools.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvpool.cxl import Backend, Composed, ComposeError, Memory
from kvpool_operator import kinds
from kvpool_operator.client import UNREACHABLE, ApiError, Cluster
from kvpool_operator.dra.allocation import MEMORY_PREFIX
from kvpool_operator.names import DRIVER, MEMORY_CLASS, MEMORY_LABEL, NO_REGION

log = logging.getLogger("kvpool.dra")
Object = dict[str, Any]

PERIOD_S = 20.0
CONFLICT_S = 0.5
HOSTNAME = "kubernetes.io/hostname"
DEVICE = "memory"  # the one device of a memory's pool
REGION_ANNOTATION = "kvpool.dev/region-on"  # the node that told of the region
_SERIAL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")


@dataclass(frozen=True, slots=True)
class Host:
    """This node, as slices name it."""

    node: str
    hostname: str  # the label that a node selector can ask for
    class_uid: str = ""  # of the DeviceClass that owns the slices

    @classmethod
    def from_node(cls, node: Mapping[str, Any], class_uid: str) -> Host:
        metadata = node["metadata"]
        hostname = (metadata.get("labels") or {}).get(HOSTNAME) or metadata["name"]
        return cls(metadata["name"], hostname, class_uid)


def slice_name(serial: str) -> str:
    return f"kvpool-memory-{serial}"


def usable(memory: Memory) -> bool:
    """Whether a memory can be handed out: healthy, and with a serial number that can be part of names."""
    return memory.healthy and memory.size_bytes > 0 and _SERIAL.fullmatch(memory.serial) is not None


def with_host(live: Object | None, memory: Memory, region: Composed | None, host: Host) -> Object:
    """The slice of a memory with this node in it; equal to `live` when nothing is new."""
    made = copy.deepcopy(live) if live else _new(memory)
    metadata, spec = made["metadata"], made["spec"]
    hosts = _hosts(spec)
    annotations = metadata.setdefault("annotations", {})
    metadata["ownerReferences"] = [_owner(host)]
    _set_hosts(spec, hosts | {host.hostname})
    known = (((spec["devices"] or [{}])[0].get("attributes") or {}).get("region") or {}).get(
        "string", NO_REGION
    )
    ways = (((spec["devices"] or [{}])[0].get("attributes") or {}).get("ways") or {}).get("int", 0)
    told_by = annotations.get(REGION_ANNOTATION, "")
    if region is not None:
        known, ways = str(region.uuid), len(region.memories)
        if known != _region(live) or told_by not in hosts:
            annotations[REGION_ANNOTATION] = host.hostname
    elif told_by == host.hostname or told_by not in hosts:
        # Another node may have composed it and this one not yet: only who told of it takes it back.
        known, ways = NO_REGION, 0
        annotations[REGION_ANNOTATION] = host.hostname
    spec["devices"] = [_device(memory, known, ways)]
    return _numbered(live, made)


def without_host(live: Object, hostname: str) -> Object | None:
    """The slice without that node; None when no node is left in it."""
    made = copy.deepcopy(live)
    hosts = _hosts(made["spec"]) - {hostname}
    if not hosts:
        return None
    _set_hosts(made["spec"], hosts)
    return _numbered(live, made)


def _new(memory: Memory) -> Object:
    return {
        "apiVersion": kinds.RESOURCE_SLICE.api_version,
        "kind": "ResourceSlice",
        "metadata": {
            "name": slice_name(memory.serial),
            "labels": {MEMORY_LABEL: memory.serial, "app.kubernetes.io/managed-by": "kvpool-dra"},
        },
        "spec": {
            "driver": DRIVER,
            "pool": {"name": f"{MEMORY_PREFIX}{memory.serial}", "generation": 0, "resourceSliceCount": 1},
            "nodeSelector": {"nodeSelectorTerms": []},
            "devices": [],
        },
    }


def _device(memory: Memory, region: str, ways: int) -> Object:
    return {
        "name": DEVICE,
        "attributes": {
            "type": {"string": "memory"},
            "serial": {"string": memory.serial},
            "kind": {"string": memory.kind},
            "region": {"string": region},
            "ways": {"int": ways},
        },
        "capacity": {"memory": {"value": str(memory.size_bytes)}},
    }


def _numbered(live: Object | None, made: Object) -> Object:
    """With the next generation, when the scheduler has to look again."""
    if live is None or _told(live) != _told(made):
        made["spec"]["pool"]["generation"] = (live["spec"]["pool"]["generation"] if live else 0) + 1
    return made


def _told(body: Object) -> Object:
    """What of a slice means something, as plain numbers and texts."""
    spec = body["spec"]
    devices = [
        (device["name"], device["attributes"], str(device["capacity"]["memory"]["value"]))
        for device in spec["devices"]
    ]
    return {"hosts": sorted(_hosts(spec)), "devices": devices}


def same(live: Object | None, made: Object) -> bool:
    if live is None or _told(live) != _told(made):
        return False
    keys = ("ownerReferences", "annotations")
    return all((live["metadata"].get(key) or None) == (made["metadata"].get(key) or None) for key in keys)


def _region(live: Object | None) -> str:
    devices = live["spec"]["devices"] if live else []
    return str(devices[0]["attributes"]["region"]["string"]) if devices else ""


def _hosts(spec: Mapping[str, Any]) -> set[str]:
    terms = (spec.get("nodeSelector") or {}).get("nodeSelectorTerms") or []
    return {
        value for term in terms for said in term.get("matchExpressions") or [] for value in said["values"]
    }


def _set_hosts(spec: Object, hosts: set[str]) -> None:
    chosen = {"key": HOSTNAME, "operator": "In", "values": sorted(hosts)}
    spec["nodeSelector"] = {"nodeSelectorTerms": [{"matchExpressions": [chosen]}]}


def _owner(host: Host) -> Object:
    kind = kinds.DEVICE_CLASS
    return {"apiVersion": kind.api_version, "kind": kind.name, "name": MEMORY_CLASS, "uid": host.class_uid}


class Publisher:
    """Keeps the slices of this node's memories true. Threads: one event loop."""

    def __init__(self, cluster: Cluster, backend: Backend, node: str) -> None:
        self._cluster, self._backend, self._node = cluster, backend, node
        self._wake = asyncio.Event()
        self.problem = ""

    def wake(self) -> None:
        """A region came or went."""
        self._wake.set()

    async def run(self) -> None:
        """Publish, and look again now and then, until cancelled."""
        while True:
            pause = PERIOD_S
            try:
                pause = PERIOD_S if await self.publish() else CONFLICT_S
                self.problem = ""
            except (*UNREACHABLE, ApiError, ComposeError) as error:
                said = str(error) or type(error).__name__
                if said != self.problem:
                    log.warning("publish_failed error=%r", said)
                self.problem = said
            try:
                await asyncio.wait_for(self._wake.wait(), pause)
            except asyncio.TimeoutError:
                continue
            self._wake.clear()

    async def publish(self) -> bool:
        """Make the slices say what this node sees. False: do it again, another node was faster."""
        node = await self._cluster.get(kinds.NODE, None, self._node)
        if node is None:
            raise ValueError(f"there is no Node {self._node}")
        of_class = await self._cluster.get(kinds.DEVICE_CLASS, None, MEMORY_CLASS)
        if of_class is None:
            raise ValueError(f"there is no DeviceClass {MEMORY_CLASS}; the chart makes it")
        host = Host.from_node(node, of_class["metadata"]["uid"])
        memories = [m for m in await asyncio.to_thread(self._backend.memories) if usable(m)]
        regions = await asyncio.to_thread(self._backend.regions)
        found = await self._cluster.list(kinds.RESOURCE_SLICE, labels=MEMORY_LABEL)
        live = {body["metadata"]["name"]: body for body in found}
        if gone := await self._gone(found, host):
            for body in found:
                await self._take_off(body, gone)
            return False  # all of them are new
        done = True
        for memory in memories:
            there = live.pop(slice_name(memory.serial), None)
            region = next((r for r in regions if memory.serial in r.memories), None)
            done &= await self._write(there, with_host(there, memory, region, host))
        for body in live.values():  # of memories that this node sees no more
            done &= await self._take_off(body, host.hostname)
        return done

    async def _take_off(self, body: Object, hostname: str) -> bool:
        if hostname not in _hosts(body["spec"]):
            return True
        made = without_host(body, hostname)
        if made is not None:
            return await self._write(body, made)
        metadata = body["metadata"]
        await self._cluster.delete(kinds.RESOURCE_SLICE, None, metadata["name"], metadata["uid"])
        log.info("slice_deleted name=%s", metadata["name"])
        return True

    async def _gone(self, found: list[Object], host: Host) -> str:
        """A node of these slices that is there no more; empty when the one that was looked for is."""
        others = {name for body in found for name in _hosts(body["spec"])} - {host.hostname}
        if not others:
            return ""
        name = random.choice(sorted(others))
        there = await self._cluster.list(kinds.NODE, labels=f"{HOSTNAME}={name}")
        return "" if there else name

    async def _write(self, live: Object | None, made: Object) -> bool:
        if same(live, made):
            return True
        made = {"apiVersion": kinds.RESOURCE_SLICE.api_version, "kind": "ResourceSlice", **made}
        try:
            if live is None:
                await self._cluster.create(made, kinds.RESOURCE_SLICE)
            else:  # of exactly the version that was read
                made["metadata"].pop("managedFields", None)
                await self._cluster.replace(made, kinds.RESOURCE_SLICE)
        except ApiError as error:
            if error.code in (404, 409):
                return False
            raise
        log.info(
            "slice_published name=%s generation=%d nodes=%s",
            made["metadata"]["name"],
            made["spec"]["pool"]["generation"],
            ",".join(sorted(_hosts(made["spec"]))),
        )
        return True
