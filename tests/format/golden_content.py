"""What the golden regions hold.

Each is written once, by the build of its time, and must be readable for ever: never change what exists here.
"""

from __future__ import annotations

from pathlib import Path

from format.blocks import Blocks, namespace

FOLDER = Path(__file__).with_name("golden")
LARGE = namespace("golden-large", 6000)  # not a multiple of a line
SMALL = namespace("golden-small", 256)

# Format 1: software coherence, 4 hosts. Host 2 died in a store; host 1 adopted shard 3 (epoch 7).
STORED_1: dict[int, list[Blocks]] = {
    0: [
        Blocks(LARGE, tuple(f"0-large-{i}" for i in range(6)), compressible=True),
        Blocks(SMALL, tuple(f"0-small-{i}" for i in range(20)), compressible=True),
    ],
    1: [Blocks(SMALL, tuple(f"1-small-{i}" for i in range(10)), compressible=True)],
    2: [Blocks(LARGE, tuple(f"2-large-{i}" for i in range(3)), compressible=True)],
    3: [Blocks(LARGE, tuple(f"3-large-{i}" for i in range(4)), compressible=True)],
}
EVICTED_1 = Blocks(SMALL, ("evicted-0", "evicted-1"), compressible=True)  # of host 1
INTERRUPTED_1 = Blocks(LARGE, ("interrupted",), compressible=True)  # of host 2
STRANGER_1 = Blocks(SMALL, ("never-stored",), compressible=True)
