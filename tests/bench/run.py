"""The benchmark of the library: `make bench`, or `python tests/bench/run.py --setting large`.

Each figure is a ratio of two things that took turns in this run. Absolute numbers help to understand a
ratio; they are never compared between runs or machines.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import damaged, directory, transfer
from bench.harness import SETTINGS, Figure, Settings, machine
from bench.reference import Reference

PARTS = ("load", "store", "eviction", "damaged", "lookup", "attach")


def figures(settings: Settings, parts: list[str], folder: Path) -> Iterator[Figure]:
    reference = Reference()
    for part in parts:
        if part == "load":
            yield from transfer.load_figures(settings, reference, folder)
        elif part == "store":
            yield from transfer.store_figures(settings, reference, folder)
        elif part == "eviction":
            yield from transfer.eviction_figures(settings, folder)
        elif part == "damaged":
            yield from damaged.damaged_figures(settings, folder)
        elif part == "lookup":
            yield from directory.lookup_figures(settings, reference, folder)
        elif part == "attach":
            yield from directory.attach_figures(settings, reference, folder)


def medium_folder(wanted: Path | None, need_bytes: int) -> Path:
    for folder in [wanted] if wanted else [Path("/dev/shm"), Path(tempfile.gettempdir())]:
        if folder.is_dir() and os.access(folder, os.W_OK):
            fs = os.statvfs(folder)
            if fs.f_bavail * fs.f_frsize >= need_bytes:
                return folder
    raise SystemExit(
        f"bench: {need_bytes >> 20} MiB needed in {wanted or '/dev/shm'}; choose another folder (--medium)"
    )


def run(
    setting: str, parts: list[str], medium: Path | None, output: Path | None, *, quiet: bool = False
) -> dict[str, object]:
    settings = SETTINGS[setting]
    base = medium_folder(medium, settings.medium_bytes)
    facts = machine(base)
    start = time.monotonic()
    results = []
    with tempfile.TemporaryDirectory(prefix="kvpool-bench-", dir=base) as folder:
        for figure in figures(settings, parts, Path(folder)):
            results.append(figure.as_dict())
            if not quiet:
                print(figure.line(), flush=True)
    facts["load_average_after"] = os.getloadavg()[0]
    report = {
        "setting": setting,
        "seconds": round(time.monotonic() - start, 1),
        "machine": facts,
        "results": results,
    }
    if output is not None:
        output.write_text(json.dumps(report, indent=1) + "\n")
    return report


def main() -> None:
    parser = argparse.ArgumentParser(
        description="kvpool's benchmark: ratios against memcpy, memory accesses and a dict"
    )
    parser.add_argument("--setting", choices=SETTINGS, default=os.environ.get("BENCH", "small"))
    parser.add_argument("--only", choices=PARTS, action="append", help="a part; may be given several times")
    parser.add_argument("--medium", type=Path, help="folder of the region files (default: /dev/shm)")
    parser.add_argument("--output", type=Path, default=Path("bench.json"))
    args = parser.parse_args()
    report = run(args.setting, args.only or list(PARTS), args.medium, args.output)
    print(f"{args.output}: {len(report['results'])} figures in {report['seconds']} s")  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
