"""`kubectl kvpool status|explain|top`: the pools of a cluster in a terminal, from their objects."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from kubernetes.aio import config
from kubernetes.aio.client import ApiClient, Configuration
from rich.console import Console
from rich.table import Table

from kvpool.api import engines, model
from kvpool.api.meter import Meter
from kvpool.api.status import Key, PoolStatus
from kvpool.errors import KvpoolError
from kvpool.explain import explain
from kvpool.quantity import human_bytes
from kvpool.text import printable
from kvpool_operator import readout
from kvpool_operator.client import UNREACHABLE, ApiError, Cluster
from kvpool_operator.listwatch import GROUP_VERSION, PAGE

CLEAR = "\x1b[H\x1b[2J"
ENGINES_SHOWN = 20
INTERVAL_S = 5.0  # the operator writes every few seconds


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 done, 1 failed, 2 wrong use."""
    given = _parser().parse_args(arguments)
    try:
        asyncio.run(_run(given))
    except KeyboardInterrupt:
        return 0
    except (KvpoolError, ApiError, config.ConfigException, *UNREACHABLE) as error:
        print(f"error: {str(error) or type(error).__name__}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kubectl kvpool", description=__doc__)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("-n", "--namespace", help="else the context's")
    common.add_argument("--context", help="of the kubeconfig; else the current one")
    common.add_argument("--kubeconfig", help="else KUBECONFIG, else ~/.kube/config")
    commands = parser.add_subparsers(dest="command", required=True, metavar="status|explain|top")
    for name, text in (
        ("status", "capacity, use, hit rate and nodes"),
        ("explain", "why the hit rate of a pool is what it is"),
        ("top", "all pools, again and again"),
    ):
        command = commands.add_parser(name, help=text, parents=[common])
        if name == "explain":
            command.add_argument("name", help="the pool's name")
            command.add_argument("--engine", help="only this engine: as status names it, or its namespace")
        if name == "status":
            command.add_argument("name", nargs="?", help="one pool, with its nodes")
        if name != "explain":
            command.add_argument("-A", "--all-namespaces", action="store_true")
        if name == "top":
            command.add_argument(
                "--interval", type=float, default=INTERVAL_S, help="seconds between two looks"
            )
            command.add_argument("--rounds", type=int, default=0, help="end after so many looks; 0 for never")
        else:
            command.add_argument("-o", "--output", choices=("table", "json"), default="table")
    return parser


async def _run(given: argparse.Namespace) -> None:
    made = Configuration()
    path = given.kubeconfig or os.environ.get("KUBECONFIG") or None
    await config.load_kube_config(path, context=given.context, client_configuration=made)
    namespace = given.namespace or _namespace_of(path, given.context)
    cluster = Cluster(ApiClient(made))
    try:
        everywhere = getattr(given, "all_namespaces", False)
        if given.command == "top":
            await _top(cluster, None if everywhere else namespace, given)
            return
        statuses = await look(cluster, None if everywhere else namespace)
        name = given.name
        if name is not None:
            statuses = [status for status in statuses if status.key == Key(namespace, name)]
            if not statuses:
                raise KvpoolError(
                    f'no pool "{name}" in namespace "{namespace}"; kubectl get kvp -A lists them.'
                )
        if given.command == "explain":
            _show_explanation(statuses, as_json=given.output == "json", engine=given.engine)
        else:
            _show_status(statuses, as_json=given.output == "json", nodes=name is not None)
    finally:
        await cluster.close()


def _namespace_of(path: str | None, context: str | None) -> str:
    """The namespace of the context."""
    contexts, active = config.list_kube_config_contexts(path)
    chosen = next((c for c in contexts if c["name"] == context), active) if context else active
    return str((chosen or {}).get("context", {}).get("namespace") or "default")


