"""Engines and namespaces as the API says them: from what engines report, and from who is attached."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from kvpool.api import model, times
from kvpool.api.status import PoolStatus
from kvpool.errors import KvpoolError
from kvpool.report import (
    Counters,
    EngineReport,
    NamespaceCounts,
    NamespaceReport,
    NamespaceUsage,
    ParticipantInfo,
)

SHOWN_DIGITS = 12
DIGITS_MIN = 4
LISTED = 10


class UnknownEngine(KvpoolError):
    """No engine of the pool is called so; the message lists those that are."""


def whose(status: PoolStatus, engine: str | None) -> tuple[Counters | None, list[str]]:
    """The counters of one engine (None: nobody counts for it alone), and its namespaces' digests.

    `engine`: its name, or the beginning of its namespace's digest; None for the whole pool.
    Raises: UnknownEngine.
    """
    if engine is None:
        return None, []
    held = list(status.namespaces or ())
    named = next((each for each in status.engines if each.engine == engine), None)
    if named is not None:
        if named.lookups is None or named.hits is None:
            return None, named.namespaces
        blocks = sum(n.blocks for n in held if n.digest[:SHOWN_DIGITS] in named.namespaces)
        own = Counters(named.lookups, named.hits, dict(named.misses or {}), stored=blocks)
        return own, named.namespaces
    digests = [n.digest for n in held if n.digest.startswith(engine) and len(engine) >= DIGITS_MIN]
    if not digests and 0 < len(engine) < DIGITS_MIN and any(n.digest.startswith(engine) for n in held):
        raise UnknownEngine(
            f"engine: {engine} is too short for the beginning of a digest: give four or more digits"
        )
    if not digests:
        listed = [each.engine for each in status.engines[:LISTED]]
        listed += [n.digest[:SHOWN_DIGITS] for n in held[:LISTED]]
        raise UnknownEngine(
            f"engine: no engine of this pool is called {engine}, and no namespace's digest begins so; "
            f"there are: {', '.join(listed) or 'none that can be seen from here'}"
        )
    told = [status.reports[digest].counts for digest in digests if digest in status.reports]
    return sum(told, NamespaceCounts()).counters() if told else None, digests


def engines(
    reports: Iterable[EngineReport],
    attached: Iterable[tuple[str, ParticipantInfo]],
    nodes: Mapping[int, str],
) -> list[model.EngineMisses]:
    """The engines of this machine: those that report, and those that are attached and do not.

    `attached`: the tier with each participant. `nodes`: names by host.
    """
    reports = list(reports)
    found = [_reported(report, nodes.get(report.host, "")) for report in reports]
    silent: dict[tuple[int, int], list[str]] = {}
    for tier, process in attached:
        if process.role == "engine" and process.alive:
            tiers = silent.setdefault((process.host, process.pid), [])
            tiers += [tier] if tier not in tiers else []
    # In pods a process id is not unique: as many as report one are taken for those that report.
    known = {(report.host, pid) for report in reports if report.ended_at is None for pid in report.pids}
    found += [
        model.EngineMisses(engine=f"h{host}/{pid}", node=nodes.get(host, ""), live=True, tiers=tiers)
        for (host, pid), tiers in silent.items()
        if (host, pid) not in known
    ]
    return sorted(found, key=lambda engine: (not engine.live, engine.engine))


def _reported(report: EngineReport, node: str) -> model.EngineMisses:
    total = report.total
    return model.EngineMisses(
        engine=report.shown,
        node=node,
        pod_name=report.pod,
        live=report.ended_at is None,
        started_at=times.text(report.started_at),
        ended_at=None if report.ended_at is None else times.text(report.ended_at),
        tiers=report.tiers,
        namespaces=[digest[:SHOWN_DIGITS] for digest in sorted(report.namespaces) if digest],
        lookups=total.lookups,
        hits=total.hits,
        hit_rate=model.percent(total.hits, total.lookups),
        misses=total.misses,
    )


def namespaces(
    known: Sequence[NamespaceUsage], reports: Mapping[str, NamespaceReport]
) -> list[model.NamespaceOfEngine]:
    """What is stored, by what has to be equal to share it, with what engines did."""
    return [_namespace(n, reports.get(n.digest)) for n in known]


def _namespace(n: NamespaceUsage, report: NamespaceReport | None) -> model.NamespaceOfEngine:
    said = str(n.description.get("block_tokens"))
    made = model.NamespaceOfEngine(
        digest=n.digest[:SHOWN_DIGITS],
        model=str(n.description.get("model", "")),
        block_tokens=int(said) if said.isdecimal() and len(said) < 10 else None,
        block_bytes=n.block_bytes,
        blocks=n.blocks,
        bytes=n.bytes,
        description={name: str(value) for name, value in n.description.items()},
    )
    if report is None:
        return made
    counts = report.counts
    return made.model_copy(
        update={
            "tenant": report.keyed,
            "lookups": counts.lookups,
            "hits": counts.hits,
            "hit_rate": model.percent(counts.hits, counts.lookups),
            "misses": dict(counts.misses),
            "saved_tokens": report.saved_tokens,
            "saved_prefill_seconds": None if report.saved_ms is None else report.saved_ms / 1000,
        }
    )
