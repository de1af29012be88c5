"""Every import of our packages goes down the layers, heavy packages have one home, no file outgrows its noun.

A failure names the line and the way out. The tables below are the architecture: a new module gets its row in
the same commit.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE_ROOTS = ("pool", "connector", "operator")
NATIVE_MODULE = "kvpool._native"
LINES_MAX = 600

# A row covers the module and all below it. Imports go to a lower layer, or sideways within one as long as no
# circle arises.
LAYERS: Mapping[str, int] = {
    "kvpool._native": 0,
    "kvpool.errors": 0,
    "kvpool.outcomes": 0,
    "kvpool.keys": 0,
    "kvpool.spec": 0,
    "kvpool.quantity": 0,
    "kvpool.rules": 0,
    "kvpool.report": 0,
    "kvpool.litmus": 0,
    "kvpool.paths": 0,
    "kvpool.medium": 0,
    "kvpool.text": 0,
    "kvpool.engine_file": 1,
    "kvpool.engine_sums": 1,
    "kvpool.engines": 1,
    "kvpool.geometry": 1,
    "kvpool.region": 1,
    "kvpool.region_file": 1,
    "kvpool.buffers": 1,
    "kvpool.cxl": 2,
    "kvpool.tiers": 2,
    "kvpool.placement": 2,
    "kvpool.opened": 3,
    "kvpool.pool": 3,
    "kvpool.provision": 3,
    "kvpool.regions_here": 3,
    "kvpool.daemon": 4,
    "kvpool.explain": 4,
    "kvpool.users": 4,
    "kvpool.view": 4,
    "kvpool.api": 4,
    "kvpool.cli": 5,
    "kvpool.__main__": 5,
    "kvpool": 6,  # the public names, lazy; nothing inside the package may need them
}

# Package (or module of ours) -> the only places that may import it.
HOMES: Mapping[str, tuple[str, ...]] = {
    # Beside regions: their sizes; and a batch of keys, or the addresses of buffers, are one native call each.
    "kvpool._native": ("kvpool.region", "kvpool.geometry", "kvpool.buffers", "kvpool.keys"),
    "yaml": ("kvpool.spec",),
    "typer": ("kvpool.cli", "kvpool.__main__"),
    "torch": ("kvpool.tiers.gpu", "kvpool_connector"),
    "vllm": ("kvpool_connector.vllm", "kvpool_connector.metrics"),
    "sglang": ("kvpool_connector.sglang",),
    "lmcache": ("kvpool_connector.lmcache",),
    "kubernetes": ("kvpool_operator",),
    "kopf": ("kvpool_operator",),
    "fastapi": ("kvpool.api",),
    "starlette": ("kvpool.api",),
    "uvicorn": ("kvpool.api",),
    "redis": ("kvpool.index", "kvpool.api.shared_history"),
}

OPERATOR_MAY_IMPORT = (
    "kvpool.cxl",
    "kvpool.errors",
    "kvpool.paths",
    "kvpool.quantity",
    "kvpool.report",
    "kvpool.rules",
    "kvpool.spec",
    "kvpool.text",
)
# The status API of a cluster: the application is the pool's, its source and access are the operator's.
API_MODULES = tuple(
    f"kvpool_operator.{name}" for name in ("access", "api", "listwatch", "plugin", "readout", "source")
)
API_MAY_IMPORT = (*OPERATOR_MAY_IMPORT, "kvpool.api", "kvpool.explain")
# The operator's process touches no region; the node's daemon is what does.
NODE_MODULES = ("kvpool_operator.node", "kvpool_operator.nodes")
NODE_MAY_IMPORT = (
    *OPERATOR_MAY_IMPORT,
    "kvpool.daemon",
    "kvpool.provision",
    "kvpool.region",
)

# pool/native: includes go up this list only. A file that is not here is named after the noun it belongs to
# (region_fsck.h -> region).
NATIVE_ORDER = (
    "error",
    "layout",
    "geometry",
    "memory",
    "copy_kernel",
    "digest",
    "fault_guard",
    "memory_cpu",
    "attached",
    "extent",
    "victim",
    "directory",
    "litmus",
    "ownership",
    "log",
    "scan",
    "replica",
    "slots",
    "transfer",
    "recovery",
    "region",
    "layout_table",
    "module",
)


@dataclass(frozen=True)
class Import:
    """One imported name: `target` is the module, `name` what is taken out of it (None for a plain import)."""

    line: int
    target: str
    name: str | None = None


def within(module: str, prefix: str) -> bool:
    return module == prefix or module.startswith(prefix + ".")


def layer_of(module: str) -> int | None:
    """The layer of the longest row that covers `module`; None when no row does."""
    rows = [row for row in LAYERS if within(module, row) and (row != "kvpool" or module == "kvpool")]
    return LAYERS[max(rows, key=len)] if rows else None


def imports_of(source: str, module: str, *, is_package: bool) -> Iterator[Import]:
    """All imports, also in functions or under TYPE_CHECKING: a dependency is one wherever it is written."""
    package = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (Import(node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            target = ".".join([*base, *([node.module] if node.module else [])])
            yield from (Import(node.lineno, target, alias.name) for alias in node.names)


def resolve(found: Import, modules: Iterable[str]) -> str:
    """The module itself: `from kvpool import region` and `from kvpool.region import Region` are the same."""
    full = f"{found.target}.{found.name}" if found.name else found.target
    return full if full in modules else found.target


def judge(module: str, found: Import, modules: frozenset[str], public: frozenset[str]) -> str | None:
    """What is wrong with one import, with the way out; None when it is fine."""
    target = resolve(found, modules)
    for package, homes in HOMES.items():
        if within(target, package) and not any(within(module, home) for home in homes) and target != module:
            return f"imports {package}, which only {' and '.join(homes)} may; ask it for what is needed"
    if within(module, "kvpool_connector") and within(target, "kvpool"):
        if target == "kvpool" and (found.name is None or found.name in public):
            return None
        return f"imports {found.name or 'all'} from {target}; connectors use only kvpool's public names"
    if within(module, "kvpool_operator") and within(target, "kvpool"):
        of_node = any(within(module, node) for node in NODE_MODULES)
        of_api = any(within(module, part) for part in API_MODULES)
        may = NODE_MAY_IMPORT if of_node else API_MAY_IMPORT if of_api else OPERATOR_MAY_IMPORT
        version = found == Import(found.line, "kvpool", "__version__")
        if version or any(within(target, allowed) for allowed in may):
            return None
        who = "the node's daemon" if of_node else "the status API" if of_api else "the operator"
        return f"imports {target}; {who} may import {', '.join(may)} only"
    if not within(module, "kvpool") or module == "kvpool":
        return None
    if within(target, "kvpool_connector") or within(target, "kvpool_operator"):
        return f"imports {target}; the pool knows neither engines nor clusters"
    if not within(target, "kvpool") or found == Import(found.line, "kvpool", "__version__"):
        return None
    layer, target_layer = layer_of(module), layer_of(target)
    if layer is None:
        return "is in no layer; give the module a row in LAYERS of tests/unit/test_layers.py"
    if target_layer is None:
        return f"imports {target}, which is in no layer; give it a row in LAYERS of tests/unit/test_layers.py"
    if target_layer > layer:
        return f"layer {layer} imports {target} (layer {target_layer}); pass the value in instead"
    return None


def circles(edges: Mapping[str, set[str]]) -> Iterator[list[str]]:
    """Each module from which following imports leads back to itself, with one such way."""
    for start in sorted(edges):
        ways = [[start, after] for after in sorted(edges[start]) if after != start]
        seen: set[str] = set()
        while ways:
            way = ways.pop()
            if way[-1] == start:
                yield way
                break
            if way[-1] not in seen:
                seen.add(way[-1])
                ways += [[*way, after] for after in sorted(edges.get(way[-1], ()))]


def our_modules() -> dict[str, Path]:
    found = {}
    for root in PACKAGE_ROOTS:
        for package in (ROOT / root).glob("kvpool*"):
            for path in sorted(package.rglob("*.py")):
                parts = path.relative_to(ROOT / root).with_suffix("").parts
                found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def public_names(modules: Mapping[str, Path]) -> frozenset[str]:
    """What kvpool/__init__.py offers: the names that it imports for the type checker (else lazily)."""
    path = modules.get("kvpool")
    found = imports_of(path.read_text(), "kvpool", is_package=True) if path else ()
    return frozenset(item.name for item in found if item.name and within(item.target, "kvpool"))


def native_rank(name: str) -> int | None:
    """Place of a native file in NATIVE_ORDER: by its own name, or else by the longest noun it starts with."""
    stem = Path(name).stem
    fits = [noun for noun in NATIVE_ORDER if stem == noun or stem.startswith(noun + "_")]
    return NATIVE_ORDER.index(max(fits, key=len)) if fits else None


def native_problems(name: str, source: str) -> Iterator[str]:
    """What is wrong with the includes of one native file, each as `line: problem`."""
    rank = native_rank(name)
    if rank is None:
        yield "1: give the file a place in NATIVE_ORDER of tests/unit/test_layers.py"
        return
    for number, line in enumerate(source.splitlines(), 1):
        quoted = re.match(r'\s*#include "([^"]+)"', line)
        if quoted and quoted[1].startswith("sim/"):
            yield f"{number}: includes the simulator, which is made of the core and not the other way round"
        elif quoted and (other := native_rank(quoted[1])) is not None and other > rank:
            yield f"{number}: includes {quoted[1]}, which comes later; pass the value in instead"
        if re.match(r"\s*#include <(nanobind/|Python\.h)", line) and NATIVE_ORDER[rank] != "module":
            yield f"{number}: includes Python, which only module.cpp may; pass plain pointers and sizes in"


def native_files() -> list[Path]:
    native = ROOT / "pool" / "native"
    return sorted(path for path in native.rglob("*") if path.suffix in (".h", ".cpp"))


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


# --- the repository -----------------------------------------------------------------------------------------


def test_imports_of_our_packages_go_down() -> None:
    modules = our_modules()
    names, public = frozenset(modules) | {NATIVE_MODULE}, public_names(modules)
    problems = []
    for module, path in modules.items():
        for found in imports_of(path.read_text(), module, is_package=path.name == "__init__.py"):
            problem = judge(module, found, names, public)
            if problem:
                problems.append(f"{relative(path)}:{found.line}: {problem}")
    assert not problems, "\n" + "\n".join(problems)


def test_imports_of_our_packages_make_no_circle() -> None:
    modules = our_modules()
    edges = {
        module: {
            target
            for found in imports_of(path.read_text(), module, is_package=path.name == "__init__.py")
            if (target := resolve(found, modules)) in modules and target != "kvpool"
        }
        for module, path in modules.items()
    }
    edges.pop("kvpool", None)  # lazy: it names everything, and nothing inside imports it
    problems = [" -> ".join(way) for way in circles(edges)]
    assert not problems, "imports go round; move what both need to a lower module:\n" + "\n".join(problems)


def test_native_includes_go_up_the_list() -> None:
    problems = [
        f"{relative(path)}:{problem}"
        for path in native_files()
        if path.parent.name == "native"
        for problem in native_problems(path.name, path.read_text())
    ]
    assert not problems, "\n" + "\n".join(problems)


def test_operator_folder_is_no_package() -> None:
    # With an __init__.py it would shadow the standard library's operator for all that runs in the checkout.
    assert not (ROOT / "operator" / "__init__.py").exists(), "operator/__init__.py shadows a standard module"


def test_files_are_short_enough_for_one_noun() -> None:
    paths = [*our_modules().values(), *(ROOT / "tests").rglob("*.py"), *native_files()]
    lengths = {path: len(path.read_text().splitlines()) for path in paths}
    long = [f"{relative(path)}: {lines} lines" for path, lines in lengths.items() if lines > LINES_MAX]
    assert not long, f"more than {LINES_MAX} lines; which two nouns are in it?\n" + "\n".join(long)


# --- the checker itself: each rule catches what it is for ---------------------------------------------------

MODULES = frozenset(
    "kvpool." + name
    for name in ("_native", "errors", "spec", "region", "pool", "daemon.loop", "daemon.chores", "newthing")
) | {"kvpool"}


def first_problem(module: str, source: str) -> str | None:
    for found in imports_of(source, module, is_package=False):
        problem = judge(module, found, MODULES, frozenset({"Pool"}))
        if problem:
            return problem
    return None


@pytest.mark.parametrize(
    ("module", "source", "expected"),
    [
        (
            "kvpool.pool",
            "from kvpool.daemon import loop",
            "layer 3 imports kvpool.daemon.loop (layer 4); pass",
        ),
        ("kvpool.pool", "from .daemon.loop import run", "layer 3 imports kvpool.daemon.loop (layer 4)"),
        (
            "kvpool.errors",
            "def f():\n    from kvpool import region",
            "imports kvpool.region (layer 1); pass the",
        ),
        ("kvpool.spec", "import kvpool", "layer 0 imports kvpool (layer 6)"),
        ("kvpool.pool", "import kvpool._native", "only kvpool.region and"),
        ("kvpool.pool", "from kvpool import _native", "only kvpool.region and"),
        ("kvpool.pool", "import yaml", "only kvpool.spec may"),
        ("kvpool.region", "import torch.cuda", "imports torch"),
        ("kvpool.newthing", "from kvpool.errors import KvpoolError", "is in no layer"),
        ("kvpool.pool", "from kvpool.newthing import x", "kvpool.newthing, which is in no layer"),
        ("kvpool.pool", "import kvpool_connector.pages", "knows neither engines nor clusters"),
        ("kvpool_connector.pages", "import vllm", "imports vllm, which only"),
        ("kvpool_connector.vllm", "from kvpool.region import Region", "only kvpool's public names"),
        ("kvpool_connector.vllm", "from kvpool import region", "only kvpool's public names"),
        ("kvpool_operator.desired", "from kvpool.region import Region", "the operator may import"),
        ("kvpool_operator.nodes.keeper", "from kvpool.pool import Pool", "the node's daemon may import"),
    ],
)
def test_judge_wrong_import_is_named_with_way_out(module: str, source: str, expected: str) -> None:
    problem = first_problem(module, source)
    assert problem is not None
    assert expected in problem


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("kvpool.pool", "from kvpool.region import Region\nfrom kvpool.errors import KvpoolError\nimport os"),
        ("kvpool.region", "from kvpool import _native"),
        ("kvpool.daemon.loop", "from kvpool import __version__\nfrom kvpool.daemon import chores"),
        ("kvpool.spec", "import yaml\nfrom .errors import ManifestError"),
        ("kvpool_connector.vllm", "import vllm, torch\nfrom kvpool import Pool"),
        ("kvpool_operator.desired", "import kopf\nfrom kvpool.spec import PoolSpec"),
        ("kvpool_operator.node", "from kvpool import __version__\nfrom kvpool.region import Region"),
    ],
)
def test_judge_right_import_is_silent(module: str, source: str) -> None:
    assert first_problem(module, source) is None


def test_circles_two_modules_import_each_other_is_found() -> None:
    assert list(circles({"a": {"b"}, "b": {"c"}, "c": {"b"}})) == [["b", "c", "b"], ["c", "b", "c"]]
    assert not list(circles({"a": {"b", "c"}, "b": {"c"}, "c": set()}))


@pytest.mark.parametrize(
    ("name", "source", "expected"),
    [
        ("layout.h", '#pragma once\n#include "region.h"', "2: includes region.h, which comes later"),
        ("region_fsck.cpp", '#include "module.h"', "1: includes module.h, which comes later"),
        ("transfer.h", "#include <nanobind/nanobind.h>", "1: includes Python"),
        ("region.cpp", '#include "sim/world.h"', "1: includes the simulator"),
        ("whatever.h", "", "NATIVE_ORDER"),
    ],
)
def test_native_problems_wrong_include_is_named(name: str, source: str, expected: str) -> None:
    assert [expected in problem for problem in native_problems(name, source)] == [True]
