"""Processes stopped at every step for longer than anything waits, then continued.

There are no leases; a participant's liveness is a lock of the kernel. What waits for time is the daemon's
heartbeat, which counts as stopped after three seconds: all stops here last longer than that.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

import kvpool.region
from children import Child, until
from crash import tally
from crash.lives import LIVES, STOP, Life, begin, steps_of
from crash.pool_world import DAMAGED, NAME, pool_world, serve_until
from crash.readers import Readers
from crash.world import LARGE, NEW, SMALL, SPACES, World, clean, load_all, store, world
from kvpool import _native
from kvpool.daemon.lock import DaemonLock
from kvpool.errors import RegionBusyError
from kvpool.outcomes import MissReason
from kvpool.paths import daemon_lock_path, report_path
from kvpool.region import Coherence, Region
from strategies import seed

pytestmark = pytest.mark.slow
COHERENCES: tuple[Coherence, ...] = ("hardware", "software")
STOP_S = 3.3  # more than the patience with a heartbeat


@contextmanager
def all_stopped(
    lives: list[Life], coherence: Coherence, dice: random.Random
) -> Iterator[list[tuple[Life, str, World, Child]]]:
    """A world for each step of each life, with a child that stopped there."""
    with ExitStack() as stack:
        stopped = []
        for life in lives:
            for step in steps_of(life, coherence):
                w = stack.enter_context(world(coherence, life.honest))
                life.prepare(w)
                child = begin(life, w, dice.randrange(1 << 30), step, 1, STOP)
                assert child.wait_stopped(), (life.name, step)
                tally.count(tally.STOPS)
                stopped.append((life, step, w, child))
        yield stopped


@pytest.mark.parametrize("coherence", COHERENCES)
def test_stopped_at_every_step_others_go_on_and_so_does_it(coherence: Coherence, readers: Readers) -> None:
    tally.use_row(tally.STOPPED)
    dice = random.Random(seed("test_stopped_at_every_step_others_go_on"))
    with all_stopped(list(LIVES), coherence, dice) as stopped:
        began, rounds = time.monotonic(), 0
        while rounds < 2 or time.monotonic() < began + STOP_S:
            for life, step, w, _ in stopped:
                print(f"{life.name} stopped at {step}: round {rounds}")
                with readers.on(w.path, tally.STOPPED, w.honest):
                    if life.adopts:  # its host must not write to shard 0, which is another's or nobody's yet
                        back = life.host == 0 and step == "adopt.done"
                        assert store(w.survivors[0], NEW, [1]) == [None if back else MissReason.FENCED]
                        load_all(w.survivors[0])
                        assert store(w.survivors[1], NEW, [2 + rounds]) == [None]
                    else:
                        w.progress(dice)
                    for region in w.survivors:  # what daemons do meanwhile
                        region.heartbeat()
                        region.evict(0.5, 3)
                        region.scrub()
                        assert not region.reap().dead or life.meanwhile or life.adopts
            rounds += 1
        for life, step, w, child in stopped:
            print(f"{life.name} goes on from {step}")
            child.signal(signal.SIGCONT)
            assert tally.result(child) == ["None"]
            if life.adopts:
                w.give_back()
            w.progress(dice)
            w.clean_up(dice)
            w.all_slots_are_usable()


@pytest.mark.parametrize("coherence", COHERENCES)
def test_stopped_until_its_shard_was_adopted_it_does_no_harm(coherence: Coherence, readers: Readers) -> None:
    """A whole host stops; another adopts its shard; then it wakes in the middle of what it did."""
    tally.use_row(tally.STOPPED)
    dice = random.Random(seed("test_stopped_until_its_shard_was_adopted"))
    lives = [life for life in LIVES if life.host == 0 and not life.adopts]
    with all_stopped(lives, coherence, dice) as stopped:
        time.sleep(STOP_S)
        for life, step, w, child in stopped:
            print(f"{life.name} stopped at {step}")
            here, there = w.survivors
            with readers.on(w.path, tally.STOPPED, w.honest):
                w.adopt(by=1)
                assert store(there, SMALL, range(20)) == [None] * 20
                load_all(there, w.honest)
                child.signal(signal.SIGCONT)
                outcomes = tally.result(child)
                assert isinstance(outcomes, list)
                assert {*outcomes} <= {"None", "fenced"}, outcomes
                for region in w.survivors:
                    load_all(region, w.honest)
                assert store(here, LARGE, [3]) == [MissReason.FENCED]
                here.reap()
                here.heartbeat()  # says that it stopped
                there.heartbeat()  # and the new owner puts in order what was written late
                clean(Region.fsck(w.path))
                w.give_back()
                w.progress(dice)
                w.clean_up(dice)
            w.all_slots_are_usable()


@pytest.mark.parametrize("coherence", COHERENCES)
def test_daemon_stopped_for_long_engines_go_on(
    coherence: Coherence, readers: Readers, monkeypatch: pytest.MonkeyPatch
) -> None:
    dice = random.Random(seed("test_daemon_stopped_for_long"))
    with pool_world(coherence, dice, readers, monkeypatch) as p:
        tally.use_row(tally.STOPPED)
        daemon = p.w.start(serve_until, p.spec, 0, "", 0)
        report = report_path(NAME, 0)
        until(report.exists)
        time.sleep(dice.uniform(0, 0.05))
        daemon.signal(signal.SIGSTOP)
        os.waitpid(daemon.pid, os.WUNTRACED)
        tally.count(tally.STOPS)
        beat = p.w.survivors[1].usage().hosts[0].heartbeat
        told = json.loads(report.read_text())["updated_at"]
        began = time.monotonic()
        while time.monotonic() < began + STOP_S:
            p.engines.progress()
            p.work()
            time.sleep(0.05)
        assert p.w.survivors[1].usage().hosts[0].heartbeat == beat
        with pytest.raises(RegionBusyError):  # it is stopped and not dead: there is no second one
            DaemonLock(daemon_lock_path(NAME, 0))
        daemon.signal(signal.SIGCONT)
        until(lambda: p.w.survivors[1].usage().hosts[0].heartbeat > beat)
        until(lambda: json.loads(report.read_text())["updated_at"] > told)
        daemon.signal(signal.SIGTERM)
        tally.result(daemon)


def machine(path: Path, name: str, step: str) -> list[str]:
    """A process on another machine: another boot, and locks that only that machine sees."""
    boot = name.encode() * 16
    kvpool.region.boot_id = lambda: boot
    lock = path.with_name(f"lock {name}")
    lock.touch()
    outcomes: set[MissReason | None] = set()
    with Region.attach(path, host=0, role="daemon", node_name=name, lock_path=lock) as region:
        if step:
            _native.stop_at(step, 1, STOP)
        for ns in SPACES:
            outcomes |= set(store(region, ns, range(40)))
        load_all(region, DAMAGED)
        region.evict(0.5, 10)
        region.heartbeat()
    return [str(o) for o in outcomes]


@pytest.mark.parametrize("coherence", COHERENCES)
def test_machine_stopped_while_another_took_its_number_nobody_gets_wrong_bytes(
    coherence: Coherence,
) -> None:
    """Two machines as one host is a mistake, and nothing but content is promised then; it holds."""
    tally.use_row(tally.STOPPED)
    fill = next(life for life in LIVES if life.name == "store into a full shard")
    with ExitStack() as stack:
        started = []
        for step in steps_of(fill, coherence):
            w = stack.enter_context(world(coherence, DAMAGED))
            w.survivors.pop(0).close()
            started.append((step, w, w.start(machine, w.path, "a", step)))
        for step, _, old in started:
            assert old.wait_stopped(), step
            tally.count(tally.STOPS)
        new = [w.start(machine, w.path, "b", "") for _, w, _ in started]
        for (step, w, old), other in zip(started, new, strict=True):
            print(f"the first machine goes on from {step}")
            assert tally.result(other) == ["None"]
            load_all(w.survivors[0], DAMAGED)
            old.signal(signal.SIGCONT)
            assert tally.result(old) == ["None"]
            load_all(w.survivors[0], DAMAGED)
            w.survivors[0].reap()
            clean(Region.fsck(w.path))
