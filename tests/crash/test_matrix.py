"""Every named step of every life, one process at a time: killed there, and between the steps."""

from __future__ import annotations

import random
import signal

import pytest

from crash import tally
from crash.instructions import lead_on, refused
from crash.lives import LIVES, STOP, Life, begin, die, steps_of
from crash.readers import Readers
from crash.world import World, world
from kvpool.region import Coherence
from strategies import seed

pytestmark = pytest.mark.slow
COHERENCES: tuple[Coherence, ...] = ("hardware", "software")
DEATHS_AT_A_STEP = 2
DEATHS_BETWEEN_STEPS = 8  # a life
INSTRUCTIONS_LOG2 = 11.0  # a store of a small block has about a thousand


def judge(life: Life, w: World, dice: random.Random) -> None:
    """After a death: nothing is lost, all go on at once, and afterwards it is as if nobody had been there."""
    if not life.evicts:
        w.keeps()
    if life.adopts:
        w.give_back()
        w.keeps()
    w.progress(dice)
    w.clean_up(dice)
    w.all_slots_are_usable()


@pytest.mark.parametrize("coherence", COHERENCES)
@pytest.mark.parametrize("life", LIVES, ids=lambda life: life.name.replace(" ", "-"))
def test_killed_at_every_step_of_its_life(life: Life, coherence: Coherence, readers: Readers) -> None:
    tally.use_row(tally.ONE)
    value = seed("test_killed_at_every_step_of_its_life")
    dice = random.Random(value)
    for step in steps_of(life, coherence):
        most = 30  # passings of the step in one life, as far as is known
        for death in range(DEATHS_AT_A_STEP):
            tally.intend(1)
            nth = dice.randint(1, most) if death else 1
            while not kill_once(life, coherence, step, nth, dice, readers):
                assert nth > 1, f"{step} is not passed any more"
                most = nth = nth // 2


def kill_once(
    life: Life, coherence: Coherence, step: str, nth: int, dice: random.Random, readers: Readers
) -> bool:
    with world(coherence, life.honest) as w, readers.on(w.path, tally.ONE, w.honest):
        life.prepare(w)
        print(f"{life.name}: step={step} nth={nth}")
        if not die(life, w, dice.randrange(1 << 30), step, nth):
            return False
        judge(life, w, dice)
        return True


@pytest.mark.parametrize("coherence", COHERENCES)
@pytest.mark.parametrize("life", LIVES, ids=lambda life: life.name.replace(" ", "-"))
def test_killed_between_the_steps_of_its_life(life: Life, coherence: Coherence, readers: Readers) -> None:
    """At any instruction: it stops at a step, goes on by so many instructions, and is killed there."""
    reason = refused()
    if reason:
        pytest.skip(reason)
    tally.use_row(tally.INSTRUCTION)
    value = seed("test_killed_between_the_steps_of_its_life")
    dice = random.Random(value)
    deaths = 0
    while deaths < DEATHS_BETWEEN_STEPS:
        with world(coherence, life.honest) as w, readers.on(w.path, tally.INSTRUCTION, w.honest):
            life.prepare(w)
            step, nth = dice.choice(steps_of(life, coherence)), dice.choice((1, 1, 2, 3, 5))
            instructions = int(2 ** dice.uniform(0, INSTRUCTIONS_LOG2))
            print(f"{life.name}: step={step} nth={nth} instructions={instructions}")
            child = begin(life, w, dice.randrange(1 << 30), step, nth, STOP)
            if not child.wait_stopped() or not lead_on(child, instructions):
                assert child.wait() == 0
                continue
            child.signal(signal.SIGKILL)
            tally.intend(1)
            assert tally.ended(child) == -signal.SIGKILL
            judge(life, w, dice)
            deaths += 1
