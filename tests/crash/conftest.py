"""The counts of the crash tests at the end of the run, and the readers that live through it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from crash import tally
from crash.readers import Readers

KILLS_MIN = int(os.environ.get("KVPOOL_KILLS_MIN", "0"))  # `make test-crash` sets it


@pytest.fixture(autouse=True)
def _row_of_its_own() -> Iterator[None]:
    yield
    tally.use_row(tally.OTHER)


@pytest.fixture(scope="session")
def readers() -> Iterator[Readers]:
    made = Readers()
    yield made
    made.end()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if tally.problems(KILLS_MIN) and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    lines = tally.table()
    if not lines:
        return
    terminalreporter.section("processes killed and stopped")
    for line in lines:
        terminalreporter.write_line(line)
    for problem in tally.problems(KILLS_MIN):
        terminalreporter.write_line(f"FAILED: {problem}", red=True)
