"""The daemon's loop: which chore is due when, what happens when one fails, and a clean end."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kvpool import engines
from kvpool.daemon import snapshot
from kvpool.daemon.chores import DaemonRegion, KeepFree, Resize, Scrub
from kvpool.daemon.coherence import CoherenceWatch, watch_in_background
from kvpool.daemon.events import EventLog
from kvpool.daemon.lock import DaemonLock
from kvpool.daemon.ownership import Ownership
from kvpool.daemon.place import Place
from kvpool.daemon.poison import PoisonWatch
from kvpool.daemon.snapshot import TierSnapshot
from kvpool.errors import FencedError, KvpoolError, MediumUnavailable
from kvpool.litmus import Litmus
from kvpool.medium import numa_node
from kvpool.paths import daemon_lock_path, ensure_pool_dir, region_path, report_path
from kvpool.provision.observe import free_bytes
from kvpool.regions_here import hosts_here
from kvpool.spec import PoolSpec, TierSpec

log = logging.getLogger("kvpool.daemon")

HEARTBEAT_S = 1.0
KEEP_FREE_S = 0.25
RESIZE_S = 0.25
REAP_S = 1.0
SCRUB_S = 1.0
REPORT_S = 2.0
FOLD_S = 5.0
RETRY_S_MAX = (
    60.0  # a chore that fails is tried again after 1, 2, 4, ... of its periods, at most this long after
)

Attach = Callable[[TierSpec, Path, int], DaemonRegion]


@dataclass
class Chore:
    """Something to do every `period_s` seconds. A failure is logged once, then retried ever more rarely."""

    name: str
    period_s: float
    run: Callable[[], object]
    clock: Callable[[], float] = time.monotonic
    failed: Callable[[Exception], None] = lambda _: None  # told once of each failure
    subject: str = ""  # the tier that it is about
    rest: float = 20.0  # what takes long is done more rarely: the pause is so many times as long
    due: float = 0.0
    failures: int = 0
    problem: str = ""

    def attempt(self, now: float) -> None:
        began = self.clock()
        try:
            self.run()
        except Exception as error:  # the daemon outlives whatever a medium does
            self.failures += 1
            problem = f"{type(error).__name__}: {error}"
            if problem != self.problem:
                log.warning("chore_failed chore=%s error=%r", self.name, problem)
                self.failed(error)
            self.problem = problem
            self.due = now + min(
                self.period_s * 2.0 ** min(self.failures, 16), max(RETRY_S_MAX, self.period_s)
            )
            if isinstance(error, FencedError):
                self.due = now + RETRY_S_MAX  # another host owns the shard; only the arbiter can change that
            return
        if self.problem:
            log.info("chore_recovered chore=%s failures=%d", self.name, self.failures)
        self.failures, self.problem = 0, ""
        # A report walks over all slots, 0.1 s at 10^7 of them.
        took = self.clock() - began
        self.due = now + max(self.period_s, took * self.rest)


@dataclass
class OpenTier:
    """A tier whose region this daemon looks after."""

    tier: TierSpec
    path: Path
    region: DaemonRegion
    keep_free: KeepFree
    scrub: Scrub
    shard: int = 0  # of this host
    seen: TierSnapshot | None = None
    poison: PoisonWatch | None = None
    place: Place | None = None
    numa_node: int | None = None

    @property
    def trouble(self) -> str:
        """What is wrong with the memory below it."""
        shards = self.seen.usage.hosts if self.seen is not None else []
        retired = sum(shard.slots_retired for shard in shards if shard.host == self.shard)
        return self.poison.trouble(retired) if self.poison is not None else ""


@dataclass
class Daemon:
    """The chores of one host of one pool."""

    spec: PoolSpec
    host: int
    tiers: list[OpenTier]
    skipped: dict[str, str] = field(default_factory=dict)
    clock: Callable[[], float] = time.monotonic
    attach: Attach = field(default_factory=lambda: attach_region)
    chores: list[Chore] = field(init=False)
    last_report: dict[str, Any] = field(default_factory=dict)  # empty before the first one
    started_at: float = field(default_factory=time.time)
    events: EventLog = field(default_factory=EventLog)
    coherence: CoherenceWatch = field(init=False)
    engines: engines.Folder = field(init=False)
    owners: dict[str, Ownership] = field(init=False)

    def __post_init__(self) -> None:
        self.owners = {}
        self.coherence = CoherenceWatch({}, self.events)
        self.chores = []
        for opened in self.tiers:
            self._look_after(opened)
        self.engines = engines.Folder(self.spec.name, self.host)
        self.chores.append(Chore("report", REPORT_S, self.report, self.clock))
        self.chores.append(Chore("engines", FOLD_S, self.fold, self.clock))

    def open(self, tier: TierSpec) -> None:
        """Look after one tier more. Its place in the order is that of `spec`.

        Raises:  KvpoolError when its region cannot be attached.
        """
        path, shard = region_path(self.spec, tier, self.host), self.spec.shard_of(tier, self.host)
        region = self.attach(tier, path, shard)
        opened = OpenTier(
            tier, path, region, KeepFree(region, self.spec.eviction), Scrub(region, SCRUB_S), shard
        )
        order = {declared.name: place for place, declared in enumerate(self.spec.tiers)}
        self.tiers = sorted([*self.tiers, opened], key=lambda each: order.get(each.tier.name, len(order)))
        self._look_after(opened)
        log.info("tier_opened tier=%s path=%s", tier.name, path)

    def close(self, name: str) -> None:
        """Leave the region of a tier, which keeps its blocks."""
        self.coherence.remove(name)
        for opened in [each for each in self.tiers if each.tier.name == name]:
            self.tiers = [each for each in self.tiers if each is not opened]
            self.chores = [chore for chore in self.chores if chore.subject != name]
            self.owners.pop(name, None)
            opened.region.close()
            log.info("tier_closed tier=%s path=%s", name, opened.path)

    def close_all(self) -> None:
        for opened in self.tiers:
            opened.region.close()

    def adjust(self, spec: PoolSpec, skipped: dict[str, str]) -> None:
        """Go by another manifest of the same pool. Tiers are opened and closed by `open` and `close`."""
        self.spec, self.skipped = spec, skipped
        declared = {tier.name: tier for tier in spec.tiers}
        for opened in self.tiers:
            opened.tier = declared.get(opened.tier.name, opened.tier)
            opened.keep_free.eviction = spec.eviction

    def _look_after(self, opened: OpenTier) -> None:
        name, shards = opened.tier.name, self.spec.shards(opened.tier)
        self.owners[name] = Ownership(self.spec.name, name, opened.shard, self.events)
        opened.numa_node = numa_node(str(opened.path))
        opened.place = Place(self.spec.name, name, opened.path, self.events)
        if shards > 1:
            test = Litmus(opened.region, opened.shard, shards, opened.tier.coherence_mode)
            self.coherence.add(name, test)
        self.chores = [*self._chores_of(opened), *self.chores]

    def _chores_of(self, opened: OpenTier) -> list[Chore]:
        name, region = opened.tier.name, opened.region

        def heartbeat() -> None:
            self.owners[name].look(region.heartbeat())

        poison = opened.poison = PoisonWatch(name, opened.path, region, self.events)

        def reap() -> None:
            done = region.reap()
            if done.dead:
                log.info(
                    "reaped tier=%s dead=%d freed=%d republished=%d",
                    name,
                    done.dead,
                    done.freed,
                    done.republished,
                )
                message = (
                    f"{done.dead} processes had died without saying goodbye: {done.freed} slots that they "
                    f"were filling are free again, {done.republished} of their blocks can be found again. "
                    "Look into the engine's log for why it died."
                )
                self.events.add("ParticipantReaped", name, message)

        def scrub() -> None:
            done = opened.scrub.run()
            if done.bad:
                log.warning("scrub_found tier=%s bad=%d; those blocks are misses now", name, done.bad)
                message = (
                    f"{done.bad} blocks were damaged ({opened.scrub.bad} since the daemon started): they "
                    "were dropped, and are misses. Look for memory errors in the machine's log; if it "
                    "happens again, replace the medium."
                )
                self.events.add("DamageFound", name, message)
            if done.failed:
                message = (
                    f"{done.failed} slots could not be read (poisoned memory, or a truncated file). "
                    "Replace the medium; what cannot be read is a miss."
                )
                self.events.add("MediumError", name, message)

        resizing = Resize(region, lambda: free_bytes(opened.path), self.clock)

        def resize() -> None:
            if resizing.run(opened.tier.capacity_bytes):
                log.info("resized tier=%s capacity=%d", name, opened.tier.capacity_bytes)

        def failed(error: Exception) -> None:
            if isinstance(error, MediumUnavailable):
                self.events.add("MediumError", name, str(error))

        return [
            Chore(f"heartbeat/{name}", HEARTBEAT_S, heartbeat, self.clock, failed, subject=name),
            Chore(f"poison/{name}", HEARTBEAT_S, poison.run, self.clock, failed, subject=name),
            Chore(f"keep-free/{name}", KEEP_FREE_S, opened.keep_free.run, self.clock, failed, subject=name),
            Chore(f"resize/{name}", RESIZE_S, resize, self.clock, failed, subject=name, rest=1.0),
            Chore(f"reap/{name}", REAP_S, reap, self.clock, failed, subject=name),
            Chore(f"scrub/{name}", SCRUB_S, scrub, self.clock, failed, subject=name),
        ]

    @property
    def refusal(self) -> str:
        """Why the pool is not ready here; empty when it is."""
        verdict = self.coherence.verdict
        return f"coherence: {verdict.message}" if verdict.status == "False" else ""

    def step(self) -> float:
        """Do what is due; returns the seconds until the next chore is."""
        now = self.clock()
        for chore in self.chores:
            if chore.due <= now:
                chore.attempt(now)
        return max(0.0, min(chore.due for chore in self.chores) - self.clock())

    def report(self) -> None:
        """Write what is known into the pool's folder, completely or not at all."""
        path = report_path(self.spec.name, self.host)
        making = path.with_suffix(".making")
        self.last_report = self.report_object()
        making.write_text(json.dumps(self.last_report) + "\n")
        os.replace(making, path)

    def fold(self) -> None:
        """Engines that ended leave their numbers."""
        folded = self.engines.fold(set(hosts_here(self.spec)) - {self.host})
        if folded:
            log.info("engines_folded pool=%s host=%d count=%d", self.spec.name, self.host, folded)

    def report_object(self) -> dict[str, Any]:
        failed = {opened.tier.name: self._look(opened) for opened in self.tiers}
        problems = [f"tier {name}: {problem}" for name, problem in failed.items() if problem]
        seen = [opened.seen for opened in self.tiers if opened.seen is not None]
        lost = {opened.tier.name: opened.place.look() for opened in self.tiers if opened.place is not None}
        return {
            **snapshot.pool_object(self.spec.name, seen),
            "host": self.host,
            "node_name": socket.gethostname(),
            "pid": os.getpid(),
            "started_at": round(self.started_at, 3),
            "updated_at": round(time.time(), 3),
            "ready": not self.refusal,
            "conditions": [self.coherence.to_object()],
            "events": self.events.to_object(),
            "engines": asdict(engines.look(self.spec.name, self.host).grouped()),
            "skipped_tiers": self.skipped,
            "numa_nodes": {opened.tier.name: opened.numa_node for opened in self.tiers},
            "scrub": {
                opened.tier.name: {
                    "checked": opened.scrub.checked,
                    "bad": opened.scrub.bad,
                    "rounds": opened.scrub.rounds,
                    "bytes": opened.scrub.bytes,
                    "next_slot": opened.scrub.next_slot,
                }
                for opened in self.tiers
            },
            "problems": [
                *([self.refusal] if self.refusal else []),
                *problems,
                *(f"tier {name}: {problem}" for name, problem in lost.items() if problem),
                *(f"tier {name}: {owner.problem}" for name, owner in self.owners.items() if owner.problem),
                *(f"tier {opened.tier.name}: {opened.trouble}" for opened in self.tiers if opened.trouble),
                *(f"{c.name}: {c.problem}" for c in self.chores if c.problem),
            ],
        }

    def _look(self, opened: OpenTier) -> str:
        """Take a new snapshot of a tier; what is wrong if that fails, and the last one stays."""
        try:
            taken = snapshot.take(opened.tier, opened.path, self.host, opened.region)
        except KvpoolError as error:
            return str(error)
        opened.seen = taken
        return ""


