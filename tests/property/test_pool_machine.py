"""A Pool against a dict: a load gives exactly what was stored, or a miss with a reason.

One process plays several participants on two hosts of a small region. What happens to be evicted is not
predicted; what is served is.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

from kvpool.errors import RegionBusyError
from kvpool.keys import KEY_BYTES, KeyBatch, Namespace
from kvpool.outcomes import MissReason
from kvpool.pool import Pool
from kvpool.region import Geometry, Region
from kvpool.tiers.mapped import MappedTier
from strategies import buffers, contents, geometries, keys_of, namespace, shm, wrong_hits

HOSTS = 2
blocks = st.lists(st.integers(0, 24), min_size=0, max_size=6)
# What a load of an undamaged region may say. Nothing else: a failed checksum would be a bug, not a reason.
HONEST_MISSES = {
    MissReason.NEVER_STORED,
    MissReason.EVICTED,
    MissReason.WRONG_NAMESPACE,
    MissReason.CHANGED_WHILE_READING,
}
HONEST_DECLINES = {MissReason.NO_SPACE, MissReason.NAMESPACES_FULL, MissReason.FENCED}


class PoolMachine(RuleBasedStateMachine):
    participants: Bundle[Pool] = Bundle("participants")

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="kvpool-test-", dir=shm()))
        self.stored: set[bytes] = set()  # keys that somebody was told are stored or present
        self.counted = self.hits = 0
        self.open: list[Pool] = []
        self.epoch = 0

    @initialize(geometry=geometries(HOSTS))
    def format(self, geometry: Geometry) -> None:
        self.path = self.folder / "region"
        self.info = Region.format(self.path, geometry)
        unit, most = self.info.min_block_bytes, self.info.extent_bytes
        # Smaller than a slot, not a multiple of a line, several slots' worth, a whole extent.
        sizes = sorted({max(1, unit // 2 - 3), unit, min(most, unit * 2 - 1), most})
        self.namespaces = [
            namespace(size, model=f"model-{i % 2}", dtype=f"d{i}") for i, size in enumerate(sizes)
        ]

    def some_namespace(self, data: st.DataObject) -> Namespace:
        return data.draw(st.sampled_from(self.namespaces), label="namespace")

    @rule(target=participants, host=st.integers(0, HOSTS - 1))
    def attach(self, host: int) -> object:
        try:
            region = Region.attach(self.path, host=host)
        except RegionBusyError:
            taken = [p for p in self.open if p.tiers[0].region.info and self.host_of(p) == host]
            assert len(taken) >= self.info.participants, "refused although an entry is free"
            return multiple()
        pool = Pool([MappedTier("t", "DRAM", True, region)], "machine")
        self.open.append(pool)
        self.hosts[id(pool)] = host
        return pool

    @initialize()
    def no_hosts(self) -> None:
        self.hosts: dict[int, int] = {}

    def host_of(self, pool: Pool) -> int:
        return self.hosts[id(pool)]

    @rule(pool=consumes(participants))
    def leave(self, pool: Pool) -> None:
        pool.close()
        self.open.remove(pool)

    @rule(pool=participants, data=st.data(), indices=blocks, pieces=st.booleans())
    def store(self, pool: Pool, data: st.DataObject, indices: list[int], pieces: bool) -> None:
        keys = keys_of(self.some_namespace(data), indices)
        payload: list[object] = list(contents(keys))
        if pieces and keys.namespace.block_bytes > 1:
            payload = [[p[:1], p[1:]] for p in contents(keys)]
        result = pool.store(keys, payload)  # type: ignore[arg-type]
        assert len(result) == len(keys)
        assert result.stored_count + result.present_count + result.declined_count == len(keys)
        for i, reason in enumerate(result.reasons):
            if reason is None:
                self.stored.add(keys.packed[i * KEY_BYTES : (i + 1) * KEY_BYTES])
            else:
                assert reason in HONEST_DECLINES, reason

    @rule(pool=participants, data=st.data(), index=st.integers(0, 24))
    def store_then_load(self, pool: Pool, data: st.DataObject, index: int) -> None:
        """Nobody else is running: what was just stored here is there, and everybody sees it."""
        keys = keys_of(self.some_namespace(data), [index])
        result = pool.store(keys, contents(keys))
        if result.declined_count:
            assert result.reasons[0] in (MissReason.NAMESPACES_FULL, MissReason.FENCED), (
                "a full pool is no reason"
            )
            return
        self.stored.add(keys.packed)
        for other in self.open:
            assert other.lookup(keys).hit_count == 1
            out = buffers(keys)
            loaded = other.load(keys, out, count=False)
            assert loaded.hit_count == 1, list(loaded.reasons)
            assert bytes(out[0]) == contents(keys)[0]

    @rule(pool=participants, data=st.data(), indices=blocks, count=st.booleans())
    def load(self, pool: Pool, data: st.DataObject, indices: list[int], count: bool) -> None:
        keys = keys_of(self.some_namespace(data), indices)
        out = buffers(keys)
        result = pool.load(keys, out, count=count)
        self.judge(keys, result.codes, out)
        assert result.bytes_loaded == result.hit_count * keys.namespace.block_bytes
        if count:
            self.counted += len(keys)
            self.hits += result.hit_count

    def judge(self, keys: KeyBatch, codes: bytes, out: list[bytearray]) -> None:
        assert len(codes) == len(keys)
        assert not wrong_hits(keys, codes, out)
        for i, code in enumerate(codes):
            key = keys.packed[i * KEY_BYTES : (i + 1) * KEY_BYTES]
            if code == 0:
                assert key in self.stored, "a hit for what was never stored"

    @rule(pool=participants, data=st.data(), indices=blocks, count=st.booleans())
    def lookup(self, pool: Pool, data: st.DataObject, indices: list[int], count: bool) -> None:
        keys = keys_of(self.some_namespace(data), indices)
        found = pool.lookup(keys, count=count)
        loaded = pool.load(keys, buffers(keys), count=False)
        # Reasons may differ: whether a block was evicted or never stored is only known while its ghost is.
        assert [c == 0 for c in found.codes] == [c == 0 for c in loaded.codes], (
            "nothing changed between the two"
        )
        assert {r for r in found.reasons if r} <= HONEST_MISSES
        for i, reason in enumerate(found.reasons):
            if (
                keys.packed[i * KEY_BYTES : (i + 1) * KEY_BYTES] not in self.stored
                and reason is MissReason.EVICTED
            ):
                # A tag of 16 bits may say so of another block, but not where nothing was ever evicted.
                assert pool.counters().evictions > 0
        if count:
            self.counted += len(keys)
            self.hits += found.hit_count

    @rule(
        pool=participants,
        fraction=st.sampled_from([0.0, 0.3, 0.7, 1.0]),
        most=st.sampled_from([0, 1, 3, 1000]),
    )
    def evict(self, pool: Pool, fraction: float, most: int) -> None:
        region = pool.tiers[0].region
        host = self.host_of(pool)
        gone = region.evict(fraction, most)
        assert gone <= most
        if gone < most and self.owner_of(region, host) == host:
            shard = region.usage().hosts[host]
            assert shard.used_bytes <= fraction * shard.capacity_bytes

    def owner_of(self, region: Region, shard: int) -> int:
        return int(region._native.usage(count_slots=False)[0][shard]["owner"])

    @rule(pool=participants, limit=st.sampled_from([None, 1, 5]))
    def scrub(self, pool: Pool, limit: int | None) -> None:
        report = pool.tiers[0].region.scrub(limit=limit)
        assert report.bad == 0

    @rule(pool=participants)
    def reap(self, pool: Pool) -> None:
        report = pool.tiers[0].region.reap()
        assert (report.dead, report.freed) == (0, 0), "everybody lives"

    @rule(pool=participants)
    def heartbeat(self, pool: Pool) -> None:
        pool.tiers[0].region.heartbeat()

    @rule(
        pool=participants,
        reason=st.sampled_from([MissReason.BELOW_MINIMUM, MissReason.DECLINED_BY_COST]),
        n=st.integers(0, 5),
    )
    def record_misses(self, pool: Pool, reason: MissReason, n: int) -> None:
        pool.record_misses(reason, n)
        self.counted += n

    @precondition(lambda self: self.epoch < 4)
    @rule(pool=participants, shard=st.integers(0, HOSTS - 1))
    def adopt(self, pool: Pool, shard: int) -> None:
        """The arbiter gives a shard to this host. Nobody is in the middle of anything, so all blocks stay."""
        before = pool.tiers[0].region.usage().hosts[shard].blocks
        self.epoch += 1
        report = pool.tiers[0].region.adopt(shard, self.epoch)
        assert (report.kept, report.freed) == (before, 0)
        for other in self.open:  # everybody hears of it, as their daemons would tell them
            other.tiers[0].region.heartbeat()

    @invariant()
    def numbers_add_up(self) -> None:
        if not self.open:
            return
        pool = self.open[0]
        c = pool.counters()
        assert c.lookups == c.hits + sum(c.misses.values())
        assert (c.lookups, c.hits) == (self.counted, self.hits)
        u = pool.tiers[0].usage()
        assert 0 <= u.used_bytes <= u.capacity_bytes
        assert u.slots_free + u.blocks == u.slots_total
        assert c.evictions <= c.stored
        assert u.blocks <= c.stored

    @invariant()
    def structure_is_clean(self) -> None:
        if self.open:
            report = self.open[0].tiers[0].region.check()
            assert report.ok, report.problems
            assert report.totals["writing"] == 0

    def teardown(self) -> None:
        for pool in self.open:
            pool.close()
        if hasattr(self, "path"):
            report = Region.fsck(self.path)
            assert report.ok, report.problems
        shutil.rmtree(self.folder, ignore_errors=True)


PoolMachine.TestCase.settings = settings(
    max_examples=int(os.environ.get("KVPOOL_EXAMPLES", "40")),
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
    phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
    print_blob=True,
)
TestPoolMachine = PoolMachine.TestCase
