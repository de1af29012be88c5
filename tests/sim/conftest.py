"""The simulators, built once, and what their runs did in all."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
totals: Counter[str] = Counter()
Simulate = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def build() -> Callable[[str], Path]:
    """Builds one of the simulators' programs and says where it is."""

    def built(target: str) -> Path:
        folder = ROOT / "build" / "sim"
        options = ["-DCMAKE_BUILD_TYPE=Release", "-DKVPOOL_SIM=ON", "-DKVPOOL_PYTHON=OFF"]
        for command in (
            ["cmake", "-S", str(ROOT), "-B", str(folder), *options],
            ["cmake", "--build", str(folder), "--target", target, "--parallel", "2"],
        ):
            done = subprocess.run(command, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return folder / "pool" / "native" / target

    return built


@pytest.fixture(scope="session")
def simulator(build: Callable[[str], Path]) -> Path:
    return build("kvpool_sim")


@pytest.fixture(scope="session")
def simulate(simulator: Path) -> Simulate:
    """Runs it with these arguments; what it prints is shown when the test fails."""

    def run(*arguments: str, timeout_s: float = 1500) -> subprocess.CompletedProcess[str]:
        done = subprocess.run([str(simulator), *arguments], capture_output=True, text=True, timeout=timeout_s)
        sys.stdout.write(done.stdout)
        sys.stderr.write(done.stderr)
        for schedules, steps, seconds in re.findall(
            r"total: (\d+) schedules, (\d+) steps in ([\d.]+) s", done.stdout
        ):
            totals["schedules"] += int(schedules)
            totals["steps"] += int(steps)
            totals["milliseconds"] += round(float(seconds) * 1000)
        for runs, states in re.findall(r"holds, complete: (\d+) runs, (\d+) states", done.stdout):
            totals["explored runs"] += int(runs)
            totals["explored states"] += int(states)
        return done

    return run


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not totals:
        return
    minutes = max(totals["milliseconds"], 1) / 60_000
    terminalreporter.section("simulator")
    terminalreporter.line(
        f"random: {totals['schedules']:,} schedules, {totals['steps']:,} steps,"
        f" {totals['steps'] / minutes / 1e6:.0f} million steps a minute"
    )
    terminalreporter.line(
        f"explored: {totals['explored states']:,} states in {totals['explored runs']:,} runs,"
        " complete up to the bounds"
    )
    for line in getattr(terminalreporter.config, "mutant_table", []):
        terminalreporter.line(line)
