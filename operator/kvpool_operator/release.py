"""Uninstalling: nothing may stay stuck on a finalizer that nobody removes any more."""

from __future__ import annotations

import asyncio
import datetime
import logging
from collections.abc import Sequence

from kvpool_operator import kinds
from kvpool_operator.client import ApiError, Cluster
from kvpool_operator.lease import RETRY_S
from kvpool_operator.names import FINALIZER, LEASE, POOL_LABEL

log = logging.getLogger("kvpool.operator")

IDENTITY = "uninstall"
ROUNDS = 10
HELD_S = 600  # long enough for helm to delete the operator, whose replicas wait for the lease meanwhile


async def release(
    cluster: Cluster, namespace: str, namespaces: Sequence[str] = (), *, driver: bool = False
) -> None:
    """Take the lease away from the operator, then the finalizer off every pool. Pools and blocks stay.

    With `driver` the pools are also taken out of what the scheduler hands out: nobody prepares them any more.

    Raises:  ApiError.
    """
    now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    body = {
        "apiVersion": kinds.LEASE.api_version,
        "kind": "Lease",
        "metadata": {"name": LEASE, "namespace": namespace},
        "spec": {
            "holderIdentity": IDENTITY,
            "leaseDurationSeconds": HELD_S,
            "acquireTime": now,
            "renewTime": now,
        },
    }
    await cluster.apply(body, kinds.LEASE)
    log.info("lease_taken namespace=%s; the operator acts no more", namespace)
    # A leader looks at its lease every RETRY_S; until then it may put a finalizer back.
    for _ in range(ROUNDS):
        await asyncio.sleep(RETRY_S * 1.5)
        if not await _strip(cluster, namespaces):
            if driver:
                await _withdraw(cluster)
            return
    raise ApiError("release", 409, "somebody puts finalizers back: is another kvpool operator running?")


async def _withdraw(cluster: Cluster) -> None:
    for body in await cluster.list(kinds.RESOURCE_SLICE, labels=POOL_LABEL):
        metadata = body["metadata"]
        await cluster.delete(kinds.RESOURCE_SLICE, None, metadata["name"], metadata["uid"])


async def _strip(cluster: Cluster, namespaces: Sequence[str]) -> int:
    """Take our finalizer off every pool; returns from how many."""
    pools = []
    for where in namespaces or (None,):
        pools += await cluster.list(kinds.POOL, where)
    stripped = 0
    for pool in pools:
        metadata = pool["metadata"]
        others = [name for name in metadata.get("finalizers") or [] if name != FINALIZER]
        if len(others) == len(metadata.get("finalizers") or []):
            continue
        stripped += 1
        try:
            await cluster.merge(
                kinds.POOL, metadata["namespace"], metadata["name"], {"metadata": {"finalizers": others}}
            )
        except ApiError as error:
            if error.code != 404:
                raise
        log.info("released pool=%s/%s", metadata["namespace"], metadata["name"])
    return stripped
