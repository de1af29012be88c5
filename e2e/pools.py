"""A KVPool and its clients, as the tests see them."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kube import Kube, KubeError, Object, ready, wait_for

HERE = Path(__file__).resolve().parent
API_VERSION = "kvpool.dev/v1alpha1"
FINALIZER = "kvpool.dev/pool"
LABEL, NAMESPACE_LABEL = "kvpool.dev/pool", "kvpool.dev/namespace"
CHILDREN = "ds,cm,svc,sa,role,rolebinding,networkpolicy,pvc,pv"
SETTLE_S = 30  # within this time after any disturbance the status tells the truth again
START_S = 90  # a pool with small tiers, its daemons' first start included
HOSTNAME = "kubernetes.io/hostname"

# What the Pod Security level `restricted` asks of a pod.
RESTRICTED = {
    "allowPrivilegeEscalation": False,
    "runAsNonRoot": True,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}


def dram(name: str = "dram", capacity: str = "64Mi", **more: Any) -> Object:
    return {"name": name, "medium": "DRAM", "capacity": capacity, **more}


def cxl(path: str, name: str = "cxl", capacity: str = "128Mi", **more: Any) -> Object:
    """A shared tier: a file that all nodes map. They are one machine, so its caches are coherent."""
    shared = {"shared": True, "coherence": "hardware", "source": {"path": path}}
    return {"name": name, "medium": "CXL", "capacity": capacity, **shared, **more}


@dataclass
class KVPool:
    """One KVPool. A question that has no answer yet raises AssertionError, which `wait_for` waits out."""

    kube: Kube
    namespace: str
    name: str
    spec: Object = field(default_factory=dict)

    def body(self) -> Object:
        metadata = {"name": self.name, "namespace": self.namespace}
        return {"apiVersion": API_VERSION, "kind": "KVPool", "metadata": metadata, "spec": self.spec}

    def apply(self, **changes: Any) -> None:
        before, self.spec = self.spec, {**self.spec, **changes}
        try:
            self.kube.apply(self.body())
        except KubeError:
            self.spec = before
            raise

    def set_tier(self, name: str, **changes: Any) -> None:
        self.apply(tiers=[{**t, **changes} if t["name"] == name else t for t in self.spec["tiers"]])

    def get(self) -> Object:
        return self.kube.get("kvpools.kvpool.dev", self.name, self.namespace)

    def status(self) -> Object:
        found: Object = self.get().get("status") or {}
        return found

    def nodes(self) -> list[Object]:
        found = self.kube.all("kvpoolnodes.kvpool.dev", self.namespace, f"{LABEL}={self.name}")
        return sorted(found, key=lambda node: node["metadata"]["name"])

    def node_on(self, node: str) -> Object:
        found = [n for n in self.nodes() if n["spec"]["nodeName"] == node]
        assert found, f"no KVPoolNode of pool {self.name} is on {node}"
        return found[0]

    def children(self, kinds: str) -> list[Object]:
        """What was made for the pool, wherever it lies: daemons do not run in the namespace of engines."""
        selector = f"{LABEL}={self.name},{NAMESPACE_LABEL}={self.namespace}"
        return self.kube.all(kinds, selector=selector)

    def child(self, kind: str) -> Object:
        (found,) = self.children(kind)
        return found

    def daemons(self) -> list[Object]:
        return self.children("pods")

    def condition(self, kind: str) -> Object:
        conditions = self.status().get("conditions") or []
        found = [condition for condition in conditions if condition["type"] == kind]
        assert found, f"pool {self.name} has no condition {kind}; it has {conditions}"
        condition: Object = found[0]
        return condition

    def tier(self, name: str) -> Object:
        found = [tier for tier in self.status().get("tiers") or [] if tier["name"] == name]
        assert found, f"status.tiers of pool {self.name} has no {name}"
        tier: Object = found[0]
        return tier

    # --- what must come true --------------------------------------------------------------------------------

    def settled(self, nodes: int | None = None) -> Object:
        """The object when its status is about the newest spec and says that all is as declared."""
        body = self.get()
        status, generation = body.get("status") or {}, body["metadata"]["generation"]
        assert status.get("observedGeneration") == generation, f"generation {generation}: {status}"
        said = {c["type"]: c for c in status.get("conditions") or []}
        assert all(c["observedGeneration"] == generation for c in said.values()), said
        for kind, wanted in (("Ready", "True"), ("Progressing", "False")):
            assert kind in said, f"no condition {kind}: {said}"
            assert said[kind]["status"] == wanted, said[kind]
        told = status["nodes"]
        assert told["ready"] == told["desired"], told
        assert nodes is None or told["desired"] == nodes, told
        assert told.get("outOfDate", 0) == 0, told
        return body

    def wait_settled(self, seconds: float = SETTLE_S, nodes: int | None = None) -> Object:
        try:
            return wait_for(f"pool {self.name} settles", seconds, lambda: self.settled(nodes))
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.kube.explain(self.namespace)}") from None

    def wait_condition(self, kind: str, status: str, reason: str = "", seconds: float = SETTLE_S) -> Object:
        def look() -> Object:
            said = self.condition(kind)
            assert said["status"] == status, said
            assert reason in ("", said["reason"]), said
            return said

        return wait_for(f"pool {self.name}: {kind}={status} {reason}", seconds, look)

    def wait_gone(self, seconds: float = 60) -> None:
        """Neither the object nor anything that was made for it is left."""

        def look() -> bool:
            assert self.kube.find("kvpools.kvpool.dev", self.name, self.namespace) is None
            left = [
                f"{body['kind']} {body['metadata']['name']} {body['metadata'].get('finalizers') or ''}"
                for body in self.children(f"{CHILDREN},kvpoolnodes.kvpool.dev,pods")
            ]
            assert not left, f"still there: {', '.join(left)}"
            return True

        wait_for(f"nothing is left of pool {self.name}", seconds, look)

    def delete(self, seconds: float = 60) -> None:
        self.kube.delete("kvpools.kvpool.dev", self.name, self.namespace, wait_s=seconds)


class Client:
    """A small pod on one node that stores and loads blocks; `restricted`, and given the pool by its label."""

    def __init__(self, pool: KVPool, node: str, image: str) -> None:
        self.pool, self.node, self.image = pool, node, image
        self.name = f"client-{pool.name}-{node}"

    def body(self) -> Object:
        container = {
            "name": "client",
            "image": self.image,
            "command": ["sleep", "infinity"],
            "securityContext": RESTRICTED,
            "volumeMounts": [{"name": "script", "mountPath": "/client"}],
            "resources": {"requests": {"memory": "64Mi"}, "limits": {"memory": "512Mi"}},
        }
        spec = {
            "nodeSelector": {HOSTNAME: self.node},
            "containers": [container],
            "volumes": [{"name": "script", "configMap": {"name": "e2e-scripts"}}],
            "terminationGracePeriodSeconds": 0,
            "automountServiceAccountToken": False,
            # It outlives a node that is away for a while.
            "tolerations": [{"operator": "Exists", "effect": "NoExecute"}],
        }
        metadata = {
            "name": self.name,
            "namespace": self.pool.namespace,
            "labels": {LABEL: self.pool.name, "e2e": "client"},
        }
        return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}

    def start(self, *, wait: bool = True) -> Client:
        self.pool.kube.apply(scripts(self.pool.namespace), self.body())
        if wait:
            self.wait_ready()
        return self

    def wait_ready(self, seconds: float = 60) -> None:
        def look() -> bool:
            body = self.pool.kube.get("pod", self.name, self.pool.namespace)
            assert ready(body), body["status"]
            return True

        try:
            wait_for(f"pod {self.name} is Ready", seconds, look)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.pool.kube.explain(self.pool.namespace)}") from None

    def restart(self) -> None:
        self.stop()
        self.start()

    def stop(self) -> None:
        self.pool.kube.delete("pod", self.name, self.pool.namespace)

    def _ask(self, word: str, series: str, count: int) -> Object:
        command = ("python", "/client/client.py", word, series, str(count))
        text = self.pool.kube.exec(self.pool.namespace, self.name, *command)
        answer: Object = json.loads(text.strip().splitlines()[-1])
        assert answer["wrong"] == 0, f"wrong bytes in {answer['wrong']} blocks of {series}"
        return answer

    def store(self, series: str, count: int) -> Object:
        answer = self._ask("store", series, count)
        assert answer["ok"] == count, answer
        return answer

    def load(self, series: str, count: int) -> Object:
        return self._ask("load", series, count)

    def must_hit(self, series: str, count: int) -> None:
        answer = self.load(series, count)
        assert answer["ok"] == count, f"{self.node} asked for {count} blocks of {series}: {answer}"


def scripts(namespace: str) -> Object:
    data = {name: (HERE / name).read_text() for name in ("client.py", "engine.py", "gap.py")}
    metadata = {"name": "e2e-scripts", "namespace": namespace}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}


def counted(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[int, int]:
    """Lookups and hits between two states of a status."""
    lookups, hits = (int(after.get(k, 0)) - int(before.get(k, 0)) for k in ("lookups", "hits"))
    return lookups, hits


def must_tell_the_truth(pool: KVPool, clients: list[Client], seconds: float = SETTLE_S) -> None:
    """Within `seconds` the status counts exactly what the clients now ask: hits and misses alike."""
    before = wait_stable_counts(pool)
    series = f"truth-{time.monotonic_ns()}"
    clients[0].store(series, 4)
    lookups = hits = 0
    for client in clients:
        hits += client.load(series, 6)["ok"]
        lookups += 6

    def look() -> bool:
        seen = counted(before, pool.status())
        assert seen == (lookups, hits), f"clients had {lookups} lookups and {hits} hits, status counts {seen}"
        return True

    wait_for(f"status of {pool.name} counts what its clients did", seconds, look)


def wait_stable_counts(pool: KVPool, quiet_s: float = 4) -> Object:
    """The status once its counters stand still: earlier lookups have arrived."""
    last, since = pool.status(), time.monotonic()
    while time.monotonic() - since < quiet_s:
        time.sleep(0.5)
        now = pool.status()
        if counted(last, now) != (0, 0):
            last, since = now, time.monotonic()
    return last
