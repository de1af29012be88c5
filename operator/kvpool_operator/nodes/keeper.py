"""Serving a pool as the node's assignment says: start, change while running, drain, remove."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from kvpool.daemon.loop import Attach, Daemon, OpenTier, serve
from kvpool.errors import KvpoolError
from kvpool.paths import ensure_pool_dir
from kvpool.provision import Regions, provision
from kvpool.provision.plan import Skip
from kvpool.quantity import human_bytes
from kvpool.report import ShardOwner
from kvpool_operator.nodes import folder
from kvpool_operator.nodes.assignment import Adoption, Assignment
from kvpool_operator.nodes.board import Board, Truth
from kvpool_operator.nodes.removal import remove_pool, remove_tier

log = logging.getLogger("kvpool.node")

WAIT_S = 0.2
PAUSE_FIRST_S, PAUSE_MAX_S = 0.5, 10.0
AGAIN_S = 60.0  # between two tries to have an optional tier
ADOPT_S = 1.0  # between two looks at whether a shard is still to be adopted

UNASSIGNED = (
    "no KVPoolNode is assigned to this node yet. The operator makes one when it sees the node in the pool: "
    "see 'kubectl get kvpool' and the operator's log."
)


class _Ended(Exception):
    """The process is to end, or something else is wanted than what is being prepared."""


def _to_be_adopted(owner: ShardOwner, host: int, adoption: Adoption) -> bool:
    """Not done yet, not overtaken by a higher epoch; or begun by a daemon of this host that was killed."""
    begun = owner.host == host and owner.epoch == adoption.epoch and not owner.settled
    return owner.epoch < adoption.epoch or begun


class Keeper:
    """Does what the board says is wanted, until `stop`.

    Threads: `run` in one; `stop` in any, also in a signal handler.
    """

    def __init__(
        self,
        board: Board,
        pool: str,
        *,
        attach: Attach | None = None,
        regions: Regions | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._board = board
        self._pool = pool
        self._attach = attach
        self._regions = regions
        self._clock = clock
        self._ending = threading.Event()
        self._leave = threading.Event()  # the daemon's loop
        self._truth = Truth()
        self._said = ""
        # While a daemon runs:
        self._served: Assignment | None = None
        self._told: dict[str, Any] | None = None
        self._tried: Assignment | None = None  # the last change, which may have failed
        self._change_due = 0.0
        self._adopt_due = 0.0
        self._again_due = 0.0
        self._closed: dict[str, tuple[object, bool]] = {}  # tier -> its region, and whether it admits blocks
        self._problems: dict[str, str] = {}  # what is wanted and could not be done yet

    def stop(self) -> None:
        self._ending.set()
        self._leave.set()

    def run(self) -> None:
        pause = PAUSE_FIRST_S
        while not self._ending.is_set():
            self._board.changed.clear()
            wanted, unreadable = self._board.wanted()
            try:
                if wanted is None:
                    self._tell_not_ready(unreadable or UNASSIGNED)
                    self._wait(PAUSE_FIRST_S)
                elif wanted.state == "Removing":
                    self._remove(wanted)
                else:
                    self._serve(wanted)
                pause = PAUSE_FIRST_S
            except _Ended:
                continue
            except (KvpoolError, OSError) as error:
                self._tell_not_ready(str(error), wanted)
                self._wait(pause)
                pause = min(pause * 2, PAUSE_MAX_S)

    def _wait(self, seconds: float) -> None:
        """Until time is up, or something else is wanted."""
        deadline = self._clock() + seconds
        while self._clock() < deadline and not self._ending.is_set() and not self._board.changed.is_set():
            self._ending.wait(WAIT_S)
            self._board.beat()

    def _tell(self, truth: Truth) -> None:
        self._truth = truth
        self._board.tell(truth)

    def _tell_not_ready(self, message: str, wanted: Assignment | None = None) -> None:
        if message != self._said:
            log.warning("not_ready pool=%s reason=%r", self._pool, message)
        self._said = message
        host, generation = (wanted.host, wanted.generation) if wanted else (0, 0)
        self._tell(Truth(message=message, host=host, generation=generation, problems=(message,)))

    # -- serving -----------------------------------------------------------------------------------------

    def _serve(self, wanted: Assignment) -> None:
        self._leave.clear()
        if self._ending.is_set():
            return
        ensure_pool_dir(self._pool)
        folder.write_host(self._pool, wanted.host)
        self._remove_undeclared(wanted)
        skipped = self._provision(wanted)
        self._served, self._told, self._problems, self._closed = wanted, None, {}, {}
        self._change_due = self._adopt_due = 0.0
        self._again_due = self._clock() + AGAIN_S
        try:
            serve(
                wanted.pool,
                wanted.host,
                skipped,
                ready=lambda: None,
                attach=self._attach,
                stop=self._leave,
                between=self._between,
            )
        finally:
            self._served = None
        self._said = ""

    def _provision(self, wanted: Assignment) -> dict[str, str]:
        """Make what is missing; returns the optional tiers that cannot be had, with the reason."""

        def progress(tier: str, done: int, total: int) -> None:
            if self._ending.is_set():
                raise _Ended
            how_far = f"{human_bytes(done)} of {human_bytes(total)}"
            self._tell(replace(self._truth, message=f'tier "{tier}": {how_far} are made'))

        actions = provision(
            wanted.pool,
            wanted.host,
            timeout_s=0.0,  # what is not there yet is looked for again, and said meanwhile
            progress=progress,
            waiting=lambda _: None,
            regions=self._regions,
            grow_later=True,  # the memory may come with the next pod
        )
        return {action.tier: action.reason for action in actions if isinstance(action, Skip)}

    def _remove_undeclared(self, wanted: Assignment) -> None:
        """Regions of tiers that were taken out of the manifest while no daemon ran here."""
        before = folder.kept_manifest(self._pool)
        if before is None:
            return
        names = {tier.name for tier in wanted.pool.tiers}
        for tier in before.tiers:
            if tier.name not in names:
                remove_tier(before, tier, wanted.host, wanted.pool)

    def _between(self, daemon: Daemon) -> None:
        """Called by the daemon several times a second: what has changed?"""
        served = self._served
        assert served is not None
        wanted, unreadable = self._board.wanted()
        if (
            self._ending.is_set()
            or wanted is None
            or wanted.state == "Removing"
            or wanted.host != served.host
            or wanted.pool.hosts != served.pool.hosts
        ):
            self._leave.set()
            return
        now = self._clock()
        if unreadable:
            self._problems["assignment"] = unreadable
        else:
            self._problems.pop("assignment", None)
        # Optional tiers that could not be had are tried again: a device may come, space may become free.
        again = bool(daemon.skipped) and now >= self._again_due
        # What failed is tried again after a while, another wish at once.
        if (wanted != served or again) and (now >= self._change_due or wanted != self._tried):
            self._tried = wanted
            self._again_due = now + AGAIN_S
            self._change(daemon, wanted)
        self._admit(daemon)
        if now >= self._adopt_due:
            self._adopt_due = now + ADOPT_S
            self._adopt(daemon, wanted)
        self._report(daemon)

    def _report(self, daemon: Daemon) -> None:
        served = self._served
        assert served is not None
        if not daemon.last_report:
            return
        problems = tuple(self._problems.values())
        # What was refused is one of the report's problems.
        why = daemon.refusal or " ".join(problems)
        if daemon.last_report is self._told and (why, served.generation, problems) == (
            self._truth.message,
            self._truth.generation,
            self._truth.problems,
        ):
            self._board.beat()
            return
        self._told = daemon.last_report
        try:
            own = {t.tier.name: asdict(t.region.counters_of(t.shard)) for t in daemon.tiers}
        except KvpoolError as error:
            own, problems = self._truth.own, (*problems, str(error))
        owners = {
            t.tier.name: [asdict(owner) for owner in daemon.owners[t.tier.name].known]
            for t in daemon.tiers
            if daemon.spec.shards(t.tier) > 1
        }
        self._tell(
            Truth(
                ready=not why,
                message=why,
                host=served.host,
                generation=served.generation,
                report=daemon.last_report,
                own=own,
                owners=owners,
                problems=problems,
                drained=self._drained(daemon, served),
            )
        )

    # -- changes -----------------------------------------------------------------------------------------

    def _change(self, daemon: Daemon, wanted: Assignment) -> None:
        """Go over to another assignment for the same host, tier by tier, without a pause for the others."""
        try:
            self._apply(daemon, wanted)
        except _Ended:
            return
        except (KvpoolError, OSError) as error:
            if self._problems.get("change") != str(error):
                log.warning(
                    "change_failed pool=%s generation=%d error=%r", self._pool, wanted.generation, str(error)
                )
            self._problems["change"] = str(error)
            self._change_due = self._clock() + PAUSE_MAX_S
            return
        self._problems.pop("change", None)
        if wanted == self._served:
            return
        self._served = wanted
        log.info("changed pool=%s generation=%d state=%s", self._pool, wanted.generation, wanted.state)
        daemon.report()

    def _apply(self, daemon: Daemon, wanted: Assignment) -> None:
        spec = wanted.pool
        if spec == daemon.spec and not daemon.skipped:
            return
        daemon.adjust(spec, daemon.skipped)  # policies at once, whatever becomes of the tiers
        names = {tier.name for tier in spec.tiers}
        for opened in daemon.tiers:
            if opened.tier.name not in names:
                self._close(daemon, opened, wanted)
        skipped = self._provision(wanted)
        daemon.adjust(spec, skipped)
        open_already = {opened.tier.name for opened in daemon.tiers}
        for tier in spec.tiers:
            if tier.name not in skipped and tier.name not in open_already:
                daemon.open(tier)

    def _close(self, daemon: Daemon, opened: OpenTier, wanted: Assignment) -> None:
        daemon.close(opened.tier.name)
        remove_tier(daemon.spec, opened.tier, wanted.host, wanted.pool)

    def _admit(self, daemon: Daemon) -> None:
        """A node that is drained stores nothing more into what others are to take over."""
        served = self._served
        assert served is not None
        closed = served.state == "Draining"
        for opened in daemon.tiers:
            if daemon.spec.shards(opened.tier) == 1 or self._closed.get(opened.tier.name) == (
                opened.region,
                closed,
            ):
                continue
            try:
                opened.region.set_closed(closed)
            except KvpoolError as error:
                self._problems[f"admit/{opened.tier.name}"] = str(error)
                continue
            self._problems.pop(f"admit/{opened.tier.name}", None)
            self._closed[opened.tier.name] = (opened.region, closed)
            if closed:
                log.info("admissions_stopped tier=%s shard=%d", opened.tier.name, opened.shard)

    def _adopt(self, daemon: Daemon, wanted: Assignment) -> None:
        """Take over the shards that this node was told to, each with its epoch once."""
        self._problems = {key: text for key, text in self._problems.items() if not key.startswith("adopt")}
        for opened in daemon.tiers:
            known = daemon.owners[opened.tier.name].known
            for adoption in wanted.adopt:
                if adoption.shard >= len(known) or not _to_be_adopted(
                    known[adoption.shard], opened.shard, adoption
                ):
                    continue
                try:
                    done = opened.region.adopt(adoption.shard, adoption.epoch)
                except KvpoolError as error:
                    self._problems[f"adopt/{opened.tier.name}/{adoption.shard}"] = str(error)
                    continue
                log.info(
                    "adopted tier=%s shard=%d epoch=%d kept=%d freed=%d republished=%d",
                    opened.tier.name,
                    adoption.shard,
                    adoption.epoch,
                    done.kept,
                    done.freed,
                    done.republished,
                )

    def _drained(self, daemon: Daemon, served: Assignment) -> tuple[str, str, str] | None:
        """The condition Drained: is what this node had in shared tiers in other hands?"""
        if served.state != "Draining":
            return None
        waiting = []
        for opened in daemon.tiers:
            known = daemon.owners[opened.tier.name].known
            if daemon.spec.shards(opened.tier) == 1:
                continue
            owner = known[opened.shard] if known else None
            given = owner is not None and owner.host != opened.shard and owner.settled
            # What we wrote is in the medium, and the new owner was told so.
            if not given or owner is None or opened.region.acknowledged_epoch(opened.shard) < owner.epoch:
                waiting.append(opened.tier.name)
        if waiting:
            message = f"No other node has taken over shard {served.host} of tier {', '.join(waiting)} yet."
            return "False", "WaitingForAdoption", message
        return "True", "HandedOver", "What this node had stored in shared tiers belongs to other nodes."

    # -- the end -----------------------------------------------------------------------------------------

    def _remove(self, wanted: Assignment) -> None:
        """The pool is deleted: nothing of it stays on this node."""
        self._tell(Truth(message="the pool is being removed", host=wanted.host, generation=wanted.generation))
        removed = remove_pool(self._pool, wanted.pool, wanted.host, patient=self._patient)
        for path in removed:
            log.info("removed pool=%s path=%s", self._pool, path)
        log.info("pool_removed pool=%s host=%d", self._pool, wanted.host)
        message = "the pool was deleted; nothing of it is left on this node"
        self._tell(Truth(message=message, host=wanted.host, generation=wanted.generation, removed=True))
        self._said = message
        while not self._ending.is_set() and not self._board.changed.is_set():
            self._wait(PAUSE_MAX_S)

    def _patient(self, seconds: float) -> bool:
        """Wait a moment; False when there is something else to do."""
        self._wait(seconds)
        return not self._ending.is_set() and not self._board.changed.is_set()
