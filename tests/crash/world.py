"""A small region with survivors on every host, and what has to be true of it when somebody has died."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

from children import Child, children
from crash import tally
from kvpool import _native
from kvpool.keys import KeyBatch, Namespace
from kvpool.outcomes import MissReason
from kvpool.region import Coherence, Region
from kvpool.report import FsckReport
from strategies import buffers, contents, keys_of, namespace, region_folder, small_geometry

UNIT = 512
SMALL, LARGE, NEW = namespace(UNIT - 3, "small"), namespace(3 * UNIT, "large"), namespace(UNIT, "new")
SPACES = (SMALL, LARGE, NEW)
INDICES = range(40)
EXTENTS, SMALL_SLOTS, LARGE_SLOTS = 6, 4, 2  # a shard; slots of a size in one extent
HONEST = frozenset({None, MissReason.NEVER_STORED, MissReason.EVICTED, MissReason.CHANGED_WHILE_READING})
Reasons = frozenset[MissReason | None]
Start = Callable[..., Child]


@lru_cache(maxsize=4096)
def right(ns: Namespace, indices: tuple[int, ...]) -> tuple[KeyBatch, list[bytes]]:
    """Keys and contents; making them costs more than a load."""
    keys = keys_of(ns, indices)
    return keys, contents(keys)


def store(region: Region, ns: Namespace, indices: Sequence[int]) -> list[MissReason | None]:
    keys, blocks = right(ns, tuple(indices))
    with tally.in_time(f"a store of {len(keys)} blocks"):
        return list(region.store(keys, blocks).reasons)


def load(
    region: Region, ns: Namespace, indices: Sequence[int], honest: Reasons = HONEST
) -> list[MissReason | None]:
    """Loads blocks. Wrong bytes and reasons that are not honest fail."""
    keys, blocks = right(ns, tuple(indices))
    out = buffers(keys)
    with tally.in_time(f"a load of {len(keys)} blocks"):
        result = region.load(keys, out)
    wrong = [i for i, code in enumerate(result.codes) if code == 0 and out[i] != blocks[i]]
    tally.count(tally.LOADED, result.hit_count)
    tally.count(tally.WRONG, len(wrong))
    assert not wrong, f"wrong bytes: blocks {wrong} of {ns.model}"
    reasons = list(result.reasons)
    assert set(reasons) <= honest, reasons
    return reasons


def load_all(region: Region, honest: Reasons = HONEST) -> int:
    """Loads every block that may be there; the number of hits comes back."""
    return sum(load(region, ns, INDICES, honest).count(None) for ns in SPACES)


def clean(report: FsckReport) -> None:
    """Nothing wrong, and every slot free or stored."""
    totals = report.totals
    whole = totals["writing"] == totals["lent"] == 0 and totals["free"] + totals["stored"] == totals["slots"]
    if not report.ok or not whole:
        tally.count(tally.FSCK)
    assert report.ok, report.problems
    assert whole, totals


class World:
    """A region with one survivor a host. 24 slots a host in 6 extents: stores evict, and sizes take space."""

    def __init__(self, path: Path, coherence: Coherence, start: Start, honest: Reasons, hosts: int) -> None:
        self.path, self.start, self.hosts = path, start, hosts
        self.epoch = 0
        self.kept: dict[Namespace, list[int]] = {}  # blocks that nobody evicts
        self.honest = honest
        Region.format(
            path,
            small_geometry(
                EXTENTS * SMALL_SLOTS,
                hosts=hosts,
                block_bytes=UNIT,
                slots_per_extent=SMALL_SLOTS,
                participants=12,
                namespaces=24,
                coherence=coherence,
            ),
        )
        self.survivors = [Region.attach(path, host=host) for host in range(hosts)]

    def close(self) -> None:
        for region in self.survivors:
            region.close()

    # -- before ------------------------------------------------------------------------------------------

    def keep(self, ns: Namespace, indices: Sequence[int], host: int = 0) -> None:
        """Blocks that have to be hits after every death in which nothing is evicted."""
        assert set(store(self.survivors[host], ns, indices)) == {None}
        self.kept.setdefault(ns, []).extend(indices)

    def die_together(self, *deaths: tuple[str, Namespace, list[int]], host: int = 0) -> None:
        """More processes die in a store, all at once, so that none has cleaned up after another."""
        tally.intend(len(deaths), tally.SEVERAL)
        dying = []
        for step, ns, indices in deaths:
            child = self.start(_store_up_to, self.path, host, step, ns, indices)
            assert child.wait_stopped(), step
            dying.append(child)
        for child in dying:
            child.signal(signal.SIGKILL)
        for child in dying:
            assert tally.ended(child, tally.SEVERAL) == -signal.SIGKILL

    def damage(self, ns: Namespace, index: int) -> bool:
        """Flips a byte of a stored block: work for a scrubber. False: it is not there any more."""
        _, (content,) = right(ns, (index,))
        data = self.path.read_bytes()
        at = data.find(content)
        if at < 0:
            return False
        with self.path.open("r+b") as f:
            f.seek(at + 5)
            f.write(bytes([data[at + 5] ^ 0x10]))
        return True

    def adopt(self, by: int, host: int = 0) -> None:
        self.epoch += 10  # an adopter that died has used one in between
        self.survivors[by].adopt(host, self.epoch)

    # -- after -------------------------------------------------------------------------------------------

    def keeps(self) -> None:
        """No block is lost by a death."""
        for region in self.survivors:
            for ns, indices in self.kept.items():
                assert set(load(region, ns, indices)) == {None}

    def progress(self, dice: random.Random) -> None:
        """Nobody has cleaned up yet: all survivors load, and store something new of every size."""
        for region in self.survivors:
            load_all(region, self.honest)
            for ns in SPACES:
                index = dice.randrange(1000, 1 << 30)
                assert store(region, ns, [index]) == [None], ns.model
                assert load(region, ns, [index]) == [None], ns.model

    def give_back(self) -> None:
        """Shard 0 was half adopted when the adopter died: another ends it, then its host takes it back."""
        self.adopt(by=1)
        for _ in range(2):
            for region in self.survivors:
                region.heartbeat()
        self.adopt(by=0)
        for _ in range(2):
            for region in self.survivors:
                region.heartbeat()

    def clean_up(self, dice: random.Random) -> None:
        """The daemon's reaping, or the next process of each host."""
        for host, region in enumerate(self.survivors):
            if dice.random() < 0.5:
                with tally.in_time("a reap"):
                    region.reap()
            else:
                with tally.in_time("an attach"):
                    Region.attach(self.path, host=host).close()
        report = self.survivors[0].check()
        clean(report)
        clean(Region.fsck(self.path))
        assert all(p.alive for p in self.survivors[0].participants())
        for region in self.survivors:
            load_all(region, self.honest)

    def all_slots_are_usable(self) -> None:
        """Nothing leaks: each host evicts all and fills every one of its slots anew."""
        for host, region in enumerate(self.survivors):
            region.evict(0.0, 1000)
            assert region.usage().hosts[host].blocks == 0
            first = 10_000 * (host + 1)
            small = range(
                first, first + 300
            )  # so many evictions that most of the large ones' extents are cut anew
            declined = [r for r in store(region, SMALL, small) if r is not None]
            large = range(first, first + region.usage().hosts[host].slots_free)
            declined += [r for r in store(region, LARGE, large) if r is not None]
            usage = region.usage().hosts[host]
            hits = load(region, SMALL, small).count(None) + load(region, LARGE, large).count(None)
            large_extents = len(large) // LARGE_SLOTS
            slots = SMALL_SLOTS * (EXTENTS - large_extents) + LARGE_SLOTS * large_extents
            got = (hits, usage.blocks, usage.slots_total, usage.slots_free, usage.extents_free)
            if declined or got != (slots, slots, slots, 0, 0):
                tally.count(tally.STUCK)
                raise AssertionError(f"slots are lost: {declined} {got} {usage}")


def _store_up_to(path: Path, host: int, step: str, ns: Namespace, indices: list[int]) -> None:
    region = Region.attach(path, host=host)
    _native.stop_at(step, 1, signal.SIGSTOP)
    store(region, ns, indices)


@contextmanager
def world(coherence: Coherence, honest: Reasons = HONEST, hosts: int = 2) -> Iterator[World]:
    with region_folder() as folder, children() as start:
        made = World(folder / "region", coherence, start, honest, hosts)
        try:
            yield made
        finally:
            made.close()
