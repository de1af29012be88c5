"""`kvpool status` and `kvpool explain`: how a pool is doing, and why."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from typing import Annotated, Any

import typer

from kvpool import paths
from kvpool.api.engines import whose
from kvpool.api.local import status_of
from kvpool.api.saved import saved
from kvpool.cli import output as out
from kvpool.cli import target
from kvpool.cli.output import Output, OutputOption
from kvpool.explain import Explanation, Reason, merged
from kvpool.explain import explain as explained
from kvpool.quantity import human_bytes
from kvpool.spec import PoolSpec
from kvpool.view import PoolView, look

CLEAR = "\x1b[H\x1b[2J"
ENGINES_SHOWN = 20
EVENTS_SHOWN = 5  # the last ones; --output json has all that the daemons keep


@out.reports_errors
def status(
    name: target.NameArgument = None,
    file: target.FileOption = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Look again and again, until Ctrl-C.")] = False,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 2.0,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show how full the pools on this machine are, who uses them and how often blocks are hit."""
    specs = _specs(name, file)
    if not watch:
        _show([look(spec) for spec in specs], output)
        return
    with out.until_interrupted() as ending:
        while not ending.is_set():
            views = [look(spec) for spec in specs]
            if output is Output.JSON:  # one line a look, so that a reader knows where each ends
                sys.stdout.write(json.dumps(_object(views)) + "\n")
                sys.stdout.flush()
            else:
                if sys.stdout.isatty():
                    sys.stdout.write(CLEAR)
                _show(views, output)
            ending.wait(interval)


def _specs(name: str | None, file: str | None) -> list[PoolSpec]:
    if name is None and file is None:
        return [target.pool(known, None) for known in paths.pool_names()]
    return [target.pool(name, file)]


def _object(views: list[PoolView]) -> dict[str, Any]:
    return {"pools": [view.to_object() for view in views]}


def _show(views: list[PoolView], output: Output) -> None:
    if output is Output.JSON:
        out.print_json(_object(views))
    elif not views:
        out.say(f"no pools on this machine (looked in {paths.runtime_dir()})")
    for number, view in enumerate(views if output is Output.TABLE else []):
        if number:
            out.say("")
        _show_pool(view)


def _show_pool(view: PoolView) -> None:
    counters = view.counters
    out.say(f"{view.spec.name}: {view.state}")
    rows: list[dict[str, object]] = []
    for tier in view.tiers:
        usage = tier.usage
        rows.append(
            {
                "tier": tier.name if tier.host in (None, 0) else f"{tier.name} (host {tier.host})",
                "medium": tier.medium,
                "used": human_bytes(usage.used_bytes),
                "of": human_bytes(usage.capacity_bytes),
                "full": f"{100 * usage.used_bytes / max(usage.capacity_bytes, 1):.0f}%",
                "blocks": usage.blocks,
                "served": f"{100 * tier.counters.hits / counters.lookups:.1f}%" if counters.lookups else "-",
                "evictions": tier.counters.evictions,
                "path": tier.path,
            }
        )
    out.print_table(rows, numbers=("used", "of", "full", "blocks", "served", "evictions"))
    rate = f"{counters.hit_rate:.1%}" if counters.lookups else "-"
    misses = ", ".join(f"{reason} {count}" for reason, count in _by_weight(counters.misses)) or "none"
    out.say(f"hit rate {rate}: {counters.hits} of {counters.lookups} looked-up blocks; misses: {misses}")
    where = " in all tiers together" if len(view.tiers) > 1 else ""
    stored = f"stored {counters.stored} blocks, {human_bytes(counters.bytes_stored)}{where}"
    out.say(f"{stored}; {_declined(counters.declined)}")
    _show_engines(view)
    out.say(f"daemons: {', '.join(map(_daemon, view.hosts))}; attached: {_participants(view)}")
    for condition in view.conditions:
        text = f"{condition['type']}: {condition['status']} ({condition['reason']})"
        out.say(text if condition["reason"] == "SingleHost" else f"{text}: {condition['message']}")
    for event in view.events[-EVENTS_SHOWN:]:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event["last_at"]))
        times = f", {event['count']} times" if event["count"] > 1 else ""
        where = f"host {event['host']}, {event['subject']}"
        out.say(f"event: {when} {event['kind']}{times} ({where}): {event['message']}")
    for problem in view.problems:
        out.say(f"problem: {problem}")
    for note in view.notes:
        out.say(f"note: {note}")


