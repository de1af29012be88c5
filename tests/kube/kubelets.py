"""The DRA driver as a process, and calls to it as a kubelet makes them."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest

from kube.apiserver import ApiServer, free_ports, missing_programs
from kube.charts import Helm
from kube.nodes import until
from kvpool_operator.dra.parameters import API_VERSION
from kvpool_operator.dra.wire import DRA, HEALTH, REGISTRATION, call, message

Object = dict[str, Any]
NODES = ("dra-a", "dra-b")
SLICES = "/apis/resource.k8s.io/v1/resourceslices"
CALL_S = 45  # as the kubelet


@dataclass
class Driver:
    """`python -m kvpool_operator.dra` on a node that has its files in `folder`."""

    kubeconfig: Path
    folder: Path
    node: str
    namespace: str
    memories: str = "2x64Mi"
    cxl: Path | None = None  # where the memories are; several nodes may have the same ones
    uid: str = "pod-1"
    arguments: tuple[str, ...] = ()
    process: subprocess.Popen[bytes] | None = None
    metrics_port: int = 0
    _channels: list[Any] = field(default_factory=list)

    def start(self) -> Driver:
        self.memory_folder.mkdir(parents=True, exist_ok=True)
        health, self.metrics_port = free_ports(2)
        command = [sys.executable, "-m", "kvpool_operator.dra"]
        command += [f"--backend=file:{self.memory_folder}?memories={self.memories}"]
        command += [f"--kubelet={self.folder / 'kubelet'}", f"--cdi={self.folder / 'cdi'}"]
        command += [f"--health-port={health}", f"--metrics-port={self.metrics_port}", *self.arguments]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                env={
                    **os.environ,
                    "KUBECONFIG": str(self.kubeconfig),
                    "NODE_NAME": self.node,
                    "POD_NAMESPACE": self.namespace,
                    "POD_UID": self.uid,
                },
                stdout=log,
                stderr=log,
            )
        return self

    def register(self) -> Object:
        """As the kubelet does when it finds the socket."""

        def found() -> Any:
            assert self.process is not None
            assert self.process.poll() is None, self.log.read_text()[-2000:]
            with contextlib.suppress(grpc.RpcError):
                return self._call(self.registration, REGISTRATION, "GetInfo", "InfoRequest")

        info = until(found, what="the driver answers")
        self._call(
            self.registration,
            REGISTRATION,
            "NotifyRegistrationStatus",
            "RegistrationStatus",
            plugin_registered=True,
        )
        return {"type": info.type, "name": info.name, "versions": list(info.supported_versions)}

    def prepare(self, *claims: Object) -> Object:
        """The answers by uid: {"devices": [...], "error": ...}"""
        answer = self._claims("NodePrepareResources", "NodePrepareResourcesRequest", claims)
        return {
            uid: {
                "error": said.error,
                "devices": [
                    (list(d.request_names), d.pool_name, d.device_name, list(d.cdi_device_ids))
                    for d in said.devices
                ],
            }
            for uid, said in answer.claims.items()
        }

    def unprepare(self, *claims: Object) -> Object:
        answer = self._claims("NodeUnprepareResources", "NodeUnprepareResourcesRequest", claims)
        return {uid: said.error for uid, said in answer.claims.items()}

    def metrics(self) -> dict[str, float]:
        """Its own numbers, by name and labels."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        return {name: float(value) for name, value in re.findall(r"^(kvpool_dra_\S+) (\S+)$", text, re.M)}

    def health(self) -> list[tuple[str, int]]:
        """The first answer of the stream."""
        request = message(HEALTH, "NodeWatchResourcesRequest")()
        with grpc.insecure_channel(f"unix:{self.endpoint}") as channel:
            stream = call(channel, HEALTH, "NodeWatchResources")(request, timeout=CALL_S)
            first = next(stream)
            stream.cancel()
        return [(device.device.pool_name, device.health) for device in first.devices]

    def _claims(self, method: str, request: str, claims: tuple[Object, ...]) -> Any:
        refs = [{key: claim["metadata"][key] for key in ("namespace", "name", "uid")} for claim in claims]
        return self._call(self.endpoint, DRA, method, request, claims=refs)

    def _call(self, socket: Path, package: Any, method: str, request: str, **fields: Any) -> Any:
        with grpc.insecure_channel(f"unix:{socket}") as channel:
            return call(channel, package, method)(message(package, request)(**fields), timeout=CALL_S)

    def kill(self) -> None:
        self.stop(signal.SIGKILL)

    def stop(self, number: int = signal.SIGTERM) -> None:
        if self.process is None:
            return
        self.process.send_signal(number)
        try:
            self.process.wait(30)
        finally:
            self.process.kill()
            self.process.wait()
            self.process = None

    @property
    def log(self) -> Path:
        return self.folder / f"dra-{self.uid}.log"

    @property
    def memory_folder(self) -> Path:
        return self.cxl or self.folder / "cxl"

    @property
    def plugin(self) -> Path:
        return self.folder / "kubelet" / "plugins" / "dra.kvpool.dev"

    @property
    def endpoint(self) -> Path:
        return self.plugin / f"dra-{self.uid}.sock"

    @property
    def registration(self) -> Path:
        return self.folder / "kubelet" / "plugins_registry" / f"dra.kvpool.dev-{self.uid}-reg.sock"

    # --- what is on the node --------------------------------------------------------------------------------

    def cdi_files(self) -> list[str]:
        return sorted(path.name for path in (self.folder / "cdi").glob("*")) if self.folder.exists() else []

    def records(self) -> list[str]:
        return sorted(path.name for path in (self.plugin / "claims").glob("*"))

    def regions(self) -> list[str]:
        return sorted(path.name for path in (self.memory_folder / "regions").glob("*"))

    def forbidden(self) -> list[str]:
        return re.findall(r".*[Ff]orbidden.*", self.log.read_text())


