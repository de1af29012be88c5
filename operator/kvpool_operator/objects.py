"""The objects that belong to a pool: one builder a kind, pure, with fixed names."""

from __future__ import annotations

import json
from typing import Any

from kvpool.quantity import format_quantity, parse_quantity
from kvpool.spec import PoolSpec
from kvpool_operator import kinds
from kvpool_operator.assign import Member
from kvpool_operator.kinds import Kind
from kvpool_operator.manifest import HUGE_MOUNT, PoolObject, Settings, parent, placed_path
from kvpool_operator.names import (
    ACCOUNT_ANNOTATION,
    API_VERSION,
    GROUP,
    METRICS_PORT,
    NAMESPACE_LABEL,
    NODE_LABEL,
    POOL_LABEL,
    RUNTIME_DIR,
    child,
    label_value,
    outside,
)

Object = dict[str, Any]

# Of the daemon itself, without the memory of its DRAM tiers: Python, the client, the directory's page tables.
BASE_REQUESTS = {"cpu": "100m", "memory": "128Mi"}
BASE_LIMITS = {"memory": "512Mi"}
# A claim has to name a size; it limits nothing here, and a changed one would be refused for a static volume.
CLAIM_SIZE = "1Gi"
GRACE_S = 30


def labels(pool: PoolObject) -> dict[str, str]:
    return {
        "app.kubernetes.io/name": "kvpool",
        "app.kubernetes.io/instance": pool.name,
        "app.kubernetes.io/component": "daemon",
        "app.kubernetes.io/managed-by": "kvpool-operator",
        POOL_LABEL: pool.name,
        NAMESPACE_LABEL: pool.namespace,
    }


def selector(pool: PoolObject) -> dict[str, str]:
    """The labels that pick a pool's daemons."""
    return {
        POOL_LABEL: pool.name,
        NAMESPACE_LABEL: pool.namespace,
        "app.kubernetes.io/component": "daemon",
    }


def owner(pool: PoolObject) -> Object:
    return {
        "apiVersion": API_VERSION,
        "kind": "KVPool",
        "name": pool.name,
        "uid": pool.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }


def within(pool: PoolObject, kind: Kind, name: str = "", **rest: Any) -> Object:
    """In the pool's namespace: owned by the pool, so the garbage collector removes it after the pool."""
    metadata: Object = {
        "name": name or child(pool.name),
        "namespace": pool.namespace,
        "labels": labels(pool),
        "ownerReferences": [owner(pool)],
    }
    return {"apiVersion": kind.api_version, "kind": kind.name, "metadata": metadata, **rest}


def beside(pool: PoolObject, kind: Kind, namespace: str, name: str = "", **rest: Any) -> Object:
    """Elsewhere (`namespace` "": cluster-scoped): no owner can be named, so the operator removes it."""
    made = within(pool, kind, name or outside(pool.namespace, pool.name), **rest)
    del made["metadata"]["ownerReferences"], made["metadata"]["namespace"]
    if namespace:
        made["metadata"]["namespace"] = namespace
    return made


def service_account(pool: PoolObject, settings: Settings) -> Object:
    return beside(pool, kinds.SERVICE_ACCOUNT, settings.namespace)


def role(pool: PoolObject) -> Object:
    """What a daemon may do: read what it is to do, write what it has done. Nothing else."""
    rules = [
        {"apiGroups": [GROUP], "resources": ["kvpoolnodes"], "verbs": ["get", "list", "watch"]},
        {
            "apiGroups": [GROUP],
            "resources": ["kvpoolnodes/status"],
            "verbs": ["get", "patch", "update"],
        },
    ]
    return within(pool, kinds.ROLE, rules=rules)


def role_binding(pool: PoolObject, settings: Settings) -> Object:
    account = outside(pool.namespace, pool.name)
    return within(
        pool,
        kinds.ROLE_BINDING,
        roleRef={"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": child(pool.name)},
        subjects=[{"kind": "ServiceAccount", "name": account, "namespace": settings.namespace}],
    )


def transfer_config(pool: str) -> str:
    """vLLM's --kv-transfer-config for the pool. The host number is the one of the engine's node."""
    return json.dumps(
        {
            "kv_connector": "KVPoolConnector",
            "kv_connector_module_path": "kvpool_connector.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"pool": pool},
        }
    )


def config_map(pool: PoolObject) -> Object:
    data = {
        "pool.yaml": PoolSpec.from_object(pool.manifest()).to_yaml(),
        "vllm.json": transfer_config(pool.name) + "\n",
    }
    return within(pool, kinds.CONFIG_MAP, data=data)


