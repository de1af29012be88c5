"""The verdict on what hosts measured of each other, for every outcome; and who is measured when."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvpool.litmus import BUSY_S, RETRY_S, SINGLE_HOST, Litmus, Verdict, combined, judge
from kvpool.report import PeerLitmus

GOOD = PeerLitmus(1, "measured", plain=64, flushed=64, ordered=640, round_trip_us=2.5)
STALE = replace(GOOD, plain_stale=60, plain_unseen=55, cached_stale=12)
DEAF = PeerLitmus(1, "deaf")
SILENT = PeerLitmus(1, "silent")


@pytest.mark.parametrize(
    ("declared", "peer", "status", "reason", "said"),
    [
        ("hardware", GOOD, "True", "Verified", "all 64 written-back stores seen, order kept in 640 looks"),
        ("software", GOOD, "True", "Verified", "0 of 128 plain reads stale (it would pass for hardware)"),
        ("software", STALE, "True", "Verified", "72 of 128 plain reads stale; coherence: software holds"),
        ("hardware", STALE, "False", "StaleReads", "72 of 128 plain reads returned old content"),
        (
            "hardware",
            replace(GOOD, plain_stale=1),
            "False",
            "StaleReads",
            "give the tier coherence: software",
        ),
        ("hardware", replace(GOOD, cached_stale=1), "False", "StaleReads", "coherence: hardware expects 0"),
        ("hardware", replace(STALE, flushed_lost=3), "False", "NotDelivered", "3 of 64 stores were not seen"),
        ("software", replace(STALE, flushed_lost=1), "False", "NotDelivered", "no coherence mode works"),
        ("software", replace(GOOD, reordered=2), "False", "Reordered", "in 2 of 640 looks"),
        ("hardware", replace(STALE, reordered=2), "False", "Reordered", "the same device"),
        ("software", DEAF, "False", "NotDelivered", "did not see what this host wrote back"),
        ("hardware", DEAF, "False", "NotDelivered", "in both directions"),
        ("software", SILENT, "Unknown", "NoPeer", "No other host answered in time"),
        ("hardware", replace(SILENT, end="busy"), "Unknown", "NoPeer", "'kvpool litmus' on another host"),
    ],
)
def test_judge_one_peer(declared: str, peer: PeerLitmus, status: str, reason: str, said: str) -> None:
    verdict = judge(declared, [peer])
    assert (verdict.status, verdict.reason) == (status, reason)
    assert said in verdict.message


def test_judge_nobody_is_unknown() -> None:
    assert judge("software", []).reason == "NoPeer"


def test_judge_expected_host_missing_is_unknown_even_if_another_one_passed() -> None:
    verdict = judge("software", [GOOD, replace(SILENT, host=2)], [1, 2, 3])
    assert (verdict.status, verdict.reason) == ("Unknown", "PeerMissing")
    assert "Hosts 2, 3 did not answer in time" in verdict.message
    assert judge("software", [GOOD, replace(SILENT, host=2)]).status == "True"


def test_judge_one_failure_among_good_ones_is_what_counts() -> None:
    verdict = judge("hardware", [GOOD, replace(STALE, host=2)], [3])
    assert (verdict.status, verdict.reason) == ("False", "StaleReads")
    assert verdict.message.startswith("Host 2:")


def test_judge_same_machine_is_said_to_prove_nothing_about_others() -> None:
    assert "says nothing about others" in judge("hardware", [replace(GOOD, same_machine=True)]).message


def test_combined_no_shared_tier_is_single_host_and_the_worst_tier_counts() -> None:
    good, unknown = judge("software", [GOOD]), judge("software", [])
    bad = judge("hardware", [STALE])
    assert combined({}).reason == "SingleHost"
    assert combined({"a": good}).status == "True"
    assert combined({"a": good, "b": unknown}).reason == "NoPeer"
    worst = combined({"a": good, "b": unknown, "c": bad})
    assert (worst.status, worst.reason) == ("False", "StaleReads")
    assert worst.message.startswith("Tier c: Host 1")


class FakeRegion:
    """Other hosts whose beats and answers the test sets."""

    def __init__(self) -> None:
        self.beats = [0, 0, 0]
        self.results = {1: GOOD, 2: replace(GOOD, host=2)}
        self.measured: list[int] = []
        self.asked = False

    def litmus_begin(self) -> bool:
        return True

    def litmus_end(self) -> None: ...

    def litmus_serve(self, budget_s: float) -> bool:
        assert budget_s < 1
        return self.asked

    def litmus_beats(self) -> list[int]:
        return list(self.beats)

    def litmus_measure(self, peer: int, rounds: int) -> PeerLitmus:
        self.measured.append(peer)
        return self.results[peer]

    def beat(self, host: int, session: int = 1) -> None:
        self.beats[host] = session << 32 | (self.beats[host] + 1) & 0xFFFFFFFF


def test_step_measures_only_who_beats_and_each_once() -> None:
    region = FakeRegion()
    litmus = Litmus(region, 0, 3, "software")
    region.beats[1] = 1 << 32  # it answered once, and may be gone
    litmus.step()
    litmus.step()
    assert litmus.may_answer()
    assert (region.measured, litmus.verdict().reason) == ([], "NoPeer")
    for _ in range(5):
        region.beat(1)
        litmus.step()
    assert (region.measured, litmus.verdict().status) == ([1], "True")
    assert litmus.verdict([1, 2]).reason == "PeerMissing"
    for _ in range(5):
        region.beat(1)
        region.beat(2)
        litmus.step()
    assert region.measured == [1, 2]
    assert litmus.verdict([1, 2]).status == "True"


def test_step_peer_started_anew_is_measured_again_and_its_failure_counts() -> None:
    region = FakeRegion()
    litmus = Litmus(region, 0, 3, "hardware")
    for session in (1, 1, 2):
        region.beat(1, session)
        litmus.step()
    assert region.measured == [1, 1]
    region.results[1] = STALE
    region.beat(1, 3)
    litmus.step()
    assert litmus.verdict().reason == "StaleReads"


def test_step_peer_that_falls_silent_keeps_its_verdict_and_is_asked_again_later() -> None:
    now = [0.0]
    region = FakeRegion()
    litmus = Litmus(region, 0, 3, "software", clock=lambda: now[0])
    for _ in range(2):
        region.beat(1)
        litmus.step()
    region.results[1] = SILENT
    for _ in range(3):
        region.beat(1, 2)
        litmus.step()
    assert region.measured == [1, 1]
    assert litmus.verdict().status == "True"
    now[0] = RETRY_S
    region.beat(1, 2)
    litmus.step()
    assert region.measured == [1, 1, 1]


def test_step_busy_peer_is_asked_again_soon() -> None:
    now = [0.0]
    region = FakeRegion()
    region.results[1] = replace(SILENT, end="busy")
    litmus = Litmus(region, 0, 3, "software", clock=lambda: now[0])
    for _ in range(3):
        region.beat(1)
        litmus.step()
    assert (region.measured, litmus.verdict().reason) == ([1], "NoPeer")
    now[0] = BUSY_S
    region.results[1] = GOOD
    region.beat(1)
    litmus.step()
    assert litmus.verdict().status == "True"


def test_verdict_of_one_host_needs_nobody() -> None:
    assert (
        Litmus(FakeRegion(), 0, 1, "software").verdict()
        == SINGLE_HOST
        == Verdict("True", "SingleHost", SINGLE_HOST.message)
    )
