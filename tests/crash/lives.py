"""What a process does before it dies, and at which named steps that can be.

A life prepares a world, then a child does one thing in it: that is where it is killed or stopped. There is no
life that demotes: stores write through to every tier, so nothing moves from one tier to another yet.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from children import Child
from crash import tally
from crash.world import HONEST, INDICES, LARGE, NEW, SMALL, UNIT, Reasons, World, load_all, store, world
from kvpool import _native
from kvpool.errors import FencedError, RegionBusyError
from kvpool.outcomes import MissReason
from kvpool.region import Coherence, Region
from strategies import namespace

KILL, STOP = int(signal.SIGKILL), int(signal.SIGSTOP)
Outcomes = set[MissReason | None]


@dataclass(frozen=True)
class Life:
    """`act` gets an attached region, or for `attaches` does it for itself."""

    name: str
    prepare: Callable[[World], None]
    act: Callable[[Region, World, random.Random], Outcomes]
    host: int = 0
    evicts: bool = True  # else everything that was stored before has to stay
    adopts: bool = False  # shard 0 is nobody's until another adopts it
    attaches: bool = False
    joins: bool = True  # others can live beside it in the same world
    meanwhile: Callable[[World], None] | None = None  # between its attaching and `act`
    honest: Reasons = HONEST


def fresh(w: World) -> None:
    """Room for everything, and some blocks on both hosts."""
    w.keep(SMALL, [0, 1, 2, 3, 4, 5])
    w.keep(LARGE, [0], host=1)


def full(w: World) -> None:
    for region in w.survivors:
        store(region, SMALL, range(30))


def dead_in_a_full_shard(w: World) -> None:
    """One died while it cut an extent anew, one in its payload, one before the entry."""
    w.die_together(
        ("extent.recut.claim", LARGE, [90]),
        ("store.payload", SMALL, [91]),
        ("store.header.word", SMALL, [92]),
    )


def dead_with_room(w: World, host: int = 0) -> None:
    w.die_together(
        ("store.header.word", SMALL, [92 + 10 * host]),
        ("store.payload", SMALL, [91 + 10 * host]),
        ("namespace.claim", NEW, [90]),
        host=host,
    )


def fresh_with_dead(w: World) -> None:
    fresh(w)
    dead_with_room(w)


def damaged(w: World) -> None:
    """One block that no reader asks for: its first load would drop it, and scrub should find it."""
    store(w.survivors[0], SMALL, range(30))
    unasked = INDICES[-1] + 1
    assert store(w.survivors[0], SMALL, [unasked]) == [None]
    assert w.damage(SMALL, unasked)


def lost(w: World) -> None:
    """Shard 0 went to host 1; no process of host 0 has said yet that it stopped."""
    fresh_with_dead(w)
    w.adopt(by=1)


def acknowledged(w: World) -> None:
    lost(w)
    w.survivors[0].heartbeat()


def first_store(region: Region, w: World, dice: random.Random) -> Outcomes:
    """A namespace that nobody knew, and so many blocks that a new extent is taken."""
    new = namespace(UNIT - 12, f"new {dice.random()}")
    return {*store(region, new, range(5)), *store(region, LARGE, [20])}


def fill(region: Region, w: World, dice: random.Random) -> Outcomes:
    return set(store(region, SMALL, range(40)))


def read(region: Region, w: World, dice: random.Random) -> Outcomes:
    load_all(region, w.honest)
    return {None}


def evict(region: Region, w: World, dice: random.Random) -> Outcomes:
    region.evict(0.2, 1000)
    return {None}


def recut(region: Region, w: World, dice: random.Random) -> Outcomes:
    return set(store(region, LARGE, range(12)))


def reap(region: Region, w: World, dice: random.Random) -> Outcomes:
    region.reap()
    return {None}


def scrub(region: Region, w: World, dice: random.Random) -> Outcomes:
    region.scrub()
    return {None}


def adopt(region: Region, w: World, dice: random.Random) -> Outcomes:
    try:
        region.adopt(0, w.epoch + 1)
    except (FencedError, RegionBusyError):  # another one has adopted meanwhile, or is about to
        return {MissReason.FENCED}
    return {None}


def beat(region: Region, w: World, dice: random.Random) -> Outcomes:
    region.heartbeat()
    return {None}


def attach(region: Region | None, w: World, dice: random.Random) -> Outcomes:
    with Region.attach(w.path, host=0) as mine:
        return set(store(mine, NEW, [1]))


LIVES = (
    Life("first store", fresh, first_store, evicts=False),
    Life("store into a full shard", full, fill),
    Life("load", fresh, read, evicts=False),
    Life("evict", full, evict),
    Life("recut", full, recut),
    Life("reap in a full shard", full, reap, meanwhile=dead_in_a_full_shard),
    Life("reap", fresh, reap, meanwhile=dead_with_room, evicts=False),
    Life("attach after a death", fresh_with_dead, attach, evicts=False, attaches=True),
    Life("scrub", damaged, scrub, joins=False, honest=HONEST | {MissReason.FAILED_CHECKSUM}),
    Life("adopt", fresh_with_dead, adopt, host=1, evicts=False, adopts=True),
    Life("take its own back", lost, adopt, evicts=False, adopts=True, joins=False),
    Life("acknowledge", lost, beat, evicts=False, adopts=True, joins=False),
    Life("audit", acknowledged, beat, host=1, evicts=False, adopts=True, joins=False),
)


def live(
    life: Life, w: World, number: int, step: str = "", nth: int = 0, signal_number: int = KILL
) -> list[str]:
    """In a child: the life up to the nth passing of the step. The outcomes come back, or the steps passed."""
    dice = random.Random(number)

    def arm() -> None:
        if step:
            _native.stop_at(step, nth, signal_number)
        else:
            _native.record_steps()

    if life.attaches:
        arm()
        outcomes = life.act(None, w, dice)  # type: ignore[arg-type]
    else:
        with Region.attach(w.path, host=life.host) as region:
            if life.meanwhile:
                signal.raise_signal(signal.SIGSTOP)
            arm()
            outcomes = life.act(region, w, dice)
    if step:
        return [str(o) for o in outcomes]
    return list(_native.recorded_steps())


def begin(
    life: Life, w: World, number: int, step: str = "", nth: int = 0, signal_number: int = KILL
) -> Child:
    """A child with this life, on its way to the step."""
    child = w.start(live, life, w, number, step, nth, signal_number)
    if life.meanwhile:
        assert child.wait_stopped()
        life.meanwhile(w)
        child.signal(signal.SIGCONT)
    return child


@cache
def steps_of(life: Life, coherence: Coherence) -> tuple[str, ...]:
    """The named steps that a process with this life passes."""
    with world(coherence) as w:
        life.prepare(w)
        steps = tally.result(begin(life, w, 1))
        assert isinstance(steps, list)
        return tuple(steps)


def die(life: Life, w: World, number: int, step: str, nth: int) -> Child | None:
    """A child that was killed at the step; None when this time it passed the step less often."""
    child = begin(life, w, number, step, nth)
    code = tally.ended(child)
    assert code in (0, -KILL), (life.name, step, nth, code)
    return child if code else None
