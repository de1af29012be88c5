"""What is known of a pool on this machine: live from its regions, else from its daemon's last report."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from kvpool import engines, paths
from kvpool.daemon import snapshot
from kvpool.daemon.last_report import last_report
from kvpool.daemon.lock import holder
from kvpool.daemon.snapshot import TierSnapshot
from kvpool.errors import KvpoolError
from kvpool.provision.plan import in_this_version
from kvpool.regions_here import RegionTarget, hosts_here, regions_of
from kvpool.report import Counters, EngineReports, NamespaceUsage
from kvpool.spec import PoolSpec

STALE_REPORT_S = 15.0  # a daemon reports every 2 s; older than this, something keeps it from doing so


@dataclass
class PoolView:
    """One look at a pool."""

    spec: PoolSpec
    tiers: list[TierSnapshot] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)  # tier -> why there are no live numbers of it
    hosts: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # about the look itself, not the pool
    reports: EngineReports = field(default_factory=EngineReports)  # one entry an engine

    @property
    def counters(self) -> Counters:
        return snapshot.totals(self.tiers)

    @property
    def namespaces(self) -> list[NamespaceUsage]:
        """What the regions hold, and what engines of late use without having stored anything."""
        used = {digest for engine in self.reports.engines for digest in engine.namespaces if digest}
        return [n for tier in self.tiers for n in tier.usage.namespaces] + [
            NamespaceUsage(n.digest, n.description, n.block_bytes, blocks=0, bytes=0)
            for n in self.reports.namespaces.values()
            if n.digest in used
        ]

    @property
    def problems(self) -> list[str]:
        """What is not as it should be, in sentences."""
        found = [f"tier {tier}: {why}" for tier, why in self.absent.items()]
        for host in self.hosts:
            found += [f"host {host['host']}: {problem}" for problem in host["problems"]]
        return found

    @property
    def conditions(self) -> list[dict[str, Any]]:
        """What the hosts of this machine say, each condition once: the worst of them."""
        order = {"False": 0, "Unknown": 1, "True": 2}
        said = [condition for host in self.hosts if host["running"] for condition in host["conditions"]]
        worst: dict[str, dict[str, Any]] = {}
        for condition in sorted(said, key=lambda c: order.get(c["status"], 1)):
            worst.setdefault(condition["type"], condition)
        return list(worst.values())

    @property
    def events(self) -> list[dict[str, Any]]:
        """What happened lately, on all hosts of this machine, the newest last."""
        found = [{"host": host["host"], **event} for host in self.hosts for event in host["events"]]
        return sorted(found, key=lambda event: float(event["last_at"]))

    @property
    def state(self) -> str:
        """Ready, Degraded (works, but something is wrong), Stopped (blocks are kept), Absent (no region), or
        Failed (no region can be opened)."""
        if not self.tiers:
            exists = any(region.path.exists() for region in regions_of(self.spec))
            return "Failed" if exists else "Absent"
        if not any(host["running"] for host in self.hosts):
            return "Stopped"
        return "Degraded" if self.problems else "Ready"

    def to_object(self) -> dict[str, Any]:
        return {
            **snapshot.pool_object(self.spec.name, self.tiers),
            "state": self.state,
            "deletion_policy": self.spec.deletion_policy,
            "conditions": self.conditions,
            "events": self.events,
            "hosts": self.hosts,
            "problems": self.problems,
            "notes": self.notes,
            "engines": [
                {"engine": engine.shown, "live": engine.ended_at is None, **asdict(engine)}
                for engine in self.reports.engines
            ],
            "namespaces": [
                {"lookups": n.counts.lookups, **asdict(n)} for n in self.reports.namespaces.values()
            ],
        }


def look(spec: PoolSpec) -> PoolView:
    """A fresh look at a pool."""
    view = PoolView(spec, hosts=[_host(spec, host) for host in hosts_here(spec)])
    for tier in spec.tiers:
        why_not = in_this_version(tier)
        if why_not is not None and not tier.optional:
            view.absent[tier.name] = why_not
    for region in regions_of(spec):
        assert region.tier is not None
        try:
            view.tiers.append(_snapshot(spec, region))
        except KvpoolError as error:
            if spec.tier(region.tier).optional and not region.path.exists():
                continue
            reported = _reported(spec, region)
            if reported is None:
                view.absent[region.label] = str(error)
                continue
            # Of another user's pool the daemon's report may be read, while the regions may not. That is no
            # fault of the pool; its faults are in the report.
            view.tiers.append(reported)
            view.notes.append(f"tier {region.label} is shown as its daemon last reported it: {error}")
    view.reports = _engines(spec)
    view.notes += [
        f"engine report {name} is not counted: {why}" for name, why in view.reports.skipped.items()
    ]
    if view.reports.left_out:
        view.notes.append(f"{view.reports.left_out} engine processes more are counted, and not listed")
    return view


def _engines(spec: PoolSpec) -> EngineReports:
    """What engines counted. What this user may not read, the daemons say."""
    seen = engines.look(spec.name).grouped()
    folder = paths.engines_path(spec.name)
    if not seen.skipped and (not folder.is_dir() or os.access(folder, os.R_OK | os.X_OK)):
        return seen
    told: list[EngineReports] = []
    for host in hosts_here(spec):
        with contextlib.suppress(KeyError, TypeError, ValueError):
            told.append(engines.reports_from((last_report(spec.name, host) or {})["engines"]))
    if not told or sum(len(each.skipped) for each in told) >= max(1, len(seen.skipped)):
        return seen
    total = told[0]
    for each in told[1:]:
        total = total + each
    return total


def _reported(spec: PoolSpec, region: RegionTarget) -> TierSnapshot | None:
    """What the running daemon last reported of a region."""
    report = last_report(spec.name, region.host)
    if report is None or holder(paths.daemon_lock_path(spec.name, region.host)) is None:
        return None
    try:
        (tier,) = (tier for tier in report["tiers"] if tier["path"] == str(region.path))
        participants = [p for p in report["participants"] if p["tier"] == region.tier]
        return TierSnapshot.from_object(tier, participants)
    except (KeyError, TypeError, ValueError):
        return None


def _snapshot(spec: PoolSpec, region: RegionTarget) -> TierSnapshot:
    from kvpool.region import Region

    if not region.path.exists():
        raise KvpoolError(f"there is no region at {region.path}")
    assert region.tier is not None
    with Region.open_read_only(region.path) as opened:
        taken = snapshot.take(spec.tier(region.tier), region.path, region.host, opened)
    taken.participants[:] = [p for p in taken.participants if p.alive]
    return taken


def _host(spec: PoolSpec, host: int) -> dict[str, Any]:
    """A host's daemon: whether it runs, and what it last had to say."""
    pid = holder(paths.daemon_lock_path(spec.name, host))
    report = last_report(spec.name, host)
    described: dict[str, Any] = {"host": host, "running": pid is not None, "pid": pid, "problems": []}
    described |= {"conditions": [], "events": []}
    if report is not None:
        age_s = round(max(0.0, time.time() - report["updated_at"]), 1)
        described |= {key: report[key] for key in ("node_name", "started_at", "updated_at", "scrub")}
        described |= {key: report.get(key, []) for key in ("conditions", "events")}
        described |= {"age_s": age_s, "problems": list(report["problems"])}
        if pid is not None and age_s > STALE_REPORT_S:
            described["problems"].append(f"the daemon (process {pid}) has not reported for {age_s:.0f} s")
        elif pid is None:
            described["problems"].append("the daemon ended without being stopped; start it with 'kvpool up'")
    return described
