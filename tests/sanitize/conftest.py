"""At the end of the sanitizers' tests: the table of what ran."""

from __future__ import annotations

import pytest

from sanitize.tools import rows


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not rows:
        return
    terminalreporter.section("sanitizers")
    line = "{:<30} {:<42} {:>7} {:>7}  {}".format
    terminalreporter.line(line("step", "what ran", "seconds", "reports", "").rstrip())
    for row in rows:
        reports = "-" if row.reports is None else str(row.reports)
        terminalreporter.line(line(row.step, row.ran, f"{row.seconds:.1f}", reports, row.note).rstrip())
    total = sum(row.reports or 0 for row in rows)
    terminalreporter.line(f"reports = {total} in {sum(row.seconds for row in rows):.0f} s")
