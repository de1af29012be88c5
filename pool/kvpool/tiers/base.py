"""What a pool expects of a tier."""

from __future__ import annotations

from typing import Protocol

from kvpool.buffers import Blocks
from kvpool.keys import KeyBatch
from kvpool.outcomes import LoadResult, LookupResult, MissReason, StoreResult
from kvpool.report import Counters, Usage


class Tier(Protocol):
    """One medium, as declared in a KVPool.

    Threads: any. `lookup` has no side effects. No call raises for a miss, a full tier or a medium that failed: these are reasons. Buffers that do
    not fit raise BufferShapeError before anything is copied.
    """

    name: str
    medium: str
    path: str
    shared: bool

    def lookup(self, keys: KeyBatch) -> LookupResult: ...
    def load(self, keys: KeyBatch, out: Blocks) -> LoadResult: ...
    def store(self, keys: KeyBatch, blocks: Blocks) -> StoreResult: ...
    def record(self, lookups: int, hits: int, misses: dict[MissReason, int] | None = None) -> None: ...
    def counters(self) -> Counters: ...
    def usage(self) -> Usage: ...
    def known_namespaces(self) -> dict[str, dict[str, object]]: ...
    def close(self) -> None: ...
