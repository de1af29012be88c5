"""Commands about CXL memory: what is there, and regions composed of it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any
from uuid import UUID, uuid4

import typer

from kvpool.cli import output as out
from kvpool.cli.output import Output, OutputOption
from kvpool.cxl import Composed, ComposeError, Memory, Wanted, open_backend
from kvpool.cxl.backend import ALIGN_BYTES, GRANULARITY_BYTES, Backend
from kvpool.quantity import format_quantity, human_bytes, parse_quantity

app = typer.Typer(
    name="cxl",
    help=(
        "CXL memory: what this machine has of it, and the regions (DAX devices) that are composed of it.\n\n"
        "Machines that see the same memory agree on a region by its UUID: give the same one, and the same "
        "memories in the same order and granularity, on each. Bytes in memory outlive a region: composing it "
        "again, also after a reboot, gives them back. (Files do not: destroy removes a region's file.)"
    ),
    no_args_is_help=True,
)

BackendOption = Annotated[
    str,
    typer.Option(
        "--backend",
        envvar="KVPOOL_CXL_BACKEND",
        help="sysfs: this machine's CXL memory. file:/FOLDER: files, for machines without it; "
        "'file:/FOLDER?memories=2x1Gi' (in quotes) makes the folder and two memories, 0x1 and 0x2, first.",
    ),
]
UuidArgument = Annotated[str, typer.Argument(metavar="UUID", help="The region's UUID.", show_default=False)]
SizeOption = Annotated[
    str,
    typer.Option(
        "--size",
        metavar="SIZE",
        help="At least this much, like 64Gi; CXL rounds up to 256Mi a memory. The device is 2Mi smaller.",
    ),
]


@app.command("list")
@out.reports_errors
def list_(backend: BackendOption = "sysfs", output: OutputOption = Output.TABLE) -> None:
    """Show memories and regions, also those that a crash left in part."""
    opened = open_backend(backend)
    memories, regions = opened.memories(), opened.regions()
    if output is Output.JSON:
        described = {"memories": [asdict(memory) for memory in memories]}
        out.print_json({**described, "regions": [_described(region) for region in regions]})
        return
    if not memories and not regions:
        out.say("no CXL memory here")
    out.print_table([_memory_row(memory, regions) for memory in memories], numbers=("size", "node"))
    for region in regions:
        for line in _region_lines(region):
            out.say(line)


@app.command()
@out.reports_errors
def compose(
    size: SizeOption,
    memory: Annotated[
        list[str],
        typer.Option(
            "--memory", metavar="SERIAL", help="A memory's serial; repeat it to interleave, in this order."
        ),
    ],
    uuid: Annotated[
        str | None,
        typer.Option("--uuid", help="The region's UUID, the same on each machine; a new one when left out."),
    ] = None,
    granularity: Annotated[
        int, typer.Option(help="Bytes of one memory before the next one's turn: 256 to 16384.")
    ] = GRANULARITY_BYTES,
    align: Annotated[str, typer.Option(help="Of the device's mappings: 4Ki, 2Mi or 1Gi.")] = format_quantity(
        ALIGN_BYTES
    ),
    backend: BackendOption = "sysfs",
    output: OutputOption = Output.TABLE,
) -> None:
    """Make a region and its device, or find them when they are there already. Its bytes stay as they are.

    When a step fails, what was begun is taken back. What a crash left of the region is completed.
    """
    wanted = Wanted(
        uuid=_uuid(uuid) if uuid is not None else uuid4(),
        memories=tuple(serial.lower() for serial in memory),
        size_bytes=_size("--size", size),
        granularity_bytes=granularity,
        align_bytes=_size("--align", align),
    )
    _print_region(open_backend(backend).compose(wanted), output)


@app.command()
@out.reports_errors
def resize(
    uuid: UuidArgument,
    size: SizeOption,
    backend: BackendOption = "sysfs",
    output: OutputOption = Output.TABLE,
) -> None:
    """Give a region another size. Its bytes stay; nobody may map it meanwhile.

    Do it on each machine that has the region, then raise the tier's capacity.
    """
    _print_region(open_backend(backend).resize(_uuid(uuid), _size("--size", size)), output)


@app.command()
@out.reports_errors
def destroy(
    uuid: UuidArgument,
    with_blocks: Annotated[
        bool, typer.Option("--with-blocks", help="Also when a kvpool region lies in it.")
    ] = False,
    backend: BackendOption = "sysfs",
    output: OutputOption = Output.TABLE,
) -> None:
    """Remove a region and its device from this machine; none there is no error.

    The UUID 00000000-0000-0000-0000-000000000000 stands for what a crash left before it had one.
    """
    number = _uuid(uuid)
    opened = open_backend(backend)
    there = _may_be_there(opened, number)
    opened.destroy(number, with_blocks=with_blocks)
    if output is Output.JSON:
        out.print_json({"destroyed": str(number)})
        return
    if there:
        out.say(f"region {number} is gone from this machine")
    else:
        out.say(f"there was no region {number}; nothing was changed")


def _may_be_there(backend: Backend, uuid: UUID) -> bool:
    try:
        return any(region.uuid == uuid for region in backend.regions())
    except ComposeError:  # another region's notes may be damaged: destroy says what hinders it
        return True


def _uuid(text: str) -> UUID:
    try:
        return UUID(text)
    except ValueError:
        out.wrong_use(f'"{text}" is not a UUID; write one like {uuid4()}.')


def _size(option: str, text: str) -> int:
    try:
        return parse_quantity(text)
    except ValueError as error:
        out.wrong_use(f"{option}: {error}")


def _described(region: Composed) -> dict[str, Any]:
    return {**asdict(region), "uuid": str(region.uuid)}


def _print_region(region: Composed, output: Output) -> None:
    if output is Output.JSON:
        out.print_json(_described(region))
        return
    device = region.device
    where = f"{device.path}, {human_bytes(device.size_bytes)}" if device else "no device yet"
    out.say(f"region {region.uuid} of {', '.join(region.memories)}: {where}")


def _memory_row(memory: Memory, regions: list[Composed]) -> dict[str, object]:
    users = [str(region.uuid) for region in regions if memory.serial in region.memories]
    state = "healthy" if memory.healthy else memory.problem
    if memory.poison:
        state += f", {len(memory.poison)} poisoned range(s)"
    return {
        "memory": memory.serial,
        "name": memory.name,
        "size": human_bytes(memory.size_bytes),
        "kind": memory.kind,
        "node": _node(memory.numa_node),
        "state": state,
        "region": ", ".join(users) or "-",
    }


def _region_lines(region: Composed) -> list[str]:
    """A region in two lines: a table with UUIDs and paths is too wide for terminals."""
    memories = f" of {', '.join(region.memories)}" if region.memories else ""
    first = f"region {region.uuid}: {human_bytes(region.size_bytes)}{memories}"
    if region.problem:
        return [first, f"  {region.problem}"]
    if len(region.memories) > 1:
        first += f", interleaved by {region.granularity_bytes} bytes"
    device = region.device
    if device is None:
        return [first, "  no device: compose it again to complete it, or destroy it"]
    second = (
        f"  {device.path}: {human_bytes(device.size_bytes)}, mappings of {human_bytes(device.align_bytes)}"
    )
    if device.numa_node is not None:
        second += f", NUMA node {device.numa_node}"
    return [first, f"{second}, {len(device.poison)} poisoned ranges" if device.poison else second]


def _node(node: int | None) -> str:
    return "-" if node is None else str(node)
