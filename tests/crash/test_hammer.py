"""Two hosts with two processes each do everything at once to one small region.

No wrong byte, no stuck slot, nothing grows. Bounded to some seconds; KVPOOL_SOAK_SECONDS makes it longer.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from children import Child, children, fd_count, rss_bytes
from crash import tally
from kvpool import _native
from kvpool.errors import RegionBusyError
from kvpool.keys import KEY_BYTES, Namespace
from kvpool.outcomes import MissReason
from kvpool.region import Coherence, Geometry, Region
from strategies import buffers, contents, keys_of, namespace, region_folder, seed, small_geometry, wrong_hits

SECONDS = float(os.environ.get("KVPOOL_SOAK_SECONDS", "0"))
UNIT = 256
SPACES = [namespace(size, f"size {size}") for size in (UNIT - 7, UNIT, 3 * UNIT + 1, 8 * UNIT)]
DEATHS = 120  # of the slow test
CALLS_MIN = 60  # a process, also where it gets no time to run
BLOCKS = 150  # of each namespace: several times what fits
HONEST = {None, MissReason.NEVER_STORED, MissReason.EVICTED, MissReason.CHANGED_WHILE_READING}
HOSTS = 2
Facts = dict[str, Any]


def hammered(coherence: Coherence) -> Geometry:
    """64 slots a host in 8 extents: everybody is in everybody's way."""
    return small_geometry(
        64,
        hosts=HOSTS,
        block_bytes=UNIT,
        slots_per_extent=8,
        participants=4,
        namespaces=4,
        coherence=coherence,
    )


def one_call(
    region: Region, dice: random.Random, facts: Counter[str], honest: set[MissReason | None] = HONEST
) -> None:
    ns: Namespace = dice.choice(SPACES)
    hot = dice.random() < 0.7
    keys = keys_of(ns, [dice.randrange(20 if hot else BLOCKS) for _ in range(dice.choice((1, 2, 8, 30)))])
    what = dice.random()
    if what < 0.45:
        out = buffers(keys)
        if ns.block_bytes > UNIT and dice.random() < 0.3:  # in pieces
            cut = dice.randrange(1, ns.block_bytes)
            result = region.load(keys, [[memoryview(b)[:cut], memoryview(b)[cut:]] for b in out])
        else:
            result = region.load(keys, out)
        wrong = wrong_hits(keys, result.codes, out)
        tally.count(tally.LOADED, result.hit_count)
        tally.count(tally.WRONG, len(wrong))
        assert not wrong, f"wrong bytes: {ns.model} block {wrong}"
        for reason in result.reasons:
            facts[f"load {reason or 'hit'}"] += 1
        assert set(result.reasons) <= honest, list(result.reasons)
    elif what < 0.9:
        for reason in region.store(keys, contents(keys)).reasons:
            facts[f"store {reason or 'ok'}"] += 1
    elif what < 0.98:
        found = region.lookup(keys)
        facts["lookups"] += 1
        assert set(found.reasons) <= honest, list(found.reasons)
    elif what < 0.99:
        facts["evicted"] += region.evict(dice.choice((0.3, 0.8)), dice.choice((1, 20)))
    else:
        report = region.scrub(limit=10)
        assert report.bad == 0 or MissReason.FAILED_CHECKSUM in honest, "a good block was called damaged"


def hammer(
    path: Path,
    host: int,
    number: int,
    until: float,
    honest: set[MissReason | None] = HONEST,
    stop: Path | None = None,
) -> Facts:
    dice = random.Random(number)
    facts: Counter[str] = Counter()
    region = Region.attach(path, host=host)
    marks: list[tuple[int, int]] = []
    calls = 0
    started = time.monotonic()
    while (time.monotonic() < until or calls < CALLS_MIN) and not (stop and stop.exists()):
        with tally.in_time("a call"):
            one_call(region, dice, facts, honest)
        calls += 1
        if calls % 400 == 0:  # a life ends well
            region.close()
            region = Region.attach(path, host=host)
        if calls % 50 == 0 and time.monotonic() > started + (until - started) * (len(marks) + 1) / 5:
            marks.append((rss_bytes(), fd_count()))
    region.close()
    return {"facts": facts, "marks": marks, "calls": calls}


