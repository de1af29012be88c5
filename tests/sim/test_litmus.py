"""The litmus test's measuring code on simulated media, good and bad ones, judged as real measurements are.

A medium on which an instruction does not work is one whose access is left out.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest

from kvpool.litmus import judge
from kvpool.report import PeerLitmus

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]  # the first one builds the simulator

ROOT = Path(__file__).resolve().parents[2]
LITMUS = ROOT / "pool" / "native" / "litmus.h"
SEEDS = min(300, int(os.environ.get("KVPOOL_SIM_SEEDS", "300")))


@pytest.fixture(scope="session")
def simulator(build: Callable[[str], Path]) -> Path:
    return build("kvpool_litmus_sim")


Verdicts = dict[int, Counter[str]]  # host -> reason -> runs


def verdicts(simulator: Path, declared: str, *arguments: str, seeds: int = SEEDS) -> Verdicts:
    command = [str(simulator), *arguments, "--seeds", f"1:{seeds}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stderr
    runs: dict[tuple[int, int], list[PeerLitmus]] = defaultdict(list)
    for line in done.stdout.splitlines():
        fields = json.loads(line)
        runs[fields.pop("by"), fields.pop("seed")].append(PeerLitmus(**fields))
    found: Verdicts = defaultdict(Counter)
    for (host, _), peers in runs.items():
        found[host][judge(declared, peers).reason] += 1
    return found


@pytest.mark.parametrize(
    ("medium", "declared", "by_host_0", "by_host_1"),
    [
        ("coherent", "hardware", "Verified", "Verified"),
        ("coherent", "software", "Verified", "Verified"),
        ("software", "software", "Verified", "Verified"),
        ("software", "hardware", "StaleReads", "StaleReads"),
        ("silent", "software", "NoPeer", "NoPeer"),
        ("one-way", "software", "NotDelivered", "NoPeer"),
        ("sticky", "software", "Verified", "NotDelivered"),
    ],
)
def test_medium_gets_its_verdict_in_every_run(
    simulator: Path, medium: str, declared: str, by_host_0: str, by_host_1: str
) -> None:
    expected = {0: Counter({by_host_0: SEEDS}), 1: Counter({by_host_1: SEEDS})}
    assert verdicts(simulator, declared, medium) == expected


def test_several_hosts_asking_each_other_at_once_never_accuse_a_good_medium(simulator: Path) -> None:
    for hosts in ("3", "4"):
        found = verdicts(simulator, "software", "software", "--hosts", hosts)
        assert all(set(reasons) <= {"Verified", "NoPeer"} for reasons in found.values())
        assert all(reasons["Verified"] > 0.9 * SEEDS for reasons in found.values())


@pytest.mark.parametrize(
    ("text", "access", "reason"),
    [
        ("// litmus.flushed", "write_back", "NotDelivered"),
        ("// litmus.test", "invalidate", "NotDelivered"),
        ("// litmus.order.fence", "store_fence", "Reordered"),
        ("// litmus.order.look", "invalidate", "Reordered"),
    ],
)
def test_instruction_that_does_not_work_is_noticed(
    simulator: Path, text: str, access: str, reason: str
) -> None:
    lines = [i for i, line in enumerate(LITMUS.read_text().splitlines(), 1) if text in line]
    assert len(lines) == 1, f"{text!r} is on lines {lines}, expected one"
    found = verdicts(
        simulator, "software", "software", "--mutant", f"litmus.h:{lines[0]} {access}", seeds=100
    )
    # Caches drop lines by themselves, so a single short run may see nothing.
    assert all(reasons[reason] > 20 for reasons in found.values()), found