def make_claim(
    api: ApiServer,
    namespace: str,
    name: str,
    devices: list[tuple[str, str]],
    parameters: Object | None = None,
    annotations: Object | None = None,
) -> Object:
    """A claim that was given these devices, as the scheduler writes it."""
    request = {"name": "r", "exactly": {"deviceClassName": "cxl-dax"}}
    opaque = {"opaque": {"driver": "dra.kvpool.dev", "parameters": parameters}}
    spec: Object = {"devices": {"requests": [request]}}
    if parameters is not None:
        spec["devices"]["config"] = [opaque]
    path = f"/apis/resource.k8s.io/v1/namespaces/{namespace}/resourceclaims"
    metadata = {"name": name, "namespace": namespace, "annotations": annotations or {}}
    body = {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": metadata, "spec": spec}
    # Applied and patched, so that the API writes opaque parameters in its own way, as it does for kubectl: it
    # takes the same keys in another order for a change.
    made = api.apply(f"{path}/{name}", body)
    assert made.ok, made.message
    results = [
        {"request": "r", "driver": "dra.kvpool.dev", "pool": pool, "device": device}
        for pool, device in devices
    ]
    allocation: Object = {"devices": {"results": results}}
    if parameters is not None:
        allocation["devices"]["config"] = [{"source": "FromClaim", **opaque}]
    merge = "application/merge-patch+json"
    status = {"status": {"allocation": allocation}}
    answer = api.request("PATCH", f"{path}/{name}/status", status, content_type=merge)
    assert answer.ok, answer.message
    return answer.body


def of_tier(namespace: str = "team", pool: str = "prefix", **more: Any) -> Object:
    tier = {"namespace": namespace, "name": pool, "tier": "cxl"}
    return {"apiVersion": API_VERSION, "kind": "RegionParameters", "pool": tier, **more}


@contextlib.contextmanager
def driver_release(api: ApiServer, namespace: str) -> Iterator[Helm]:
    """The chart with the driver, in a namespace of its own, and two nodes."""
    missing = missing_programs(["helm"])
    if missing:
        pytest.skip(missing)
    for name in NODES:
        labels = {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux", "member": "dra"}
        body = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}}
        assert api.create("/api/v1/nodes", body).code in (201, 409)
    api.kubectl("create", "namespace", namespace)
    made = Helm(api, namespace)
    made.install("--set=dra.enabled=true,dra.backend=file:/mnt/cxl")
    api.kubectl("wait", "--for=condition=Established", "crd/kvpools.kvpool.dev", "--timeout=30s")
    yield made
    made.uninstall()
