"""`kvpool top`: all pools of this machine, live."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

import typer
from rich.live import Live
from rich.table import Table

from kvpool import paths
from kvpool.api.meter import Amount, Meter
from kvpool.api.saved import saved
from kvpool.cli import output as out
from kvpool.cli import target
from kvpool.explain import merged
from kvpool.quantity import human_bytes
from kvpool.text import printable
from kvpool.view import PoolView, look

COLUMNS = (
    "pool",
    "state",
    "hit rate",
    "now",
    "lookups/s",
    "loaded/s",
    "stored/s",
    "evicted/s",
    "used",
    "engines",
    "saved",
    "main miss",
)
LEFT = ("pool", "state", "main miss")


@dataclass
class Gauge:
    """A pool that is watched: what happens to it between two looks."""

    meter: Meter = field(default_factory=Meter)
    at: float | None = None

    def row(self, view: PoolView, now: float) -> list[str]:
        """The cells of COLUMNS."""
        amount = self.meter.step({tier.path: tier.counters for tier in view.tiers})
        seconds = None if self.at is None else max(now - self.at, 1e-9)
        self.at = now
        counters = view.counters
        capacity = sum(tier.usage.capacity_bytes for tier in view.tiers)
        used = sum(tier.usage.used_bytes for tier in view.tiers)
        return [
            view.spec.name,
            view.state,
            f"{counters.hit_rate:.1%}" if counters.lookups else "-",
            f"{amount.hits / amount.lookups:.1%}" if amount.lookups else "-",
            *_rates(amount, seconds),
            f"{100 * used / capacity:.0f}% of {human_bytes(capacity)}" if capacity else "-",
            str(sum(engine.ended_at is None for engine in view.reports.engines)),
            _saved(view),
            _main_miss(counters.misses),
        ]


def _saved(view: PoolView) -> str:
    """Seconds of prefill, or tokens as long as no engine has measured how long it computes."""
    known = saved(view.counters.hits, merged(view.namespaces), view.reports.namespaces)
    if known is None:
        return "-"
    if known.prefill_seconds is not None:
        return f"{known.prefill_seconds:.1f} s"
    return f"{known.tokens} tokens"


def _rates(amount: Amount, seconds: float | None) -> list[str]:
    if seconds is None:  # the first look
        return ["-"] * 4
    return [
        f"{amount.lookups / seconds:.0f}",
        human_bytes(int(amount.bytes_loaded / seconds)),
        human_bytes(int(amount.bytes_stored / seconds)),
        f"{amount.evictions / seconds:.0f}",
    ]


def _main_miss(misses: dict[str, int]) -> str:
    total = sum(misses.values())
    if not total:
        return "-"
    reason, count = max(misses.items(), key=lambda item: (item[1], item[0]))
    return f"{reason} {count / total:.0%}"


def table(rows: Sequence[Sequence[str]]) -> Table:
    made = Table(box=None, pad_edge=False, header_style="bold")
    for name in COLUMNS:
        made.add_column(name.upper(), justify="left" if name in LEFT else "right", no_wrap=True)
    for row in rows:
        made.add_row(*map(printable, row))
    return made


@out.reports_errors
def top(
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 2.0,
    rounds: Annotated[int, typer.Option(min=0, help="End after so many looks; 0 for never.")] = 0,
) -> None:
    """Show all pools of this machine, live: hit rate, traffic, use, until Ctrl-C.

    When the output is no terminal, each look is a table of its own.
    """
    gauges: dict[str, Gauge] = {}
    screen = Live(console=out.console(), screen=True, auto_refresh=False) if sys.stdout.isatty() else None
    looks = 0
    with screen or contextlib.nullcontext(), out.until_interrupted() as ending:
        while not ending.is_set():
            seen = table(_rows(gauges))
            if screen is not None:
                screen.update(seen, refresh=True)
            else:
                out.console().print(seen)
            looks += 1
            if looks == rounds:
                return
            ending.wait(interval)


def _rows(gauges: dict[str, Gauge]) -> list[list[str]]:
    now = time.monotonic()
    names = paths.pool_names()
    for name in gauges.keys() - set(names):
        del gauges[name]
    return [gauges.setdefault(name, Gauge()).row(look(target.pool(name, None)), now) for name in names]