def service(pool: PoolObject, settings: Settings) -> Object:
    """Headless: Prometheus finds every daemon by it."""
    spec = {
        "clusterIP": "None",
        "selector": selector(pool),
        "ports": [{"name": "metrics", "port": METRICS_PORT, "targetPort": "metrics", "protocol": "TCP"}],
    }
    return beside(pool, kinds.SERVICE, settings.namespace, spec=spec)


def network_policy(pool: PoolObject, settings: Settings) -> Object:
    """In: metrics and probes. Out: the API server and names."""
    spec = {
        "podSelector": {"matchLabels": selector(pool)},
        "policyTypes": ["Ingress", "Egress"],
        "ingress": [{"ports": [{"port": METRICS_PORT, "protocol": "TCP"}]}],
        "egress": [
            {"ports": [{"port": 443, "protocol": "TCP"}, {"port": 6443, "protocol": "TCP"}]},
            {"ports": [{"port": 53, "protocol": "UDP"}, {"port": 53, "protocol": "TCP"}]},
        ],
    }
    return beside(pool, kinds.NETWORK_POLICY, settings.namespace, spec=spec)


def volumes(pool: PoolObject) -> list[Object]:
    """A volume for the pool's folder on whatever node, and one for each tier with a path of its own.

    hostPath, but as a PersistentVolume: pods under the `restricted` security level may mount claims, and no
    hostPath. It has no node affinity, for every node has its own folder at that path.
    """
    found = [_volume(pool, "", pool.node_folder, "DirectoryOrCreate")]
    if pool.huge:
        found.append(_volume(pool, "huge-pages", pool.huge_folder, "DirectoryOrCreate"))
    devices = {tier.name for tier in pool.devices}
    for tier in pool.placed:
        if tier.name not in devices:  # a device needs more than a mount: a DRA claim
            found.append(_volume(pool, tier.name, placed_path(tier), "File"))
    return found


def _volume(pool: PoolObject, part: str, path: str, kind: str) -> Object:
    spec = {
        "capacity": {"storage": CLAIM_SIZE},
        "accessModes": ["ReadWriteMany"],
        "persistentVolumeReclaimPolicy": "Retain",
        "storageClassName": "",
        "volumeMode": "Filesystem",
        "claimRef": {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "namespace": pool.namespace,
            "name": child(pool.name, part),
        },
        "hostPath": {"path": path, "type": kind},
    }
    return beside(pool, kinds.VOLUME, "", outside(pool.namespace, pool.name, part), spec=spec)


def claims(pool: PoolObject) -> list[Object]:
    return [
        within(
            pool,
            kinds.CLAIM,
            made["spec"]["claimRef"]["name"],
            spec={
                "accessModes": ["ReadWriteMany"],
                "storageClassName": "",
                "volumeMode": "Filesystem",
                "volumeName": made["metadata"]["name"],
                "resources": {"requests": {"storage": CLAIM_SIZE}},
            },
        )
        for made in volumes(pool)
    ]


def pool_node(pool: PoolObject, member: Member) -> Object:
    spec = {
        "pool": pool.name,
        "nodeName": member.node,
        "host": member.index if pool.shared else 0,
        "state": member.state,
        "adopt": [{"shard": claim.shard, "epoch": claim.epoch} for claim in member.claims],
        "manifest": pool.manifest(),
    }
    made = within(pool, kinds.POOL_NODE, f"{pool.name}-{member.index}", spec=spec)
    made["metadata"]["labels"][NODE_LABEL] = label_value(member.node)
    return made


def daemon_set(pool: PoolObject, settings: Settings, account_uid: str = "") -> Object:
    spec = {
        "selector": {"matchLabels": selector(pool)},
        "updateStrategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 1}},
        "revisionHistoryLimit": 3,
        "template": {
            "metadata": {"labels": labels(pool), "annotations": {ACCOUNT_ANNOTATION: account_uid}},
            "spec": _pod(pool, settings),
        },
    }
    return beside(pool, kinds.DAEMON_SET, settings.namespace, spec=spec)