def _show_engines(view: PoolView) -> None:
    """A table of those that count for themselves: they live, or ended within the hour."""
    rows: list[dict[str, object]] = []
    shown = sorted(view.reports.engines, key=lambda engine: engine.ended_at is not None)[:ENGINES_SHOWN]
    for engine in shown:
        total = engine.total
        worst = _by_weight(total.misses)[:1]
        models = {
            str(view.reports.namespaces[digest].description.get("model", ""))
            for digest in engine.namespaces
            if digest in view.reports.namespaces and digest
        }
        rows.append(
            {
                "engine": engine.shown,
                "state": "lives" if engine.ended_at is None else "ended",
                "hit rate": f"{total.hits / total.lookups:.1%}" if total.lookups else "-",
                "lookups": total.lookups,
                "main miss": f"{worst[0][0]} {worst[0][1]}" if worst else "-",
                "namespaces": ",".join(sorted(digest[:12] for digest in engine.namespaces if digest)[:3])
                or "-",
                "model": ",".join(sorted(models)) or "-",
            }
        )
    if rows:
        out.print_table(rows, numbers=("hit rate", "lookups"))
    if len(view.reports.engines) > len(shown):
        out.say(f"and {len(view.reports.engines) - len(shown)} engines more; --output json has all")
    known = saved(view.counters.hits, merged(view.namespaces), view.reports.namespaces)
    if known is not None and view.counters.hits:
        about = "" if known.exact else "about "
        seconds = ""
        if known.prefill_seconds is not None:
            of = f"{known.prefill_coverage or 0:.0f}% of the hits"
            seconds = f", {known.prefill_seconds:.1f} s of prefill (measured for {of})"
        out.say(f"saved: {about}{known.tokens} tokens{seconds}")


def _by_weight(counts: dict[str, int]) -> list[tuple[str, int]]:
    return sorted(((k, v) for k, v in counts.items() if v), key=lambda item: (-item[1], item[0]))


def _declined(declined: dict[str, int]) -> str:
    return "declined: " + (", ".join(f"{reason} {n}" for reason, n in _by_weight(declined)) or "none")


def _daemon(host: dict[str, Any]) -> str:
    return f"host {host['host']} " + (f"process {host['pid']}" if host["running"] else "not running")


def _participants(view: PoolView) -> str:
    engines = {(p.host, p.pid) for tier in view.tiers for p in tier.participants if p.role == "engine"}
    return f"{len(engines)} engine process{'' if len(engines) == 1 else 'es'}"


@out.reports_errors
def explain(
    name: target.NameArgument = None,
    file: target.FileOption = None,
    engine: Annotated[
        str | None,
        typer.Option("--engine", "-e", help="Only this engine: as status names it, or its namespace."),
    ] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Say why the hit rate of a pool is what it is, and what to do about it."""
    spec = target.pool(name, file)
    view = look(spec)
    counters, of = whose(status_of(view, time.time()), engine)
    explanation = explained(counters or view.counters, view.namespaces, of=of)
    if output is Output.JSON:
        out.print_json({"name": spec.name, **asdict(explanation), "problems": view.problems})
        return
    _show_explanation(explanation)
    for problem in view.problems:
        out.say(f"problem: {problem}")


def _show_explanation(explanation: Explanation) -> None:
    out.say(explanation.headline)
    if explanation.advice:
        out.say(f"What to do: {explanation.advice}")
    _show_reasons("misses", explanation.misses)
    _show_reasons("stores declined", explanation.declined)
    for difference in explanation.namespaces:
        out.say("")
        out.say(
            f"Namespace {difference.namespace} ({difference.blocks} blocks) cannot use the "
            f"{difference.nearest_blocks} blocks of {difference.nearest}:"
        )
        out.print_table(
            [
                {"field": d.field, "here": d.here, "there": d.there, "what to do": d.advice}
                for d in difference.differences
            ]
        )


def _show_reasons(title: str, reasons: tuple[Reason, ...]) -> None:
    if not reasons:
        return
    out.say("")
    out.print_table(
        [
            {title: r.reason, "blocks": r.count, "share": f"{r.share:.1%}", "meaning": r.meaning}
            for r in reasons
        ],
        numbers=("blocks", "share"),
    )
