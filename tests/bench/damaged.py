"""Loads beside damaged blocks: what a thousand of them cost the others of their namespace.

Two regions take turns that are equal but for the damage. `mixed` loads damaged and whole blocks in one batch:
the yardstick is the same batch where all are whole, so the figure says what a failed block costs beyond being
read. `whole` loads only the whole ones. A host drops damaged blocks of its own shard at the first load; those
of another host are found damaged again and again, until their owner reads or scrubs them.
"""

# ruff: noqa: B023 -- the closures are called within the iteration that makes them

from __future__ import annotations

import mmap
import random
from collections.abc import Iterator
from pathlib import Path

from bench.harness import Figure, Settings, by_turns
from bench.memory import Memory, keys, namespace
from kvpool.region import Geometry, Region

BLOCK_BYTES = 65536


def damaged_figures(settings: Settings, folder: Path) -> Iterator[Figure]:
    whole = settings.cold_bytes // BLOCK_BYTES
    bad = min(1000, whole)
    space = namespace(BLOCK_BYTES)
    everything = list(range(whole + bad))
    random.Random(1).shuffle(everything)
    good = [i for i in everything if i < whole]
    source, out = Memory((whole + bad) * BLOCK_BYTES), Memory((whole + bad) * BLOCK_BYTES)
    source.fill(BLOCK_BYTES)
    for coherence in ("hardware", "software"):
        paths = [folder / "whole", folder / "damaged"]
        for path in paths:
            capacity = 2 * ((whole + bad) * BLOCK_BYTES * 5 // 4 + (8 << 20))
            sizes = Geometry(
                capacity,
                hosts=2,
                min_block_bytes=BLOCK_BYTES,
                participants=4,
                namespaces=4,
                coherence=coherence,  # type: ignore[arg-type]
            )
            Region.format(path, sizes, force=path.exists())
            with Region.attach(path) as region:
                pages = source.pages(BLOCK_BYTES, 1, range(whole + bad))
                stored = region.store(keys(space, range(whole + bad)), pages).stored_count
                assert stored == whole + bad
        _damage(paths[1], source.map[8 : 8 + 64], whole, bad)
        # The owner comes last: it drops what it finds.
        for where, host in (("cross-host", 1), ("same-host", 0)):
            with Region.attach(paths[0], host=host) as healthy, Region.attach(paths[1], host=host) as damaged:
                for batch, numbers, hits in (("mixed", everything, whole), ("whole", good, whole)):
                    batch_keys, room = keys(space, numbers), out.pages(BLOCK_BYTES, 1, range(len(numbers)))

                    def load(region: Region, expected: int) -> None:
                        served = region.load(batch_keys, room).hit_count
                        assert served == expected, f"{served} of {expected} blocks were served"

                    ours, theirs = by_turns(
                        settings.rounds,
                        lambda: load(damaged, hits),
                        lambda: load(healthy, len(numbers)),
                    )
                    yield Figure(
                        "load-beside-damaged",
                        {
                            "batch": batch,
                            "damaged": bad,
                            "whole": whole,
                            "from": where,
                            "coherence": coherence,
                        },
                        "times the speed of the same batch where nothing is damaged",
                        [t / o for o, t in zip(ours, theirs, strict=True)],
                        [o / len(numbers) * 1e6 for o in ours],
                        [t / len(numbers) * 1e6 for t in theirs],
                        "us/block",
                    )
        for path in paths:
            path.unlink()
    source.close()
    out.close()


def _damage(path: Path, mark: bytes, whole: int, bad: int) -> None:
    """Flips a bit of the blocks from number `whole` on. Each begins with its number, then `mark`."""
    done, at = 0, 0
    with path.open("r+b") as f, mmap.mmap(f.fileno(), 0) as m:
        while (at := m.find(mark, at)) >= 0:
            if int.from_bytes(m[at - 8 : at], "little") >= whole:
                m[at + 1000] ^= 1
                done += 1
            at += BLOCK_BYTES - 8
    assert done == bad, f"{done} blocks damaged, {bad} intended"
