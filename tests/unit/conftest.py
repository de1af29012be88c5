"""Fixtures of the unit tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from strategies import region_folder


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder in memory for region files."""
    with region_folder() as path:
        yield path
