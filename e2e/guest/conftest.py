"""Two guests for all tests, which come in an order: each goes on with what the one before left."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from guest import image
from guest.shared import RESULT, Shared

_shared: list[Shared] = []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.guest)


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    lacking = image.lacking()
    if lacking:
        pytest.skip("; ".join(lacking))
    RESULT.unlink(missing_ok=True)
    made = Shared(tmp_path_factory.mktemp("guests"))
    _shared.append(made)
    try:
        yield made
    finally:
        made.end()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for made in _shared:
        words = ", ".join(f"{count} {name}" for name, count in made.counted.items())
        terminalreporter.write_line(f"guests: {words}; {RESULT.name} has more")
