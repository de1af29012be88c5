"""Commands about manifests and regions: validate, fsck, scrub, dump, format, layout."""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from kvpool.cli import output as out
from kvpool.cli import target
from kvpool.cli.output import Output, OutputOption
from kvpool.errors import KvpoolError
from kvpool.provision import real_regions
from kvpool.provision.apply import apply
from kvpool.provision.observe import look_at
from kvpool.provision.plan import Format, Shape, format_obstacle, in_this_version
from kvpool.quantity import human_bytes, parse_quantity
from kvpool.regions_here import RegionTarget
from kvpool.spec import PoolSpec

SLOT_STATES = ("writing", "stored", "lent", "retired")  # those that are not free
SCRUB_SLOTS = 1024  # a step between two looks at the progress


@out.reports_errors
def validate(
    file: Annotated[
        str, typer.Option("--file", "-f", metavar="FILE", help="The manifest; - for standard input.")
    ],
    output: OutputOption = Output.TABLE,
) -> None:
    """Check a manifest and list every mistake in it. Touches nothing."""
    spec = target.read_manifest(file)
    warnings = list(_warnings(spec))
    if output is Output.JSON:
        manifest = spec.to_object()
        out.print_json({"valid": True, "name": spec.name, "warnings": warnings, "manifest": manifest})
        return
    tiers = ", ".join(f"{t.name} ({t.medium}, {human_bytes(t.capacity_bytes)})" for t in spec.tiers)
    hosts = f"{spec.hosts} host{'s' if spec.hosts > 1 else ''}"
    out.say(f'{file}: valid. Pool "{spec.name}", {hosts}, tiers in lookup order: {tiers}')
    for warning in warnings:
        out.note(f"warning: {warning}")


def _warnings(spec: PoolSpec) -> Iterator[str]:
    for index, tier in enumerate(spec.tiers):
        missing = in_this_version(tier)
        if missing:
            what = "'kvpool up' leaves it out" if tier.optional else "'kvpool up' refuses it"
            yield f"spec.tiers[{index}]: {missing}; {what}"
        if tier.shared and spec.hosts == 1:
            yield f"spec.tiers[{index}].shared: only one host shares it; set spec.hosts to their number"


