"""Preparing a claim on this node, and taking it back: as often as the kubelet likes, across any restart."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from kvpool.cxl import Backend, ComposeError
from kvpool_operator import kinds
from kvpool_operator.client import UNREACHABLE, ApiError, Cluster
from kvpool_operator.dra import pools, regions
from kvpool_operator.dra.allocation import Allocation, ClaimRef, Result, allocation_of
from kvpool_operator.dra.cdi import Folder, Given, Mount
from kvpool_operator.dra.checkpoint import Checkpoint, Record
from kvpool_operator.dra.parameters import POLICIES, NotYet, PoolParameters, Refused, RegionParameters
from kvpool_operator.manifest import PoolObject
from kvpool_operator.names import GROUP_ID, POLICY_ANNOTATION

log = logging.getLogger("kvpool.dra")
_T = TypeVar("_T")

# A pod that comes before its pool's daemon has started on the node is worth waiting for: the kubelet gives a
# call 45 s, and tries again only after another minute.
WAIT_S, WAIT_POLL_S = 20.0, 0.5


@dataclass(frozen=True, slots=True)
class Settings:
    """What the plugin was started with, as far as claims see it."""

    node: str
    namespace: str  # the operator's: its claims name the tiers that their regions are for
    region_namespaces: frozenset[str] = frozenset()  # others whose claims may have memory by itself
    group_id: int = GROUP_ID


@dataclass
class Preparer:
    """Threads: one event loop. The backend's calls block, and are made in threads.

    Raises:  Refused by `prepare`; ApiError and UNREACHABLE where the Kubernetes API is needed.
    """

    cluster: Cluster
    backend: Backend
    checkpoint: Checkpoint
    cdi: Folder
    settings: Settings
    wait_s: float = WAIT_S
    changed: Callable[[], None] = lambda: None  # told when a region came or a claim went

    async def prepare(self, ref: ClaimRef) -> Sequence[Result]:
        """The claim's devices, ready on this node; what is prepared already stays as it is."""
        async with self.checkpoint.locked(ref.uid):
            record = self.checkpoint.read(ref.uid)
            ready = record is not None and record.state == "prepared" and self.cdi.has(ref.uid)
            try:
                allocation = allocation_of(
                    ref, await self.cluster.get(kinds.RESOURCE_CLAIM, ref.namespace, ref.name)
                )
            except (*UNREACHABLE, ApiError):
                if record is not None and ready:
                    return record.results  # the API server may be away: what was prepared is still good
                raise
            if record is not None and ready and record.results == allocation.results:
                return record.results
            record = Record(ref, "preparing", allocation.results)
            if isinstance(allocation.parameters, PoolParameters):
                found = await self._pool(ref, allocation, allocation.parameters)
                self.checkpoint.write(record)
            else:
                record, found = await self._region(record, allocation, allocation.parameters)
            await asyncio.to_thread(self.cdi.write, ref.uid, found)
            self.checkpoint.write(record.told(state="prepared"))
            log.info("prepared claim=%s/%s uid=%s", ref.namespace, ref.name, ref.uid)
            return allocation.results

    async def unprepare(self, ref: ClaimRef) -> None:
        """Nothing of the claim is given to containers any more; a region stays until its claim is gone."""
        async with self.checkpoint.locked(ref.uid):
            self.cdi.remove(ref.uid)
            record = self.checkpoint.read(ref.uid)
            if record is None or not record.region:
                self.checkpoint.remove(ref.uid)
            else:
                policy = await self.policy_now(record)
                self.checkpoint.write(record.told(state="released", policy=policy))
            log.info("unprepared claim=%s/%s uid=%s", ref.namespace, ref.name, ref.uid)
        self.changed()

    async def claim(self, ref: ClaimRef) -> dict[str, Any] | None:
        """The claim itself; None when it is gone, or another one has its name."""
        found = await self.cluster.get(kinds.RESOURCE_CLAIM, ref.namespace, ref.name)
        return found if found is not None and found["metadata"].get("uid") == ref.uid else None

    async def policy_now(self, record: Record) -> str:
        """What shall become of a region, as far as it is known now."""
        try:
            claim = await self.claim(record.ref)
        except (*UNREACHABLE, ApiError):
            return record.policy
        return record.policy if claim is None else self.policy_of(record, claim)

    def policy_of(self, record: Record, claim: Mapping[str, Any]) -> str:
        """What shall become of a region: as its KVPool says now, where the operator made the claim."""
        if record.ref.namespace != self.settings.namespace:
            return record.policy
        said = (claim["metadata"].get("annotations") or {}).get(POLICY_ANNOTATION, record.policy)
        return said if said in POLICIES else record.policy

    async def _pool(self, ref: ClaimRef, allocation: Allocation, parameters: PoolParameters) -> Given:
        wanted = allocation.pool
        body = None
        if wanted.namespace == ref.namespace:  # another one's is not even looked at
            body = await self.cluster.get(kinds.POOL, wanted.namespace, wanted.name)
        pool = pools.usable_pool(ref, wanted, body)
        until = time.monotonic() + self.wait_s
        while True:
            try:
                return await self._served(ref, pool, parameters)
            except NotYet:
                if time.monotonic() >= until:
                    raise
            await asyncio.sleep(WAIT_POLL_S)

    async def _served(self, ref: ClaimRef, pool: PoolObject, parameters: PoolParameters) -> Given:
        """What this node has of the pool. Raises: NotYet before its daemon has started."""
        here = await self._composing(self.backend.regions) if pool.claimed else []
        found = pools.given(ref, pool, parameters.role, here, self.settings.group_id)
        if not Path(pool.node_folder).is_dir():
            raise NotYet(
                f"{ref.where}: KVPool {pool.name} is not served on this node yet: "
                f"{pool.node_folder} is missing. The "
                "pool's daemon makes it; the pod is tried again by itself."
            )
        return found

    async def _region(
        self, record: Record, allocation: Allocation, parameters: RegionParameters
    ) -> tuple[Record, Given]:
        ref, tier = record.ref, parameters.tier
        self._may_have_region(ref, parameters)
        memories = await self._composing(self.backend.memories)
        there = await self._composing(self.backend.regions)
        wanted = regions.wanted(ref, allocation, parameters, memories, there)
        record = record.told(region=str(wanted.uuid), policy=parameters.policy)
        record = record.told(policy=await self.policy_now(record))
        # Before anything is made: a crash in between leaves a region that somebody knows of.
        self.checkpoint.write(record)
        try:
            composed = await self._composing(lambda: self.backend.compose(wanted))
        except Refused:
            if not any(region.uuid == wanted.uuid for region in there):
                self.checkpoint.remove(ref.uid)  # the backend took back what it had begun
            raise
        self.changed()
        at = regions.container_path(ref, tier)
        place = regions.placed(composed, at)
        return record, Given(
            mounts=(place,) if isinstance(place, Mount) else (),
            nodes=() if isinstance(place, Mount) else (place,),
            environment=() if tier else (("KVPOOL_REGION", at),),
            group_id=self.settings.group_id,
        )

    def _may_have_region(self, ref: ClaimRef, parameters: RegionParameters) -> None:
        own = ref.namespace == self.settings.namespace
        if parameters.tier is not None and not own:
            raise Refused(
                f"{ref.where}: parameters.pool is for the claims of the operator in "
                f"{self.settings.namespace}; a pod gets "
                "a KVPool by DeviceClass kvpool."
            )
        if not own and ref.namespace not in self.settings.region_namespaces:
            raise Refused(
                f"{ref.where}: claims of namespace {ref.namespace} get no CXL memory by itself, "
                "because it may hold what "
                "others stored. Use a KVPool, or add the namespace to the chart's dra.regionNamespaces."
            )

    async def _composing(self, act: Callable[[], _T]) -> _T:
        try:
            return await asyncio.to_thread(act)
        except ComposeError as error:
            raise Refused(str(error)) from None
