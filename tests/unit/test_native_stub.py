"""pool/kvpool/_native.pyi says what the built module has: the same names, with the same parameters in order.

The stub is written by hand, because a type such as "writable buffer" is more than what nanobind can say. The
other side is what nanobind's own generator reads from the built module; annotations are not compared.
"""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

stubgen = pytest.importorskip("nanobind.stubgen", reason="nanobind is not installed; 'make setup' does it")

Signature = tuple[str, ...]


def parameters(function: ast.FunctionDef) -> Signature:
    """Parameter names in order, with `=` for those that have a default, `*` and `/` where they stand."""
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    first_default = len(positional) - len(arguments.defaults)
    out = []
    for index, argument in enumerate(positional):
        out.append(argument.arg + ("=" if index >= first_default else ""))
        if index + 1 == len(arguments.posonlyargs):
            out.append("/")
    if arguments.vararg or arguments.kwonlyargs:
        out.append("*")
    out += [
        argument.arg + ("=" if default is not None else "")
        for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    if arguments.kwarg:
        out.append("**")
    return tuple(out)


def names_of(body: list[ast.stmt], prefix: str = "") -> dict[str, list[Signature] | str]:
    """Public names: a function with its signatures (one for each overload), a class, or a value."""
    found: dict[str, list[Signature] | str] = {}
    for node in body:
        if isinstance(node, ast.FunctionDef):
            if node.name.startswith("_") and node.name != "__init__":
                continue
            if any(isinstance(mark, ast.Name) and mark.id == "property" for mark in node.decorator_list):
                found[prefix + node.name] = "value"
            elif not any(isinstance(mark, ast.Attribute) for mark in node.decorator_list):  # x.setter
                signatures = found.setdefault(prefix + node.name, [])
                assert isinstance(signatures, list)
                signatures.append(parameters(node))
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            found[prefix + node.name] = "class"
            found |= names_of(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, ast.AnnAssign | ast.Assign):
            targets = [node.target] if isinstance(node, ast.AnnAssign) else node.targets
            for target in targets:
                if isinstance(target, ast.Name) and not target.id.startswith("_"):
                    found[prefix + target.id] = "value"
    return found


def differences(stub: str, built: str) -> list[str]:
    """One line for each name that only one side has or that both have differently."""
    said, real = names_of(ast.parse(stub).body), names_of(ast.parse(built).body)
    problems = [f"{name}: in the stub, not in the module" for name in said.keys() - real.keys()]
    problems += [f"{name}: in the module, not in the stub" for name in real.keys() - said.keys()]
    problems += [
        f"{name}: the stub says {said[name]}, the module has {real[name]}"
        for name in said.keys() & real.keys()
        if said[name] != real[name]
    ]
    return sorted(problems)


def test_stub_and_built_module_agree() -> None:
    native = importlib.import_module("kvpool._native")
    generator = stubgen.StubGen(native)
    generator.put(native)
    path = Path(__file__).resolve().parents[2] / "pool" / "kvpool" / "_native.pyi"
    problems = differences(path.read_text(), generator.get())
    assert not problems, "pool/kvpool/_native.pyi is out of date:\n" + "\n".join(problems)


def test_differences_are_found_on_both_sides() -> None:
    stub = "def f(a: int, b: int = 0) -> None: ...\nclass C:\n    def m(self, x: int) -> int: ...\nold: int"
    built = (
        "def f(a: int) -> None: ...\nclass C:\n    def m(self, y: int) -> int: ...\ndef new() -> None: ..."
    )
    problems = differences(stub, built)
    assert [line.split(":")[0] for line in problems] == ["C.m", "f", "new", "old"]
    assert not differences(stub, stub)
