"""The counts themselves: a crash, a hang, a failure, wrong bytes and a damage that never was are seen."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from damage import workers
from damage.tally import MUST_BE_ZERO, Row, Tally
from damage.tiny import ALL, Tiny
from kvpool.region import Region
from strategies import region_folder


@pytest.fixture
def tally(monkeypatch: pytest.MonkeyPatch) -> Tally:
    """One of this test's own."""
    own = Tally()
    monkeypatch.setattr(workers, "TALLY", own)
    monkeypatch.setattr(workers, "STUCK_S", 0.3)
    return own


def crash() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    raise KeyError("not a KvpoolError")


@pytest.mark.parametrize(
    ("what", "does"), [("crashed", crash), ("stuck", lambda: time.sleep(60)), ("failed", fail)]
)
def test_try_all_counts_how_workers_end_and_tries_the_rest(
    tally: Tally, what: str, does: Callable[[], None]
) -> None:
    def prepare(worker: int, row: Row) -> Callable[[int], None]:
        def use(item: int) -> None:
            row.add("zeros")
            if item == 3:
                does()

        return use

    with pytest.raises(AssertionError, match="3: "):
        workers.try_all(range(10), prepare)
    assert {name: tally.total(name) for name in MUST_BE_ZERO if tally.total(name)} == {what: 1}
    assert tally.total("zeros") == 10, "all others were tried"
    assert tally.problems(0) == [f"{what}: 1, expected 0"]


def test_try_all_and_the_run_fail_when_damages_did_not_happen(tally: Tally) -> None:
    with pytest.raises(AssertionError, match="fewer damages"):
        workers.try_all(range(4), lambda worker, row: lambda item: row.add("zeros") if item else None)
    assert tally.problems(0) == ["damages: 3, fewer than the 4 intended"]
    assert tally.problems(1) != tally.problems(0), "and so does a run that opened too few regions"


@pytest.mark.parametrize(("what", "does"), [("crashed", crash), ("failed", fail)])
def test_users_that_end_badly_are_counted(tally: Tally, what: str, does: Callable[[], None]) -> None:
    def body(row: Row, going: workers.Going) -> None:
        while going():
            time.sleep(0.001)
        does()

    with pytest.raises(AssertionError), workers.users(body):
        pass
    assert tally.total(what) == 1


def test_wrong_bytes_are_counted_and_named(tally: Tally) -> None:
    class Liar:
        """A region that calls everything a hit."""

        path = "liar"

        def load(self, keys: object, out: list[bytearray]) -> object:
            return type("Result", (), {"codes": bytes(len(ALL))})

    def prepare(worker: int, row: Row) -> Callable[[int], None]:
        with region_folder() as folder:
            tiny = Tiny(Path(folder) / "tiny", "hardware")

        def use(item: int) -> None:
            row.add("zeros")
            liar: Region = Liar()  # type: ignore[assignment]
            tiny.load(liar, row)

        return use

    with pytest.raises(AssertionError, match="WRONG BYTES were served"):
        workers.try_all([1], prepare)
    assert tally.total("wrong") == len(ALL)
