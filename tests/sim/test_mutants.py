"""Each access and each check of the protocol is left out in turn, and a scenario must notice.

What nobody notices is in `NEEDLESS`, with the reason why nobody needs it, or what it is for.
A place is named by file, function and access; its number counts those alike in the function, from the top.
`kvpool_sim --places` lists all.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sim.survivors import NEEDLESS, PAIRS, UNVISITED

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

Simulate = Callable[..., subprocess.CompletedProcess[str]]
PARTS = 2  # processes
NATIVE = Path(__file__).resolve().parents[2] / "pool" / "native"
PROTOCOL = (
    *("attached.h", "directory.h", "log.h", "ownership.h", "recovery.h"),
    *("replica.h", "scan.h", "slots.h", "transfer.h"),
)
ACCESS = re.compile(
    r"\b(?:m|m_|mem)\.(?:write_back|invalidate(?:_all)?|store_fence|full_fence|cas_word|without)\("
)


@pytest.fixture(scope="module")
def table(simulator: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Place -> ["caught", scenario, how, schedules, what was seen] or ["survives"]."""
    brief = tmp_path_factory.mktemp("mutants") / "survivors"
    brief.write_text("".join(f"{place}\n" for place in NEEDLESS))

    def part(number: int) -> str:
        arguments = ["--mutants", "--part", f"{number}/{PARTS}", "--schedules", "1500", "--runs", "20000"]
        command = [str(simulator), *arguments, "--briefly", str(brief)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    with ThreadPoolExecutor(PARTS) as threads:
        lines = "".join(threads.map(part, range(PARTS))).splitlines()
    return {place: rest for place, *rest in sorted(line.split("\t") for line in lines)}


def test_every_place_left_out_is_noticed_or_known_to_be_needless(
    table: dict[str, list[str]], pytestconfig: pytest.Config
) -> None:
    caught = {place: row for place, row in table.items() if row[0] == "caught"}
    pytestconfig.mutant_table = [  # type: ignore[attr-defined]
        f"mutants: {len(caught)} caught, {len(table) - len(caught)} known to survive",
        *(f"  {place:<60} {row[1]:<10} {row[2]:<8} {row[3]:>6} schedules" for place, row in caught.items()),
    ]
    assert set(table) - set(caught) == set(NEEDLESS)
    assert len(caught) >= 108


def test_every_access_in_the_source_is_a_place_that_is_left_out(simulate: Simulate) -> None:
    listed = set()
    for row in simulate("--places").stdout.splitlines():
        name, line, _ = row.split("\t")
        listed.add((name.split()[0], int(line.removeprefix("line "))))
    unlisted = set()
    for file in PROTOCOL:
        for number, line in enumerate((NATIVE / file).read_text().splitlines(), 1):
            code = line.partition("//")[0].strip()
            if ACCESS.search(code) and (file, number) not in listed:
                unlisted.add(f"{file}: {code}")
    assert unlisted == set(UNVISITED)


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair[1]} + {pair[2]}")
def test_two_places_that_stand_in_for_each_other_are_noticed_together(
    simulate: Simulate, pair: tuple[list[str], str, str]
) -> None:
    how, first, second = pair
    done = simulate(*how, "--mutant", first, "--mutant", second)
    assert "VIOLATED" in done.stdout, f"{first} and {second}: nobody notices"
