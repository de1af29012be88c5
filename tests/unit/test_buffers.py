"""What a caller may give as the memory of blocks, and what it is told when it gives something else."""

from __future__ import annotations

import ctypes
from array import array

import pytest

from kvpool.buffers import PageLayout, Pages, to_native
from kvpool.errors import BufferShapeError

SIZE = 64


class DlTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


class Tensor:
    """A DLPack tensor of bytes that is not a Python buffer, as torch's are: 8 rows of 8."""

    def __init__(self, memory: bytearray, device: int = 1, strides: tuple[int, int] = (8, 1)) -> None:
        self.memory = memory
        self.device = device
        keep = (ctypes.c_char * len(memory)).from_buffer(memory)
        self.shape, self.strides = (ctypes.c_int64 * 2)(8, 8), (ctypes.c_int64 * 2)(*strides)
        self.tensor = DlTensor(
            ctypes.addressof(keep), device, 0, 2, 1, 8, 1, self.shape, self.strides, 0, None, None
        )
        self.keep = keep

    def __dlpack__(self, **_: object) -> object:
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        return new(ctypes.addressof(self.tensor), b"dltensor", None)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device, 0


def addresses(packed: bytes) -> list[int]:
    return array("Q", packed).tolist()


def address_of(memory: bytearray) -> int:
    return ctypes.addressof((ctypes.c_char * len(memory)).from_buffer(memory))


def test_buffers_of_all_kinds_give_their_address() -> None:
    memory = bytearray(SIZE)
    floats = array("f", bytes(SIZE))
    for buffer in (
        memory,
        memoryview(memory),
        memoryview(memory).cast("f"),
        memoryview(memory).cast("B", (8, 8)),
    ):
        assert addresses(to_native([buffer], 1, SIZE, writable=True).base) == [address_of(memory)]
    assert addresses(to_native([floats], 1, SIZE, writable=True).base) == [floats.buffer_info()[0]]


def test_dlpack_tensor_gives_its_address_and_size() -> None:
    memory = bytearray(SIZE)
    native = to_native([Tensor(memory)], 1, SIZE, writable=True)
    assert addresses(native.base) == [address_of(memory)]
    assert addresses(native.bytes) == [SIZE]


@pytest.mark.parametrize(
    "tensor", [Tensor(bytearray(128), strides=(16, 1)), Tensor(bytearray(SIZE), device=2)]
)
def test_dlpack_tensor_with_gaps_or_on_a_device_is_refused(tensor: Tensor) -> None:
    with pytest.raises(
        BufferShapeError, match="block 0: the tensor is not contiguous in host memory; give a contiguous CPU"
    ):
        to_native([tensor], 1, SIZE, writable=False)


def test_block_in_pieces_keeps_their_order() -> None:
    a, b = bytearray(16), bytearray(SIZE - 16)
    native = to_native([[a, b], (b, a)], 2, SIZE, writable=True)
    assert native.pieces == 2
    assert addresses(native.base) == [address_of(m) for m in (a, b, b, a)]
    assert addresses(native.bytes) == [16, 48, 48, 16]


def test_read_only_buffers_will_do_for_a_store_only() -> None:
    assert to_native([bytes(SIZE)], 1, SIZE, writable=False).pieces == 1
    for buffer in (bytes(SIZE), memoryview(bytearray(SIZE)).toreadonly()):
        with pytest.raises(
            BufferShapeError, match="block 0: the buffer is read-only; a load needs one that can be written"
        ):
            to_native([buffer], 1, SIZE, writable=True)


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ([bytearray(SIZE)] * 3, "3 buffers for 2 keys; give one block for each key"),
        ([], "0 buffers for 2 keys"),
        (
            [bytearray(SIZE), bytearray(SIZE - 1)],
            "block 1 has 63 bytes, the namespace's blocks have 64 bytes",
        ),
        ([bytearray(SIZE), bytearray(SIZE + 1)], "block 1 has 65 bytes"),
        ([bytearray(SIZE), bytearray(0)], "block 1 has 0 bytes"),
        (
            [[bytearray(32)] * 2, [bytearray(SIZE)]],
            "block 1 has 1 pieces, block 0 has 2; all blocks need the same number",
        ),
        ([[bytearray(32)] * 2, [bytearray(32), bytearray(31)]], "block 1 has 63 bytes"),
        ([[], []], "block 0 has 0 pieces"),
        ([bytearray(SIZE), memoryview(bytearray(2 * SIZE))[::2]], "block 1: the buffer is not contiguous"),
        (
            [bytearray(SIZE), "x" * SIZE],
            "block 1: str is neither a buffer nor DLPack; give bytes, an array or a CPU tensor",
        ),
        ([bytearray(SIZE), None], "block 1: NoneType is neither"),
    ],
)
def test_blocks_that_do_not_fit_are_refused_with_the_first_wrong_one(
    blocks: list[object], message: str
) -> None:
    with pytest.raises(BufferShapeError, match=message):
        to_native(blocks, 2, SIZE, writable=False)


def test_pages_carry_one_address_a_layer_however_many_blocks() -> None:
    layout = PageLayout([(1 << 20, 4096, 32), (1 << 21, 4096, 32)])
    native = to_native(Pages(layout, list(range(1000))), 1000, SIZE, writable=True)
    assert addresses(native.base) == [1 << 20, 1 << 21]
    assert addresses(native.stride) == [4096, 4096]
    assert array("q", native.ids).tolist() == list(range(1000))


@pytest.mark.parametrize(
    ("pages", "message"),
    [
        (
            Pages(PageLayout([(4096, 4096, 32)]), [0, 1]),
            "pages of 32 bytes a block, the namespace's blocks have 64 bytes",
        ),
        (Pages(PageLayout([(4096, 4096, 64)]), [0]), "1 buffers for 2 keys"),
        (Pages(PageLayout([(4096, 4096, 64)]), [0, -1]), "block id -1"),
        (Pages(PageLayout([(4096, 4096, 64)], block_count=4), [0, 4]), r"block id 4 .* 4 blocks"),
    ],
)
def test_pages_that_do_not_fit_are_refused(pages: Pages, message: str) -> None:
    with pytest.raises(BufferShapeError, match=message):
        to_native(pages, 2, SIZE, writable=True)


def test_page_layout_without_layers_is_refused() -> None:
    with pytest.raises(BufferShapeError, match="no layers"):
        PageLayout([])
