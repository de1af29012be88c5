"""A daemon killed at every step of its chores and at any moment: engines go on, the next daemon cleans up.

`serve` is the whole daemon, with its lock, its signals and its report; in a forked child it can be told at
which named step to die. Daemons that are programs (`python -m kvpool.daemon`) die at random moments.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time

import pytest

from children import Child
from crash import tally
from crash.pool_world import NAME, pool_spec, pool_world, serve_until
from crash.readers import Readers
from crash.world import HONEST, clean, right
from kvpool import Pool
from kvpool.daemon.lock import holder
from kvpool.paths import daemon_lock_path
from kvpool.provision import provision
from kvpool.region import Coherence, Region
from strategies import buffers, namespace, region_folder, seed

pytestmark = pytest.mark.slow
COHERENCES: tuple[Coherence, ...] = ("hardware", "software")
DEATHS_AT_A_STEP = 2
DEATHS_AT_ANY_MOMENT = 25
PROGRAMS = 4


@pytest.mark.parametrize("coherence", COHERENCES)
def test_daemon_killed_at_every_step_of_its_chores(
    coherence: Coherence, readers: Readers, monkeypatch: pytest.MonkeyPatch
) -> None:
    dice = random.Random(seed("test_daemon_killed_at_every_step_of_its_chores"))
    with pool_world(coherence, dice, readers, monkeypatch) as p:
        p.work()
        steps = tally.result(p.w.start(serve_until, p.spec, 0, "", 0, 0.7))
        assert isinstance(steps, list)
        assert {"attach.live", "evict.claim", "release.free", "append.record", "reap.before_free"} <= {*steps}
        print(steps)
        for step in steps:
            for _ in range(DEATHS_AT_A_STEP):
                nth = 1 if step in ("attach.live", "publish.cas") else dice.choice((1, 1, 2, 3, 7))
                print(f"daemon at {step} nth={nth}")
                tally.intend(1)
                p.work()
                daemon = p.w.start(serve_until, p.spec, 0, step, nth)
                while not _has_ended(daemon):  # reaping is a chore too: engines die while it runs
                    p.work()
                assert tally.ended(daemon) == -signal.SIGKILL
                p.judge()


def _has_ended(child: Child, within_s: float = 0.05) -> bool:
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        if os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            return True
        time.sleep(0.001)
    return False


@pytest.mark.parametrize("coherence", COHERENCES)
def test_daemon_killed_at_any_moment(
    coherence: Coherence, readers: Readers, monkeypatch: pytest.MonkeyPatch
) -> None:
    dice = random.Random(seed("test_daemon_killed_at_any_moment"))
    with pool_world(coherence, dice, readers, monkeypatch) as p:
        for _ in range(DEATHS_AT_ANY_MOMENT):
            tally.intend(1)
            p.work()
            daemon = p.w.start(serve_until, p.spec, 0, "", 0)
            time.sleep(dice.uniform(0, 0.03))
            daemon.signal(signal.SIGKILL)
            assert tally.ended(daemon) == -signal.SIGKILL
            p.judge()


@pytest.mark.parametrize("coherence", COHERENCES)
def test_program_of_the_daemon_killed_at_any_moment(
    coherence: Coherence, readers: Readers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `kvpool up` starts it, on regions as `kvpool up` makes them."""
    tally.use_row(tally.DAEMON)
    dice = random.Random(seed("test_program_of_the_daemon_killed_at_any_moment"))
    space = namespace(32 << 10, "small")
    with region_folder() as folder:
        monkeypatch.setenv("KVPOOL_RUNTIME_DIR", str(folder / "run"))
        spec = pool_spec(folder, folder / "cxl", coherence, ("8Mi", "16Mi"))
        provision(spec, 0, timeout_s=10, progress=lambda *_: None, waiting=lambda _: None)
        keys, blocks = right(space, tuple(range(400)))  # more than fits: there is always something to evict
        out = buffers(keys)
        with Pool.open(spec, host=0) as pool:
            for _ in range(PROGRAMS):
                reading, writing = os.pipe()
                command = [sys.executable, "-m", "kvpool.daemon", NAME, "--ready-fd", str(writing)]
                daemon = subprocess.Popen(command, pass_fds=[writing], stderr=subprocess.DEVNULL)
                os.close(writing)
                with os.fdopen(reading) as ready:
                    assert ready.readline() == "ready\n"
                tally.intend(1)
                until_s = time.monotonic() + dice.uniform(0, 0.6)
                while time.monotonic() < until_s:
                    _store_and_load(pool, keys, blocks, out)
                daemon.kill()
                assert daemon.wait() == -signal.SIGKILL
                tally.count(tally.KILLS)
                _store_and_load(pool, keys, blocks, out)
                assert holder(daemon_lock_path(NAME, 0)) is None
        for name in ("dram", "cxl"):
            Region.attach(folder / name).close()
            clean(Region.fsck(folder / name))


def _store_and_load(pool: Pool, keys, blocks: list[bytes], out: list[bytearray]) -> None:  # type: ignore[no-untyped-def]
    with tally.in_time("a store and a load beside a daemon"):
        assert set(pool.store(keys, blocks).reasons) == {None}
        result = pool.load(keys, out)
    wrong = [i for i, code in enumerate(result.codes) if code == 0 and out[i] != blocks[i]]
    tally.count(tally.LOADED, result.hit_count)
    tally.count(tally.WRONG, len(wrong))
    assert not wrong
    assert set(result.reasons) <= HONEST, list(result.reasons)
