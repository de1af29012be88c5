"""Each access and each check of the protocol is left out in turn, and a scenario must notice.

What nobody notices is in `SURVIVES`, with the reason why it may be left out, or why it stays all the same.
A place is named by file, function and access; its number counts those alike in the function, from the top.
`kvpool_sim --places` lists all.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sim.survivors import PAIRS, SURVIVES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

Simulate = Callable[..., subprocess.CompletedProcess[str]]
PARTS = 2  # processes


@pytest.fixture(scope="module")
def table(simulator: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Place -> ["caught", scenario, how, schedules, what was seen] or ["survives"]."""
    brief = tmp_path_factory.mktemp("mutants") / "survivors"
    brief.write_text("".join(f"{place}\n" for place in SURVIVES))

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
    assert set(table) - set(caught) == set(SURVIVES)
    assert len(caught) >= 83


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair[1]} + {pair[2]}")
def test_two_places_that_stand_in_for_each_other_are_noticed_together(
    simulate: Simulate, pair: tuple[list[str], str, str]
) -> None:
    how, first, second = pair
    done = simulate(*how, "--mutant", first, "--mutant", second)
    assert "VIOLATED" in done.stdout, f"{first} and {second}: nobody notices"
