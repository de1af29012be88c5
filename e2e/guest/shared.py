"""Two guests that share a CXL memory and a pool on it, what they did, and e2e-cxl.json, which tells it."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from guest import image
from guest.machine import DEVICE_OFFSET, Done, Guest
from guest.places import ROOT

RESULT = ROOT / "e2e-cxl.json"
REGION = "11111111-2222-4333-8444-555555555555"
SERIAL, OTHER = "0xc1", "0xc2"
REGION_SIZE = "256Mi"
POOL = "shared"
MANIFEST = """\
apiVersion: kvpool.dev/v1alpha1
kind: KVPool
metadata: {{name: {pool}}}
spec:
  hosts: 2
  tiers:
  - name: cxl
    medium: CXL
    capacity: {capacity}
    shared: true
    coherence: software
    source: {{path: /dev/dax0.0}}
"""

T = TypeVar("T")


class Shared:
    """Guests a (host 0) and b (host 1)."""

    def __init__(self, folder: Path) -> None:
        kvpool = folder / "kvpool.cpio"
        base = image.base()
        image.kvpool(kvpool)
        boots = [base / "kernel", base / "base.cpio", kvpool]
        memories = [folder / "memory.0", folder / "memory.1"]
        self.memory = memories[0]  # the one that the pool lies in
        self.a, self.b = (
            Guest(host, folder / name, boots, memories, [folder / f"labels.{name}{n}" for n in range(2)])
            for host, name in enumerate("ab")
        )
        self.counted: Counter[str] = Counter(stored=0, hits=0, misses=0, wrong=0, boots=0)
        self.told: dict[str, Any] = {}

    def end(self) -> None:
        """Switches off. What the guests said stays; their memories and archives do not."""
        for guest in (self.a, self.b):
            guest.kill()
            (guest.folder / "initrd").unlink(missing_ok=True)
        for path in self.memory.parent.iterdir():
            if path.is_file():
                path.unlink()

    def both(self, work: Callable[[Guest], T]) -> list[T]:
        """Does the same on both guests at the same time."""
        with ThreadPoolExecutor(2) as threads:
            return list(threads.map(work, (self.a, self.b)))

    def tell(self, **facts: Any) -> None:
        """Keeps what is found out in e2e-cxl.json."""
        self.told.update(facts)
        RESULT.write_text(json.dumps({**self.told, **self.counted}, indent=1) + "\n")

    # -- the memory ----------------------------------------------------------------------------------------

    def compose(self, guest: Guest, *more: str, size: str = REGION_SIZE) -> Any:
        done = guest.must(*_compose(size), *more, "--output", "json")
        return done.json()

    def compose_refused(self, guest: Guest, *more: str, size: str = REGION_SIZE) -> str:
        """The message with which a composition is refused."""
        return refused(guest.run(*_compose(size), *more))

    def flip_anywhere(self, count: int, capacity_bytes: int, seed: int) -> None:
        """Turns `count` bits of the pool, wherever: payloads, headers, directory, superblocks."""
        choose = random.Random(seed)
        with self.memory.open("r+b") as file:
            for _ in range(count):
                place = DEVICE_OFFSET + choose.randrange(capacity_bytes)
                file.seek(place)
                byte = file.read(1)[0]
                file.seek(place)
                file.write(bytes([byte ^ 1 << choose.randrange(8)]))

    def flip(self, needle: bytes, at: int = 0) -> bool:
        """Turns one bit where the memory holds `needle`, as failing hardware does."""
        with self.memory.open("r+b") as file:
            data = file.read()
            place = data.find(needle, DEVICE_OFFSET)
            if place < 0:
                return False
            file.seek(place + at)
            file.write(bytes([data[place + at] ^ 1]))
        return True

    # -- the pool ------------------------------------------------------------------------------------------

    def up(self, guest: Guest, capacity: str = "48Mi") -> Done:
        guest.write("/root/pool.yaml", MANIFEST.format(pool=POOL, capacity=capacity))
        return guest.must("kvpool", "up", "-f", "/root/pool.yaml", "--no-api")

    def down(self, guest: Guest) -> None:
        guest.call("close", pool=POOL)
        guest.must("kvpool", "down", POOL)

    def store(self, guest: Guest, seed: str, count: int, first: int = 0) -> dict[str, int]:
        found: dict[str, int] = guest.call("store", pool=POOL, seed=seed, first=first, count=count)
        self.counted["stored"] += found.get("stored", 0)
        self.tell()
        return found

    def load(self, guest: Guest, seed: str, count: int, first: int = 0) -> dict[str, int]:
        """What loading gives. A hit with other content than was stored ends the suite."""
        found: dict[str, int] = guest.call("load", pool=POOL, seed=seed, first=first, count=count)
        self.counted["hits"] += found["hit"]
        self.counted["wrong"] += found["wrong"]
        self.counted["misses"] += sum(n for reason, n in found.items() if reason.startswith("miss"))
        self.tell()
        assert found["wrong"] == 0, found
        return found


def refused(done: Done) -> str:
    assert done.code == 1, (done.out, done.err)
    return done.err


def _compose(size: str) -> list[str]:
    return ["kvpool", "cxl", "compose", "--uuid", REGION, "--memory", SERIAL, "--size", size]