async def look(cluster: Cluster, namespace: str | None) -> list[PoolStatus]:
    """All pools of a namespace, or of all of them, sorted."""
    pools = [readout.pool_of(body) for body in await _all(cluster, namespace, "kvpools")]
    nodes: dict[Key, list[readout.NodeObject]] = {}
    for body in await _all(cluster, namespace, "kvpoolnodes"):
        node = readout.node_of(body)
        nodes.setdefault(node.pool, []).append(node)
    now = time.time()
    return [readout.status_of(p, nodes.get(p.key, ()), now) for p in sorted(pools, key=lambda p: p.key)]


async def _all(cluster: Cluster, namespace: str | None, plural: str) -> list[dict[str, Any]]:
    where = f"/namespaces/{namespace}" if namespace else ""
    found: list[dict[str, Any]] = []
    query = {"limit": str(PAGE)}
    while True:
        page = await cluster.read(f"/apis/{GROUP_VERSION}{where}/{plural}", query)
        found += page["items"]
        following = page["metadata"].get("continue")
        if not following:
            return found
        query = {"limit": str(PAGE), "continue": following}


# --- what is shown ------------------------------------------------------------------------------------------


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else 200, highlight=False, markup=False, soft_wrap=True)


def _say(console: Console, text: str) -> None:
    """A line; one, whatever others wrote into it."""
    console.print(printable(text))


def _table(rows: list[dict[str, str]], numbers: tuple[str, ...] = ()) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in rows[0] if rows else ():
        table.add_column(name.upper(), justify="right" if name in numbers else "left", no_wrap=True)
    for row in rows:
        table.add_row(*map(printable, row.values()))
    return table


def _rate(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:.1f}%"


def _condition(status: PoolStatus, kind: str) -> str:
    return next((c.status for c in status.pool.conditions if c.type == kind), "Unknown")


def _row(status: PoolStatus) -> dict[str, str]:
    pool = status.pool
    return {
        "namespace": pool.namespace,
        "name": pool.name,
        "ready": _condition(status, "Ready"),
        "nodes": f"{pool.nodes.ready}/{pool.nodes.desired}",
        "used": human_bytes(pool.used_bytes),
        "of": human_bytes(pool.capacity_bytes),
        "hit rate": _rate(pool.hit_rate),
        "lookups": str(pool.lookups),
        "evicted": str(pool.evictions),
    }


NUMBERS = (
    "used",
    "of",
    "hit rate",
    "lookups",
    "evicted",
    "now",
    "lookups/s",
    "blocks",
    "saved tokens",
    "engines",
)


def _show_status(statuses: list[PoolStatus], *, as_json: bool, nodes: bool) -> None:
    console = _console()
    if as_json:
        pools = [
            json.loads(status.aged_body(time.time()))
            | {"nodeList": [json.loads(node.model_dump_json()) for node in status.nodes]}
            | {"engines": [json.loads(engine.model_dump_json()) for engine in status.engines]}
            | {"namespaces": [json.loads(n.model_dump_json()) for n in _namespaces(status)]}
            for status in statuses
        ]
        sys.stdout.write(json.dumps({"pools": pools}, indent=2) + "\n")
        return
    console.print(_table([_row(status) for status in statuses], NUMBERS) if statuses else "no pools")
    for status in statuses if nodes else ():
        rows = [
            {
                "node": node.node_name or node.name,
                "state": node.state,
                "ready": "yes" if node.ready else "no",
                "hit rate": _rate(node.hit_rate),
                "lookups": str(node.lookups),
                "message": node.message or "; ".join(node.problems),
            }
            for node in status.nodes
        ]
        console.print()
        console.print(_table(rows, NUMBERS) if rows else "no node runs it yet")
        _show_engines(console, status)
        for condition in status.pool.conditions:
            said = f"{condition.type}: {condition.status} ({condition.reason})"
            _say(console, f"{said}: {condition.message}" if condition.message else said)
        for event in list(status.events)[-5:]:
            where = f"{event.node}, {event.tier}"
            _say(console, f"event: {event.at} {event.reason} ({where}): {event.message}")


def _namespaces(status: PoolStatus) -> list[model.NamespaceOfEngine]:
    return engines.namespaces(status.namespaces or (), status.reports)


