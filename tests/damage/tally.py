"""What the suite did, counted where it happens: rows of counters in memory that forked children share.

So the counts are true even when a child dies. `conftest.py` prints their sums and fails the run when they are
not as they should be.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable

from kvpool.outcomes import MissReason

KINDS = (
    "bit flipped",
    "bit flipped in both superblocks",
    "several bits flipped",
    "zeros",
    "ones",
    "noise",
    "another block's bytes",
    "shifted",
    "lines swapped",
    "headers swapped",
    "shards swapped",
    "regions swapped",
    "halves of two regions",
    "overwritten in use",
    "truncated",
    "truncated in use",
    "copied in use",
    "another format version",
)
MUST_BE_ZERO = ("wrong", "stuck", "crashed", "failed")
FACTS = (
    *KINDS,
    *MUST_BE_ZERO,
    "intended",
    "openings",
    "refused",
    "hits",
    *(str(reason) for reason in MissReason),
)
_PLACE = {name: i for i, name in enumerate(FACTS)}
_ROWS = 512
_TEXT_BYTES = 2048


class Row:
    """The counters and the notes of one process. One writer at a time."""

    def __init__(self, counters: memoryview, text: memoryview) -> None:
        self._counters, self._text = counters, text

    def add(self, fact: str, by: int = 1) -> None:
        self._counters[_PLACE[fact]] += by

    def get(self, fact: str) -> int:
        return self._counters[_PLACE[fact]]

    def note(self, text: str) -> None:
        """Replaces the note, which is read after the process is gone: what went wrong."""
        data = text.encode(errors="replace")[: _TEXT_BYTES - 1] + b"\0"
        self._text[: len(data)] = data

    def text(self) -> str:
        data = bytes(self._text)
        return data[: data.find(b"\0")].decode(errors="replace")


class Tally:
    """All rows. A row is taken by the parent, before the fork."""

    def __init__(self) -> None:
        self._counters = memoryview(mmap.mmap(-1, _ROWS * len(FACTS) * 8)).cast("Q")
        self._texts = memoryview(mmap.mmap(-1, _ROWS * _TEXT_BYTES))
        self._used = 0
        self.here = self.row()  # the test process's own

    def row(self) -> Row:
        i, n = self._used, len(FACTS)
        assert i < _ROWS, "more children than rows: raise _ROWS"
        self._used += 1
        return Row(self._counters[i * n : (i + 1) * n], self._texts[i * _TEXT_BYTES : (i + 1) * _TEXT_BYTES])

    def total(self, facts: Iterable[str] | str) -> int:
        names = (facts,) if isinstance(facts, str) else tuple(facts)
        n = len(FACTS)
        return sum(self._counters[row * n + _PLACE[name]] for row in range(self._used) for name in names)

    @property
    def damages(self) -> int:
        return self.total(KINDS)

    @property
    def loaded(self) -> int:
        return self.total(("hits", "wrong", *(str(reason) for reason in MissReason)))

    def problems(self, at_least: int) -> list[str]:
        """Why the run has to fail; none is right."""
        found = [f"{name}: {self.total(name)}, expected 0" for name in MUST_BE_ZERO if self.total(name)]
        if self.damages < self.total("intended"):
            found.append(f"damages: {self.damages}, fewer than the {self.total('intended')} intended")
        if self.total("openings") + self.loaded < at_least:
            found.append(
                f"damaged openings and loads: {self.total('openings') + self.loaded}, "
                f"expected {at_least} or more"
            )
        return found

    def lines(self) -> list[str]:
        """The summary."""
        rows = [f"damages                  {self.damages:>19,}  of {self.total('intended'):,} intended"]
        rows += [f"  {kind:<33}{n:>9,}" for kind in KINDS if (n := self.total(kind))]
        rows.append(
            f"damaged regions opened   {self.total('openings'):>19,}"
            f"  {self.total('refused'):,} of them refused"
        )
        rows.append(
            f"blocks loaded, checked   {self.loaded:>19,}  {self.total('hits'):,} hits with right bytes"
        )
        rows += [f"  {reason.value:<33}{n:>9,}" for reason in MissReason if (n := self.total(str(reason)))]
        rows.append("; ".join(f"{name} = {self.total(name)}" for name in MUST_BE_ZERO))
        return rows


TALLY = Tally()