def judge_end(path: Path, facts: Counter[str], damaged: bool = False) -> None:
    for host in range(HOSTS):
        with Region.attach(path, host=host) as region:
            report = region.check()
            totals = report.totals
            tally.count(tally.FSCK, not report.ok)
            assert report.ok, report.problems
            assert totals["writing"] == totals["lent"] == 0
            assert totals["free"] + totals["stored"] == totals["slots"]
            usage = region.usage()
            assert usage.used_bytes <= usage.capacity_bytes
            for ns in SPACES:
                keys = keys_of(ns, range(BLOCKS))
                out = buffers(keys)
                result = region.load(keys, out)
                wrong = wrong_hits(keys, result.codes, out)
                tally.count(tally.LOADED, result.hit_count)
                tally.count(tally.WRONG, len(wrong))
                assert not wrong
            region.evict(0.0, 10**6)
            assert region.usage().hosts[host].blocks == 0, "a slot is stuck"
            counters = region.counters()
            assert counters.lookups == counters.hits + sum(counters.misses.values())
            assert counters.scrub_bad == 0 or damaged


@pytest.mark.parametrize("coherence", ["hardware", "software"])
def test_two_hosts_with_two_processes_each_never_get_wrong_bytes(coherence: Coherence) -> None:
    value = seed("test_two_hosts_with_two_processes")
    with region_folder() as folder, children() as start:
        path = folder / "region"
        Region.format(
            path,
            hammered(coherence),
        )
        until = time.monotonic() + (SECONDS or 3.0)
        workers = [
            start(hammer, path, i % HOSTS, value + i, until, timeout_s=int(SECONDS) + 60) for i in range(4)
        ]
        with Region.attach(path, host=0, role="daemon") as a, Region.attach(path, host=1, role="daemon") as b:
            while time.monotonic() < until:  # what daemons do meanwhile
                for region in (a, b):
                    region.heartbeat()
                    assert region.reap().dead == 0
                    region.evict(0.8, 50)
                    assert region.scrub(limit=50).bad == 0
                    usage = region.usage()
                    assert usage.used_bytes <= usage.capacity_bytes
                    problems = region.check().problems
                    assert not problems, problems
                tally.facts()
                time.sleep(0.01)
        facts: Counter[str] = Counter()
        for worker in workers:
            report = tally.result(worker)
            facts += report["facts"]
            if not report["marks"]:
                continue
            first, last = report["marks"][0], report["marks"][-1]
            assert last[1] <= first[1], f"file descriptors grew: {report['marks']}"
            assert last[0] <= first[0] + (8 << 20), f"memory grew: {report['marks']}"
        print(sorted(facts.items()))
        assert facts["load hit"] > 0
        judge_end(path, facts)


@pytest.mark.parametrize("coherence", ["hardware", "software"])
def test_processes_killed_at_random_others_never_notice(coherence: Coherence) -> None:
    tally.use_row(tally.RANDOM)
    value = seed("test_processes_killed_at_random")
    dice = random.Random(value)
    with region_folder() as folder, children() as start:
        path = folder / "region"
        Region.format(
            path,
            hammered(coherence),
        )
        until = time.monotonic() + (SECONDS or 3.0)
        number = value
        workers: list[tuple[Child, int, bool]] = []

        def replace(place: int, host: int, mortal: bool) -> tuple[Child, int, bool]:
            nonlocal number
            number += 1
            return start(hammer, path, host, number, until, timeout_s=int(SECONDS) + 60), host, mortal

        for i in range(4):
            workers.append(replace(i, i % HOSTS, i < 2))
        deaths = 0
        while time.monotonic() < until - 0.2 or deaths < 2:
            time.sleep(dice.uniform(0.01, 0.1))
            tally.facts()
            i = dice.randrange(2)
            child, host, _ = workers[i]
            child.signal(signal.SIGKILL)
            code = tally.ended(child)
            assert code in (-signal.SIGKILL, 0), code  # 0: it had just ended
            deaths += 1
            workers[i] = replace(i, host, True)
        for child, _, _ in workers:
            tally.result(child)
        judge_end(path, Counter())


