"""Do two hosts see each other's stores as a region declares it? Who asks whom, and the verdict (DESIGN 4.7).

The measuring itself is native (pool/native/litmus.h). The verdict is pure, from what was measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from kvpool.report import PeerLitmus

CONDITION = "CoherenceVerified"
ROUNDS = 64  # of each test with each peer: a few milliseconds
SERVE_S = 0.25  # at one go
RETRY_S = 30.0  # until a peer that did not answer is asked again
BUSY_S = 1.0  # ... one that answered others all the time

Status = Literal["True", "False", "Unknown"]
Reason = Literal["SingleHost", "Verified", "StaleReads", "NotDelivered", "Reordered", "NoPeer", "PeerMissing"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The condition CoherenceVerified. `reason` is a constant; `message` has the numbers and what to do."""

    status: Status
    reason: Reason
    message: str


class LitmusRegion(Protocol):
    """What the litmus test needs of a region."""

    def litmus_begin(self) -> bool: ...
    def litmus_end(self) -> None: ...
    def litmus_serve(self, budget_s: float) -> bool: ...
    def litmus_beats(self) -> list[int]: ...
    def litmus_measure(self, peer: int, rounds: int) -> PeerLitmus: ...


SINGLE_HOST = Verdict(
    "True", "SingleHost", "One host uses it; the processes of a host see each other's stores."
)


def judge(declared: str, peers: Iterable[PeerLitmus], expected: Iterable[int] = ()) -> Verdict:
    """Whether what was measured fits the declared coherence mode ("hardware" or "software").

    `expected`: hosts that must have been measured; without any, one is enough.
    """
    known = sorted(peers, key=lambda peer: peer.host)
    for peer in known:  # what is wrong with one is wrong with all
        failed = _failed(declared, peer)
        if failed is not None:
            return failed
    measured = [peer for peer in known if peer.measured]
    missing = sorted(set(expected) - {peer.host for peer in measured})
    if missing:
        return Verdict(
            "Unknown",
            "PeerMissing",
            f"{_hosts(missing).capitalize()} did not answer in time. {_ask(missing)}",
        )
    if not measured:
        return Verdict(
            "Unknown",
            "NoPeer",
            f"No other host answered in time. {_ask(())}",
        )
    return Verdict("True", "Verified", " ".join(_passed(declared, peer) for peer in measured))


def _failed(declared: str, peer: PeerLitmus) -> Verdict | None:
    host = f"Host {peer.host}"
    check = (
        "Check that all hosts map the same bytes of the same device, and map them as cached memory; "
        "no coherence mode works on this medium as it is."
    )
    if peer.end == "deaf":
        return Verdict(
            "False",
            "NotDelivered",
            f"{host} lives, its stores arrive here, but it did not see what this host wrote back; "
            f"expected: written back and invalidated lines arrive in both directions. {check}",
        )
    if peer.flushed_lost:
        return Verdict(
            "False",
            "NotDelivered",
            f"{host}: {peer.flushed_lost} of {peer.flushed} stores were not seen after write-back and "
            f"invalidate; expected 0. {check}",
        )
    if peer.reordered:
        return Verdict(
            "False",
            "Reordered",
            f"{host}: in {peer.reordered} of {peer.ordered} looks a flag was there before what was stored "
            f"ahead of it; expected 0. {check}",
        )
    stale = peer.plain_stale + peer.cached_stale
    if declared == "hardware" and (stale or peer.plain_unseen):
        return Verdict(
            "False",
            "StaleReads",
            f"{host}: {stale} of {peer.plain + peer.flushed} plain reads returned old content; "
            "coherence: hardware expects 0. Write-back and invalidate work, so give the tier "
            "coherence: software (the region has to be made anew for it).",
        )
    return None


