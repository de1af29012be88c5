"""Builds with sanitizers, made once and kept in build/sanitize, and the table of what ran under them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[2]
BUILDS = ROOT / "build" / "sanitize"
SHORT = bool(os.environ.get("KVPOOL_SANITIZE_SHORT"))
# Of the native test program, each time it runs.
SECONDS = float(os.environ.get("KVPOOL_SANITIZE_SECONDS", "2" if SHORT else "10"))

HAMMER, SIMULATORS, NATIVE = "kvpool_hammer", ("kvpool_sim", "kvpool_litmus_sim"), "_native"
OPTIONS: Mapping[str, Sequence[str]] = {
    "address": ("-DKVPOOL_SANITIZE=address", "-DKVPOOL_SIM=ON", f"-DPython_EXECUTABLE={sys.executable}"),
    "thread": ("-DKVPOOL_SANITIZE=thread", "-DKVPOOL_SIM=ON", "-DKVPOOL_PYTHON=OFF"),
    "memcheck": ("-DCMAKE_BUILD_TYPE=RelWithDebInfo", "-DKVPOOL_PYTHON=OFF"),
}
TARGETS: Mapping[str, Sequence[str]] = {
    "address": (HAMMER, *SIMULATORS, NATIVE),
    "thread": (HAMMER, *SIMULATORS),
    "memcheck": (HAMMER,),
}

# How a report begins. Valgrind has many kinds: each is a line that is followed by an indented stack.
REPORT = re.compile(
    r"ERROR: (?:Address|Leak)Sanitizer|: runtime error: |(?:WARNING|FATAL): ThreadSanitizer: "
    r"|^==\d+== (?=\S)(?:[^\n]*)\n==\d+== {4}at 0x",
    re.MULTILINE,
)


@dataclass
class Row:
    step: str
    ran: str
    seconds: float
    reports: int | None = None
    note: str = ""


rows: list[Row] = []


@dataclass
class Done:
    code: int
    output: str
    reports: list[str] = field(default_factory=list)  # each one's text

    def show(self) -> str:
        return "\n".join([f"exit code {self.code}", *self.reports[:3], self.output[-4000:]])


def reports_in(text: str) -> list[str]:
    starts = [m.start() for m in REPORT.finditer(text)]
    return [text[a:b][:6000] for a, b in pairwise([*starts, len(text)])]


def run(
    command: Sequence[str | Path],
    env: Mapping[str, str] | None = None,
    *,
    leaks: bool = True,
    timeout_s: float = 1500,
) -> Done:
    """Runs a command, and collects what the tools reported: in files, because tests capture output."""
    with TemporaryDirectory(prefix="kvpool-sanitize-") as folder:
        log = f"log_path={folder}/report"
        options = {
            # SIGBUS is ours to handle, and a test wants to die by it.
            "ASAN_OPTIONS": f"{log}:handle_sigbus=0:detect_leaks={int(leaks)}",
            "UBSAN_OPTIONS": f"{log}:print_stacktrace=1",
            "TSAN_OPTIONS": f"{log}:second_deadlock_stack=1",
        }
        words = [str(word).replace("{reports}", folder) for word in command]
        done = subprocess.run(
            words,
            cwd=ROOT,
            env={**os.environ, **options, **(env or {})},
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
        )
        output = done.stdout + done.stderr
        texts = [output, *(p.read_text(errors="replace") for p in sorted(Path(folder).iterdir()))]
    return Done(done.returncode, output, [report for text in texts for report in reports_in(text)])


@cache
def built(kind: str) -> Path:
    """The folder with the programs of this build."""
    started = time.monotonic()
    build = BUILDS / kind
    configure = ["cmake", "-S", ROOT, "-B", build, "-G", "Ninja", "-DKVPOOL_HAMMER=ON", "-DKVPOOL_WERROR=OFF"]
    make = ["cmake", "--build", build, "--parallel", "2", "--target"]
    for command in ([*configure, *OPTIONS[kind]], [*make, *TARGETS[kind]]):
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    rows.append(Row("build", kind, time.monotonic() - started))
    return build / "pool" / "native"


@cache
def hammer(kind: str) -> tuple[str, ...]:
    """The command that starts the native test program of this build."""
    program = str(built(kind) / HAMMER)
    if kind == "memcheck":
        return (
            *valgrind(
                "--error-exitcode=97",
                "--leak-check=full",
                "--errors-for-leak-kinds=definite,possible",
            ),
            program,
        )
    return (*alone(kind), program)


@cache
def alone(kind: str) -> tuple[str, ...]:
    """What a program of this build has to be started with."""
    if kind == "thread":
        # Where the kernel scatters mappings more widely than the tool expects, it starts without that only.
        program = built(kind) / HAMMER
        tried = subprocess.run([program, "plant", "leak"], capture_output=True, text=True)
        if "unexpected memory mapping" in tried.stderr:
            return ("setarch", "-R")
    return ()


def valgrind(*options: str) -> tuple[str, ...]:
    program = shutil.which("valgrind")
    assert program is not None, "valgrind is not here; `.ci/system --sanitize` installs it, or says how"
    return (
        program,
        "-q",
        "--fair-sched=yes",
        "--num-callers=40",
        "--log-file={reports}/memcheck.%p",
        *options,
    )
