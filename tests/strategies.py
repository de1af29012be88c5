"""Namespaces, keys and contents for tests.

The content of a block follows from its key, so anybody can tell whether bytes are right.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import strategies as st

from kvpool.keys import KEY_BYTES, KeyBatch, Namespace
from kvpool.region import Coherence, Geometry


def namespace(block_bytes: int = 4096, model: str = "m", **more: object) -> Namespace:
    """A namespace that differs from another one in just what is given."""
    fields: dict[str, object] = {
        "weights": "f" * 64,
        "dtype": "bfloat16",
        "kv_layout": "NHD",
        "block_tokens": 16,
        "hash_scheme": "sha256_cbor seed 0",
    }
    return Namespace(model=model, block_bytes=block_bytes, **{**fields, **more})  # type: ignore[arg-type]


def block_hash(index: int) -> bytes:
    """What an engine would give as the hash of its block `index`."""
    return hashlib.sha256(b"block %d" % index).digest()


def keys_of(ns: Namespace, indices: Sequence[int]) -> KeyBatch:
    """The keys of blocks `indices`."""
    return KeyBatch.from_hashes(ns, [block_hash(i) for i in indices])


def content(key: bytes, block_bytes: int) -> bytes:
    """The one right content of the block with this key."""
    unit = hashlib.shake_128(key).digest(min(block_bytes, 1024))
    # Every KiB differs from the others, so that pieces in a wrong order or from a wrong place are seen.
    units = [
        hashlib.sha256(key + i.to_bytes(4, "little")).digest() + unit[32:]
        for i in range(-(-block_bytes // 1024))
    ]
    return b"".join(units)[:block_bytes]


def contents(keys: KeyBatch) -> list[bytes]:
    """The right contents of all keys of a batch."""
    p = keys.packed
    return [content(p[i : i + KEY_BYTES], keys.namespace.block_bytes) for i in range(0, len(p), KEY_BYTES)]


def buffers(keys: KeyBatch) -> list[bytearray]:
    """Room for a load of `keys`, filled with what no block contains."""
    return [bytearray(b"\xee" * keys.namespace.block_bytes) for _ in range(len(keys))]


def wrong_hits(keys: KeyBatch, codes: bytes, out: Sequence[bytes | bytearray]) -> list[int]:
    """Places of the batch that were called hits and hold something else than the block."""
    right = contents(keys)
    return [i for i, code in enumerate(codes) if code == 0 and out[i] != right[i]]


def seed(name: str) -> int:
    """The seed of a random test: KVPOOL_TEST_SEED, else a new one. A failure shows it."""
    value = int(os.environ.get("KVPOOL_TEST_SEED") or int.from_bytes(os.urandom(4), "little"))
    print(f"{name}: seed={value}; again: KVPOOL_TEST_SEED={value} pytest -k {name}")
    return value


def shm() -> Path:
    """Where regions of tests lie: in memory when there is a place for it."""
    return Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path(os.environ.get("TMPDIR", "/tmp"))


@contextmanager
def region_folder() -> Iterator[Path]:
    """An empty folder for regions, gone afterwards."""
    with TemporaryDirectory(prefix="kvpool-test-", dir=shm()) as folder:
        yield Path(folder)


# Geometries from one slot of one extent upwards; `slots` of the smallest size a host.
def small_geometry(
    slots: int,
    *,
    hosts: int = 1,
    block_bytes: int = 1024,
    slots_per_extent: int = 0,
    participants: int = 8,
    namespaces: int = 8,
    coherence: Coherence = "hardware",
) -> Geometry:
    """A geometry whose every host has at least `slots` slots of `block_bytes`, and not many more."""
    per_extent = slots_per_extent or slots
    low, high = 4096, 1 << 30
    while high - low > 4096:  # the smallest capacity with enough extents
        middle = (low + high) // 2 // 4096 * 4096
        g = _geometry(middle, hosts, block_bytes, per_extent, participants, namespaces, coherence)
        if _extents(g) * per_extent >= slots:
            high = middle
        else:
            low = middle
    return _geometry(high, hosts, block_bytes, per_extent, participants, namespaces, coherence)


def _geometry(
    capacity: int,
    hosts: int,
    block_bytes: int,
    per_extent: int,
    participants: int,
    namespaces: int,
    coherence: Coherence,
) -> Geometry:
    return Geometry(
        capacity_bytes=capacity,
        hosts=hosts,
        extent_bytes=per_extent * block_bytes,
        min_block_bytes=block_bytes,
        participants=participants,
        namespaces=namespaces,
        coherence=coherence,
    )


def _extents(geometry: Geometry) -> int:
    from kvpool.errors import GeometryError

    try:
        return int(geometry.plan()["extent_count"])
    except GeometryError:
        return 0


coherences: st.SearchStrategy[Coherence] = st.sampled_from(["hardware", "software"])


@st.composite
def geometries(draw: st.DrawFn, hosts: int = 2) -> Geometry:
    """Small regions with all the corners: one extent, one slot, one bucket, blocks as large as an extent."""
    per_extent = draw(st.sampled_from([1, 2, 3, 7, 16]))
    return small_geometry(
        per_extent * draw(st.sampled_from([1, 2, 3, 5])),
        hosts=hosts,
        block_bytes=draw(st.sampled_from([64, 128, 1024])),
        slots_per_extent=per_extent,
        participants=draw(st.sampled_from([2, 3, 8])),
        namespaces=draw(st.sampled_from([3, 4])),
        coherence=draw(coherences),
    )
