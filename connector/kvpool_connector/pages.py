"""An engine's paged KV cache, seen as blocks of bytes: one page of every layer makes one block.

`DirectPages` lets the pool copy between its medium and the cache itself. `StagedPages` copies through a host
buffer, for caches in the memory of an accelerator.
"""

from __future__ import annotations

import ctypes
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvpool import KeyBatch, KvpoolError, PageLayout, Pages, Pool

logger = logging.getLogger("vllm.kvpool")

# Bounds the host memory that staging takes; large enough that one copy to the device is worth its launch.
STAGING_BYTES_MAX = 64 << 20

_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23


class LayoutError(KvpoolError, ValueError):
    """The cache's memory layout cannot be cut into blocks."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's part of the cache.

    `inside` describes a page: where it is equal in two caches, the same bytes are the same block.
    """

    name: str
    tensor: Any
    address: int
    block_count: int
    block_stride_bytes: int
    page_bytes: int
    inside: str


def describe(caches: Mapping[str, Any], block_count: int) -> list[Layer]:
    """The layers of a cache in the order of their names (numbers count as numbers), each memory once.

    Raises: LayoutError when a block's page of some layer is not one dense run of bytes.
    """
    layers: dict[int, Layer] = {}
    for name in sorted(caches, key=_natural):
        layer = _layer(name, caches[name], block_count)
        layers.setdefault(layer.address, layer)  # layers that share one cache are one layer to the pool
    return list(layers.values())


def _natural(name: str) -> tuple[tuple[int, int | str], ...]:
    return tuple((0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"(\d+)", name) if part)


def _layer(name: str, tensor: Any, block_count: int) -> Layer:
    if not isinstance(tensor, torch.Tensor):
        raise LayoutError(f"KV cache of {name}: {type(tensor).__name__}, expected one tensor a layer")
    rows, *inner = tensor.shape
    if not inner or rows % block_count:
        raise LayoutError(
            f"KV cache of {name}: shape {tuple(tensor.shape)} does not start with {block_count} blocks"
        )
    # A backend may cut each of the engine's blocks into smaller ones of its own; they follow each other.
    rows_per_block = rows // block_count
    item = tensor.element_size()
    row_stride, *strides = tensor.stride()
    dense = 1
    for stride, size in sorted(zip(strides, inner, strict=True)):
        if size != 1 and stride != dense:
            raise LayoutError(
                f"KV cache of {name}: strides {tensor.stride()} for shape {tuple(tensor.shape)}: "
                "the parts of one block lie apart"
            )
        dense *= size
    if rows_per_block > 1 and row_stride != dense:
        raise LayoutError(
            f"KV cache of {name}: the {rows_per_block} parts of one block have gaps between them"
        )
    return Layer(
        name=name,
        tensor=tensor,
        address=tensor.data_ptr(),
        block_count=block_count,
        block_stride_bytes=row_stride * rows_per_block * item,
        page_bytes=dense * rows_per_block * item,
        inside=f"{rows_per_block}*{tuple(inner)}/{tuple(strides)}/{tensor.dtype}".replace(
            "torch.", ""
        ).replace(" ", ""),
    )


def open_cache(layers: Sequence[Layer], *, always_stage: bool = False) -> DirectPages | StagedPages:
    if always_stage or any(layer.tensor.device.type != "cpu" for layer in layers):
        return StagedPages(layers)
    return DirectPages(layers)


