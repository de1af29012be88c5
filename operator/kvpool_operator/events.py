"""Events for what a person should know, each said once."""

from __future__ import annotations

import datetime
import hashlib
import logging
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Literal

from kvpool_operator import kinds
from kvpool_operator.client import UNREACHABLE, ApiError, Cluster

log = logging.getLogger("kvpool.operator")

KEPT_MAX = 4096  # events that are remembered, so that they are not said again
Object = dict[str, Any]


def now_text() -> str:
    """The time as Kubernetes writes it."""
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


class Events:
    """Posts events about pools. What was said before is not said again; what could not be posted is."""

    def __init__(self, cluster: Cluster, component: str = "kvpool-operator") -> None:
        self._cluster = cluster
        self._component = component
        self._said: OrderedDict[str, None] = OrderedDict()

    async def say(
        self,
        about: Mapping[str, Any],
        reason: str,
        message: str,
        *,
        kind: Literal["Normal", "Warning"] = "Normal",
        once: str = "",
    ) -> None:
        """Post an event about the object `about`, unless one with the same `once` was posted before.

        The event's name comes from that, so neither a second replica nor a restarted operator repeats it.
        """
        metadata = about["metadata"]
        identity = "/".join((metadata["uid"], reason, once or message))
        if identity in self._said:
            return
        self._said[identity] = None
        while len(self._said) > KEPT_MAX:
            self._said.popitem(last=False)
        digest = hashlib.sha256(identity.encode()).hexdigest()[:16]
        now = now_text()
        body: Object = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": f"{metadata['name']}.{digest}", "namespace": metadata["namespace"]},
            "involvedObject": {
                "apiVersion": about["apiVersion"],
                "kind": about["kind"],
                "name": metadata["name"],
                "namespace": metadata["namespace"],
                "uid": metadata["uid"],
                "resourceVersion": metadata.get("resourceVersion", ""),
            },
            "reason": reason,
            "message": message[:1024],
            "type": kind,
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
            "source": {"component": self._component},
            "reportingComponent": self._component,
        }
        try:
            await self._cluster.create(body, kinds.EVENT)
        except (*UNREACHABLE, ApiError) as error:
            if not isinstance(error, ApiError) or error.code != 409:  # 409: it is there already
                self._said.pop(identity, None)  # the next reconcile says it again
                log.warning("event_failed pool=%s reason=%s error=%r", metadata["name"], reason, str(error))
