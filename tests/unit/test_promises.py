"""PROMISES.md names code and tests that exist: a renamed test must not leave a promise without one."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NAMED = re.compile(r"`((?:tests|pool|connector)/[\w./]+)(?:::(\w+))?`")


def missing(text: str) -> list[str]:
    """What `text` names in backquotes and what is not there."""
    gone = []
    for file, test in NAMED.findall(text):
        path = ROOT / file
        if not path.is_file():
            gone.append(file)
        elif test:
            names = {
                node.name
                for node in ast.walk(ast.parse(path.read_text()))
                if isinstance(node, ast.FunctionDef)
            }
            if test not in names:
                gone.append(f"{file}::{test}")
    return gone


def test_promises_name_files_and_tests_that_exist() -> None:
    assert missing((ROOT / "tests" / "PROMISES.md").read_text()) == []


def test_missing_finds_a_file_and_a_test_that_are_not_there() -> None:
    text = (
        "`tests/unit/test_promises.py::test_gone` `tests/unit/test_promises.py::missing` `pool/native/gone.h`"
    )
    assert missing(text) == ["tests/unit/test_promises.py::test_gone", "pool/native/gone.h"]
