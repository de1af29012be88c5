"""The real protocol code on a simulated non-coherent medium.

The scenarios hold, and leaving out an access of the protocol that matters is noticed.

Longer:  KVPOOL_SIM_SEEDS=20000 make test-sim.  A failure prints the command that repeats it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]  # the first one builds the simulator

ROOT = Path(__file__).resolve().parents[2]
NATIVE = ROOT / "pool" / "native"
SEEDS = int(os.environ.get("KVPOOL_SIM_SEEDS", "300"))
SCENARIOS = ("evict", "full", "sizes", "crash", "adopt", "zombie")

# Accesses that a scenario must miss when they are left out: (scenario, file, text of the
# source line, access). The rest of the protocol's accesses is not covered by mutants yet.
MUTANTS = (
    ("crash", "slots.h", "// evict.mark", "write_back"),
    ("crash", "transfer.h", "// load.payload.inv, after", "invalidate"),
    ("adopt", "transfer.h", "// store.payload.fence", "store_fence"),
    ("evict", "transfer.h", "no fence: an entry whose header is not there yet", "write_back"),
    ("adopt", "recovery.h", "// adopt.inv", "invalidate"),
)


@pytest.fixture(scope="session")
def simulator() -> Path:
    build = ROOT / "build" / "sim"
    options = ["-DCMAKE_BUILD_TYPE=Release", "-DKVPOOL_SIM=ON", "-DKVPOOL_PYTHON=OFF"]
    for command in (
        ["cmake", "-S", str(ROOT), "-B", str(build), *options],
        ["cmake", "--build", str(build), "--target", "kvpool_sim", "--parallel", "2"],
    ):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return build / "pool" / "native" / "kvpool_sim"


def run(simulator: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([str(simulator), *arguments], capture_output=True, text=True, timeout=600)
    sys.stdout.write(done.stdout)
    return done


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_scenario_holds_under_random_schedules(simulator: Path, scenario: str) -> None:
    done = run(simulator, "--scenario", scenario, "--seeds", f"1:{SEEDS}")
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_scenario_of_the_simulator_is_run_here(simulator: Path) -> None:
    assert run(simulator, "--list").stdout.split() == list(SCENARIOS)


@pytest.mark.parametrize(("scenario", "file", "text", "access"), MUTANTS)
def test_left_out_access_is_noticed(
    simulator: Path, scenario: str, file: str, text: str, access: str
) -> None:
    lines = [i for i, line in enumerate((NATIVE / file).read_text().splitlines(), 1) if text in line]
    assert len(lines) == 1, f"{file}: {text!r} is on lines {lines}, expected one"
    place = f"{file}:{lines[0]} {access}"
    assert place in run(simulator, "--places", scenario, "--seeds", "1:60").stdout.splitlines()
    done = run(simulator, "--scenario", scenario, "--mutant", place, "--seeds", "1:3000")
    assert "VIOLATED" in done.stdout, f"{scenario} holds without {place}"