def _show_engines(console: Console, status: PoolStatus) -> None:
    """Who uses the pool, with which settings, and what that saved."""
    rows = [
        {
            "engine": engine.engine,
            "node": engine.node,
            "state": "lives" if engine.live else "ended",
            "hit rate": _rate(engine.hit_rate),
            "lookups": str(engine.lookups or 0),
            "main miss": max((engine.misses or {"-": 0}).items(), key=lambda item: item[1])[0],
            "namespaces": ",".join(engine.namespaces[:3]),
        }
        for engine in status.engines[:ENGINES_SHOWN]
    ]
    if rows:
        console.print()
        console.print(_table(rows, NUMBERS))
    spaces = [
        {
            "namespace": n.digest,
            "model": n.model,
            "blocks": str(n.blocks),
            "hit rate": _rate(n.hit_rate),
            "lookups": str(n.lookups or 0),
            "saved tokens": str(n.saved_tokens or 0),
        }
        for n in _namespaces(status)
    ]
    if spaces:
        console.print()
        console.print(_table(spaces, NUMBERS))
    console.print(f"saved: {_saved(status)}")


def _saved(status: PoolStatus) -> str:
    """Tokens, and seconds of prefill where engines have measured how long they compute."""
    known = status.pool.saved
    if known is None:
        return "-"
    seconds = "" if known.prefill_seconds is None else f", {known.prefill_seconds:.1f} s"
    return f"{'' if known.exact else 'about '}{known.tokens} tokens{seconds}"


def _show_explanation(statuses: list[PoolStatus], *, as_json: bool, engine: str | None) -> None:
    console = _console()
    for status in statuses:
        counters, of = engines.whose(status, engine)
        explained = explain(counters or status.counters, status.namespaces or (), of=of)
        if as_json:
            sys.stdout.write(json.dumps({"name": status.key.name, **asdict(explained)}, indent=2) + "\n")
            continue
        _say(console, explained.headline)
        if explained.advice:
            _say(console, f"What to do: {explained.advice}")
        rows = [
            {"misses": r.reason, "blocks": str(r.count), "share": f"{r.share:.1%}", "meaning": r.meaning}
            for r in explained.misses
        ]
        if rows:
            console.print()
            console.print(_table(rows, ("blocks", "share")))
        for difference in explained.namespaces:
            console.print()
            _say(
                console,
                f"Namespace {difference.namespace} ({difference.blocks} blocks) cannot use the "
                f"{difference.nearest_blocks} blocks of {difference.nearest}:",
            )
            console.print(
                _table(
                    [
                        {"field": d.field, "here": d.here, "there": d.there, "what to do": d.advice}
                        for d in difference.differences
                    ]
                )
            )
        for problem in status.pool.problems:
            _say(console, f"problem: {problem}")
        if status.namespaces is None:
            console.print(
                "In which settings engines differ, these daemons do not tell: they are of an older version. "
                "'kvpool explain' in a daemon's pod does."
            )


async def _top(cluster: Cluster, namespace: str | None, given: argparse.Namespace) -> None:
    console = _console()
    meters: dict[Key, Meter] = {}
    began: float | None = None
    looks = 0
    while True:
        statuses = await look(cluster, namespace)
        now = time.monotonic()
        rows = []
        for status in statuses:
            amount = meters.setdefault(status.key, Meter()).step(status.series)
            seconds = None if began is None else now - began
            rows.append(
                _row(status)
                | {
                    "now": f"{amount.hits / amount.lookups:.1%}" if amount.lookups else "-",
                    "lookups/s": "-" if not seconds else f"{amount.lookups / seconds:.0f}",
                    "engines": str(sum(engine.live for engine in status.engines)),
                    "saved": _saved(status),
                }
            )
        began = now
        if sys.stdout.isatty():
            sys.stdout.write(CLEAR)
        console.print(_table(rows, NUMBERS) if rows else "no pools")
        looks += 1
        if looks == given.rounds:
            return
        await asyncio.sleep(given.interval)


if __name__ == "__main__":
    sys.exit(main())
