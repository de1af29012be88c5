"""The damage suite sums up what it did, and fails when the sum is not right."""

from __future__ import annotations

import os

import pytest

from damage.tally import TALLY

AT_LEAST = int(os.environ.get("KVPOOL_DAMAGE_AT_LEAST", "0"))


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if exitstatus == pytest.ExitCode.OK and TALLY.total("intended") and TALLY.problems(AT_LEAST):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not TALLY.total("intended"):
        return
    terminalreporter.section("damage")
    for line in TALLY.lines():
        terminalreporter.write_line(line)
    for problem in TALLY.problems(AT_LEAST):
        terminalreporter.write_line(f"damage: {problem}", red=True)