@pytest.mark.slow
@pytest.mark.parametrize("coherence", ["hardware", "software"])
def test_several_killed_in_the_same_moment_others_never_notice(coherence: Coherence) -> None:
    """Wherever they are just then, on both hosts; two that are never killed see all of it."""
    tally.use_row(tally.RANDOM)
    value = seed("test_several_killed_in_the_same_moment")
    dice = random.Random(value)
    with region_folder() as folder, children() as start:
        path, stop = folder / "region", folder / "stop"
        Region.format(path, replace(hammered(coherence), participants=8))
        far = time.monotonic() + 3600
        numbers = itertools.count(value)

        def worker(place: int) -> Child:
            return start(hammer, path, place % HOSTS, next(numbers), far, HONEST, stop, timeout_s=3600)

        workers = [worker(place) for place in range(6)]
        deaths = 0
        until = time.monotonic() + SECONDS
        while deaths < DEATHS or time.monotonic() < until:
            time.sleep(dice.uniform(0.0, 0.04))
            places = dice.sample(range(2, 6), dice.choice((1, 2, 3)))
            tally.intend(len(places))
            for place in places:
                workers[place].signal(signal.SIGKILL)
            for place in places:
                assert tally.ended(workers[place]) == -signal.SIGKILL
                workers[place].end()
                workers[place] = worker(place)
            deaths += len(places)
        stop.touch()
        for child in workers:
            tally.result(child)
        judge_end(path, Counter())


@pytest.mark.parametrize("coherence", ["hardware", "software"])
def test_threads_of_one_process_share_one_attachment(coherence: Coherence) -> None:
    value = seed("test_threads_of_one_process")
    with region_folder() as folder:
        path = folder / "region"
        Region.format(
            path,
            small_geometry(
                32,
                hosts=HOSTS,
                block_bytes=UNIT,
                slots_per_extent=8,
                participants=4,
                namespaces=4,
                coherence=coherence,
            ),
        )
        failures: list[BaseException] = []
        until = time.monotonic() + (SECONDS or 1.0)
        with Region.attach(path, host=0) as here, Region.attach(path, host=1) as there:

            def work(region: Region, number: int) -> None:
                dice, facts = random.Random(number), Counter[str]()
                try:
                    while time.monotonic() < until:
                        one_call(region, dice, facts)
                except BaseException as e:
                    failures.append(e)

            threads = [
                threading.Thread(target=work, args=((here, there)[i % 2], value + i)) for i in range(6)
            ]
            for t in threads:
                t.start()
            for t in threads:
                t.join()
            assert not failures, failures
        judge_end(path, Counter())


@pytest.mark.parametrize("coherence", ["hardware", "software"])
def test_shards_change_hands_under_living_writers_without_wrong_bytes(coherence: Coherence) -> None:
    """The worst arbiter: it takes shards from living hosts. Stores may be refused, blocks may be damaged."""
    value = seed("test_shards_change_hands")
    dice = random.Random(value)
    honest = HONEST | {MissReason.FAILED_CHECKSUM}
    with region_folder() as folder, children() as start:
        path = folder / "region"
        Region.format(path, hammered(coherence))
        until = time.monotonic() + (SECONDS or 2.0)
        workers = [
            start(hammer, path, i % HOSTS, value + i, until, honest, timeout_s=int(SECONDS) + 60)
            for i in range(4)
        ]
        epoch = 0
        with Region.attach(path, host=0) as a, Region.attach(path, host=1) as b:
            while time.monotonic() < until:
                epoch += 1
                dice.choice((a, b)).adopt(dice.randrange(HOSTS), epoch)
                for region in (a, b):
                    region.heartbeat()
                    region.reap()
                time.sleep(dice.uniform(0, 0.03))
            facts: Counter[str] = Counter()
            for worker in workers:
                facts += tally.result(worker)["facts"]
            print(sorted(facts.items()))
            assert facts["load hit"] > 0
            for host, region in enumerate((a, b)):  # everybody gets his own back
                region.adopt(host, epoch + 1)
                region.heartbeat()
                region.scrub()
        judge_end(path, facts, damaged=True)


def die(path: Path, step: str) -> None:
    region = Region.attach(path, host=0)
    keys = keys_of(SPACES[0], [1])
    _native.stop_at(step, 1, signal.SIGKILL)
    region.store(keys, contents(keys))


def test_entries_of_the_dead_are_used_again_when_all_are_taken() -> None:
    with region_folder() as folder, children() as start:
        path = folder / "region"
        Region.format(path, small_geometry(8, block_bytes=UNIT, participants=2, namespaces=4))
        for _ in range(20):
            assert tally.ended(start(die, path, "store.claim")) == -signal.SIGKILL
        with Region.attach(path), Region.attach(path) as second:
            with pytest.raises(RegionBusyError, match="all 2 participant entries"):
                Region.attach(path)
            report = second.check()
            assert report.ok, report.problems
            assert report.totals["writing"] == 0
        assert KEY_BYTES == 32
