"""What nobody needs any more: regions of claims that are gone, and what a killed plugin left."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable
from pathlib import Path
from uuid import UUID

from kvpool.cxl import ComposeError, RegionInUse
from kvpool_operator import kinds
from kvpool_operator.client import UNREACHABLE, ApiError
from kvpool_operator.dra.allocation import ClaimRef
from kvpool_operator.dra.checkpoint import Record
from kvpool_operator.dra.parameters import Refused, RegionParameters, parse
from kvpool_operator.dra.prepare import Preparer
from kvpool_operator.dra.regions import uuid_of
from kvpool_operator.names import DRIVER

log = logging.getLogger("kvpool.dra")

FIRST_S, MOST_S = 1.0, 60.0  # between two looks at claims that were released
HALF_WRITTEN_S = 60.0  # the other instance may just be writing one


class Leftovers:
    """Looks after what `Preparer` keeps on record. Threads: one event loop."""

    def __init__(self, preparer: Preparer) -> None:
        self._preparer = preparer
        self._wake = asyncio.Event()
        self._from_before: set[str] = set()  # claims on record at the start that were not looked at since

    def wake(self) -> None:
        """Something was released: look soon."""
        self._wake.set()

    async def run(self) -> None:
        """At the start everything, then what was released; until cancelled."""
        pause, tidied = FIRST_S, False
        while True:
            try:
                if not tidied:
                    self._from_before = self._preparer.checkpoint.uids()
                    await self.tidy()
                    tidied = True
                await self.release()
            except Exception:  # a folder that cannot be read: it is tried again
                log.exception("leftovers_failed")
            try:
                await asyncio.wait_for(self._wake.wait(), pause)
                self._wake.clear()
                pause = FIRST_S
            except asyncio.TimeoutError:
                pause = min(pause * 2, MOST_S)

    async def tidy(self) -> None:
        """CDI files that no record stands for, and files that were half written."""
        preparer = self._preparer
        for uid in preparer.cdi.uids() - preparer.checkpoint.uids():
            async with preparer.checkpoint.locked(uid):
                # The record is written first and removed last: without one nobody is at work here.
                if uid not in preparer.checkpoint.uids():
                    try:
                        preparer.cdi.remove(uid)
                    except OSError as error:
                        log.warning("leftover_kept cdi=%s error=%r", uid, str(error))
                        continue
                    log.warning("leftover_removed cdi=%s", uid)
        _remove_old([*preparer.cdi.unfinished(), *preparer.checkpoint.unfinished()])

    async def release(self) -> None:
        """End what is on record for claims that are gone, and at a start also what still counts as prepared.

        A claim that goes while its pod runs (its finalizer was taken off by hand) is left to the kubelet,
        which takes it back when the pod ends; only a new start looks closer. Whatever happens to one record
        keeps no other from being looked at.
        """
        for uid in sorted(self._preparer.checkpoint.uids()):
            try:
                await self._release(uid, gone_too=uid in self._from_before)
                self._from_before.discard(uid)
            except (*UNREACHABLE, ApiError) as error:
                log.warning("leftovers_failed claim=%s error=%r", uid, str(error) or type(error).__name__)
            except Exception:
                log.exception("leftovers_failed claim=%s", uid)

    async def _release(self, uid: str, *, gone_too: bool) -> None:
        checkpoint = self._preparer.checkpoint
        record = checkpoint.read(uid)
        if record is None or (record.state == "prepared" and not record.region and not gone_too):
            return
        claim = await self._preparer.claim(record.ref)
        async with checkpoint.locked(uid):
            record = checkpoint.read(uid)
            if record is None:
                return
            if claim is None and (record.state != "prepared" or gone_too):
                await self._end(record)
            elif claim is not None and record.region:
                # A pool's policy may change while its region is in use, and the claim may be gone before
                # it is taken back here.
                policy = self._preparer.policy_of(record, claim)
                if policy != record.policy:
                    checkpoint.write(record.told(policy=policy))

    async def _end(self, record: Record) -> None:
        preparer, ref = self._preparer, record.ref
        preparer.cdi.remove(ref.uid)
        if record.region and not await self._destroyed(record):
            return
        preparer.checkpoint.remove(ref.uid)
        preparer.changed()

    async def _destroyed(self, record: Record) -> bool:
        """Let a region go, or keep it as its policy says. False: it is in the way of something, try again."""
        uuid, ref, with_blocks = UUID(record.region), record.ref, record.policy == "Delete"
        # What belongs to no pool goes with its claim, unless somebody has put a pool's blocks into it.
        if not (with_blocks or uuid == uuid_of(ref, None)) or await self._is_wanted(record):
            log.info("region_kept uuid=%s policy=%s", uuid, record.policy)
            return True
        try:
            await asyncio.to_thread(self._preparer.backend.destroy, uuid, with_blocks=with_blocks)
        except ComposeError as error:
            log.warning("region_kept uuid=%s error=%r", uuid, str(error))
            return isinstance(error, RegionInUse) and not with_blocks
        log.info("region_destroyed uuid=%s claim=%s/%s", uuid, ref.namespace, ref.name)
        return True

    async def _is_wanted(self, record: Record) -> bool:
        """Whether another claim is for the same region: a pool that was deleted and made again at once."""
        checkpoint = self._preparer.checkpoint
        for uid in checkpoint.uids() - {record.ref.uid}:
            other = checkpoint.read(uid)
            if other is not None and other.region == record.region and other.state != "released":
                return True
        for claim in await self._preparer.cluster.list(
            kinds.RESOURCE_CLAIM, self._preparer.settings.namespace
        ):
            metadata = claim["metadata"]
            ref = ClaimRef(metadata["namespace"], metadata["name"], metadata["uid"])
            if ref.uid != record.ref.uid and record.region in _regions_of(ref, claim):
                return True
        return False


def _regions_of(ref: ClaimRef, claim: dict[str, object]) -> Iterable[str]:
    spec: object = claim.get("spec") or {}
    devices = spec.get("devices") or {} if isinstance(spec, dict) else {}
    for config in devices.get("config") or []:
        opaque = config.get("opaque") or {}
        if opaque.get("driver") != DRIVER:
            continue
        try:
            parameters = parse(opaque.get("parameters"))
        except Refused:
            continue
        if isinstance(parameters, RegionParameters):
            yield str(uuid_of(ref, parameters.tier))


def _remove_old(paths: Iterable[Path]) -> None:
    for path in paths:
        try:
            if time.time() - path.stat().st_mtime > HALF_WRITTEN_S:
                path.unlink()
        except FileNotFoundError:
            continue
        except OSError as error:
            log.warning("leftover_kept path=%s error=%r", path, str(error))
