"""Commands about the hosts that share a region: litmus and adopt."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvpool.cli import output as out
from kvpool.cli import target
from kvpool.cli.output import Output, OutputOption
from kvpool.errors import KvpoolError, RegionBusyError
from kvpool.litmus import ROUNDS, Litmus, Verdict
from kvpool.regions_here import RegionTarget
from kvpool.report import PeerLitmus

if TYPE_CHECKING:
    from kvpool.region import Region

POLL_S = 0.005
LINGER_S = 1.0  # after we are done: the other host may have begun later
BEATS_S = 2.5  # a daemon beats every second


@out.reports_errors
def litmus(
    path: Annotated[Path, typer.Option("--path", help="The region: a DAX device, or a file.")],
    host: target.HostOption = None,
    peer_hosts: Annotated[
        str | None, typer.Option(help="Hosts to test with, like 1,2; all others when left out.")
    ] = None,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds to wait for the other hosts.")] = 30.0,
    rounds: Annotated[int, typer.Option(min=1, max=100000, help="Tries of each test.")] = ROUNDS,
    output: OutputOption = Output.TABLE,
) -> None:
    """Measure whether hosts see each other's stores as the region's coherence mode promises.

    Run it on two hosts at the same time, each with its own --host; where the daemon runs, it answers. Exit
    code 0: the declared mode holds; 1: it does not; 3: not verified, because a host did not answer in time.
    """
    from kvpool.region import Region

    number = target.host_or_default(host)
    with Region.attach(path, host=number, role="tool") as region:
        hosts, declared = region.info.hosts, region.info.coherence
        expected = _expected(peer_hosts, number, hosts)
        test = Litmus(region, number, hosts, declared, rounds, retry_s=1.0)
        if not test.begin():
            raise RegionBusyError(
                f"region {path}: another process of host {number} is at it, most likely its daemon: "
                "'kvpool status' has its verdict (CoherenceVerified)."
            )
        try:
            if expected:
                _measure(test, expected, timeout)
        finally:
            test.end()
        verdict = test.verdict(expected)
    peers = [test.peers[peer] for peer in sorted(test.peers)]
    _print_litmus(path, number, declared, verdict, peers, output)
    if verdict.status != "True":
        raise typer.Exit(out.EXIT_FAILED if verdict.status == "False" else out.EXIT_NOT_VERIFIED)


def _expected(peer_hosts: str | None, host: int, hosts: int) -> list[int]:
    if peer_hosts is None:
        return [other for other in range(hosts) if other != host]
    numbers = [text.strip() for text in peer_hosts.split(",")]
    if not all(text.isdecimal() and int(text) < hosts and int(text) != host for text in numbers):
        others = ",".join([str(other) for other in range(hosts) if other != host][:2])
        advice = (
            f"write numbers below {hosts}, without {host}, like {others}" if others else "it has no others"
        )
        out.wrong_use(f'--peer-hosts: "{peer_hosts}" are not other hosts of this region; {advice}.')
    return sorted({int(text) for text in numbers})


def _measure(test: Litmus, expected: list[int], timeout_s: float) -> None:
    """Until all that are expected were measured, then as long as somebody goes on asking us."""
    deadline = time.monotonic() + timeout_s
    ends: float | None = None
    while time.monotonic() < (deadline if ends is None else min(ends, deadline)):
        busy = test.step()
        done = all(peer in test.peers and test.peers[peer].end in ("measured", "deaf") for peer in expected)
        if busy or not done:
            ends = None
        elif ends is None:
            ends = time.monotonic() + LINGER_S
        if not busy:
            time.sleep(POLL_S)


def _print_litmus(
    path: Path, host: int, declared: str, verdict: Verdict, peers: list[PeerLitmus], output: Output
) -> None:
    if output is Output.JSON:
        rows = [asdict(peer) for peer in peers]
        result = {"path": str(path), "host": host, "coherence": declared, **asdict(verdict), "peers": rows}
        out.print_json(result)
        return
    table: list[dict[str, object]] = [
        {
            "peer": f"host {peer.host}",
            "answer": peer.end,
            "plain stale": f"{peer.plain_stale} of {peer.plain}",
            "cached stale": f"{peer.cached_stale} of {peer.flushed}",
            "flushed lost": f"{peer.flushed_lost} of {peer.flushed}",
            "reordered": f"{peer.reordered} of {peer.ordered}",
            "round trip": f"{peer.round_trip_us:.1f} us",
            "slowest": f"{peer.round_trip_max_us:.1f} us",
        }
        for peer in peers
    ]
    numbers = ("plain stale", "cached stale", "flushed lost", "reordered", "round trip", "slowest")
    out.print_table(table, numbers=numbers)
    word = {"True": "verified", "False": "REFUSED", "Unknown": "not verified"}[verdict.status]
    out.say(f"{path}, coherence: {declared}: {word} ({verdict.reason}). {verdict.message}")


@out.reports_errors
def adopt(
    shard: Annotated[int, typer.Option(min=0, help="The shard to take over: the number of its host.")],
    epoch: Annotated[int, typer.Option(min=1, help="Higher than every epoch given for this shard before.")],
    target_: target.TargetArgument = None,
    file: target.FileOption = None,
    host: target.HostOption = None,
    tier: Annotated[str | None, typer.Option(help="Only this tier.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Even while its owner's daemon lives.")] = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Take over the shard of a host that is gone, with all its blocks; or take this host's own shard back.

    The old owner stores nothing more as soon as it sees this. One person or operator gives the epochs.
    """
    named = target_ if target_ is not None and "/" not in target_ else None
    number = target.host_or_default(host, target.pool(named, file).name if named or file else None)
    regions = [region for region in target.regions(target_, file, tier) if _shared(region)]
    if not regions:
        raise KvpoolError("there is no region here that several hosts share, so no shard to adopt.")
    results = [_adopt(region, number, shard, epoch, force=force) for region in regions]
    if output is Output.JSON:
        out.print_json({"shard": shard, "epoch": epoch, "host": number, "regions": results})
        return
    for r in results:
        out.say(
            f"{r['path']}: host {number} owns shard {shard} with epoch {epoch}: {r['kept']} blocks kept, "
            f"{r['freed']} unfinished slots freed, {r['republished']} blocks entered again"
        )


