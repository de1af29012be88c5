"""The caller's memory of a batch of blocks: buffers, lists of pieces, or pages of an engine's KV cache."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from kvpool import _native
from kvpool.errors import BufferShapeError

Buffer: TypeAlias = Any  # buffer protocol or DLPack (CPU)
Packed: TypeAlias = bytes  # numbers of 8 bytes each


class PageLayout:
    """Where an engine keeps the pages of a block: one a layer, `block_stride_bytes` from block to block.

    layers: (address of block 0, block_stride_bytes, page_bytes) each. The memory must stay where it is as
    long as the layout is used; `keepalive` is held for that. With `block_count`, block ids beyond it are
    refused instead of followed into other memory.
    """

    __slots__ = ("base", "block_bytes", "block_count", "bytes", "keepalive", "pieces", "stride")

    def __init__(
        self, layers: Sequence[tuple[int, int, int]], keepalive: object = None, block_count: int | None = None
    ) -> None:
        if not layers:
            raise BufferShapeError(
                "page layout: no layers; give (address, block_stride_bytes, page_bytes) for each"
            )
        self.base = array("Q", (a for a, _, _ in layers)).tobytes()
        self.stride = array("Q", (s for _, s, _ in layers)).tobytes()
        self.bytes = array("Q", (n for _, _, n in layers)).tobytes()
        self.pieces = len(layers)
        self.block_bytes = sum(n for _, _, n in layers)
        self.keepalive = keepalive
        self.block_count = block_count

    @classmethod
    def from_tensors(cls, tensors: Sequence[Any]) -> PageLayout:
        """From CPU tensors (torch) whose first dimension is the block and whose t[b] is contiguous.

        Neighbouring layers that lie next to each other in memory become one piece.
        """
        layers: list[tuple[int, int, int]] = []
        for t in tensors:
            if t.device.type != "cpu" or not t[0].is_contiguous():
                raise BufferShapeError(
                    f"page layout: a tensor on {t.device} with strides {tuple(t.stride())}; "
                    "expected one in host memory whose [block] is contiguous"
                )
            item = t.element_size()
            address, stride, size = t.data_ptr(), t.stride(0) * item, t[0].numel() * item
            last_address, last_stride, last_size = layers[-1] if layers else (0, 0, 0)
            if last_stride == stride and last_address + last_size == address and last_size + size <= stride:
                address, size = last_address, last_size + size
                layers.pop()
            layers.append((address, stride, size))
        return cls(layers, keepalive=tuple(tensors), block_count=min((len(t) for t in tensors), default=0))


@dataclass(frozen=True, slots=True)
class Pages:
    """Blocks of an engine's KV cache by their block ids: the hot path, no Python object a piece."""

    layout: PageLayout
    block_ids: Sequence[int]

    def __len__(self) -> int:
        return len(self.block_ids)


Blocks: TypeAlias = Pages | Sequence[Buffer] | Sequence[Sequence[Buffer]]


@dataclass(frozen=True, slots=True)
class NativeBuffers:
    """The packed form that the native core reads; `held` keeps the memory alive during the call."""

    base: Packed
    stride: Packed
    bytes: Packed
    ids: Packed
    pieces: int
    held: object


def _address(buffer: Buffer, writable: bool, where: str) -> tuple[int, int, object]:
    try:
        view = memoryview(buffer)
    except TypeError:
        if not hasattr(buffer, "__dlpack__"):
            raise BufferShapeError(
                f"{where}: {type(buffer).__name__} is neither a buffer nor DLPack; "
                "give bytes, an array or a CPU tensor"
            ) from None
        try:
            address, size = _native.dlpack_address(buffer)
        except TypeError:
            raise BufferShapeError(
                f"{where}: the tensor is not contiguous in host memory; give a contiguous CPU tensor"
            ) from None
        return address, size, buffer
    if not view.c_contiguous:
        raise BufferShapeError(
            f"{where}: the buffer is not contiguous; give a contiguous one or a list of pieces"
        )
    if writable and view.readonly:
        raise BufferShapeError(
            f"{where}: the buffer is read-only; a load needs one that can be written, such as bytearray"
        )
    return _native.buffer_address(view), view.nbytes, view


def to_native(blocks: Blocks, count: int, block_bytes: int, *, writable: bool) -> NativeBuffers:
    """Checks `blocks` and packs its addresses.

    Raises: BufferShapeError before anything is copied, with the index of the first block that does not fit.
    """
    if len(blocks) != count:
        raise BufferShapeError(f"{len(blocks)} buffers for {count} keys; give one block for each key")
    if isinstance(blocks, Pages):
        layout = blocks.layout
        if layout.block_bytes != block_bytes:
            raise BufferShapeError(
                f"pages of {layout.block_bytes} bytes a block, "
                f"the namespace's blocks have {block_bytes} bytes"
            )
        ids = array("q", blocks.block_ids)
        if ids and (min(ids) < 0 or (layout.block_count is not None and max(ids) >= layout.block_count)):
            wrong = min(ids) if min(ids) < 0 else max(ids)
            have = "0 or more"
            if layout.block_count is not None:
                have = f"one of the {layout.block_count} blocks that the layout has"
            raise BufferShapeError(f"block id {wrong} is not in the pages; expected {have}")
        return NativeBuffers(layout.base, layout.stride, layout.bytes, ids.tobytes(), layout.pieces, layout)
    pieces = 1
    base, sizes, held = array("Q"), array("Q"), []
    for i, block in enumerate(blocks):
        parts = block if isinstance(block, (list, tuple)) else (block,)
        if i == 0:
            pieces = len(parts)
        if len(parts) != pieces or not parts:
            raise BufferShapeError(
                f"block {i} has {len(parts)} pieces, block 0 has {pieces}; all blocks need the same number"
            )
        total = 0
        for part in parts:
            address, size, hold = _address(part, writable, f"block {i}")
            base.append(address)
            sizes.append(size)
            held.append(hold)
            total += size
        if total != block_bytes:
            raise BufferShapeError(
                f"block {i} has {total} bytes, the namespace's blocks have {block_bytes} bytes"
            )
    return NativeBuffers(base.tobytes(), b"", sizes.tobytes(), b"", pieces, held)