class DirectPages:
    """A cache in host memory: the pool reads and writes its pages where they are."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        self._layout = PageLayout(
            [(layer.address, layer.block_stride_bytes, layer.page_bytes) for layer in layers],
            keepalive=[layer.tensor for layer in layers],
            block_count=min(layer.block_count for layer in layers),
        )
        self.block_bytes = self._layout.block_bytes

    def load(self, pool: Pool, keys: KeyBatch, block_ids: Sequence[int]) -> bytes:
        return pool.load(keys, Pages(self._layout, block_ids)).codes

    def store(self, pool: Pool, keys: KeyBatch, block_ids: Sequence[int]) -> bytes:
        return pool.store(keys, Pages(self._layout, block_ids)).codes


class StagedPages:
    """A cache in an accelerator's memory: blocks pass through a host buffer of bounded size."""

    def __init__(self, layers: Sequence[Layer], *, staging_bytes_max: int = STAGING_BYTES_MAX) -> None:
        self.block_bytes = sum(layer.page_bytes for layer in layers)
        self._pages = [_byte_rows(layer) for layer in layers]
        self._device = layers[0].tensor.device
        self._rows_max = max(1, staging_bytes_max // self.block_bytes)
        # Loads may run beside the engine's steps while a step stores: each direction has its own buffer.
        self._buffers: dict[str, Any] = {}

    def load(self, pool: Pool, keys: KeyBatch, block_ids: Sequence[int]) -> bytes:
        codes = b""
        for start, ids in self._chunks(block_ids):
            rows = self._rows("load", len(ids))
            got = pool.load(keys[start : start + len(ids)], _row_pages(rows)).codes
            index = torch.tensor(ids, dtype=torch.long, device=self._device)
            # A row that missed is garbage and goes to a block that the engine recomputes.
            offset = 0
            for page in self._pages:
                piece = rows[:, offset : offset + page.shape[1]]
                page.index_copy_(0, index, piece.to(self._device))
                offset += page.shape[1]
            self._finish()
            codes += got
        return codes

    def store(self, pool: Pool, keys: KeyBatch, block_ids: Sequence[int]) -> bytes:
        codes = b""
        for start, ids in self._chunks(block_ids):
            rows = self._rows("store", len(ids))
            index = torch.tensor(ids, dtype=torch.long, device=self._device)
            offset = 0
            for page in self._pages:
                rows[:, offset : offset + page.shape[1]].copy_(page.index_select(0, index))
                offset += page.shape[1]
            self._finish()
            codes += pool.store(keys[start : start + len(ids)], _row_pages(rows)).codes
        return codes

    def _chunks(self, block_ids: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
        for start in range(0, len(block_ids), self._rows_max):
            yield start, list(block_ids[start : start + self._rows_max])

    def _rows(self, direction: str, count: int) -> Any:
        buffer = self._buffers.get(direction)
        if buffer is None or buffer.shape[0] < count:
            pinned = self._device.type == "cuda"
            buffer = torch.empty((count, self.block_bytes), dtype=torch.uint8, pin_memory=pinned)
            self._buffers[direction] = buffer
        return buffer[:count]

    def _finish(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.current_stream(self._device).synchronize()


def _byte_rows(layer: Layer) -> Any:
    """The layer's memory as a [block, byte] view."""
    tensor = layer.tensor
    rows = tensor.shape[0] * tensor.stride(0) * tensor.element_size() // layer.block_stride_bytes
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    start = tensor.storage_offset() * tensor.element_size()
    return flat.set_(tensor.untyped_storage(), start, (rows, layer.page_bytes), (layer.block_stride_bytes, 1))


def _row_pages(rows: Any) -> Pages:
    count, block_bytes = rows.shape
    layout = PageLayout([(rows.data_ptr(), block_bytes, block_bytes)], keepalive=rows, block_count=count)
    return Pages(layout, range(count))


def prefault(layers: Sequence[Layer]) -> int:
    """Back the cache's host memory with pages, huge ones where the system has them; returns the bytes backed.

    An engine reserves its cache and touches a block when it first uses it. A load would then wait for the
    kernel to clear each page right before overwriting it, which costs more than the copy.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    done = 0
    storages = {
        (s.data_ptr(), s.nbytes()): s
        for s in (layer.tensor.untyped_storage() for layer in layers if layer.tensor.device.type == "cpu")
    }
    for start, size in storages:
        first, last = -(-start // 4096) * 4096, (start + size) // 4096 * 4096
        if last <= first or last - first > _available_bytes():
            continue
        span = (ctypes.c_void_p(first), ctypes.c_size_t(last - first))
        libc.madvise(*span, _MADV_HUGEPAGE)  # only a wish
        if libc.madvise(*span, _MADV_POPULATE_WRITE) == 0:
            done += last - first
    return done


def _available_bytes() -> int:
    """Memory that can be taken without swapping; 0 when the system does not say."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return 0
