"""Which replica acts: the one that holds the Lease. The others watch, so that they can take over at once.

The client library's own election fails on its first create (kubernetes 37.0.2 passes a bool where its model
wants a string), hence these few lines. As there, no clock is compared between machines: a lease is over when
this process has not seen it change for as long as it is valid.
"""

from __future__ import annotations

import asyncio
import datetime
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvpool_operator import kinds
from kvpool_operator.client import UNREACHABLE, ApiError, Cluster
from kvpool_operator.names import LEASE

log = logging.getLogger("kvpool.operator")

# A leader that dies is replaced after VALID_S + RETRY_S at most; one that cannot reach the API server stops
# acting after RENEW_S, before anybody else may start.
VALID_S, RENEW_S, RETRY_S = 15, 10, 2


@dataclass
class Lease:
    """One candidate for the lease. `leading` is told whenever this process begins or ends to hold it."""

    cluster: Cluster
    namespace: str
    identity: str
    leading: Callable[[bool], None]
    valid_s: float = VALID_S
    renew_s: float = RENEW_S
    retry_s: float = RETRY_S

    def __post_init__(self) -> None:
        self._held = False
        self._renewed_at = 0.0
        self._seen: object = None  # the lease as it was when it last changed
        self._seen_at = 0.0

    async def run(self) -> None:
        """Try to hold the lease until cancelled; then give it up, so that the next one need not wait."""
        try:
            while True:
                try:
                    self._set(await asyncio.wait_for(self._try(), self.renew_s / 2))
                except (*UNREACHABLE, ApiError) as error:
                    log.warning("lease_failed error=%r", str(error) or type(error).__name__)
                    if self._held and time.monotonic() - self._renewed_at > self.renew_s:
                        self._set(False)
                await asyncio.sleep(self.retry_s)
        finally:
            if self._held:
                await self._give_up()
            self._set(False)

    async def _try(self) -> bool:
        """Take the lease, or renew it; returns whether this process holds it."""
        began = time.monotonic()
        found = await self.cluster.get(kinds.LEASE, self.namespace, LEASE)
        if found is None:
            await self.cluster.create(self._body({}), kinds.LEASE)
            self._renewed_at = began
            return True
        spec = found.get("spec") or {}
        holder = spec.get("holderIdentity") or ""
        state = (holder, spec.get("renewTime"), spec.get("leaseTransitions"))
        if state != self._seen:
            self._seen, self._seen_at = state, began
        valid_s = float(spec.get("leaseDurationSeconds") or self.valid_s)
        if holder not in ("", self.identity) and began - self._seen_at < valid_s:
            return False
        # With the version that was read: of two candidates one wins, the other gets a conflict.
        await self.cluster.replace(self._body(found), kinds.LEASE)
        self._renewed_at = began
        return True

    def _body(self, found: dict[str, Any]) -> dict[str, Any]:
        now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        spec = found.get("spec") or {}
        mine = spec.get("holderIdentity") == self.identity
        return {
            "apiVersion": kinds.LEASE.api_version,
            "kind": kinds.LEASE.name,
            "metadata": found.get("metadata") or {"name": LEASE, "namespace": self.namespace},
            "spec": {
                "holderIdentity": self.identity,
                "leaseDurationSeconds": int(self.valid_s),
                "acquireTime": spec["acquireTime"] if mine else now,
                "renewTime": now,
                "leaseTransitions": int(spec.get("leaseTransitions") or 0) + (0 if mine else 1),
            },
        }

    async def _give_up(self) -> None:
        try:
            found = await self.cluster.get(kinds.LEASE, self.namespace, LEASE)
            if found is not None and found["spec"].get("holderIdentity") == self.identity:
                found["spec"]["holderIdentity"] = ""
                await self.cluster.replace(found, kinds.LEASE)
        except (*UNREACHABLE, ApiError) as error:
            log.warning("lease_not_given_up error=%r", str(error))

    def _set(self, held: bool) -> None:
        if held != self._held:
            log.info("leading identity=%s" if held else "not_leading identity=%s", self.identity)
            self._held = held
            self.leading(held)
