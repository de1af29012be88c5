"""Sources and statuses for the API's tests, without a region or a cluster."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, Literal

from kvpool.api import model
from kvpool.api.status import Board, Key, PoolStatus, Readiness
from kvpool.report import Counters, NamespaceUsage

NOW = 1_800_000_000.0


class Clock:
    """Time that moves when it is told to."""

    def __init__(self, now: float = NOW) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class StillSource:
    """A source whose board is filled by the test."""

    kind: Literal["local", "cluster"] = "cluster"

    def __init__(self, *statuses: PoolStatus) -> None:
        self._board = Board()
        self.ready = Readiness(True)
        for status in statuses:
            self._board.put(status)

    @property
    def board(self) -> Board:
        return self._board

    def readiness(self) -> Readiness:
        return self.ready

    async def run(self) -> None:
        await asyncio.Event().wait()


def namespace(digest: str, blocks: int = 10, **fields: object) -> NamespaceUsage:
    description: dict[str, object] = {"model": "m", "dtype": "float16", "block_tokens": 16, "tp_size": 1}
    return NamespaceUsage(digest, description | fields, 4096, blocks, blocks * 4096)


def counters(lookups: int, hits: int, **other: Any) -> Counters:
    misses = {"evicted": lookups - hits} if lookups > hits else {}
    return Counters(lookups=lookups, hits=hits, misses=misses, **other)


def pool(
    name: str = "p", space: str = "team", lookups: int = 100, hits: int = 80, nodes: int = 2, **other: Any
) -> PoolStatus:
    counted = counters(lookups, hits)
    tier = model.Tier(
        name="dram",
        medium="DRAM",
        capacity_bytes=1 << 30,
        used_bytes=1 << 29,
        blocks=10,
        lookups=lookups,
        hits=hits,
        hit_rate=model.percent(hits, lookups),
    )
    conditions = [model.Condition(type="Ready", status="True", reason="AllNodesReady")]
    shown = model.Pool(
        namespace=space,
        name=name,
        conditions=conditions,
        nodes=model.NodeCounts(desired=nodes, ready=nodes),
        capacity_bytes=1 << 30,
        used_bytes=1 << 29,
        blocks=10,
        lookups=lookups,
        hits=hits,
        hit_rate=model.percent(hits, lookups),
        misses=counted.misses,
        tiers=[tier],
    )
    made = PoolStatus(
        key=Key(space, name),
        pool=shown,
        observed_at=NOW,
        stale_after_s=60.0,
        counters=counted,
        nodes=[
            model.Node(name=f"{name}-{i}", node_name=f"worker-{i}", ready=True, tiers=[tier], lookups=lookups)
            for i in range(nodes)
        ],
        nodes_at={f"{name}-{i}": NOW - i for i in range(nodes)},
        namespaces=[namespace("ab" * 20), namespace("cd" * 20, 4, dtype="float32")],
        engines=[model.EngineMisses(engine="h0/4711", node="worker-0", tiers=["dram"])],
        series={"node-0": counted},
    )
    return replace(made, **other)
