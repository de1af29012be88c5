"""Regions with blocks of several sizes, and what anybody may do with them while the medium lies."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from damage.tally import Row
from damage.workers import Going, User
from kvpool.errors import KvpoolError
from kvpool.keys import KeyBatch, Namespace
from kvpool.outcomes import REASON_BY_CODE
from kvpool.region import Coherence, Region
from strategies import buffers, contents, keys_of, namespace, small_geometry

UNIT = 256
SPACES = [namespace(UNIT, "a"), namespace(4 * UNIT - 5, "b"), namespace(10, "c")]
LARGE_SPACES = [namespace(4096, "a"), namespace(16384 - 100, "b"), namespace(100, "c")]


def make(
    path: Path,
    coherence: Coherence = "hardware",
    first: int = 0,
    *,
    spaces: Sequence[Namespace] = SPACES,
    slots: int = 48,
    each: int = 6,
) -> None:
    """A region of two hosts; of each namespace blocks `first` and on, `each` on every host."""
    geometry = small_geometry(
        slots,
        hosts=2,
        block_bytes=spaces[0].block_bytes,
        slots_per_extent=8,
        participants=4,
        namespaces=4,
        coherence=coherence,
    )
    Region.format(path, geometry, force=path.exists())
    for host in (0, 1):
        with Region.attach(path, host=host) as region:
            for space in spaces:
                keys = keys_of(space, range(first + each * host, first + each * host + each))
                region.store(keys, contents(keys))
            region.evict(0.5, 2)


def load(region: Region, keys: KeyBatch, row: Row) -> bytes:
    """Loads and counts what came of it; a hit with other bytes than those stored is wrong, and named."""
    out = buffers(keys)
    codes = region.load(keys, out).codes
    row.add("hits", codes.count(0))
    for i, (code, got, want) in enumerate(zip(codes, out, contents(keys), strict=True)):
        if code:
            row.add(str(REASON_BY_CODE[code]))
        elif got != want:
            row.add("wrong")
            row.add("hits", -1)
            row.note(f"block {i} of {keys.namespace.model}, {region.path}")
    return codes


def attach(path: Path, row: Row, host: int) -> Region | None:
    """None: refused, with a KvpoolError."""
    row.add("openings")
    try:
        return Region.attach(path, host=host)
    except KvpoolError:
        row.add("refused")
        return None


def upkeep(region: Region) -> None:
    """All that looks into a region or keeps it in order."""
    for call in (
        region.check,
        region.usage,
        region.counters,
        region.participants,
        lambda: list(region.dump()),
        region.reap,
        region.heartbeat,
        region.scrub,
        lambda: region.evict(0.5, 5),
    ):
        with suppress(KvpoolError):
            call()


def use(
    path: Path, row: Row, spaces: Sequence[Namespace], indices: Sequence[int], dice: random.Random
) -> None:
    """Everything that anybody may do with a region, on both hosts."""
    for host in (0, 1):
        region = attach(path, row, host)
        if region is None:
            continue
        with region:
            for space in spaces:
                keys = keys_of(space, indices)
                region.lookup(keys)
                load(region, keys, row)
                region.store(keys, contents(keys))
                load(region, keys, row)
            upkeep(region)
            if dice.random() < 0.2:
                with suppress(KvpoolError):
                    region.adopt(1 - host, dice.randrange(1, 1 << 62))
            load(region, keys_of(spaces[0], indices), row)


def user(path: Path, host: int, indices: Sequence[int], *, stores: bool = False) -> User:
    """A process that reads, or stores and reads, for as long as it may."""

    def body(row: Row, going: Going) -> None:
        dice = random.Random(host)
        calls = 0
        with Region.attach(path, host=host) as region:
            while going():
                keys = keys_of(dice.choice(SPACES), dice.sample(indices, 8))
                if stores:
                    region.store(keys, contents(keys))
                load(region, keys, row)
                calls += 1
                if stores and calls % 20 == 0:
                    upkeep(region)

    return body


def opener(path: Path, indices: Sequence[int]) -> User:
    """A process that attaches anew again and again, as the next readers do."""

    def body(row: Row, going: Going) -> None:
        dice = random.Random(7)
        while going():
            region = attach(path, row, dice.randrange(2))
            if region is not None:
                with region:
                    load(region, keys_of(dice.choice(SPACES), dice.sample(indices, 8)), row)

    return body
