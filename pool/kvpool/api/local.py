"""The source for one machine: its pools, seen with the same code as `kvpool status`."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

from kvpool import paths
from kvpool.api import engines, model, times
from kvpool.api.saved import saved
from kvpool.api.status import Board, Key, PoolStatus, Readiness
from kvpool.daemon.snapshot import TierSnapshot
from kvpool.errors import KvpoolError
from kvpool.explain import merged
from kvpool.report import Counters
from kvpool.spec import PoolSpec
from kvpool.view import PoolView, look

log = logging.getLogger("kvpool.api")

NAMESPACE = "local"
LOOK_S = 2.0  # as often as a daemon reports
REST = 20  # a look walks over all slots, 0.1 s at 10^7 of them: rest this many times as long as it took
STALE_S = 15.0


class LocalSource:
    """Looks at this machine's pools again and again."""

    kind: Literal["local", "cluster"] = "local"

    def __init__(
        self,
        names: Callable[[], Sequence[str]] = paths.pool_names,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._names, self._clock = names, clock
        self._board = Board()
        self._looked = False
        self._problem = ""

    @property
    def board(self) -> Board:
        return self._board

    def readiness(self) -> Readiness:
        if not self._looked:
            return Readiness(False, "the first look at this machine's pools is not done yet; ask again")
        if self._problem:
            return Readiness(False, f"this machine's pools cannot be looked at: {self._problem}")
        return Readiness(True)

    async def run(self) -> None:
        while True:
            began = time.monotonic()
            await self.step()
            took = time.monotonic() - began
            await asyncio.sleep(max(LOOK_S, took * REST))

    async def step(self) -> None:
        """One look at everything, in a thread: regions may lie on slow media."""
        try:
            statuses = await asyncio.to_thread(self._look)
        except Exception as error:  # the API outlives whatever a medium does
            problem = f"{type(error).__name__}: {error}"
            if problem != self._problem:
                log.warning("look_failed error=%r", problem)
            self._problem = problem
            return
        self._problem, self._looked = "", True
        for key in set(self._board.known()) - {status.key for status in statuses}:
            self._board.remove(key)
        for status in statuses:
            self._board.put(status)

    def _look(self) -> list[PoolStatus]:
        return [self._look_at(name) for name in self._names()]

    def _look_at(self, name: str) -> PoolStatus:
        at = self._clock()
        try:
            return status_of(look(PoolSpec.from_file(paths.manifest_path(name))), at)
        except KvpoolError as error:
            return _failed(name, str(error), at)


def status_of(view: PoolView, at: float) -> PoolStatus:
    """What `kvpool status` shows, as the API says it."""
    counters = view.counters
    namespaces = merged(view.namespaces)
    tiers = model.with_rates(_tiers(view.tiers), counters.lookups)
    nodes = [_node(view, host) for host in view.hosts]
    # A host that was stopped on purpose leaves no report: it is not wanted any more, and not missing.
    wanted = [host for host in view.hosts if host["running"] or host["problems"]]
    pool = model.Pool(
        namespace=NAMESPACE,
        name=view.spec.name,
        conditions=_conditions(view),
        nodes=model.NodeCounts(desired=len(wanted), ready=sum(node.ready for node in nodes)),
        capacity_bytes=sum(tier.capacity_bytes for tier in tiers),
        used_bytes=sum(tier.used_bytes for tier in tiers),
        blocks=sum(tier.blocks for tier in tiers),
        lookups=counters.lookups,
        hits=counters.hits,
        hit_rate=model.percent(counters.hits, counters.lookups),
        misses=counters.misses,
        evictions=counters.evictions,
        tiers=tiers,
        saved=saved(counters.hits, namespaces, view.reports.namespaces),
        problems=view.problems,
    )
    reported = {
        _node_name(view, host): float(host["updated_at"]) for host in view.hosts if "updated_at" in host
    }
    return PoolStatus(
        key=Key(NAMESPACE, view.spec.name),
        pool=pool,
        observed_at=at,
        stale_after_s=STALE_S,
        counters=counters,
        nodes=nodes,
        nodes_at=reported,
        namespaces=namespaces,
        reports=view.reports.namespaces,
        engines=_engines(view),
        events=[_event(view, event) for event in view.events],
        series={f"{tier.path}": tier.counters for tier in view.tiers},
    )


def _tiers(snapshots: Sequence[TierSnapshot]) -> list[model.Tier]:
    """One entry a tier: the regions of several hosts of this machine are added."""
    found: dict[str, model.Tier] = {}
    for taken in snapshots:
        tier = _tier(taken)
        before = found.get(tier.name)
        if before is not None:
            tier = before.model_copy(
                update={
                    "capacity_bytes": before.capacity_bytes + tier.capacity_bytes,
                    "used_bytes": before.used_bytes + tier.used_bytes,
                    "blocks": before.blocks + tier.blocks,
                    "evictions": before.evictions + tier.evictions,
                    "lookups": before.lookups + tier.lookups,
                    "hits": before.hits + tier.hits,
                }
            )
        found[tier.name] = tier
    return list(found.values())


def _tier(taken: TierSnapshot) -> model.Tier:
    shared = taken.host is None
    shards = [
        model.Shard(
            shard=shard.host,
            owner=shard.owner,
            epoch=shard.epoch,
            used_bytes=shard.used_bytes,
            blocks=shard.blocks,
        )
        for shard in (taken.usage.hosts if shared else ())
    ]
    return model.Tier(
        name=taken.name,
        medium=taken.medium,
        capacity_bytes=taken.usage.capacity_bytes,
        used_bytes=taken.usage.used_bytes,
        blocks=taken.usage.blocks,
        evictions=taken.counters.evictions,
        lookups=taken.counters.lookups,
        hits=taken.counters.hits,
        shared=shared,
        shards=shards,
    )


def _node_name(view: PoolView, host: dict[str, Any]) -> str:
    return f"{view.spec.name}-{host['host']}"


def _node(view: PoolView, host: dict[str, Any]) -> model.Node:
    """A host of this machine. Of a region that several hosts share nobody knows whose lookups they were."""
    alone = len(view.hosts) == 1
    tiers = [tier for tier in view.tiers if alone or tier.host in (None, host["host"])]
    own = [tier for tier in tiers if alone or tier.host is not None]
    counters = sum((tier.counters for tier in own), Counters())
    refused = any(condition["status"] == "False" for condition in host["conditions"])
    ready = host["running"] and not refused
    message = (
        "" if ready else "; ".join(host["problems"]) or "its daemon is not running: 'kvpool up' starts it"
    )
    started = host.get("started_at")
    return model.Node(
        name=_node_name(view, host),
        node_name=host.get("node_name", ""),
        host=host["host"],
        ready=ready,
        message=message,
        version="",
        started_at=None if started is None else times.text(started),
        conditions=[_condition(condition) for condition in host["conditions"]],
        tiers=model.with_rates(map(_tier, tiers), counters.lookups if alone else 0),
        lookups=counters.lookups,
        hits=counters.hits,
        hit_rate=model.percent(counters.hits, counters.lookups),
        misses=counters.misses,
        problems=list(host["problems"]),
    )


def _condition(said: dict[str, Any]) -> model.Condition:
    return model.Condition(
        type=said["type"],
        status=said["status"],
        reason=said["reason"],
        message=said["message"],
        last_transition_time=times.text(said["since"]),
    )


def _conditions(view: PoolView) -> list[model.Condition]:
    state, problems = view.state, view.problems
    ready = state in ("Ready", "Degraded")
    advice = {
        "Stopped": "no daemon runs; the blocks are kept, and engines go on. Start it with 'kvpool up'.",
        "Absent": "no region of it exists on this machine. Make it with 'kvpool up'.",
        "Failed": "; ".join(problems) or "no region can be opened. See 'kvpool fsck'.",
    }
    return [
        model.Condition(
            type="Ready",
            status="True" if ready else "False",
            reason="DaemonRuns" if ready else state,
            message="" if ready else advice.get(state, ""),
        ),
        model.Condition(
            type="Degraded",
            status="True" if problems else "False",
            reason="Problems" if problems else "AsExpected",
            message="; ".join(problems),
        ),
        *(_condition(said) for said in view.conditions),
    ]


def _engines(view: PoolView) -> list[model.EngineMisses]:
    attached = [(tier.name, process) for tier in view.tiers for process in tier.participants]
    names = {host["host"]: host.get("node_name", "") for host in view.hosts}
    return engines.engines(view.reports.engines, attached, names)


def _event(view: PoolView, event: dict[str, Any]) -> model.Event:
    quiet = event["kind"] in ("ShardReleased", "ShardAudited", "ShardAdopted")
    return model.Event(
        type="Normal" if quiet else "Warning",
        reason=event["kind"],
        tier=event["subject"],
        node=f"{view.spec.name}-{event['host']}",
        message=event["message"],
        count=event["count"],
        at=times.text(event["last_at"]),
    )


def _failed(name: str, why: str, at: float) -> PoolStatus:
    """A pool that is known by name only."""
    condition = model.Condition(type="Ready", status="False", reason="CannotBeSeen", message=why)
    pool = model.Pool(namespace=NAMESPACE, name=name, conditions=[condition], problems=[why])
    return PoolStatus(
        key=Key(NAMESPACE, name), pool=pool, observed_at=at, stale_after_s=STALE_S, counters=Counters()
    )