@out.reports_errors
def fsck(
    target_: target.TargetArgument = None,
    file: target.FileOption = None,
    repair: Annotated[
        bool,
        typer.Option(
            "--repair",
            help="Put in order what is found in the shards that this machine's hosts own. Reads all their "
            "blocks and drops damaged ones; loses no right one.",
        ),
    ] = False,
    host: target.HostOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Check the structure of a pool's regions, or of one region. Engines may go on meanwhile.

    Reads only, unless --repair is given; --host chooses one host's shard for that. Exit code 0: clean, or
    everything was repaired; 1: something is wrong still.
    """
    regions = target.regions(target_, file, host=host if repair else None)
    results = [_fsck(region, repair=repair) for region in regions]
    clean = all(result["ok"] for result in results)
    if output is Output.JSON:
        out.print_json({"ok": clean, "regions": results})
    else:
        for result in results:
            totals = ", ".join(
                f"{count} {name.replace('_', ' ')}" for name, count in result["totals"].items()
            )
            for done in result.get("repaired", []):
                out.say(f"{result['path']}: repaired: {done}")
            verdict = "clean" if result["ok"] else "NOT CLEAN"
            out.say(f"{result['path']}: {verdict}" + (f" ({totals})" if totals else ""))
            if result.get("medium", {}).get("kind", "file") != "file":
                out.say(f"  {_medium(result['medium'])}")
            for problem in result["problems"]:
                out.say(f"  {problem}")
    if not clean:
        if not repair and any(result["totals"] for result in results):  # what is no region has none
            out.note("'kvpool fsck --repair' puts in order what belongs to this machine's hosts.")
        raise typer.Exit(out.EXIT_FAILED)


def _medium(medium: dict[str, Any]) -> str:
    what = {"device": "a DAX device", "dax-file": "a file that is mapped directly (fsdax)"}[medium["kind"]]
    node = "" if medium["numa_node"] is None else f", near NUMA node {medium['numa_node']}"
    synchronous = ", with MAP_SYNC" if medium["synchronous"] else ""
    return f"on {what}, mapped in multiples of {human_bytes(medium['align_bytes'])}{synchronous}{node}"


def _fsck(region: RegionTarget, *, repair: bool) -> dict[str, Any]:
    from kvpool.region import Region

    result: dict[str, Any] = {"tier": region.tier, "path": str(region.path)}
    done: list[str] = []
    if repair:
        result["repaired"] = done
    try:
        left = _repair(region.path, region.shards, done) if repair else []
        found = Region.fsck(region.path)
        result["medium"] = asdict(Region.inspect(region.path).medium)
        if repair and found.problems:
            # A damaged word may have named the repairing process itself as the one that is at it.
            left = _repair(region.path, region.shards, done)
            found = Region.fsck(region.path)
    except KvpoolError as error:
        return result | {"ok": False, "problems": [str(error)], "totals": {}}
    problems = left + [problem for problem in found.problems if problem not in left]
    return result | {"ok": not problems, "problems": problems, "totals": found.totals}


def _repair(path: Path, shards: Iterable[int], done: list[str]) -> list[str]:
    """Repair the shards, add to `done`, return what is left."""
    from kvpool.region import Region

    left: list[str] = []
    for shard in shards:
        with Region.attach(path, host=shard, role="tool") as attached:
            report = attached.repair()
        done += [f"shard {shard}: {text}" for text in report.done]
        left += [f"shard {shard}: {text}" for text in report.left]
    return left


@out.reports_errors
def scrub(
    target_: target.TargetArgument = None,
    file: target.FileOption = None,
    host: target.HostOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Read every block that this machine's hosts stored, and drop the damaged ones.

    Exit code 1 when there were any. Each host checks what it stored; --host chooses one.
    """
    results = []
    with out.progress("checking") as progress:
        for region in target.regions(target_, file, host=host):
            for shard in region.shards:
                results.append(_scrub(region, shard, progress))
    clean = not any(result["bad"] for result in results)
    if output is Output.JSON:
        out.print_json({"ok": clean, "regions": results})
    else:
        for r in results:
            verdict = f"{r['bad']} were damaged and are gone" if r["bad"] else "all are right"
            where = f"{r['path']}, shard {r['shard']}"
            out.say(f"{where}: {r['checked']} blocks checked in {r['seconds']:.1f} s, {verdict}")
    if not clean:
        raise typer.Exit(out.EXIT_FAILED)


def _scrub(region: RegionTarget, shard: int, progress: out.Show) -> dict[str, Any]:
    from kvpool.region import Region

    began = time.monotonic()
    checked = bad = position = 0
    with Region.attach(region.path, host=shard, role="tool") as attached:
        total = attached.usage().hosts[shard].slots_total
        while True:
            report = attached.scrub(start=position, limit=SCRUB_SLOTS)
            checked, bad, position = checked + report.checked, bad + report.bad, report.next_slot
            progress(region.label, min(position or total, total), total)
            if position == 0:
                break
    named = {"tier": region.tier, "path": str(region.path), "shard": shard}
    return {**named, "checked": checked, "bad": bad, "seconds": round(time.monotonic() - began, 3)}


@out.reports_errors
def dump(
    target_: target.TargetArgument = None,
    file: target.FileOption = None,
    tier: Annotated[str | None, typer.Option(help="Only this tier.")] = None,
    state: Annotated[
        str | None, typer.Option(help="Only slots in this state: writing, stored, lent, retired.")
    ] = None,
    limit: Annotated[int, typer.Option(min=0, help="At most so many slots a region; 0 for all.")] = 100,
    output: OutputOption = Output.TABLE,
) -> None:
    """List the slots of a pool that are not free: state, owner, key (12 digits), size. For debugging."""
    if state is not None and state.lower() not in SLOT_STATES:
        out.wrong_use(f'--state: "{state}" is not known; write {", ".join(SLOT_STATES)}.')
    regions = target.regions(target_, file, tier)
    if output is Output.JSON:
        # Written piece by piece: the slots of a large region do not fit into one list.
        sys.stdout.write("[")
        separator = "\n"
        for region in regions:
            for slot in itertools.islice(_slots(region, state), limit or None):
                sys.stdout.write(separator + json.dumps(slot))
                separator = ",\n"
        sys.stdout.write("\n]\n")
        return
    for region in regions:
        rows = list(itertools.islice(_slots(region, state), limit or None))
        more = " (there may be more: raise --limit)" if len(rows) == limit else ""
        out.say(f"{region.path}: {len(rows)} slots{more}")
        for row in rows:
            del row["tier"], row["path"]
        out.print_table(rows, numbers=("host", "extent", "slot", "count", "length_bytes", "age"))


def _slots(region: RegionTarget, state: str | None) -> Iterator[dict[str, object]]:
    from kvpool.region import Region

    with Region.open_read_only(region.path) as opened:
        for slot in opened.dump():
            if state is None or slot.state == state.lower():
                yield {"tier": region.tier, "path": str(region.path), **asdict(slot)}


@out.reports_errors
def format_region(
    path: Annotated[Path, typer.Argument(help="A file to make, or a DAX device.")],
    capacity: Annotated[str, typer.Option(help="Size of the region, like 64Gi.")],
    hosts: Annotated[int, typer.Option(min=1, max=64, help="Hosts that share the region.")] = 1,
    coherence: Annotated[str, typer.Option(help="hardware; software for CXL that hosts share.")] = "hardware",
    min_block_size: Annotated[str | None, typer.Option(help="Smallest block, like 16Ki.")] = None,
    extent_size: Annotated[str | None, typer.Option(help="What one block size gets at a time.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Erase what is there.")] = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Make an empty region. `kvpool up` does this by itself; this is for erasing one, and for tests."""
    if coherence not in ("hardware", "software"):
        out.wrong_use(f'--coherence: "{coherence}" is not known; write hardware or software.')
    path = path.absolute()
    shape = Shape(
        capacity_bytes=_quantity("--capacity", capacity),
        hosts=hosts,
        coherence="software" if coherence == "software" else "hardware",
        min_block_bytes=_quantity("--min-block-size", min_block_size) if min_block_size else None,
        extent_bytes=_quantity("--extent-size", extent_size) if extent_size else None,
    )
    regions = real_regions()
    found = look_at(path, regions.inspect)
    obstacle = format_obstacle(path, shape, found, force=force)
    if obstacle is not None:
        raise obstacle
    on: Literal["nothing", "file", "device"] = found.kind if found.kind in ("file", "device") else "nothing"
    with out.byte_progress("making") as progress:
        apply([Format("", path, shape, on)], regions, progress, force=force)
    made = regions.inspect(path)
    if output is Output.JSON:
        sizes = {"capacity_bytes": shape.capacity_bytes, "hosts": hosts}
        out.print_json({"path": str(path), "uuid": made.uuid, **sizes})
    else:
        size = human_bytes(shape.capacity_bytes)
        out.say(f"made region {path}: {size}, {hosts} shard{'s' if hosts > 1 else ''}, uuid {made.uuid}")


def _quantity(option: str, text: str) -> int:
    try:
        return parse_quantity(text)
    except ValueError as error:
        out.wrong_use(f"{option}: {error}")


@out.reports_errors
def layout(output: OutputOption = Output.TABLE) -> None:
    """Print the format of a region, byte by byte, as this build writes it."""
    from kvpool.region import FORMAT_VERSION, layout_table

    if output is Output.JSON:
        out.print_json({"format_version": FORMAT_VERSION, "table": layout_table()})
    else:
        sys.stdout.write(layout_table())