def _passed(declared: str, peer: PeerLitmus) -> str:
    stale = peer.plain_stale + peer.cached_stale
    plain = f"{stale} of {peer.plain + peer.flushed} plain reads stale"
    flushed = f"all {peer.flushed} written-back stores seen, order kept in {peer.ordered} looks"
    where = " It runs on this same machine, which says nothing about others." if peer.same_machine else ""
    if declared == "software" and not stale:
        plain += " (it would pass for hardware)" if not peer.same_machine else ""
    return (
        f"Host {peer.host}: {flushed}, {plain}; coherence: {declared} holds. "
        f"Round trip {peer.round_trip_us:.1f} us.{where}"
    )


def _hosts(hosts: Iterable[int]) -> str:
    numbers = ", ".join(map(str, hosts))
    return f"host {numbers}" if "," not in numbers else f"hosts {numbers}"


def _ask(hosts: Iterable[int]) -> str:
    whom = _hosts(hosts) if hosts else "another host"
    return (
        f"Start the pool's daemon ('kvpool up') or 'kvpool litmus' on {whom} and look again. If it runs "
        "there, the medium delivers nothing between the hosts, or they do not map the same bytes."
    )


@dataclass
class Litmus:
    """One host's litmus test with all others of a region: answers them, and measures who answers."""

    region: LitmusRegion
    host: int
    hosts: int
    declared: str
    rounds: int = ROUNDS
    retry_s: float = RETRY_S
    clock: Callable[[], float] = time.monotonic
    peers: dict[int, PeerLitmus] = field(default_factory=dict)
    _seen: dict[int, int] = field(default_factory=dict)  # beats at the last look
    _session: dict[int, int] = field(default_factory=dict)  # of the peer, when it was measured
    _again: dict[int, float] = field(default_factory=dict)  # when a peer that failed us is asked again

    def begin(self) -> bool:
        """Take this host's turn; False when another process has it."""
        return self.region.litmus_begin()

    def end(self) -> None:
        self.region.litmus_end()

    def step(self) -> bool:
        """Answer who asks, measure one peer that answers and was not measured yet. True: it was busy."""
        asked = self.region.litmus_serve(SERVE_S)
        for peer in self._answering():
            result = self.region.litmus_measure(peer, self.rounds)
            # What was measured before stands until something else has been measured.
            if result.end in ("measured", "deaf") or peer not in self.peers:
                self.peers[peer] = result
            if result.measured:
                self._session[peer] = _session(self._seen[peer])
            wait_s = {"measured": 0.0, "busy": BUSY_S}.get(result.end, self.retry_s)
            self._again[peer] = self.clock() + wait_s
            return True
        return asked

    def _answering(self) -> list[int]:
        """Hosts whose beat has changed since the last look, and which are to be measured (again)."""
        found = []
        for host, beat in enumerate(self.region.litmus_beats()):
            before = self._seen.get(host)
            self._seen[host] = beat
            if host == self.host or not beat or before is None or beat == before:
                continue
            if self._session.get(host) == _session(beat) or self.clock() < self._again.get(host, 0.0):
                continue
            found.append(host)
        return found

    def may_answer(self) -> bool:
        """Whether some other host has answered once and has not said goodbye: it may live."""
        return any(beat for host, beat in enumerate(self.region.litmus_beats()) if host != self.host)

    def verdict(self, expected: Iterable[int] = ()) -> Verdict:
        return SINGLE_HOST if self.hosts == 1 else judge(self.declared, self.peers.values(), expected)


def _session(beat: int) -> int:
    """The part of a beat (layout.h) that is another one when another process answers."""
    return beat >> 32 & 0xFFFFFF


def combined(verdicts: Mapping[str, Verdict]) -> Verdict:
    """One condition for a pool, from those of its shared tiers: what is wrong first, then what is unknown."""
    if not verdicts:
        return Verdict("True", "SingleHost", "No tier is shared by several hosts.")
    order: dict[Status, int] = {"False": 0, "Unknown": 1, "True": 2}
    worst = min(order[verdict.status] for verdict in verdicts.values())
    kept = {tier: verdict for tier, verdict in verdicts.items() if order[verdict.status] == worst}
    first = next(iter(kept.values()))
    message = " ".join(f"Tier {tier}: {verdict.message}" for tier, verdict in kept.items())
    return Verdict(first.status, first.reason, message)
