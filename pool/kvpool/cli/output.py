"""What commands print: results to standard output, everything else to standard error."""

from __future__ import annotations

import functools
import json
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Annotated, Any, NoReturn, ParamSpec, TypeVar

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table

from kvpool.errors import KvpoolError, ManifestError, WrongUse
from kvpool.quantity import human_bytes
from kvpool.spec import InvalidManifest
from kvpool.text import printable

EXIT_FAILED = 1
EXIT_WRONG_USE = 2
EXIT_NOT_VERIFIED = 3
WIDTH_OF_A_FILE = 200  # when no terminal says how wide it is: wide enough that no path is broken

Show = Callable[[str, int, int], None]  # name, done, total

P = ParamSpec("P")
R = TypeVar("R")


@contextmanager
def until_interrupted() -> Iterator[threading.Event]:
    """For commands that go on: the event is set by Ctrl-C.

    An exception would be lost where Python ignores them, such as in a destructor. The second Ctrl-C is one
    all the same, for a look that hangs.
    """
    ending = threading.Event()

    def interrupted(*_: object) -> None:
        ending.set()
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, interrupted)
    try:
        yield ending
    finally:
        signal.signal(signal.SIGINT, before)


class Output(str, Enum):
    """The form of a command's result."""

    TABLE = "table"
    JSON = "json"


OutputOption = Annotated[
    Output, typer.Option("--output", "-o", help="Print the result as a table or as JSON.")
]


def console(*, error: bool = False) -> Console:
    """Where to print. Made anew each time: tests and pipes replace the streams."""
    stream = sys.stderr if error else sys.stdout
    width = None if stream.isatty() else WIDTH_OF_A_FILE
    return Console(file=stream, width=width, highlight=False, markup=False, soft_wrap=True)


def say(text: str) -> None:
    """A line of the result; one, whatever others wrote into it."""
    console().print(printable(text))


def note(text: str) -> None:
    """Lines about what is going on."""
    console(error=True).print("\n".join(map(printable, text.split("\n"))))


def print_json(result: object) -> None:
    sys.stdout.write(json.dumps(result, indent=2) + "\n")
    sys.stdout.flush()


def print_table(rows: list[dict[str, object]], numbers: tuple[str, ...] = ()) -> None:
    """Rows of equal keys as a table; `numbers` names the columns that are right-aligned."""
    if not rows:
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in rows[0]:
        right = name in numbers
        table.add_column(name.upper(), justify="right" if right else "left", no_wrap=True, overflow="ignore")
    for row in rows:
        table.add_row(*(printable(str(cell)) for cell in row.values()))
    console().print(table)


def reports_errors(command: Callable[P, R]) -> Callable[P, R]:
    """A command whose errors become a message and an exit code; with --output json the error is JSON too."""

    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        as_json = kwargs.get("output") == Output.JSON
        try:
            return command(*args, **kwargs)
        except KvpoolError as error:
            _fail(error, as_json)
        except ImportError as error:
            if "kvpool" not in str(error.name) and "kvpool" not in str(error):
                raise
            missing = KvpoolError(f"kvpool's compiled part is missing ({error}). Install kvpool again.")
            _fail(missing, as_json)

    return wrapped


def _fail(error: KvpoolError, as_json: bool) -> NoReturn:
    if as_json:
        described: dict[str, Any] = {"kind": type(error).__name__, "message": str(error)}
        if isinstance(error, InvalidManifest):
            described["kind"] = "ManifestError"
            described["problems"] = [
                {"path": p.path, "message": p.message, "line": p.line} for p in error.problems
            ]
        print_json({"error": described})
    note(f"error: {error}")
    wrong = isinstance(error, (ManifestError, WrongUse))
    raise typer.Exit(EXIT_WRONG_USE if wrong else EXIT_FAILED) from None


def wrong_use(text: str) -> NoReturn:
    """End because of how the command was called."""
    note(f"error: {text}")
    raise typer.Exit(EXIT_WRONG_USE)


@contextmanager
def byte_progress(verb: str) -> Iterator[Show]:
    """Shows how far something with bytes has come: a bar on a terminal, else a line every tenth."""
    with progress(verb, human_bytes) as show:
        yield show


@contextmanager
def progress(verb: str, shown: Callable[[int], str] = str) -> Iterator[Show]:
    """Shows how far something has come, by (name, done, total)."""
    out = console(error=True)
    if not out.is_terminal:
        yield _Tenths(verb, shown)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[amount]}"))
    with Progress(*columns, console=out, transient=True) as bars:
        tasks: dict[str, TaskID] = {}

        def show(name: str, done: int, total: int) -> None:
            if name not in tasks:
                tasks[name] = bars.add_task(f"{verb} {name}", total=total, amount="")
            bars.update(tasks[name], completed=done, total=total, amount=f"{shown(done)} of {shown(total)}")

        yield show


class _Tenths:
    """Progress for a log file: nothing for what is quickly done, else a line every tenth, 2 s apart."""

    LINE_S_MIN = 2.0

    def __init__(self, verb: str, shown: Callable[[int], str]) -> None:
        self._verb, self._shown = verb, shown
        self._tenth, self._last = 0, time.monotonic()

    def __call__(self, name: str, done: int, total: int) -> None:
        tenth = 10 * done // max(total, 1)
        now = time.monotonic()
        if tenth != self._tenth and now - self._last >= self.LINE_S_MIN:
            self._tenth, self._last = tenth, now
            note(f"{self._verb} {name}: {self._shown(done)} of {self._shown(total)}")
