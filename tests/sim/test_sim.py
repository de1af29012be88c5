"""The real protocol code on a simulated non-coherent medium: random schedules, and all of them up to a bound.

Longer:  KVPOOL_SIM_SEEDS=20000 make test-sim.  A failure prints the command that repeats it.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]  # the first one builds the simulator

Simulate = Callable[..., subprocess.CompletedProcess[str]]
SEEDS = int(os.environ.get("KVPOOL_SIM_SEEDS", "1000"))
SCENARIOS = (
    *("evict", "probe", "writers", "overflow", "sizes", "namespaces", "keeper", "log"),
    *("crash", "reap", "deaths", "first", "recut", "adopt", "fresh", "adopters", "zombie", "back"),
    *("present", "damage"),
)
# They begin where one instruction matters, so there are fewer schedules of each to be seen.
DIRECTED = (
    *("vouched", "taken", "evicting", "storing", "again", "begun", "cutters", "shrunk"),
    *("restart", "unsound", "header", "words", "retired"),
)

# Scenario -> (preemptions, events): every schedule up to that bound is tried, of a small configuration.
# What is not here has too many for the usual run; KVPOOL_SIM_DEEP=1 tries those, too.
BOUNDS = {
    "evict": (3, 3),
    "probe": (3, 3),
    "writers": (2, 1),
    "overflow": (2, 2),
    "sizes": (1, 1),
    "namespaces": (1, 0),
    "keeper": (1, 1),
    "log": (1, 1),
    "crash": (1, 0),
    "reap": (1, 0),
    "first": (1, 0),
    "recut": (1, 0),
    "adopt": (1, 0),
    "fresh": (0, 1),
    "adopters": (3, 3),
    "zombie": (1, 1),
    "back": (1, 0),
    "present": (1, 0),
    "vouched": (3, 3),
    "taken": (1, 1),
    "evicting": (2, 0),
    "storing": (1, 2),
    "again": (1, 0),
    "begun": (1, 0),
    "cutters": (1, 0),
    "shrunk": (1, 0),
    "restart": (1, 0),
    "unsound": (1, 0),
    "header": (3, 3),
    "retired": (1, 0),
}
DEEP = {
    "evict": (7, 7),
    "writers": (2, 2),
    "namespaces": (1, 1),
    "crash": (1, 1),
    "reap": (2, 0),
    "first": (1, 1),
    "recut": (1, 1),
    "adopt": (1, 1),
    "fresh": (1, 1),
    "back": (1, 1),
    "present": (1, 1),
    "evicting": (2, 2),
    "again": (1, 1),
    "begun": (1, 1),
    "cutters": (1, 1),
    "unsound": (1, 1),
}


@pytest.mark.parametrize("scenario", SCENARIOS + DIRECTED)
def test_scenario_holds_under_random_schedules(simulate: Simulate, scenario: str) -> None:
    seeds = SEEDS if scenario in SCENARIOS else max(SEEDS // 4, 250)
    done = simulate("--scenario", scenario, "--seeds", f"1:{seeds}")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("scenario", SCENARIOS + DIRECTED)
def test_scenario_holds_when_payload_keeps_no_order(simulate: Simulate, scenario: str) -> None:
    done = simulate("--scenario", scenario, "--weak", "--seeds", f"1:{max(SEEDS // 10, 50)}")
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_scenario_of_the_simulator_is_run_here(simulate: Simulate) -> None:
    listed = [line.split()[0] for line in simulate("--list").stdout.splitlines()]
    assert listed == [*SCENARIOS, *DIRECTED]


@pytest.mark.parametrize("scenario", DEEP if os.environ.get("KVPOOL_SIM_DEEP") else BOUNDS)
def test_scenario_holds_under_every_schedule_up_to_a_bound(simulate: Simulate, scenario: str) -> None:
    preemptions, events = (DEEP if os.environ.get("KVPOOL_SIM_DEEP") else BOUNDS)[scenario]
    done = simulate("--explore", scenario, "--preemptions", str(preemptions), "--events", str(events))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "holds, complete" in done.stdout
