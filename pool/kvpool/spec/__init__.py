"""The KVPool manifest: the only reader of it, and all rules that it keeps."""

from __future__ import annotations

from kvpool.spec.manifest import InvalidManifest, PoolSpec
from kvpool.spec.mistakes import Problem
from kvpool.spec.tier import Coherence, Eviction, Medium, Source, TierSpec

__all__ = [
    "Coherence",
    "Eviction",
    "InvalidManifest",
    "Medium",
    "PoolSpec",
    "Problem",
    "Source",
    "TierSpec",
]
