"""Buffers for the benchmark: memory with a known address, filled so that no two blocks are equal."""

from __future__ import annotations

import ctypes
import mmap
import os
from array import array
from pathlib import Path

from kvpool.buffers import PageLayout, Pages
from kvpool.keys import KeyBatch, Namespace


class Memory:
    """Anonymous memory, or a file on the medium; all its pages are there before anything is timed."""

    def __init__(self, size: int, file: Path | None = None) -> None:
        if file is None:
            self.map = mmap.mmap(-1, size)
        else:
            with open(file, "wb+") as f:
                f.truncate(size)
                self.map = mmap.mmap(f.fileno(), size)
            file.unlink()
        self.size = size
        self._export = ctypes.c_char.from_buffer(self.map)
        self.address = ctypes.addressof(self._export)
        for at in range(0, size, 1 << 20):
            self.map[at : min(size, at + (1 << 20))] = bytes(min(1 << 20, size - at))

    def fill(self, block_bytes: int) -> None:
        noise = os.urandom(block_bytes)
        for i, at in enumerate(range(0, self.size - block_bytes + 1, block_bytes)):
            self.map[at : at + block_bytes] = noise
            self.map[at : at + 8] = i.to_bytes(8, "little")

    def pieces(self, block_bytes: int, pieces: int, blocks: range) -> array[int]:
        """Addresses of the pieces of `blocks`. As in an engine: each layer has its pages side by side."""
        piece, count = block_bytes // pieces, self.size // block_bytes
        return array("Q", (self.address + (p * count + b) * piece for b in blocks for p in range(pieces)))

    def pages(self, block_bytes: int, pieces: int, blocks: range) -> Pages:
        piece, count = block_bytes // pieces, self.size // block_bytes
        layers = [(self.address + p * count * piece, piece, piece) for p in range(pieces)]
        return Pages(PageLayout(layers, keepalive=self), list(blocks))

    def close(self) -> None:
        del self._export
        self.map.close()


def namespace(block_bytes: int) -> Namespace:
    return Namespace(
        model="bench",
        weights="0" * 16,
        dtype="bfloat16",
        kv_layout="bench",
        block_tokens=16,
        block_bytes=block_bytes,
        hash_scheme="counting",
    )


def keys(space: Namespace, numbers: range | list[int]) -> KeyBatch:
    return KeyBatch.from_hashes(space, b"".join(n.to_bytes(32, "little") for n in numbers))
