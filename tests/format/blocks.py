"""Blocks whose bytes follow from their name: a test can tell right from wrong without keeping a copy."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from kvpool.keys import KeyBatch, Namespace
from kvpool.region import Region


def namespace(name: str, block_bytes: int) -> Namespace:
    return Namespace(
        model=name,
        weights="0" * 16,
        dtype="float32",
        kv_layout="test",
        block_tokens=16,
        block_bytes=block_bytes,
        hash_scheme="sha256 seed 0",
    )


def payload(space: Namespace, name: str, *, compressible: bool = False) -> bytes:
    seed = hashlib.shake_256(f"{space.model} {name}".encode())
    if not compressible:
        return seed.digest(space.block_bytes)
    return (seed.digest(64) * (space.block_bytes // 64 + 1))[: space.block_bytes]


@dataclass(frozen=True)
class Blocks:
    """A batch of named blocks of one namespace."""

    space: Namespace
    names: tuple[str, ...]
    compressible: bool = False

    @cached_property
    def keys(self) -> KeyBatch:
        return KeyBatch.from_hashes(
            self.space, [hashlib.sha256(name.encode()).digest() for name in self.names]
        )

    @cached_property
    def payloads(self) -> list[bytes]:
        return [payload(self.space, name, compressible=self.compressible) for name in self.names]

    def buffers(self) -> list[bytearray]:
        return [bytearray(self.space.block_bytes) for _ in self.names]

    def __len__(self) -> int:
        return len(self.names)

    def only(self, indices: Sequence[int]) -> Blocks:
        return Blocks(self.space, tuple(self.names[i] for i in indices), self.compressible)


def store(region: Region, blocks: Blocks) -> list[str]:
    """Stores; the reasons why not, "" for what is there now."""
    return [str(r or "") for r in region.store(blocks.keys, blocks.payloads).reasons]


def load(region: Region, blocks: Blocks) -> list[str]:
    """Loads; a miss's reason, "" for a hit. A hit with any other bytes than those stored fails the test."""
    out = blocks.buffers()
    reasons = [str(r or "") for r in region.load(blocks.keys, out).reasons]
    for name, got, want, reason in zip(blocks.names, out, blocks.payloads, reasons, strict=True):
        assert reason or got == want, f"WRONG BYTES served for block {name} of {region.path}"
    return reasons
