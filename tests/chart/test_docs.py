"""docs/kubernetes.md explains every reason that the operator gives, and none that it does not."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import get_args

import pytest

from kvpool.daemon.events import Kind

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "kubernetes.md").read_text()
NAMES = ROOT / "operator" / "kvpool_operator" / "names.py"


@pytest.fixture(scope="module")
def names() -> ModuleType:
    """The operator's constants, loaded without what else the operator needs."""
    spec = importlib.util.spec_from_file_location("operator_names", NAMES)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rows(heading: str) -> list[list[str]]:
    """The cells of each row of the first table below a heading, without its head."""
    _, _, text = PAGE.partition(f"\n{heading}\n")
    table = text.strip().split("\n\n")
    (lines,) = [part.splitlines() for part in table if part.startswith("|")][:1]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_docs_have_a_row_for_each_reason_of_each_condition(names: ModuleType) -> None:
    told = [(row[0], row[1]) for row in rows("## Troubleshooting")]
    given = [(condition, reason) for condition, reasons in names.REASONS.items() for reason in reasons]
    assert len(told) == len(set(told))
    assert set(told) == set(given)


def test_docs_have_a_row_for_each_event(names: ModuleType) -> None:
    told = [reason.strip() for row in rows("### Events") for reason in row[0].split(",")]
    given = {*get_args(Kind), *(v for k, v in vars(names).items() if k.startswith("EVENT_"))}
    assert sorted(told) == sorted(given)


def test_docs_name_labels_and_annotations_that_there_are(names: ModuleType) -> None:
    known = {value for value in vars(names).values() if isinstance(value, str)}
    for name in re.findall(r"`(kvpool\.dev/[a-z-]+)", PAGE):
        assert name in known, name
    assert f":{names.METRICS_PORT}" in PAGE or f"port {names.METRICS_PORT}" in PAGE
    assert f"[{names.GROUP_ID}]" in PAGE
