"""The `kvpool` command: pools on this machine, without a cluster."""

from __future__ import annotations

from typing import Annotated

import typer

from kvpool.cli import api, check, cxl, hosts, lifecycle, top, watch

app = typer.Typer(
    name="kvpool",
    help=(
        "One pool of KV-cache blocks for all engines of a machine or cluster.\n\n"
        "Results go to standard output (--output json is stable), everything else to standard error. "
        "Exit codes: 0 done, 1 failed, 2 wrong use (a wrong manifest too); litmus also 3: not verified."
    ),
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"kvpool {version('kvpool')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


app.command()(lifecycle.up)
app.command()(lifecycle.down)
app.command()(watch.status)
app.command()(watch.explain)
app.command()(top.top)
app.command()(api.api)
app.command()(check.validate)
app.command()(check.fsck)
app.command()(check.scrub)
app.command()(check.dump)
app.command()(hosts.litmus)
app.command()(hosts.adopt)
app.command("format")(check.format_region)
app.command()(check.layout)
app.add_typer(cxl.app)


def main() -> None:
    """The entry point of the `kvpool` script."""
    app()
