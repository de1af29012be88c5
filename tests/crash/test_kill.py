"""A process killed at every named step leaves nothing stuck, and nobody ever gets wrong bytes."""

from __future__ import annotations

import random
import re
import signal
from pathlib import Path

import pytest

from children import Child, children
from crash import tally
from crash.world import LARGE, NEW, SMALL, SPACES, UNIT, clean, load, load_all, store
from kvpool import _native
from kvpool.errors import KvpoolError, SuperblockError
from kvpool.keys import KeyBatch
from kvpool.outcomes import MissReason
from kvpool.region import Coherence, Geometry, Region
from strategies import contents, keys_of, region_folder, seed, small_geometry

NATIVE = Path(__file__).resolve().parents[2] / "pool" / "native"


def geometry(coherence: Coherence) -> Geometry:
    """24 slots in 6 extents for 40 blocks of two sizes: stores evict, and space moves between the sizes."""
    return small_geometry(
        24, hosts=2, block_bytes=UNIT, slots_per_extent=4, participants=6, namespaces=4, coherence=coherence
    )


def die_in_a_store(path: Path, step: str) -> None:
    region = Region.attach(path, host=0)
    _native.stop_at(step, 1, signal.SIGKILL)
    store(region, SMALL, [90])


def everything(path: Path, record: bool, step: str = "", nth: int = 0) -> list[str]:
    """Passes every step that a process of host 0 can pass; the steps that were passed come back."""
    dead = Child(die_in_a_store, path, "store.payload")  # somebody for the reaper
    assert tally.ended(dead) == -signal.SIGKILL
    dead.end()
    if record:
        _native.record_steps()
    else:
        _native.stop_at(step, nth, signal.SIGKILL)
    with Region.attach(path, host=0) as region:
        store(region, SMALL, list(range(8)))
        load_all(region)
        store(region, NEW, [0, 1])
        store(region, SMALL, list(range(40)))  # evicts inline
        store(region, LARGE, list(range(12)))  # takes extents from the small ones
        region.evict(0.5, 5)
        region.scrub()
        region.heartbeat()
        store(region, SMALL, list(range(30, 36)))
        region.evict(0.0, 1000)
        store(region, NEW, [2])
    return list(_native.recorded_steps())


def steps_of_a_life(coherence: Coherence) -> list[str]:
    with region_folder() as folder, children() as start:
        path = folder / "region"
        Region.format(path, geometry(coherence))
        return list(start(everything, path, True).result())


def check_after_a_death(path: Path, survivors: list[Region]) -> None:
    """Others go on at once; after the next attach the region is as if the dead one had never been there."""
    for region in survivors:
        load_all(region)
        for ns in SPACES:
            index = random.randrange(40)
            reasons = store(region, ns, [index])
            if reasons == [None] and region is survivors[0]:
                keys = keys_of(ns, [index])
                assert region.lookup(keys).hit_count == 1
            assert set(reasons) <= {None, MissReason.NO_SPACE}, (
                reasons
            )  # a stuck slot may be the last one until it is reaped
    with Region.attach(path, host=0) as fresh:
        assert all(p.alive for p in fresh.participants())
        clean(fresh.check())
        load_all(fresh)
        assert [store(fresh, ns, [7]) for ns in SPACES] == [[None]] * 3
    clean(Region.fsck(path))


def all_slots_are_usable(region: Region) -> None:
    region.evict(0.0, 1000)
    assert region.usage().hosts[0].blocks == 0
    keys = keys_of(SMALL, range(100, 400))  # enough evictions for the large ones' extents to be cut anew
    assert region.store(keys, contents(keys)).declined_count == 0
    usage = region.usage().hosts[0]
    assert (region.lookup(keys).hit_count, usage.blocks, usage.slots_free, usage.extents_free) == (
        24,
        24,
        0,
        0,
    ), usage


@pytest.mark.parametrize("coherence", ["hardware", "software"])
def test_process_killed_at_any_step_leaves_nothing_stuck(coherence: Coherence) -> None:
    tally.use_row(tally.ONE)
    value = seed("test_process_killed_at_any_step")
    dice = random.Random(value)
    random.seed(value)
    steps = steps_of_a_life(coherence)
    assert {"store.claim", "evict.claim", "extent.recut.claim", "reap.before_clean", "append.record"} <= set(
        steps
    )
    for step in steps:
        with region_folder() as folder, children() as start:
            path = folder / "region"
            Region.format(path, geometry(coherence))
            with Region.attach(path, host=0) as here, Region.attach(path, host=1) as there:
                store(here, SMALL, [20, 21, 22])  # no large ones: their first store has to cut an extent anew
                store(there, LARGE, [23, 24])
                for nth in (1, dice.randint(2, 40)):
                    print(f"step={step} nth={nth}")
                    code = tally.ended(start(everything, path, False, step, nth))
                    assert code == -signal.SIGKILL or (nth > 1 and code == 0), (step, nth, code)
                    check_after_a_death(path, [here, there])
                here.reap()
                all_slots_are_usable(here)


