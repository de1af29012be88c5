"""The native part under AddressSanitizer, UndefinedBehaviorSanitizer, ThreadSanitizer and valgrind memcheck.

Nothing of ours is suppressed: races that the protocol means to have are atomics.
Longer:   KVPOOL_SANITIZE_SECONDS=300 make test-sanitize
Shorter:  KVPOOL_SANITIZE_SHORT=1 make test-sanitize, as in CI: all of the native part, little of Python
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from sanitize.tools import NATIVE, ROOT, SECONDS, SHORT, Done, Row, alone, built, hammer, rows, run, valgrind

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]  # the first one of each kind builds

SITE = ROOT / "tests" / "sanitize" / "site"
PLANTED = {
    "address": ("overflow", "fiber", "undefined", "leak"),
    "thread": ("race",),
    "memcheck": ("overflow", "uninitialised", "leak"),
}
WHAT = {"address": "address, undefined behaviour", "thread": "races", "memcheck": "valgrind memcheck"}
SIMULATED_MEDIA = ("software", "coherent", "silent", "one-way", "sticky")
# All quick suites that touch the native module, but those whose processes kill each other.
SUITES: Sequence[str] = ("tests/unit", "tests/property", "tests/format", "tests/damage")
NOT_NATIVE = ("tests/unit/test_layers.py", "tests/unit/test_native_stub.py", "tests/unit/test_promises.py")
MEMCHECK_SUITES: Sequence[str] = (
    "tests/unit/test_region.py",
    "tests/unit/test_buffers.py",
    "tests/unit/test_region_refusals.py",
    "tests/unit/test_keys.py",
)
if SHORT:  # what hands memory of Python to the native part
    SUITES = ("tests/unit/test_region.py", "tests/unit/test_buffers.py", "tests/format")
    MEMCHECK_SUITES = ("tests/unit/test_buffers.py",)
SEEDS = 10 if SHORT else 40
# A report counts when our module is anywhere in it; the interpreter has some of its own, also without us.
OURS = re.compile(rf"{NATIVE}\.[\w.-]*so|kvp::|nanobind")


@contextmanager
def step(name: str, ran: str) -> Iterator[Row]:
    row = Row(name, ran, 0.0, 0)
    started = time.monotonic()
    try:
        yield row
    finally:
        row.seconds = time.monotonic() - started
        rows.append(row)


def judge(row: Row, done: Done) -> None:
    row.reports = len(done.reports)
    if done.code != 0 and not done.reports:
        row.note = f"exit code {done.code}"
    assert not done.reports, done.show()
    assert done.code == 0, done.show()


# -- the tools see what they are for -----------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "fault"), [(kind, fault) for kind in PLANTED for fault in PLANTED[kind]])
def test_planted_fault_is_reported(kind: str, fault: str) -> None:
    done = run([*hammer(kind), "plant", fault])
    assert done.code != 0, done.show()
    assert len(done.reports) >= 1, done.show()


# -- the native test program -------------------------------------------------------------------------------


@pytest.mark.parametrize("coherence", ["hardware", "software"])
@pytest.mark.parametrize("kind", ["address", "thread", "memcheck"])
def test_threads_that_do_everything_at_once_make_no_report(kind: str, coherence: str) -> None:
    # One thread at a time there, and each many times slower.
    seconds = SECONDS * (4 if kind == "memcheck" else 1)
    command = [*hammer(kind), str(seconds), coherence]
    with step(WHAT[kind], f"native threads, {coherence}-coherent") as row:
        done = run(command, timeout_s=10 * seconds + 300)
        loads = [int(n) for n in re.findall(r"(\d+) loaded", done.output)]
        row.note = f"{sum(loads):,} blocks loaded, all right"
        judge(row, done)
    assert len(loads) == 5
    assert min(loads) > 0


# -- the simulator -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["address", "thread"])
def test_simulator_makes_no_report(kind: str) -> None:
    program = (*alone(kind), built(kind) / "kvpool_sim")
    with step(WHAT[kind], f"simulator, every scenario, {SEEDS} seeds") as row:
        judge(row, run([*program, "--seeds", f"1:{SEEDS}"]))
    with step(WHAT[kind], "simulator, every schedule to a bound") as row:
        judge(row, run([*program, "--explore", "evict", "--preemptions", "1", "--events", "1"]))


@pytest.mark.parametrize("kind", ["address", "thread"])
def test_simulated_litmus_makes_no_report(kind: str) -> None:
    program = (*alone(kind), built(kind) / "kvpool_litmus_sim")
    with step(WHAT[kind], f"simulated litmus test on {len(SIMULATED_MEDIA)} media") as row:
        for medium in SIMULATED_MEDIA:
            judge(row, run([*program, medium, "--seeds", "1:10"]))


# -- Python ------------------------------------------------------------------------------------------------


def runtime(name: str) -> str:
    compiler = os.environ.get("CXX", "c++")
    found = subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    return found.stdout.strip()


@pytest.fixture(scope="module")
def sanitized() -> Mapping[str, str]:
    """The environment in which Python has the sanitized module, and gets its own memory from malloc."""
    module = next(built("address").glob(f"{NATIVE}*.so"))
    return {
        "LD_PRELOAD": f"{runtime('libasan.so')} {runtime('libstdc++.so')}",
        "PYTHONPATH": os.pathsep.join([str(SITE), str(ROOT / "tests")]),
        "KVPOOL_NATIVE": str(module),
        "PYTHONMALLOC": "malloc",
    }


def pytest_of(*arguments: str) -> Sequence[str]:
    return (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout=600", *arguments)


OVERFLOW = """
import ctypes, sys
from pathlib import Path
from kvpool import _native
from kvpool.region import Region
from regions import NS, make
from strategies import contents, keys_of
print(_native.__file__)
with Region.attach(make(Path(sys.argv[1]))) as region:
    keys = keys_of(NS, [1])
    assert region.store(keys, contents(keys)).stored_count == 1
    small = bytearray(NS.block_bytes // 2)
    at = ctypes.addressof(ctypes.c_char.from_buffer(small))
    word = lambda value: value.to_bytes(8, "little")
    region._native.load(keys.packed, word(at), b"", word(NS.block_bytes), b"", 1, NS.block_bytes)
"""


def test_buffer_of_python_too_small_is_reported(sanitized: Mapping[str, str], tmp_path: Path) -> None:
    done = run([sys.executable, "-c", OVERFLOW, tmp_path / "region"], sanitized, leaks=False)
    assert sanitized["KVPOOL_NATIVE"] in done.output
    assert done.code != 0
    assert any("heap-buffer-overflow" in report for report in done.reports), done.show()


def test_python_suites_make_no_report(sanitized: Mapping[str, str]) -> None:
    ignored = [f"--ignore={path}" for path in NOT_NATIVE]
    chosen = "not slow and not engine and not gpu"
    with step(WHAT["address"], ", ".join(s.removeprefix("tests/") for s in SUITES) + " (pytest)") as row:
        done = run(pytest_of("-m", chosen, *ignored, *SUITES), sanitized, leaks=False)
        row.note = passed(done)
        judge(row, done)


def test_python_under_memcheck_makes_no_report_of_ours() -> None:
    shipped = Path("/usr/lib/valgrind/python3.supp")  # of the interpreter; the only suppressions
    options = [f"--suppressions={shipped}"] if shipped.exists() else []
    env = {"PYTHONMALLOC": "malloc"}
    with step(WHAT["memcheck"], f"{len(MEMCHECK_SUITES)} modules of tests/unit (pytest)") as row:
        command = [*valgrind("--leak-check=no", *options), *pytest_of("-m", "not slow", *MEMCHECK_SUITES)]
        done = run(command, env, leaks=False)
        ours = [report for report in done.reports if OURS.search(report)]
        row.note = f"{passed(done)}; {len(done.reports) - len(ours)} reports of the interpreter alone"
        judge(row, Done(done.code, done.output, ours))


def passed(done: Done) -> str:
    found = re.search(r"(\d+) passed", done.output)
    return f"{found[1]} tests passed" if found else "no test passed"
