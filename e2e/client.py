"""Stores and loads blocks whose bytes follow from their names. Runs in a pod that was given a pool.

    python client.py store|load SERIES COUNT

Prints one line of JSON: how many blocks were stored or present, or hit and missed for which reason, and how
many blocks came back with other bytes than were stored (it must be none).
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections import Counter

from kvpool import KeyBatch, Namespace, Pool

BLOCK_BYTES = 64 << 10
BATCH = 64


def block(series: str, number: int) -> bytes:
    return hashlib.shake_128(f"{series}/{number}".encode()).digest(BLOCK_BYTES)


def main(word: str, series: str, count: int) -> dict[str, object]:
    namespace = Namespace(
        model="e2e",
        weights="w1",
        dtype="bytes",
        kv_layout="flat",
        block_tokens=16,
        block_bytes=BLOCK_BYTES,
        hash_scheme="sha256",
    )
    said: Counter[str] = Counter()
    wrong = 0
    with Pool.open(os.environ["KVPOOL_POOL"]) as pool:
        for first in range(0, count, BATCH):
            numbers = range(first, min(first + BATCH, count))
            hashes = [hashlib.sha256(f"{series}/{number}".encode()).digest() for number in numbers]
            keys = KeyBatch.from_hashes(namespace, hashes)
            if word == "store":
                reasons = pool.store(keys, [block(series, number) for number in numbers]).reasons
            else:
                out = [bytearray(BLOCK_BYTES) for _ in numbers]
                reasons = pool.load(keys, out).reasons
                pairs = zip(numbers, out, reasons, strict=True)
                wrong += sum(r is None and data != block(series, n) for n, data, r in pairs)
            said.update("ok" if reason is None else str(reason) for reason in reasons)
    return {"ok": said.pop("ok", 0), "not": dict(said), "wrong": wrong}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], sys.argv[2], int(sys.argv[3]))))