def _shared(region: RegionTarget) -> bool:
    from kvpool.region import Region

    return Region.inspect(region.path).hosts > 1


def _adopt(region: RegionTarget, host: int, shard: int, epoch: int, *, force: bool) -> dict[str, Any]:
    from kvpool.region import Region

    with Region.attach(region.path, host=host, role="tool") as attached:
        if shard >= attached.info.hosts:
            raise KvpoolError(
                f"region {region.path}: there is no shard {shard}; "
                f"it has shards 0 to {attached.info.hosts - 1}."
            )
        owner = attached.owners()[shard].host
        if owner != host and shard != host and not force:  # its own shard a host may take back
            _refuse_living(attached, region, owner, shard)
        done = attached.adopt(shard, epoch)
    return {"tier": region.tier, "path": str(region.path), **asdict(done)}


def _refuse_living(attached: Region, region: RegionTarget, owner: int, shard: int) -> None:
    """Raises: RegionBusyError while the daemon of the shard's owner beats."""
    first = attached.heartbeat_of(owner)
    if first == 0:
        return  # it never had a daemon; if engines run there, they store nothing more in this shard
    deadline = time.monotonic() + BEATS_S
    while time.monotonic() < deadline:
        time.sleep(BEATS_S / 25)
        if attached.heartbeat_of(owner) != first:
            raise RegionBusyError(
                f"region {region.path}: host {owner}, which owns shard {shard}, is alive: its daemon beats. "
                "Nothing was changed. Stop it first, or add --force: it then stores nothing there any more."
            )
