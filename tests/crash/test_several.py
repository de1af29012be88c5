"""Two or three processes die in the same moment, each at its own step, on one host and on two."""

from __future__ import annotations

import random
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from children import Child
from crash import tally
from crash.lives import LIVES, STOP, Life, dead_with_room, fresh, full, live, steps_of
from crash.readers import Readers
from crash.world import HONEST, LARGE, NEW, SMALL, SPACES, World, load_all, store, world
from kvpool.outcomes import MissReason
from kvpool.region import Coherence, Region
from strategies import seed

pytestmark = pytest.mark.slow
COHERENCES: tuple[Coherence, ...] = ("hardware", "software")
CASES = 40
JOINING = [life for life in LIVES if life.joins]
HERE_OR_THERE = [life for life in JOINING if not life.adopts and not life.attaches]
DAMAGED = HONEST | {MissReason.FAILED_CHECKSUM}


def needs_dead(life: Life) -> bool:
    return life.meanwhile is not None or life.adopts or life.attaches


def stand(w: World, victims: list[tuple[Life, str, int]], dice: random.Random) -> list[Child | None]:
    """A child for each victim that stands at its step, or None where it ended without coming there.

    All attach before any of them begins, so that those who died before are still there for the reapers.
    """
    paused = [
        None
        if life.attaches
        else w.start(live, replace(life, meanwhile=fresh), w, dice.randrange(1 << 30), step, nth, STOP)
        for life, step, nth in victims
    ]
    assert all(child is None or child.wait_stopped() for child in paused)
    for host in {0 if life.adopts else life.host for life, _, _ in victims if needs_dead(life)}:
        dead_with_room(w, host)
    standing: list[Child | None] = []
    for child, (life, step, nth) in zip(paused, victims, strict=True):
        if child is None:
            child = w.start(live, life, w, dice.randrange(1 << 30), step, nth, STOP)
        else:
            child.signal(signal.SIGCONT)
        if child.wait_stopped():
            standing.append(child)
        else:
            assert child.wait() == 0, (life.name, step, nth)
            standing.append(None)
    return standing


def judge(w: World, dice: random.Random, adopted: bool, kept: bool) -> None:
    if kept:
        w.keeps()
    if adopted:
        w.give_back()
    w.progress(dice)
    w.clean_up(dice)
    w.all_slots_are_usable()


@pytest.mark.parametrize("coherence", COHERENCES)
@pytest.mark.parametrize("where", ["one-host", "two-hosts"])
def test_several_killed_at_their_steps_at_once(where: str, coherence: Coherence, readers: Readers) -> None:
    tally.use_row(tally.SEVERAL)
    value = seed("test_several_killed_at_their_steps_at_once")
    dice = random.Random(value)
    cases = 0
    while cases < CASES:
        lives = [dice.choice(JOINING) for _ in range(dice.choice((2, 2, 3)))]
        if where == "two-hosts":
            lives[0] = dice.choice(HERE_OR_THERE)
        victims = [(x, dice.choice(steps_of(x, coherence)), dice.choice((1, 1, 2, 4))) for x in lives]
        if where == "two-hosts":
            victims[0] = (replace(lives[0], host=1), *victims[0][1:])
        adopted = any(life.adopts for life in lives)
        with world(coherence) as w, readers.on(w.path, tally.SEVERAL):
            kept = dice.random() < 0.5 and not any(life.evicts for life in lives)
            (fresh if kept else full)(w)
            print([(life.name, life.host, step, nth) for life, step, nth in victims], "kept" if kept else "")
            standing = [child for child in stand(w, victims, dice) if child is not None]
            if len(standing) < 2:
                continue
            if not adopted and dice.random() < 0.3:
                w.progress(dice)
                kept = False
            tally.intend(len(standing))
            for child in standing:
                child.signal(signal.SIGKILL)
            for child in standing:
                assert tally.ended(child) == -signal.SIGKILL
            judge(w, dice, adopted, kept)
            cases += 1


