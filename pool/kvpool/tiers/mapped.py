"""Tiers of mapped memory: DRAM (a file on /dev/shm or hugetlbfs) and CXL (a DAX device or file)."""

from __future__ import annotations

from dataclasses import dataclass

from kvpool.buffers import Blocks
from kvpool.keys import KeyBatch
from kvpool.outcomes import LoadResult, LookupResult, MissReason, StoreResult
from kvpool.region import Region
from kvpool.report import Counters, Usage


@dataclass(frozen=True, slots=True)
class MappedTier:
    """A tier over one attached region."""

    name: str
    medium: str
    shared: bool
    region: Region

    @property
    def path(self) -> str:
        return self.region.path

    def lookup(self, keys: KeyBatch) -> LookupResult:
        return self.region.lookup(keys)

    def load(self, keys: KeyBatch, out: Blocks) -> LoadResult:
        return self.region.load(keys, out)

    def store(self, keys: KeyBatch, blocks: Blocks) -> StoreResult:
        return self.region.store(keys, blocks)

    def record(self, lookups: int, hits: int, misses: dict[MissReason, int] | None = None) -> None:
        self.region.record(lookups, hits, misses)

    def counters(self) -> Counters:
        return self.region.counters()

    def usage(self) -> Usage:
        return self.region.usage()

    def known_namespaces(self) -> dict[str, dict[str, object]]:
        return self.region.known_namespaces()

    def close(self) -> None:
        self.region.close()
