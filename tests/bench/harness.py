"""Timing by turns: ours and the yardstick alternate within one run, and only their ratio is a figure."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from kvpool import _native


@dataclass(frozen=True)
class Settings:
    """How much a run does. Compare the figures of two runs only when they had one setting."""

    name: str
    rounds: int
    cold_bytes: int  # far more than the last-level cache
    warm_bytes: int  # well within it
    block_bytes: tuple[int, ...]
    slot_counts: tuple[int, ...]
    threads: tuple[int, ...]
    batches: int  # of 512 keys, a round

    @property
    def medium_bytes(self) -> int:
        """Room that is needed on the medium at once."""
        return max(5 * self.cold_bytes, 600 * max(self.slot_counts)) + (64 << 20)


_CORES = os.cpu_count() or 1
SETTINGS = {
    "tiny": Settings("tiny", 2, 1 << 20, 256 << 10, (65536,), (1000,), (1, 2), 2),
    "small": Settings(
        "small",
        7,
        128 << 20,
        4 << 20,
        (65536, 1 << 20, 2 << 20),
        (10**3, 10**5, 10**6),
        (1, min(2, _CORES)),
        40,
    ),
    "large": Settings(
        "large", 21, 1 << 30, 4 << 20, (65536, 1 << 20, 2 << 20), (10**3, 10**5, 10**6), (1, _CORES), 200
    ),
}


@dataclass
class Figure:
    """One ratio. `meaning` says whether it is one of speeds (more is better) or of times (less is)."""

    name: str
    case: dict[str, object]
    meaning: str
    ratios: list[float]
    ours: list[float]
    yardstick: list[float]
    unit: str
    extra: dict[str, object] = field(default_factory=dict)

    def as_dict(self) -> dict[str, object]:
        return {
            "name": self.name,
            **self.case,
            "meaning": self.meaning,
            "ratio_median": round(median(self.ratios), 4),
            "ratio_quartiles": [round(q, 4) for q in quartiles(self.ratios)],
            "ours_median": round(median(self.ours), 3),
            "yardstick_median": round(median(self.yardstick), 3),
            "unit": self.unit,
            "rounds": len(self.ratios),
            **self.extra,
        }

    def line(self) -> str:
        low, high = quartiles(self.ratios)
        case = " ".join(f"{k}={v}" for k, v in self.case.items())
        return (
            f"{self.name:<22} {case:<78} {median(self.ratios):7.3f}  [{low:.3f} .. {high:.3f}]  "
            f"{median(self.ours):9.2f} | {median(self.yardstick):9.2f} {self.unit}"
        )


def quartiles(values: list[float]) -> tuple[float, float]:
    ordered = sorted(values)
    last = len(ordered) - 1
    return ordered[round(last * 0.25)], ordered[round(last * 0.75)]


def seconds(call: Callable[[], None]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def by_turns(
    rounds: int,
    ours: Callable[[], None],
    yardstick: Callable[[], None],
    between: Callable[[], None] | None = None,
) -> tuple[list[float], list[float]]:
    """Seconds of each round of both. The first round is thrown away; who begins changes every round."""
    a: list[float] = []
    b: list[float] = []
    for i in range(rounds + 1):
        pair = [(ours, a), (yardstick, b)]
        for call, into in pair if i % 2 == 0 else reversed(pair):
            into.append(seconds(call))
        if between is not None:
            between()
    return a[1:], b[1:]


class Threads:
    """Runs one call a thread and waits for all; with one thread there is no pool in the way."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._pool = ThreadPoolExecutor(count) if count > 1 else None

    def run(self, call: Callable[[int], None]) -> None:
        if self._pool is None:
            call(0)
        else:
            for done in [self._pool.submit(call, i) for i in range(self.count)]:
                done.result()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()


def _first_line(path: str, key: str) -> str:
    try:
        for line in Path(path).read_text().splitlines():
            if line.startswith(key):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return ""


def _commit() -> str:
    git = shutil.which("git")
    if git is None:
        return ""
    done = subprocess.run(
        [git, "describe", "--always", "--dirty"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip()


def machine(medium: Path) -> dict[str, Any]:
    """What a figure depends on besides the code."""
    caches = {}
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level, kind = (index / "level").read_text().strip(), (index / "type").read_text().strip()
        caches[f"L{level} {kind}"] = (index / "size").read_text().strip()
    fs = os.statvfs(medium)
    return {
        "cpu": _first_line("/proc/cpuinfo", "model name") or platform.processor(),
        "cores": _CORES,
        "caches": caches,
        "memory": _first_line("/proc/meminfo", "MemTotal"),
        "virtual": "hypervisor" in _first_line("/proc/cpuinfo", "flags"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "copy_kernel": _native.copy_kind(),
        "cache_instructions": _native.cache_ops(),
        "medium": str(medium),
        "medium_free_bytes": fs.f_bavail * fs.f_frsize,
        "load_average_before": os.getloadavg()[0],
        "commit": _commit(),
    }
