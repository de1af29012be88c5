"""Cuts torch tensors into blocks and moves them through a region. Run by test_pages.py, where torch is."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import torch

from kvpool import KeyBatch, Namespace, Pool
from kvpool.errors import BufferShapeError
from kvpool_connector import pages

BLOCKS = 12
LAYERS = 3
HEADS, TOKENS, CONTENT = 2, 32, 64


def tensors(layout: str) -> dict[str, torch.Tensor]:
    """Layer caches as an engine makes them: views of one storage, [block, head, token, content]."""
    sizes = {"L": LAYERS, "B": BLOCKS, "H": HEADS, "N": TOKENS, "C": CONTENT}
    storage = torch.randn([sizes[axis] for axis in layout])
    logical = storage.permute([layout.index(axis) for axis in "LBHNC"])
    return {f"layers.{8 + i}.attn": logical[i] for i in range(LAYERS)}  # 8, 9, 10: numbers, not text


def check_layout(pool: Pool, layout: str, always_stage: bool) -> None:
    source = tensors(layout)
    layers = pages.describe(source, BLOCKS)
    assert [layer.name for layer in layers] == [f"layers.{8 + i}.attn" for i in range(LAYERS)]
    cache = pages.open_cache(layers, always_stage=always_stage)
    if isinstance(cache, pages.StagedPages):
        cache._rows_max = 2  # several passes through the buffer
    assert cache.block_bytes == LAYERS * HEADS * TOKENS * CONTENT * 4
    where = f"{layout} {always_stage}"
    namespace = Namespace("m", "w", "float32", where, TOKENS, cache.block_bytes, "h")
    keys = KeyBatch.from_hashes(
        namespace, [hashlib.sha256(f"{where}{i}".encode()).digest() for i in range(5)]
    )
    assert cache.store(pool, keys, [3, 0, 7, 11, 4]) == bytes(5)
    assert cache.store(pool, keys, [3, 0, 7, 11, 4]) == bytes([1] * 5)

    target = tensors(layout)
    untouched = {name: tensor.clone() for name, tensor in target.items()}
    into = pages.open_cache(pages.describe(target, BLOCKS), always_stage=not always_stage)
    assert into.load(pool, keys, [1, 2, 3, 4, 5]) == bytes(5)
    for name, tensor in target.items():
        for there, here in zip([3, 0, 7, 11, 4], [1, 2, 3, 4, 5], strict=True):
            assert torch.equal(tensor[here], source[name][there]), (where, name)
        for block in (0, 6, 7, 8, 9, 10, 11):
            assert torch.equal(tensor[block], untouched[name][block]), (where, name)
    for wrong in (BLOCKS, -1):
        check_no_such_block(pool, into, keys[:1], wrong)


def check_no_such_block(
    pool: Pool, cache: pages.DirectPages | pages.StagedPages, keys: KeyBatch, block: int
) -> None:
    """A block id beyond the cache is an error, and nothing else is written to."""
    for move in (cache.load, cache.store):
        try:
            move(pool, keys, [block])
        except (BufferShapeError, IndexError, RuntimeError):
            continue
        raise AssertionError(f"{move.__qualname__} followed block {block}")


def check_split_blocks(pool: Pool) -> None:
    """A backend that cuts each block in two: the same bytes in another order are another layout."""
    whole = torch.randn(BLOCKS, HEADS, TOKENS, CONTENT)
    split = whole.view(BLOCKS * 2, HEADS, TOKENS // 2, CONTENT)
    (a,), (b,) = pages.describe({"l": whole}, BLOCKS), pages.describe({"l": split}, BLOCKS)
    assert (a.page_bytes, a.block_stride_bytes) == (b.page_bytes, b.block_stride_bytes)
    assert a.inside != b.inside


def check_shared_layer() -> None:
    one = torch.randn(BLOCKS, HEADS, TOKENS, CONTENT)
    assert len(pages.describe({"a": one, "b": one}, BLOCKS)) == 1


def check_refused() -> None:
    wrong = {
        "the parts of one block lie apart": torch.randn(HEADS, BLOCKS, TOKENS, CONTENT).permute(1, 0, 2, 3),
        "does not start with": torch.randn(BLOCKS + 1, HEADS, TOKENS, CONTENT),
        "expected one tensor a layer": [torch.randn(BLOCKS, 4)],
        "have gaps between them": torch.randn(BLOCKS * 2, 6)[:, :4],
    }
    for message, tensor in wrong.items():
        said = ""
        try:
            pages.describe({"l": tensor}, BLOCKS)
        except pages.LayoutError as error:
            said = str(error)
        assert message in said, (message, said)


def check_prefault() -> None:
    source = tensors("LBHNC")
    before = {name: tensor.clone() for name, tensor in source.items()}
    pages.prefault(pages.describe(source, BLOCKS))
    assert all(torch.equal(source[name], before[name]) for name in source)


def main() -> None:
    with Pool.open(Path(sys.argv[1]), host=0) as pool:
        for layout in ("LBHNC", "LBNHC", "BLHNC", "BLNHC"):
            for always_stage in (False, True):
                check_layout(pool, layout, always_stage)
        check_split_blocks(pool)
    check_shared_layer()
    check_refused()
    check_prefault()
    print("checked")


if __name__ == "__main__":
    main()
