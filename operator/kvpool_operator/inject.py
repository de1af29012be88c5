"""Giving an engine's pod the pool that its label names. Pure.

The pod gets claims (of volumes, or of the DRA driver), never hostPath, so that it passes the `restricted`
security level; a supplemental group, because regions belong to that group; and the pool's place and connector
configuration in its environment.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from kvpool.errors import ManifestError
from kvpool_operator.manifest import HUGE_MOUNT, PoolObject, placed_path
from kvpool_operator.names import (
    CONTAINERS_ANNOTATION,
    GROUP_ID,
    INJECTED_ANNOTATION,
    POOL_LABEL,
    POOL_REQUEST,
    RUNTIME_DIR,
    SKIPPED_ANNOTATION,
    child,
)
from kvpool_operator.objects import transfer_config

Object = dict[str, Any]

VOLUME_PREFIX = "kvpool-place-"


class Skipped(Exception):
    """Why a pod is left as it is; the text goes into an annotation."""


def inject(
    pod: Mapping[str, Any],
    pool_body: Mapping[str, Any] | None,
    group_id: int = GROUP_ID,
    *,
    driver: bool = False,
) -> Object:
    """The pod with the pool that its label names, or with an annotation that says why not."""
    made = copy.deepcopy(dict(pod))
    metadata = made.setdefault("metadata", {})
    annotations = metadata.setdefault("annotations", {})
    name = (metadata.get("labels") or {}).get(POOL_LABEL, "")
    try:
        pool = _usable(name, pool_body, driver)
        containers = _containers(made, annotations)
        places = [] if pool.by_claim else _places(pool)
        _check_free(made, containers, places)
    except Skipped as skipped:
        annotations[SKIPPED_ANNOTATION] = str(skipped)
        return made
    spec = made["spec"]
    spec["volumes"] = [
        *(v for v in spec.get("volumes") or [] if not v["name"].startswith(VOLUME_PREFIX)),
        *(
            {"name": f"{VOLUME_PREFIX}{i}", "persistentVolumeClaim": {"claimName": claim}}
            for i, (claim, _) in enumerate(places)
        ),
    ]
    security = spec.setdefault("securityContext", {})
    groups = security.get("supplementalGroups") or []
    security["supplementalGroups"] = [*groups, *([group_id] if group_id not in groups else [])]
    for container in containers:
        container["volumeMounts"] = [
            *(m for m in container.get("volumeMounts") or [] if not m["name"].startswith(VOLUME_PREFIX)),
            *({"name": f"{VOLUME_PREFIX}{i}", "mountPath": path} for i, (_, path) in enumerate(places)),
        ]
        container["env"] = _environment(pool, container.get("env") or [])
        if pool.by_claim:
            _add_claim(container.setdefault("resources", {}), "claims", {"name": POOL_REQUEST})
    if pool.by_claim:  # everything of the pool comes with it
        template = {"name": POOL_REQUEST, "resourceClaimTemplateName": child(pool.name)}
        _add_claim(spec, "resourceClaims", template)
    annotations.pop(SKIPPED_ANNOTATION, None)
    annotations[INJECTED_ANNOTATION] = pool.name
    return made


def _usable(name: str, body: Mapping[str, Any] | None, driver: bool) -> PoolObject:
    if body is None:
        raise Skipped(f"there is no KVPool {name} in this namespace; create it, then this pod again.")
    if body["metadata"].get("deletionTimestamp"):
        raise Skipped(f"KVPool {name} is being deleted.")
    try:
        pool = PoolObject.from_object(body)
    except ManifestError as error:
        raise Skipped(f"KVPool {name} is not valid: {error}") from None
    if pool.by_claim and not driver:
        device = placed_path(pool.devices[0]) if pool.devices else "memory of a DeviceClass"
        raise Skipped(
            f"KVPool {name} lies on {device}: a pod gets a device by a resource claim only, and "
            "the DRA driver "
            "is not installed (dra.enabled in the chart)."
        )
    return pool


def _containers(pod: Object, annotations: Mapping[str, str]) -> list[Object]:
    """The containers that get the pool: those that the annotation lists, else all."""
    there = {container["name"]: container for container in pod["spec"].get("containers") or []}
    listed = annotations.get(CONTAINERS_ANNOTATION)
    if listed is None:
        return list(there.values())
    wanted = [name.strip() for name in listed.split(",") if name.strip()]
    missing = [name for name in wanted if name not in there]
    if missing or not wanted:
        raise Skipped(
            f"annotation {CONTAINERS_ANNOTATION} names {', '.join(missing) or 'nothing'}; the pod has the "
            f"containers {', '.join(there)}."
        )
    return [there[name] for name in wanted]


def _places(pool: PoolObject) -> list[tuple[str, str]]:
    """(claim, where it is mounted)"""
    places = [(child(pool.name), pool.folder)]
    if pool.huge:
        places.append((child(pool.name, "huge-pages"), f"{HUGE_MOUNT}/{pool.name}"))
    places += [(child(pool.name, tier.name), placed_path(tier)) for tier in pool.placed]
    return places


def _check_free(pod: Object, containers: list[Object], places: list[tuple[str, str]]) -> None:
    for container in containers:
        for mount in container.get("volumeMounts") or []:
            taken = any(mount["mountPath"].rstrip("/") == path for _, path in places)
            if taken and not mount["name"].startswith(VOLUME_PREFIX):
                raise Skipped(
                    f"container {container['name']} mounts something else at {mount['mountPath']} already."
                )


def _add_claim(body: Object, key: str, claim: Object) -> None:
    """Into a list that the user may have begun, once."""
    others = [other for other in body.get(key) or [] if other["name"] != claim["name"]]
    body[key] = [*others, claim]


def environment(pool: PoolObject) -> dict[str, str]:
    """What an engine has to know of its pool."""
    return {
        "KVPOOL_RUNTIME_DIR": RUNTIME_DIR,
        "KVPOOL_POOL": pool.name,
        "KVPOOL_KV_TRANSFER_CONFIG": transfer_config(pool.name),
        "PYTHONHASHSEED": "0",  # where block hashes start from: the same in every engine of a pool
    }


def _environment(pool: PoolObject, given: list[Object]) -> list[Object]:
    """What the user set stays; ours come first, so that their variables can refer to them."""
    ours = environment(pool)
    theirs = {variable["name"] for variable in given}
    return [*({"name": k, "value": v} for k, v in ours.items() if k not in theirs), *given]
