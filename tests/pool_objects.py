"""Plain objects as the API server would hand them out."""

from __future__ import annotations

from typing import Any

from kvpool_operator.manifest import PoolObject, Settings

Object = dict[str, Any]

SETTINGS = Settings(image="localhost/kvpool:1", namespace="kvpool-system")
DRAM: Object = {"name": "dram", "medium": "DRAM", "capacity": "64Mi"}
CXL: Object = {
    "name": "cxl",
    "medium": "CXL",
    "capacity": "128Mi",
    "shared": True,
    "source": {"path": "/dev/shm/shared/prefix"},
}


def pool_body(
    name: str = "prefix", *, namespace: str = "team", tiers: list[Object] | None = None, **spec: Any
) -> Object:
    body = {"hosts": 2, "tiers": [DRAM, CXL] if tiers is None else tiers, **spec}
    if not any(tier.get("shared") for tier in body["tiers"]):
        body.pop("hosts")
    return {
        "apiVersion": "kvpool.dev/v1alpha1",
        "kind": "KVPool",
        "metadata": {
            "name": name,
            "namespace": namespace,
            "uid": "uid-1",
            "generation": 1,
            "resourceVersion": "10",
        },
        "spec": body,
    }


def pool(name: str = "prefix", **spec: Any) -> PoolObject:
    return PoolObject.from_object(pool_body(name, **spec))


def node_status(**more: Any) -> Object:
    return {
        "observedGeneration": 1,
        "ready": True,
        "tiers": [],
        "lookups": 0,
        "hits": 0,
        "misses": {},
        **more,
    }


def pool_node(index: int, node: str, status: Object | None = None, *, name: str = "prefix") -> Object:
    return {
        "apiVersion": "kvpool.dev/v1alpha1",
        "kind": "KVPoolNode",
        "metadata": {"name": f"{name}-{index}", "namespace": "team", "generation": 1, "uid": f"uid-{index}"},
        "spec": {"pool": name, "nodeName": node, "host": index, "state": "Active", "adopt": []},
        **({"status": status} if status is not None else {}),
    }
