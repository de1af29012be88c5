"""A flipped bit in a claim line claims no shard and takes no claim away."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from format.blocks import Blocks, load, namespace, store
from format.layout_file import RegionBytes
from kvpool.region import Coherence, Geometry, Region

SPACE = namespace("claims", 512)
WRONG_COPY = "has a wrong copy"
CLAIM_BITS = 5 * 8 * 8  # of the line; the rest is reserved


def make(path: Path, coherence: Coherence) -> Path:
    Region.format(
        path,
        Geometry(
            64 << 10,
            hosts=2,
            min_block_bytes=512,
            participants=4,
            namespaces=1,
            align_bytes=4096,
            coherence=coherence,
        ),
    )
    return path


@contextmanager
def flipped(path: Path, at: int, bit: int) -> Iterator[None]:
    def flip() -> None:
        with path.open("r+b") as f:
            f.seek(at + bit // 8)
            (byte,) = f.read(1)
            f.seek(at + bit // 8)
            f.write(bytes([byte ^ 1 << bit % 8]))

    flip()
    yield
    flip()


@pytest.mark.parametrize("coherence", ["hardware", "software"])
def test_claim_line_bit_flipped_nobody_claims_so_nobody_is_fenced(
    tmp_path: Path, coherence: Coherence
) -> None:
    path = make(tmp_path / "region", coherence)
    whole = RegionBytes(path.read_bytes())
    with Region.attach(path, host=0) as here, Region.attach(path, host=1) as there:
        for host in (0, 1):
            for on in (0, 1):
                for bit in range(CLAIM_BITS):
                    with flipped(path, whole.claims(host).start + 64 * on, bit):
                        block = Blocks(SPACE, (f"{host} {on} {bit}",))
                        for region in (here, there):
                            assert store(region, block) == [""]
                            assert load(region, block) == [""]
                            assert [o.host for o in region.heartbeat().owners] == [0, 1]
        assert here.check().ok


@pytest.mark.parametrize("coherence", ["hardware", "software"])
def test_claim_line_bit_flipped_the_claim_holds_and_repair_puts_it_right(
    tmp_path: Path, coherence: Coherence
) -> None:
    path = make(tmp_path / "region", coherence)
    block = Blocks(SPACE, ("first",))
    with Region.attach(path, host=0) as old, Region.attach(path, host=1) as new:
        assert store(old, block) == [""]
        new.adopt(0, 5)
        at = RegionBytes(path.read_bytes()).claims(1).start
        for bit in range(CLAIM_BITS):
            with flipped(path, at, bit):
                assert store(old, Blocks(SPACE, (f"late {bit}",))) == ["fenced"]
                owner = new.heartbeat().owners[0]
                assert (owner.host, owner.epoch, owner.settled) == (1, 5, True)
                assert load(new, block) == [""]
                if bit % 7 == 0:
                    assert any(WRONG_COPY in problem for problem in new.check().problems)
        for bit in range(0, CLAIM_BITS, 5):
            with path.open("r+b") as f:
                f.seek(at + bit // 8)
                (byte,) = f.read(1)
                f.seek(at + bit // 8)
                f.write(bytes([byte ^ 1 << bit % 8]))
            assert new.repair().done == ["1 claim lines with a wrong copy put right"]
            assert new.check().ok
        assert store(old, Blocks(SPACE, ("late",))) == ["fenced"]