def test_every_step_in_the_core_is_killed_somewhere() -> None:
    """A new KVP_STEP without a test that dies there is seen here."""
    named = set()
    for file in NATIVE.rglob("*.h"), NATIVE.rglob("*.cpp"):
        for source in file:
            named |= set(re.findall(r'KVP_STEP\("([^"]+)"\)', source.read_text()))
    elsewhere = {
        "adopt.claimed",
        "adopt.freed",
        "adopt.log.refill",
        "adopt.done",
        "acknowledge.before_flush",  # these and those of adopt: test_matrix.py
        "acknowledge.done",
        "namespace.judged",  # test_namespaces.py
        "audit.begin",
        "audit.done",
        "format.before_superblock",
        "format.before_magic",
        "extent.retire.claim",  # these: test_resize.py
        "extent.retired",
        "resize.allowed",
        "resize.before_punch",
        "resize.filled",
        "retire.claim",  # these: tests/damage/test_poison.py
        "retire.slot",
    }
    killed = set(steps_of_a_life("hardware")) | elsewhere
    assert named - killed == set()


def test_namespace_row_of_a_dead_process_is_named_by_fsck_and_reaped() -> None:
    with region_folder() as folder, children() as start:
        path = folder / "region"
        Region.format(path, geometry("hardware"))
        with Region.attach(path) as region:
            assert tally.ended(start(die_in_a_store, path, "namespace.claim")) == -signal.SIGKILL
            (problem, _) = sorted(region.check().problems)
            assert "namespace 0 is being written by a process that is gone" in problem
            assert region.reap().dead == 1
            clean(region.check())


def adopt(path: Path, step: str, epoch: int) -> None:
    with Region.attach(path, host=1) as region:
        _native.stop_at(step, 1, signal.SIGKILL)
        region.adopt(0, epoch)


@pytest.mark.parametrize("coherence", ["hardware", "software"])
@pytest.mark.parametrize("step", ["adopt.claimed", "adopt.freed", "adopt.log.refill", "adopt.done"])
def test_adopter_killed_at_any_step_next_adopter_keeps_the_blocks(step: str, coherence: Coherence) -> None:
    tally.use_row(tally.ONE)
    with region_folder() as folder, children() as start:
        path = folder / "region"
        Region.format(path, geometry(coherence))
        with Region.attach(path, host=0) as old:
            store(old, SMALL, list(range(10)))
            dead = start(die_in_a_store, path, "store.payload")
            assert tally.ended(dead) == -signal.SIGKILL
        assert tally.ended(start(adopt, path, step, 5)) == -signal.SIGKILL
        with Region.attach(path, host=0) as old:
            assert store(old, SMALL, [30]) == [MissReason.FENCED]
            load_all(old)
        with Region.attach(path, host=1) as region:
            with pytest.raises(KvpoolError, match="not higher"):
                region.adopt(0, 4)
            # What the dead one began with epoch 5 is completed with it; then that epoch is used up.
            if not region.owners()[0].settled:
                assert region.adopt(0, 5).kept == 10
            with pytest.raises(KvpoolError, match="not higher"):
                region.adopt(0, 5)
            assert region.adopt(0, 6).kept == 10
            assert load(region, SMALL, range(10)) == [None] * 10
            check = region.check()
            assert check.totals["writing"] == 0
        with Region.attach(path, host=0) as back:  # and the old owner gets it back
            back.adopt(0, 7)
            assert store(back, SMALL, [31]) == [None]
            assert load_all(back) == 11
            assert back.check().ok


def adopt_and_die(path: Path) -> None:
    with Region.attach(path, host=1) as region:
        _native.stop_at("adopt.done", 1, signal.SIGKILL)
        region.adopt(0, 1)


@pytest.mark.parametrize("coherence", ["hardware", "software"])
def test_adopter_dies_its_hosts_next_process_audits_the_shard(coherence: Coherence) -> None:
    """Else what the old owner wrote late would stay as it is for good."""
    with region_folder() as folder, children() as start:
        path = folder / "region"
        Region.format(path, geometry(coherence))
        with Region.attach(path, host=0) as here, Region.attach(path, host=1) as there:
            store(here, SMALL, range(10))
            assert tally.ended(start(adopt_and_die, path)) == -signal.SIGKILL
            assert not there._native.audit_adopted()  # the old owner has not said that it stopped
            here.heartbeat()
            assert there._native.audit_adopted()
            assert not there._native.audit_adopted()  # once is enough
            assert there.reap().dead == 1
            assert load(there, SMALL, range(10)) == [None] * 10
        clean(Region.fsck(path))


