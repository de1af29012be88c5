"""The pool: the tiers of one KVPool, in order, as one store of blocks."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from kvpool.buffers import Blocks, Pages, to_native
from kvpool.engine_file import EngineFile
from kvpool.engines import close_report, open_report
from kvpool.errors import KvpoolError
from kvpool.keys import KeyBatch, Namespace
from kvpool.opened import Opened, spec_of
from kvpool.outcomes import (
    CODE_BY_REASON,
    HIT,
    PRESENT,
    REASON_BY_CODE,
    STORED,
    LoadResult,
    LookupResult,
    MissReason,
    StoreResult,
)
from kvpool.region import Role
from kvpool.report import Counters, PrefillCurve
from kvpool.spec import PoolSpec
from kvpool.text import valid
from kvpool.tiers.base import Tier

_NEVER_STORED = CODE_BY_REASON[MissReason.NEVER_STORED]
_WRONG_NAMESPACE = CODE_BY_REASON[MissReason.WRONG_NAMESPACE]
# How long an answer to "is this namespace known?" is good: it only names the reason of a miss.
_NAMESPACES_FRESH_S = 5.0


class Pool:
    """Blocks in and out of all tiers of one KVPool, for one process on one host.

    Threads: any thread may call; copies run without the GIL. Two running calls must not share a buffer.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        name: str = "",
        *,
        opened: Opened | None = None,
        report: EngineFile | None = None,
    ) -> None:
        """`opened`: how the tiers were opened, by which the pool follows its manifest. `report`: where this
        process counts what it does, besides the tiers."""
        if not tiers:
            raise KvpoolError(
                f"pool {name}: no tier can be opened here; it needs at least one DRAM or CXL tier"
            )
        self.name = name
        self.tiers: tuple[Tier, ...] = tuple(tiers)
        self._opened = opened
        self._report = report
        self._reporting = report is not None
        self._strangers: dict[bytes, tuple[float, bool]] = {}

    @classmethod
    def open(
        cls,
        target: str | Path | PoolSpec,
        *,
        host: int | None = None,
        role: Role = "engine",
        engine: str = "",
    ) -> Pool:
        """Attaches to the tiers of a pool that `kvpool up` or the operator has provisioned.

        While it is open it follows the manifest of the pool that runs: tiers come and go.
        `target`: a manifest, its path, or the name of a pool that runs on this machine. `host`: this
        process's host (shard of shared tiers), by default KVPOOL_HOST, or what the pool's daemon says, or 0.
        `engine`: equal in all processes of one engine, which are then shown as one.

        Raises: ManifestError, MediumUnavailable (a tier that is not optional cannot be opened), RegionError.
        """
        spec = target if isinstance(target, PoolSpec) else spec_of(target)
        opened = Opened(spec.name, role, host)
        tiers = opened.open(spec)
        try:
            names = [tier.name for tier in tiers]
            report = open_report(spec.name, opened.host, names, engine) if role == "engine" else None
            return cls(tiers, spec.name, opened=opened, report=report)
        except BaseException:
            for tier in tiers:
                tier.close()
            raise

    def _current(self) -> tuple[Tier, ...]:
        """The tiers as the manifest has them now; looked at once a second.

        A tier that goes is left when the last call that uses it is over: nothing here keeps it then.
        """
        tiers = self.tiers
        after = tiers if self._opened is None else self._opened.follow(tiers)
        if after is not tiers:
            self.tiers = after
        return after

    def close(self) -> None:
        """Leaves all tiers."""
        for tier in self.tiers:
            tier.close()
        report, self._reporting = self._report if self._reporting else None, False
        if report is not None:
            close_report(report)

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def lookup(self, keys: KeyBatch, *, count: bool = False) -> LookupResult:
        """Which of `keys` are in any tier; one reason a key, None = found. No side effects unless `count`.

        A hit is no promise: the block may be evicted before it is loaded, which is then a miss.
        """
        tiers = self._current()
        codes = tiers[0].lookup(keys).codes
        for tier in tiers[1:]:
            missing = [i for i, c in enumerate(codes) if c != HIT]
            if not missing:
                break
            codes = _merge(codes, missing, tier.lookup(keys.select(missing)).codes)
        codes = self._name_strangers(keys, codes)
        if count:
            hits, misses = codes.count(HIT), _reasons(codes)
            tiers[0].record(len(codes), hits, misses)
            if self._report is not None:
                self._report.served(keys.namespace, hits, misses, 0)
        return LookupResult(codes)

    def load(self, keys: KeyBatch, out: Blocks, *, count: bool = True) -> LoadResult:
        """Copy the payloads of `keys` into `out`, each one verified.

        Shapes:  n keys, len(out) == n; each block writable and exactly namespace.block_bytes, as one buffer,
                 a list of pieces, or `Pages`.
        Result:  reasons[i] is None on a hit; on a miss out[i] holds garbage and must not be used.
        Threads: any; the GIL is released while copying; two running calls must not share a buffer.
        Raises:  BufferShapeError, before anything is copied. Never for a miss, a full tier or a dead tier.
        Source:  DESIGN 4.4; PROTOCOL 2.
        """
        tiers = self._current()
        first = tiers[0].load(keys, out)
        codes, loaded = first.codes, first.bytes_loaded
        served = [codes.count(HIT)]
        for tier in tiers[1:]:
            missing = [i for i, c in enumerate(codes) if c != HIT]
            if not missing:
                break
            part = tier.load(keys.select(missing), _select(out, missing))
            codes = _merge(codes, missing, part.codes)
            served.append(part.hit_count)
            loaded += part.bytes_loaded
        codes = self._name_strangers(keys, codes)
        if count:
            misses = _reasons(codes)
            tiers[0].record(len(codes) - sum(served[1:]), served[0], misses)
            for tier, hits in zip(tiers[1:], served[1:], strict=False):
                if hits:
                    tier.record(hits, hits)
            if self._report is not None:
                self._report.served(keys.namespace, sum(served), misses, loaded)
        return LoadResult(codes, loaded)

    def store(self, keys: KeyBatch, blocks: Blocks) -> StoreResult:
        """Store the blocks that are not there yet, in every tier: upper ones are fast, others see the shared.

        Shapes:  as `load`, but read-only buffers will do.
        Result:  a block is stored (None), present before (None, counted in present_count), or declined with a
                 reason. A full tier evicts.
        Threads: any; the GIL is released while copying.
        Raises:  BufferShapeError, before anything is copied; NamespaceError: a block larger than an extent.
        Source:  DESIGN 4.3; PROTOCOL 1.
        """
        to_native(blocks, len(keys), keys.namespace.block_bytes, writable=False)  # all tiers or none
        tiers = self._current()
        codes = tiers[0].store(keys, blocks).codes
        for tier in tiers[1:]:
            codes = bytes(map(_better_store, codes, tier.store(keys, blocks).codes))
        result = StoreResult(codes)
        if self._report is not None:
            stored, present = result.stored_count, result.present_count
            declined = _reasons(codes) if stored + present < len(codes) else {}
            self._report.stored(keys.namespace, stored, present, declined)
        return result

    def record_misses(self, reason: MissReason, count: int, namespace: Namespace | None = None) -> None:
        """Counts blocks that the caller did not load: the hit rate is over all that could be served."""
        if count > 0:
            self.tiers[0].record(count, 0, {reason: count})
            if self._report is not None:
                self._report.served(namespace, 0, {reason: count}, 0)

    def record_saved(self, namespace: Namespace, seconds: float, blocks: int) -> None:
        """Counts the time that the caller would have computed, had it not loaded `blocks` blocks."""
        if self._report is not None and seconds > 0:
            self._report.saved(namespace, round(min(seconds, 1e9) * 1e6), blocks)

    def record_curve(self, curve: PrefillCurve) -> None:
        """Says how long the caller computes."""
        if self._report is not None:
            self._report.measured(curve)

    def record_use(self, namespace: Namespace) -> None:
        """Says that the caller uses `namespace`, before it does: what sets it apart can then be told."""
        if self._report is not None:
            self._report.know(namespace)

    def counters(self) -> Counters:
        """Totals of all processes on all hosts, since the tiers were formatted."""
        total = Counters()
        for tier in self.tiers:
            total = total + tier.counters()
        return total

    def _name_strangers(self, keys: KeyBatch, codes: bytes) -> bytes:
        """Says wrong-namespace, not never-stored, where the pool knows the model but not this namespace."""
        if _NEVER_STORED in codes and self._is_stranger(keys):
            return codes.replace(bytes([_NEVER_STORED]), bytes([_WRONG_NAMESPACE]))
        return codes

    def _is_stranger(self, keys: KeyBatch) -> bool:
        digest, now = keys.namespace.digest, time.monotonic()
        asked, stranger = self._strangers.get(digest, (0.0, False))
        if asked and now - asked < _NAMESPACES_FRESH_S:
            return stranger
        try:
            known = {d: n for tier in self.tiers for d, n in tier.known_namespaces().items()}
        except KvpoolError:  # a tier that fails gives its own reason to its blocks
            known = {}
        model = valid(keys.namespace.model)  # as descriptions have it
        stranger = digest.hex() not in known and any(n.get("model") == model for n in known.values())
        self._strangers[digest] = (now, stranger)
        return stranger


def _select(blocks: Blocks, indices: Sequence[int]) -> Blocks:
    if isinstance(blocks, Pages):
        return Pages(blocks.layout, [blocks.block_ids[i] for i in indices])
    return [blocks[i] for i in indices]


def _merge(codes: bytes, missing: Sequence[int], later: bytes) -> bytes:
    """What a later tier says of the missing ones; its "never stored" hides no better reason from above."""
    merged = bytearray(codes)
    for i, code in zip(missing, later, strict=True):
        if code != _NEVER_STORED:
            merged[i] = code
    return bytes(merged)


def _better_store(a: int, b: int) -> int:
    """Stored anywhere is stored, else present anywhere is present, else the first reason."""
    if STORED in (a, b):
        return STORED
    return PRESENT if PRESENT in (a, b) else a


def _reasons(codes: bytes) -> dict[MissReason, int]:
    if codes.count(HIT) == len(codes):
        return {}
    counts = Counter(codes)
    return {r: n for c, n in counts.items() if (r := REASON_BY_CODE[c]) is not None}
