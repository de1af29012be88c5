"""What kopf is used for: the watches, the server of the webhook.

Handlers return nothing, and all are coroutines: kopf would call plain functions in threads, while cache and
queue belong to the event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import kopf

from kvpool_operator import kinds
from kvpool_operator.cache import Cache
from kvpool_operator.inject import inject
from kvpool_operator.kinds import CHILDREN, OF_DRIVER, Kind
from kvpool_operator.metrics import Metrics
from kvpool_operator.names import FINALIZER, GROUP, INJECTED_ANNOTATION, POOL_LABEL, SKIPPED_ANNOTATION

Object = dict[str, Any]
Changed = Callable[[Kind, Object], None]

# (kind, server-side label selector): only what belongs to a pool is sent to us.
Watched = tuple[tuple[Kind, str], ...]


def watched(driver: bool) -> Watched:
    """What is watched; what the DRA driver brings only where it is installed."""
    return (
        (kinds.POOL, ""),
        (kinds.NODE, ""),
        *((kind, POOL_LABEL) for kind in CHILDREN if driver or kind not in OF_DRIVER),
    )


def registry(cache: Cache, changed: Changed, driver: bool = False) -> kopf.OperatorRegistry:
    """The watches that kopf keeps. `changed` is told of each object that came, changed or went.

    It is told only after the first lists of all kinds are in the cache: kopf runs no handler before all of
    its indexes are filled, and the indexing functions are what fills the cache.
    """
    made = kopf.OperatorRegistry()

    @kopf.on.login(registry=made)
    async def login(**given: Any) -> kopf.ConnectionInfo | None:
        return kopf.login_with_service_account(**given) or kopf.login_with_kubeconfig(**given)

    for kind, _ in watched(driver):
        _watch(made, kind, cache, changed)

    return made


def add_webhook(
    made: kopf.OperatorRegistry, cache: Cache, metrics: Metrics, group_id: int, driver: bool = False
) -> None:
    """Pods that carry a pool's label get the pool; path /inject of the webhook's server."""

    @kopf.on.mutate("v1", "pods", operation="CREATE", id="inject", registry=made)
    async def give_pool(body: kopf.Body, namespace: str | None, patch: kopf.Patch, **_: Any) -> None:
        pod = _plain(body)
        name = (pod["metadata"].get("labels") or {}).get(POOL_LABEL)
        if not name:
            return
        pool = cache.get(kinds.POOL, namespace or pod["metadata"].get("namespace") or "default", name)
        changed_pod = inject(pod, pool, group_id, driver=driver)
        annotations = changed_pod["metadata"]["annotations"]
        metrics.injections.labels("skipped" if SKIPPED_ANNOTATION in annotations else "injected").inc()
        patch.metadata["annotations"] = {
            key: annotations[key] for key in (INJECTED_ANNOTATION, SKIPPED_ANNOTATION) if key in annotations
        }
        for part in ("volumes", "securityContext", "containers", "resourceClaims"):
            if changed_pod["spec"].get(part) != pod["spec"].get(part):
                patch.spec[part] = changed_pod["spec"][part]


def _watch(made: kopf.OperatorRegistry, kind: Kind, cache: Cache, changed: Changed) -> None:
    place = _place(kind)

    @kopf.index(*place, id=f"index-{kind.plural}", registry=made)
    async def learn(body: kopf.Body, **_: Any) -> None:
        cache.put(kind, slim(kind, _plain(body)), watched=True)

    @kopf.on.event(*place, id=f"event-{kind.plural}", registry=made)
    async def happened(event: Any, **_: Any) -> None:
        body = slim(kind, event["object"])
        if event["type"] == "DELETED":
            cache.drop(kind, body)
        else:
            cache.put(kind, body, watched=True)
        changed(kind, body)


def slim(kind: Kind, body: Mapping[str, Any]) -> Object:
    """What of an object is kept in memory. Objects of a list do not say what they are, so it is added."""
    made = {**body, "apiVersion": kind.api_version, "kind": kind.name}
    made["metadata"] = {k: v for k, v in body["metadata"].items() if k != "managedFields"}
    if kind is kinds.NODE:  # kilobytes of images, addresses, volumes
        spec, status = body.get("spec") or {}, body.get("status") or {}
        made["metadata"]["annotations"] = {}
        made["spec"] = {k: spec[k] for k in ("unschedulable", "taints") if k in spec}
        made["status"] = {
            "conditions": [c for c in status.get("conditions") or [] if c.get("type") == "Ready"]
        }
    return made


def _plain(value: Any) -> Any:
    """kopf hands out views; the cache keeps plain objects."""
    if hasattr(value, "items"):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def settings(webhook: kopf.WebhookServer | None, driver: bool = False) -> kopf.OperatorSettings:
    """kopf's settings: a watch that says nothing is ended and begun anew, nothing is written to objects."""
    made = kopf.OperatorSettings()
    made.persistence.finalizer = FINALIZER + "-kopf"  # never set: no handler of ours asks for one
    made.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix=GROUP)
    made.persistence.diffbase_storage = kopf.AnnotationsDiffBaseStorage(prefix=GROUP)
    made.posting.enabled = False  # events are posted by kvpool_operator.events, each once
    made.watching.server_timeout = 240
    made.watching.client_timeout = 270
    made.watching.connect_timeout = 5
    made.networking.request_timeout = 20
    made.scanning.disabled = True
    made.peering.standalone = True
    for kind, labels in watched(driver):
        if labels:
            made.watching.label_selectors[_place(kind)] = labels
    if webhook is not None:
        made.admission.server = webhook
        made.admission.managed = None
    return made


def _place(kind: Kind) -> Any:
    return (kind.group, kind.version, kind.plural) if kind.group else (kind.version, kind.plural)