def serve(
    spec: PoolSpec,
    host: int,
    skipped: dict[str, str],
    *,
    ready: Callable[[], None],
    refused: Callable[[str], None] = lambda _: None,
    attach: Attach | None = None,
    stop: threading.Event | None = None,
    between: Callable[[Daemon], None] = lambda _: None,
) -> None:
    """Look after the regions of `host` until SIGTERM or SIGINT.

    `ready` is called once, when all tiers are open and their coherence is not known to be wrong; `refused`
    before that, with the reason, when it is. The daemon goes on all the same: it tests again, and says so.
    `between` is called before each look at the chores, several times a second: there the pool may change.

    Threads: the main thread only, because it takes the signals (unless `stop` is given).
    Raises:  RegionBusyError when this host has a daemon already; KvpoolError when a tier cannot be opened.
    """
    ensure_pool_dir(spec.name)
    with ExitStack() as closing:
        lock = DaemonLock(daemon_lock_path(spec.name, host))
        closing.callback(lock.close)
        ending = stop or _stop_on_signals(closing)
        daemon = Daemon(spec, host, [], skipped, attach=attach or attach_region)
        closing.callback(daemon.close_all)
        with contextlib.suppress(OSError):  # engines then try themselves
            daemon.engines.make()
        for tier in spec.tiers:
            if tier.name not in skipped:
                daemon.open(tier)
        daemon.coherence.start()
        watch_in_background(daemon.coherence, closing)
        daemon.report()
        if daemon.refusal:
            log.error("not_ready pool=%s host=%d reason=%r", spec.name, host, daemon.refusal)
            refused(daemon.refusal)
        announced = False
        while True:
            if not announced and not daemon.refusal:
                announced = True
                tiers = ",".join(t.tier.name for t in daemon.tiers)
                log.info("ready pool=%s host=%d tiers=%s", spec.name, host, tiers)
                ready()
            between(daemon)
            if ending.wait(daemon.step()):
                break
        log.info("stopping pool=%s host=%d", spec.name, host)
        report_path(spec.name, host).unlink(missing_ok=True)


def _stop_on_signals(closing: ExitStack) -> threading.Event:
    ending = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        before = signal.signal(number, lambda *_: ending.set())
        closing.callback(signal.signal, number, before)
    return ending


def attach_region(tier: TierSpec, path: Path, shard: int) -> DaemonRegion:
    """The region at `path`, attached as the daemon of its shard."""
    from kvpool.region import Region  # late: what only reads manifests and reports needs no compiled part

    return Region.attach(path, host=shard, role="daemon", node_name=socket.gethostname())