def _pod(pool: PoolObject, settings: Settings) -> Object:
    mounts, host_paths = _places(pool)
    asked = pool.raw.get("daemon") or {}
    probe = {"httpGet": {"path": "/healthz", "port": "metrics"}, "periodSeconds": 10, "timeoutSeconds": 5}
    ready = {"httpGet": {"path": "/readyz", "port": "metrics"}, "periodSeconds": 2, "timeoutSeconds": 5}
    container: Object = {
        "name": "daemon",
        "image": asked.get("image") or settings.image,
        "imagePullPolicy": settings.pull_policy,
        "command": ["python", "-m", "kvpool_operator.node"],
        "env": [
            {"name": "KVPOOL_POOL", "value": pool.name},
            {"name": "KVPOOL_NAMESPACE", "value": pool.namespace},
            {"name": "KVPOOL_RUNTIME_DIR", "value": RUNTIME_DIR},
            *(
                {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
                for name, path in (("NODE_NAME", "spec.nodeName"), ("POD_NAME", "metadata.name"))
            ),
        ],
        "ports": [{"name": "metrics", "containerPort": METRICS_PORT, "protocol": "TCP"}],
        "resources": {
            **resources(pool),
            **({"claims": [{"name": tier.name} for tier in pool.claimed]} if pool.claimed else {}),
        },
        # Filling a large tier with pages takes minutes before the first answer.
        "startupProbe": {**probe, "periodSeconds": 2, "failureThreshold": 300},
        "livenessProbe": {**probe, "failureThreshold": 6},
        "readinessProbe": ready,
        "volumeMounts": mounts,
        "securityContext": _container_security(pool),
    }
    pod: Object = {
        "serviceAccountName": outside(pool.namespace, pool.name),
        "terminationGracePeriodSeconds": GRACE_S,
        "containers": [container],
        "volumes": host_paths,
        # Root, without any of its powers: the folders that the kubelet makes on the node belong to root.
        "securityContext": {
            "runAsUser": 0,
            "runAsGroup": settings.group_id,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "nodeSelector": {"kubernetes.io/os": "linux", **(pool.raw.get("nodeSelector") or {})},
    }
    if pool.claimed:
        pod["resourceClaims"] = [
            {"name": tier.name, "resourceClaimName": outside(pool.namespace, pool.name, tier.name)}
            for tier in pool.claimed
        ]
    if tolerations := pool.raw.get("tolerations"):
        pod["tolerations"] = tolerations
    if priority := pool.raw.get("priorityClassName") or settings.priority_class:
        pod["priorityClassName"] = priority
    if settings.pull_secrets:
        pod["imagePullSecrets"] = [{"name": name} for name in settings.pull_secrets]
    return pod


def _container_security(pool: PoolObject) -> Object:
    if pool.devices:  # a container sees no device that it was not given, unless it is privileged
        return {"privileged": True, "readOnlyRootFilesystem": True}
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def _places(pool: PoolObject) -> tuple[list[Object], list[Object]]:
    """(mounts of the daemon's container, volumes of its pod)"""
    places = [(pool.folder, pool.node_folder, "DirectoryOrCreate")]
    if pool.huge:
        places.append((f"{HUGE_MOUNT}/{pool.name}", pool.huge_folder, "DirectoryOrCreate"))
    devices = {tier.name for tier in pool.devices}
    for tier in pool.placed:
        path = placed_path(tier)
        if tier.name in devices:
            places.append((path, path, "CharDevice"))
        else:
            places.append((parent(path), parent(path), "DirectoryOrCreate"))
    unique = list(dict.fromkeys(places))
    mounts = [{"name": f"place-{i}", "mountPath": at} for i, (at, _, _) in enumerate(unique)]
    host_paths = [
        {"name": f"place-{i}", "hostPath": {"path": path, "type": kind}}
        for i, (_, path, kind) in enumerate(unique)
    ]
    mounts.append({"name": "tmp", "mountPath": "/tmp"})
    host_paths.append({"name": "tmp", "emptyDir": {"sizeLimit": "16Mi"}})
    return mounts, host_paths


def resources(pool: PoolObject) -> Object:
    """Requests and limits that cover the DRAM tiers: their pages are memory of the daemon's."""
    asked = (pool.raw.get("daemon") or {}).get("resources") or {}
    requests = {**BASE_REQUESTS, **(asked.get("requests") or {})}
    limits = {**BASE_LIMITS, **(asked.get("limits") or {})}
    for amounts in (requests, limits):
        amounts["memory"] = _plus(amounts["memory"], pool.memory_bytes)
    if pool.huge_bytes:
        requests["hugepages-2Mi"] = limits["hugepages-2Mi"] = format_quantity(pool.huge_bytes)
    return {"requests": requests, "limits": limits}


def _plus(amount: object, count_bytes: int) -> str:
    return format_quantity(parse_quantity(amount) + count_bytes)