def format_dying(path: Path, step: str, nth: int, kept: Geometry) -> None:
    _native.stop_at(step, nth, signal.SIGKILL)
    Region.format(path, kept)


@pytest.mark.parametrize(
    ("step", "nth"), [("format.before_superblock", 1), ("format.before_magic", 1), ("format.before_magic", 2)]
)
def test_format_killed_leaves_no_region_or_a_whole_one(step: str, nth: int) -> None:
    tally.use_row(tally.ONE)
    with region_folder() as folder, children() as start:
        path = folder / "region"
        dead = start(format_dying, path, step, nth, geometry("hardware"))
        assert tally.ended(dead) == -signal.SIGKILL
        try:
            region = Region.attach(path)
        except SuperblockError:
            Region.format(path, geometry("hardware"), force=True)
            region = Region.attach(path)
        with region:
            assert store(region, SMALL, [1]) == [None]
            assert load_all(region) == 1


def stop_in_a_store(path: Path, step: str) -> KeyBatch:
    with Region.attach(path, host=0) as region:
        _native.stop_at(step, 1, signal.SIGSTOP)
        store(region, SMALL, [0])
        _native.stop_at("", 0, 0)
        results = [store(region, SMALL, list(range(20))), store(region, LARGE, [0, 1, 2])]
        region.heartbeat()
        load_all(region)
        return results  # type: ignore[return-value]


STORE_STEPS = [
    "attach.live",
    "namespace.claim",
    "extent.claim",
    "store.claim",
    "store.payload",
    "store.payload.fence",
    "store.header.body",
    "store.header.word",
    "publish.cas",
    "store.published",
    "append.record",
    "append.tail",
]


@pytest.mark.parametrize("coherence", ["hardware", "software"])
def test_writer_stopped_at_any_step_others_go_on_and_so_does_it(coherence: Coherence) -> None:
    for step in STORE_STEPS[1:]:
        with region_folder() as folder, children() as start:
            path = folder / "region"
            Region.format(path, geometry(coherence))
            writer = start(stop_in_a_store, path, step)
            assert writer.wait_stopped(), step
            tally.count(tally.STOPS)
            with Region.attach(path, host=0) as here, Region.attach(path, host=1) as there:
                for region in (here, there):
                    assert region.reap().dead == 0
                    for ns in (LARGE, SMALL):
                        reasons = set(store(region, ns, list(range(30))))
                        # Only what the stopped one is in the middle of may be refused.
                        assert reasons == {None} or step in ("extent.claim", "store.claim"), (step, reasons)
                    load_all(region)
                    region.evict(0.2, 1000)
                    region.scrub()
                writer.signal(signal.SIGCONT)
                for reasons in tally.result(writer):
                    assert set(reasons) == {None}, (step, reasons)
                assert here.reap().dead == 0
                load_all(here)
                load_all(there)
                report = here.check()
                assert report.ok, (step, report.problems)
                assert report.totals["writing"] == 0


@pytest.mark.parametrize("coherence", ["hardware", "software"])
def test_zombie_writer_is_fenced_after_adoption(coherence: Coherence) -> None:
    for step in STORE_STEPS[1:]:
        with region_folder() as folder, children() as start:
            path = folder / "region"
            Region.format(path, geometry(coherence))
            with Region.attach(path, host=0) as old:
                store(old, LARGE, [10, 11])
            zombie = start(stop_in_a_store, path, step)
            assert zombie.wait_stopped(), step
            tally.count(tally.STOPS)
            with Region.attach(path, host=1) as region:
                report = region.adopt(0, 1)
                assert report.kept >= 2
                load_all(region)
                zombie.signal(signal.SIGCONT)
                small, large = tally.result(zombie)
                # The store that it was in may end well; all that come after are refused.
                assert set(small[1:]) | set(large) == {MissReason.FENCED}, (step, small, large)
                load_all(region)
                assert load(region, LARGE, [10, 11]) == [None, None]
                assert store(region, SMALL, [5]) == [None]  # into its own shard
                region.adopt(0, 2)  # the audit after the zombie's acknowledgement
                report2 = region.check()
                assert report2.ok, (step, report2.problems)
                assert report2.totals["writing"] == 0
                load_all(region)
