"""Verified load and store against memcpy of the same buffers; store with eviction against store without."""

# ruff: noqa: B023 -- the closures are called within the iteration that makes them

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from bench.harness import Figure, Settings, Threads, by_turns
from bench.memory import Memory, keys, namespace
from bench.reference import Reference
from kvpool.region import Coherence, Geometry, Region

SPEED = "times the speed of memcpy of the same buffers"
GIB = 1 << 30
PIECES = 32  # layers of a block, for the case that is not contiguous


def _region(path: Path, total_bytes: int, block_bytes: int, coherence: Coherence) -> None:
    path.unlink(missing_ok=True)
    blocks = total_bytes // block_bytes
    capacity = 2 * (total_bytes * 5 // 4 + max(16, blocks // 8) * block_bytes + (8 << 20))
    Region.format(
        path,
        Geometry(
            capacity, hosts=2, min_block_bytes=block_bytes, participants=4, namespaces=4, coherence=coherence
        ),
        preallocate=True,
    )


def _slices(count: int, parts: int) -> list[range]:
    return [range(i * count // parts, (i + 1) * count // parts) for i in range(parts)]


def load_figures(settings: Settings, reference: Reference, folder: Path) -> Iterator[Figure]:
    """Cold: every round goes over more memory than the caches hold. Warm: the same few blocks again."""
    shapes = [(b, 1) for b in settings.block_bytes] + [(settings.block_bytes[-1], PIECES)]
    for coherence in ("hardware", "software"):
        for block_bytes, pieces in shapes:
            for warmth, total in (("cold", settings.cold_bytes), ("warm", settings.warm_bytes)):
                yield from _load(settings, reference, folder, coherence, block_bytes, pieces, warmth, total)


def _load(
    settings: Settings,
    reference: Reference,
    folder: Path,
    coherence: Coherence,
    block_bytes: int,
    pieces: int,
    warmth: str,
    total: int,
) -> Iterator[Figure]:
    path, count = folder / "region", total // block_bytes
    size = count * block_bytes
    _region(path, total, block_bytes, coherence)
    source, out = Memory(size, folder / "source"), Memory(size)
    source.fill(block_bytes // pieces)
    space = namespace(block_bytes)
    repeats = max(1, settings.cold_bytes // size // 4) if warmth == "warm" else 1
    with Region.attach(path, host=0) as owner, Region.attach(path, host=1) as other:
        everything = range(count)
        pages = source.pages(block_bytes, pieces, everything)
        assert owner.store(keys(space, everything), pages).stored_count == count
        for where, region in (("same-host", owner), ("cross-host", other)):
            for threads in settings.threads:
                team, parts = Threads(threads), _slices(count, threads)
                part_keys = [keys(space, p) for p in parts]
                part_pages = [out.pages(block_bytes, pieces, p) for p in parts]
                part_to = [out.pieces(block_bytes, pieces, p) for p in parts]
                part_from = [source.pieces(block_bytes, pieces, p) for p in parts]
                hits = [0] * threads

                def load(i: int) -> None:
                    for _ in range(repeats):
                        hits[i] = region.load(part_keys[i], part_pages[i]).hit_count

                def copy(i: int) -> None:
                    for _ in range(repeats):
                        reference.copy(part_to[i], part_from[i], block_bytes // pieces)

                def spoil() -> None:  # so that only a load that really copied makes the buffers right again
                    for at in range(0, size, block_bytes):
                        out.map[at : at + 8] = bytes(8)

                ours, theirs = by_turns(
                    settings.rounds,
                    lambda: team.run(load),
                    lambda: team.run(copy),
                )
                spoil()
                team.run(load)
                team.close()
                assert sum(hits) == count, "a block was not served"
                assert reference.equal(
                    out.pieces(block_bytes, pieces, everything),
                    source.pieces(block_bytes, pieces, everything),
                    block_bytes // pieces,
                ), "a load gave other bytes than were stored"
                yield Figure(
                    "load",
                    {
                        "block_kib": block_bytes >> 10,
                        "pieces": pieces,
                        "from": where,
                        "coherence": coherence,
                        "threads": threads,
                        "state": warmth,
                    },
                    SPEED,
                    [t / o for o, t in zip(ours, theirs, strict=True)],
                    [repeats * size / o / GIB for o in ours],
                    [repeats * size / t / GIB for t in theirs],
                    "GiB/s",
                )
    source.close()
    out.close()
    path.unlink()


def store_figures(settings: Settings, reference: Reference, folder: Path) -> Iterator[Figure]:
    shapes = [(b, 1) for b in settings.block_bytes] + [(settings.block_bytes[-1], PIECES)]
    for coherence in ("hardware", "software"):
        for block_bytes, pieces in shapes:
            yield from _store(settings, reference, folder, coherence, block_bytes, pieces)


def _store(
    settings: Settings,
    reference: Reference,
    folder: Path,
    coherence: Coherence,
    block_bytes: int,
    pieces: int,
) -> Iterator[Figure]:
    path, count = folder / "region", settings.cold_bytes // block_bytes
    size = count * block_bytes
    _region(path, size, block_bytes, coherence)
    source, target = Memory(size), Memory(size, folder / "target")
    source.fill(block_bytes // pieces)
    space = namespace(block_bytes)
    with Region.attach(path, host=0) as region:
        for threads in settings.threads:
            team, parts = Threads(threads), _slices(count, threads)
            part_keys = [keys(space, p) for p in parts]
            part_pages = [source.pages(block_bytes, pieces, p) for p in parts]
            part_from = [source.pieces(block_bytes, pieces, p) for p in parts]
            part_to = [target.pieces(block_bytes, pieces, p) for p in parts]
            stored = [0] * threads

            def store(i: int) -> None:
                stored[i] = region.store(part_keys[i], part_pages[i]).stored_count

            def copy(i: int) -> None:
                reference.copy(part_to[i], part_from[i], block_bytes // pieces)

            def empty() -> None:
                assert sum(stored) == count, "a block was not stored"
                region.evict(0.0, 1 << 40)

            # Once before: the slots' pages are made by the first to touch them.
            team.run(store)
            empty()
            ours, theirs = by_turns(
                settings.rounds,
                lambda: team.run(store),
                lambda: team.run(copy),
                between=empty,
            )
            team.close()
            yield Figure(
                "store",
                {
                    "block_kib": block_bytes >> 10,
                    "pieces": pieces,
                    "coherence": coherence,
                    "threads": threads,
                    "state": "cold",
                },
                SPEED,
                [t / o for o, t in zip(ours, theirs, strict=True)],
                [size / o / GIB for o in ours],
                [size / t / GIB for t in theirs],
                "GiB/s",
            )
    source.close()
    target.close()
    path.unlink()


def eviction_figures(settings: Settings, folder: Path) -> Iterator[Figure]:
    """Every store evicts a block inline; the yardstick is the same store with slots to spare."""
    for block_bytes in settings.block_bytes:
        count = settings.cold_bytes // block_bytes
        source = Memory(count * block_bytes)
        source.fill(block_bytes)
        pages, space = source.pages(block_bytes, 1, range(count)), namespace(block_bytes)
        full_path, free_path = folder / "full", folder / "free"
        _region(full_path, count * block_bytes, block_bytes, "hardware")
        _region(free_path, count * block_bytes, block_bytes, "hardware")
        batches = (keys(space, range(i * count, (i + 1) * count)) for i in range(1 << 30))
        with Region.attach(full_path) as full, Region.attach(free_path) as free:
            while full.counters().evictions == 0:
                full.store(next(batches), pages)
            free.store(next(batches), pages)
            free.evict(0.0, 1 << 40)
            before = full.counters().evictions
            ours, theirs = by_turns(
                settings.rounds,
                lambda: _all_stored(full.store(next(batches), pages).stored_count, count),
                lambda: _all_stored(free.store(next(batches), pages).stored_count, count),
                between=lambda: _empty(free),
            )
            evicted = full.counters().evictions - before
        yield Figure(
            "store-with-eviction",
            {"block_kib": block_bytes >> 10, "threads": 1, "state": "cold"},
            "times the speed of the same store with free slots",
            [t / o for o, t in zip(ours, theirs, strict=True)],
            [o / count * 1e6 for o in ours],
            [t / count * 1e6 for t in theirs],
            "us/block",
            {"evictions_per_store": round(evicted / (count * (settings.rounds + 1)), 3)},
        )
        source.close()
        full_path.unlink()
        free_path.unlink()


def _empty(region: Region) -> None:
    region.evict(0.0, 1 << 40)


def _all_stored(stored: int, count: int) -> None:
    assert stored == count, f"{count - stored} of {count} blocks were declined"