REAPER = next(life for life in LIVES if life.name == "reap")
WRITERS = [
    life for life in LIVES if life.name in ("first store", "store into a full shard", "recut", "evict")
]


@pytest.mark.parametrize("coherence", COHERENCES)
def test_writer_killed_while_a_reaper_is_reaping_another(coherence: Coherence, readers: Readers) -> None:
    """The reaper goes on afterwards, and sees to the one that it had begun with."""
    tally.use_row(tally.SEVERAL)
    dice = random.Random(seed("test_writer_killed_while_a_reaper_is_reaping_another"))
    for step in steps_of(REAPER, coherence):
        for writer in WRITERS:
            for _ in range(2):
                with world(coherence) as w, readers.on(w.path, tally.SEVERAL):
                    full(w)
                    writers_step = dice.choice(steps_of(writer, coherence))
                    print(f"reaper at {step}; {writer.name} at {writers_step}")
                    victims = [(REAPER, step, 1), (writer, writers_step, dice.choice((1, 2)))]
                    reaper, dying = stand(w, victims, dice)
                    if dying is None:  # the dead ones hold what it would have taken
                        continue
                    tally.intend(1)
                    dying.signal(signal.SIGKILL)
                    assert tally.ended(dying) == -signal.SIGKILL
                    w.progress(dice)
                    if reaper is not None:
                        reaper.signal(signal.SIGCONT)
                        assert tally.result(reaper) == ["None"]
                    judge(w, dice, adopted=False, kept=False)


def write_on(path: Path, host: int, number: int, stop: Path) -> dict[str, int]:
    """A living engine: stores and loads until it is told to stop. Fenced is the only refusal."""
    tally.use_row(tally.SEVERAL)
    dice = random.Random(number)
    counts = {"stored": 0, "fenced": 0, "loaded": 0}
    with Region.attach(path, host=host) as region:
        while not stop.exists():
            ns = dice.choice(SPACES)
            for reason in store(region, ns, [dice.randrange(40) for _ in range(4)]):
                assert reason in (None, MissReason.FENCED), reason
                counts["stored" if reason is None else "fenced"] += 1
            counts["loaded"] += load_all(region, DAMAGED)
            region.heartbeat()
    return counts


@pytest.mark.parametrize("coherence", COHERENCES)
def test_adopter_killed_while_writers_of_all_hosts_live(coherence: Coherence, readers: Readers) -> None:
    """Also the old owner's: it is fenced, and nobody else loses a store."""
    tally.use_row(tally.SEVERAL)
    dice = random.Random(seed("test_adopter_killed_while_writers_of_all_hosts_live"))
    adopter = next(life for life in LIVES if life.name == "adopt")
    for step in steps_of(adopter, coherence):
        for nth in (1, 2, 3):
            with world(coherence, DAMAGED, hosts=3) as w, readers.on(w.path, tally.SEVERAL, DAMAGED):
                full(w)
                w.die_together(("store.header.word", SMALL, [92]), ("extent.recut.claim", LARGE, [91]))
                stop = w.path.with_name("stop")
                numbers = [dice.randrange(1 << 30) for _ in range(3)]
                writers = [w.start(write_on, w.path, host, numbers[host], stop) for host in range(3)]
                print(f"adopter at {step} nth={nth}")
                child = w.start(live, adopter, w, 1, step, nth)
                if tally.ended(child) == 0:  # a living process republished before it
                    assert step == "publish.cas" or nth > 1
                else:
                    tally.intend(1)
                    assert child.status == -signal.SIGKILL
                time.sleep(dice.uniform(0, 0.01))
                for host in (1, 2):
                    assert store(w.survivors[host], NEW, [500 + host]) == [None]
                w.give_back()
                stop.touch()
                counts = [tally.result(writer) for writer in writers]
                print(counts)
                for count in counts[1:]:
                    assert count["fenced"] == 0, counts
                    assert count["stored"] > 0
                w.survivors[0].scrub()
                w.honest = DAMAGED
                judge(w, dice, adopted=False, kept=False)
