"""`fsck --repair` killed in the middle: what it leaves is no worse than before, and the next one finishes."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest

from children import children
from crash import tally
from damage.blocks import make
from damage.test_repair import CLAIM, damaged, repaired, served
from kvpool.errors import KvpoolError
from kvpool.region import Region
from strategies import region_folder, seed

pytestmark = pytest.mark.slow
ROUNDS = int(os.environ.get("KVPOOL_REPAIR_ROUNDS", "200"))
LIVES_S = 0.006  # about as long as a repair takes


def test_repairer_killed_at_any_moment_next_one_finishes_and_no_right_block_is_lost() -> None:
    tally.use_row(tally.REPAIRER)
    value = seed("test_repairer_killed_at_any_moment")
    finished = killed = 0
    with region_folder() as folder, children() as start:
        whole_path, path = folder / "whole", folder / "region"
        make(whole_path, "software")
        whole = whole_path.read_bytes()
        for number in range(value, value + ROUNDS):
            dice = random.Random(number)
            data, _ = damaged(whole, dice, 10)
            path.write_bytes(data)
            try:
                before = served(path)
                path.write_bytes(data)
                child = start(repaired, path)
                time.sleep(dice.random() * LIVES_S)
                child.signal(signal.SIGKILL)
                code = tally.ended(child)
                assert code in (0, -signal.SIGKILL), code  # 0: it had just ended
                finished += code == 0
                killed += code != 0
                child.end()
                left = repaired(path)
            except KvpoolError:
                continue
            if any(CLAIM in text for text in left):
                continue
            problems = Region.fsck(path).problems
            if problems:
                tally.count(tally.FSCK)
            assert not left, number
            assert not problems, f"{problems} {number}"
            after = served(path)
            tally.count(tally.LOADED, len(after))
            assert after >= before, number
    assert finished < ROUNDS
    tally.intend(ROUNDS // 4)
    assert killed >= ROUNDS // 4
