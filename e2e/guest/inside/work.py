"""The work of an engine in a guest: blocks whose content follows from their number, stored and checked."""

from __future__ import annotations

import hashlib
import mmap
import os
import threading
from collections import Counter
from collections.abc import Callable
from uuid import UUID

from kvpool import KeyBatch, Namespace, Pool
from kvpool.cxl import ComposeError, Wanted
from kvpool.cxl.kernel import Kernel
from kvpool.cxl.sysfs import SysfsBackend

BLOCK_BYTES = 16384
BATCH = 16
STEPS_MAX = 40  # more than a composition has

_pools: dict[str, Pool] = {}
_stored_count = 0  # by store_on_and_on


def namespace() -> Namespace:
    return Namespace(
        model="guest",
        weights="none",
        dtype="float32",
        kv_layout="flat",
        block_tokens=16,
        block_bytes=BLOCK_BYTES,
        hash_scheme="sha256",
    )


def content(seed: str, number: int) -> bytes:
    return hashlib.shake_128(f"{seed} {number}".encode()).digest(BLOCK_BYTES)


def keys(seed: str, numbers: range) -> KeyBatch:
    hashes = [hashlib.sha256(f"{seed} {number}".encode()).digest() for number in numbers]
    return KeyBatch.from_hashes(namespace(), hashes)


def _pool(name: str) -> Pool:
    if name not in _pools:
        _pools[name] = Pool.open(name)
    return _pools[name]


def close(pool: str) -> None:
    """Leaves the pool, so that its device can be taken away."""
    opened = _pools.pop(pool, None)
    if opened is not None:
        opened.close()


def _batches(first: int, count: int) -> list[range]:
    return [range(at, min(at + BATCH, first + count)) for at in range(first, first + count, BATCH)]


def store(pool: str, seed: str, first: int, count: int) -> dict[str, int]:
    """How many of the blocks were stored, were there, or were declined, by reason."""
    found: Counter[str] = Counter()
    for numbers in _batches(first, count):
        result = _pool(pool).store(keys(seed, numbers), [content(seed, number) for number in numbers])
        found["stored"] += result.stored_count
        found["present"] += result.present_count
        found.update(f"declined {reason.value}" for reason in result.reasons if reason is not None)
    return {key: count for key, count in found.items() if count}


def load(pool: str, seed: str, first: int, count: int) -> dict[str, int]:
    """How many of the blocks were hits, misses by reason, and hits whose content is not what was stored."""
    found: Counter[str] = Counter(hit=0, wrong=0)
    for numbers in _batches(first, count):
        out = [bytearray(BLOCK_BYTES) for _ in numbers]
        result = _pool(pool).load(keys(seed, numbers), out)
        for number, reason, got in zip(numbers, result.reasons, out, strict=True):
            if reason is not None:
                found[f"miss {reason.value}"] += 1
            else:
                found["hit"] += 1
                found["wrong"] += bytes(got) != content(seed, number)
    return dict(found)


def store_on_and_on(pool: str, seed: str) -> None:
    """Stores block after block in the background; `stored_so_far` tells how many are there."""

    def go() -> None:
        global _stored_count
        first = 0
        while True:
            store(pool, seed, first, BATCH)
            first += BATCH
            _stored_count = first

    threading.Thread(target=go, daemon=True).start()


def stored_so_far() -> int:
    return _stored_count


def write_device(path: str, seed: str) -> None:
    """Fills the first MiB of a device."""
    with _mapped(path) as device:
        device[: len(_pattern(seed))] = _pattern(seed)


def device_has(path: str, seed: str) -> bool:
    """Whether the first MiB of a device is what `write_device` wrote."""
    with _mapped(path) as device:
        return device[: len(_pattern(seed))] == _pattern(seed)


def _mapped(path: str) -> mmap.mmap:
    file = os.open(path, os.O_RDWR)
    try:
        return mmap.mmap(file, 2 << 20)
    finally:
        os.close(file)


def _pattern(seed: str) -> bytes:
    return hashlib.shake_128(seed.encode()).digest(1 << 20)


def fail_at_each_step(uuid: str, memories: list[str], size_bytes: int) -> list[str]:
    """Composes with an error injected at the 1st, 2nd, ... change of the kernel's state, until none is left.

    Each failure must leave the kernel as it was. Returns what was made to fail, in order.
    """

    def fail() -> None:
        raise OSError(5, "injected error")

    wanted, failed = Wanted(UUID(uuid), tuple(memories), size_bytes), []
    for step in range(1, STEPS_MAX):
        kernel = _Stopping(step, before=fail)
        try:
            SysfsBackend(kernel).compose(wanted)
        except ComposeError:
            failed.append(kernel.last)
            _nothing_is_left(kernel.last)
        else:
            SysfsBackend().destroy(wanted.uuid)
            _nothing_is_left("all went well, and it was destroyed")
            return failed
    raise AssertionError("the composition never came to its end")


def die_at_each_step(uuid: str, memories: list[str], size_bytes: int) -> int:
    """Composes in processes that die after the 1st, 2nd, ... change of the kernel's state.

    After each, what is left is listed, and the same composition succeeds. Returns how many died.
    """

    def die() -> None:
        os._exit(9)

    wanted, backend = Wanted(UUID(uuid), tuple(memories), size_bytes), SysfsBackend()
    for step in range(1, STEPS_MAX):
        pid = os.fork()
        if pid == 0:
            SysfsBackend(_Stopping(step, after=die)).compose(wanted)
            os._exit(0)
        if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0:
            backend.destroy(wanted.uuid)
            return step - 1
        left = backend.regions()
        if len(left) != 1:
            raise AssertionError(f"after step {step}: {left}")
        if backend.compose(wanted).device is None:
            raise AssertionError(f"after step {step}: no device")
        for region in backend.regions():  # the first step leaves one without a UUID
            backend.destroy(region.uuid)
        _nothing_is_left(f"step {step}")
    raise AssertionError("the composition never came to its end")


class _Stopping(Kernel):
    """The kernel, with something else happening at one of the changes of its state."""

    def __init__(
        self, step: int, *, before: Callable[[], None] | None = None, after: Callable[[], None] | None = None
    ) -> None:
        super().__init__()
        self._left, self._before, self._after = step, before, after
        self.last = ""

    def _change(self, what: str, change: Callable[[], str]) -> str:
        self._left -= 1
        if self._left == 0 and self._before:
            self.last = what
            self._before()
        said = change()
        if self._left == 0 and self._after:
            self._after()
        return said

    def write(self, path: str, text: str) -> None:
        def change() -> str:
            super(_Stopping, self).write(path, text)
            return ""

        self._change(f"{path.split('/')[-1]} {text}", change)

    def run(self, *command: str) -> str:
        if command[1] != "create-namespace":
            return super().run(*command)
        return self._change(command[1], lambda: super(_Stopping, self).run(*command))


def _nothing_is_left(after: str) -> None:
    kernel, devices = Kernel(), "bus/cxl/devices"
    regions = SysfsBackend(kernel).regions()
    busy = [name for name in kernel.names(devices) if kernel.number(f"{devices}/{name}/dpa_size")]
    if regions or busy:
        raise AssertionError(f"left after {after}: {regions}, decoders with memory: {busy}")
