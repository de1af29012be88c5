"""Lookup against one memory access and against a Python dict; attach against a copy of the directory."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import subprocess
import sys
import time
from array import array
from collections.abc import Iterator
from pathlib import Path

from bench.harness import Figure, Settings, by_turns, seconds
from bench.memory import keys, namespace
from bench.reference import Chase, Reference
from kvpool.buffers import PageLayout, Pages
from kvpool.keys import KeyBatch
from kvpool.region import Coherence, Geometry, Region

BATCH = 512
BLOCK_BYTES = 64  # the directory is what is measured
DIRECTORY_BYTES = 64 + 16  # header line and bucket lines, a slot
SPACE = namespace(BLOCK_BYTES)


def _format(path: Path, slots: int, coherence: Coherence) -> None:
    path.unlink(missing_ok=True)
    Region.format(
        path,
        Geometry(
            2 * (slots * 260 + (1 << 20)),
            hosts=2,
            min_block_bytes=BLOCK_BYTES,
            participants=4,
            namespaces=2,
            coherence=coherence,
        ),
        preallocate=False,
    )


def fill(region: Region, slots: int) -> None:
    block = (ctypes.c_char * BLOCK_BYTES)()
    layout = PageLayout([(ctypes.addressof(block), 0, BLOCK_BYTES)], keepalive=block)
    step = 16384
    for start in range(0, slots, step):
        numbers = range(start, min(slots, start + step))
        stored = region.store(keys(SPACE, numbers), Pages(layout, [0] * len(numbers))).stored_count
        assert stored == len(numbers), f"{len(numbers) - stored} blocks were declined"


def _batches(settings: Settings, slots: int, hits: bool) -> list[KeyBatch]:
    draw = random.Random(1)
    if not hits:
        return [KeyBatch.from_hashes(SPACE, os.urandom(32 * BATCH)) for _ in range(settings.batches)]
    return [keys(SPACE, [draw.randrange(slots) for _ in range(BATCH)]) for _ in range(settings.batches)]


def lookup_figures(settings: Settings, reference: Reference, folder: Path) -> Iterator[Figure]:
    for slots in settings.slot_counts:
        chase = Chase(reference, slots * DIRECTORY_BYTES)
        table = dict.fromkeys(_packed_keys(slots))
        for coherence in ("hardware", "software"):
            path = folder / "region"
            _format(path, slots, coherence)
            with Region.attach(path, host=0) as owner, Region.attach(path, host=1) as other:
                fill(owner, slots)
                ready_s = _until_replica_is_there(other, slots)
                for where, region in (("own", owner), ("remote", other)):
                    for what in ("hits", "misses"):
                        batches = _batches(settings, slots, what == "hits")
                        for warmth in ("cold", "warm"):
                            asked = batches if warmth == "cold" else batches[:1] * len(batches)
                            case: dict[str, object] = {
                                "slots": slots,
                                "what": what,
                                "shard": where,
                                "coherence": coherence,
                                "state": warmth,
                            }
                            extra: dict[str, object] = (
                                {"replica_ready_s": round(ready_s, 4)} if where == "remote" else {}
                            )
                            yield from _lookup(
                                settings, region, asked, what == "hits", chase, table, case, extra
                            )
            path.unlink()


def _packed_keys(slots: int) -> Iterator[bytes]:
    for start in range(0, slots, 1 << 16):
        packed = keys(SPACE, range(start, min(slots, start + (1 << 16)))).packed
        yield from (packed[i : i + 32] for i in range(0, len(packed), 32))


def _until_replica_is_there(region: Region, slots: int) -> float:
    """Seconds of lookups until the other host's directory has been walked."""
    one = keys(SPACE, [slots - 1])

    def walk() -> None:
        for _ in range(slots // 2048 + 2):
            region.lookup(one)

    return seconds(walk)


def _lookup(
    settings: Settings,
    region: Region,
    asked: list[KeyBatch],
    hits: bool,
    chase: Chase,
    table: dict[bytes, None],
    case: dict[str, object],
    extra: dict[str, object],
) -> Iterator[Figure]:
    count = BATCH * len(asked)
    found = 0

    def ours() -> None:
        nonlocal found
        found = 0
        for batch in asked:
            found += region.lookup(batch).hit_count

    def in_dict() -> None:
        for batch in asked:
            packed = batch.packed
            for i in range(0, BATCH * 32, 32):
                table.get(packed[i : i + 32])

    a, b = by_turns(settings.rounds, ours, lambda: chase.run(count))
    assert found == (count if hits else 0)
    yield _lookup_figure(
        "lookup-vs-access", "times one dependent random memory access", case, a, b, count, extra
    )
    c, d = by_turns(settings.rounds, ours, in_dict)
    yield _lookup_figure(
        "lookup-vs-dict", "times a Python dict lookup of a bytes key", case, c, d, count, extra
    )


def _lookup_figure(
    name: str,
    meaning: str,
    case: dict[str, object],
    ours: list[float],
    theirs: list[float],
    count: int,
    extra: dict[str, object],
) -> Figure:
    return Figure(
        name,
        case,
        meaning,
        [o / t for o, t in zip(ours, theirs, strict=True)],
        [o / count * 1e9 for o in ours],
        [t / count * 1e9 for t in theirs],
        "ns/key",
        extra,
    )


def attach_figures(settings: Settings, reference: Reference, folder: Path) -> Iterator[Figure]:
    """After a predecessor that closed, and after one that was killed."""
    for slots in settings.slot_counts:
        for after in ("closed", "killed"):
            path = folder / "region"
            _format(path, slots, "hardware")
            with Region.attach(path) as region:
                fill(region, slots)
            directory = (ctypes.c_char * (slots * DIRECTORY_BYTES))()
            copy = (ctypes.c_char * (slots * DIRECTORY_BYTES))()
            to, source = array("Q", [ctypes.addressof(copy)]), array("Q", [ctypes.addressof(directory)])
            rounds, ours, theirs = min(settings.rounds, 5), [], []
            for _ in range(rounds):
                if after == "killed":
                    _die_in(path)
                start = time.perf_counter()
                region = Region.attach(path)
                ours.append(time.perf_counter() - start)
                assert region.lookup(keys(SPACE, [slots - 1])).hit_count == 1
                region.close()
                theirs.append(seconds(lambda: reference.copy(to, source, slots * DIRECTORY_BYTES)))  # noqa: B023
            yield Figure(
                "attach",
                {"slots": slots, "after": after, "state": "warm"},
                "times a memcpy of the directory (80 bytes a slot)",
                [o / t for o, t in zip(ours, theirs, strict=True)],
                [o * 1e3 for o in ours],
                [t * 1e3 for t in theirs],
                "ms",
            )
            path.unlink()


def _die_in(path: Path) -> None:
    program = (
        "import os, sys; from kvpool.region import Region\n"
        "region = Region.attach(sys.argv[1]); os.kill(os.getpid(), 9)"
    )
    died = subprocess.run([sys.executable, "-c", program, str(path)], check=False)
    assert died.returncode == -signal.SIGKILL
