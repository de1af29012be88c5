"""kvpool: one tiered, shared pool of LLM KV-cache blocks.

Public names are loaded when they are first used: `kvpool.spec` and `kvpool.report` need no compiled part.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvpool.buffers import PageLayout as PageLayout
    from kvpool.buffers import Pages as Pages
    from kvpool.errors import BufferShapeError as BufferShapeError
    from kvpool.errors import KvpoolError as KvpoolError
    from kvpool.errors import ManifestError as ManifestError
    from kvpool.errors import MediumUnavailable as MediumUnavailable
    from kvpool.errors import NamespaceError as NamespaceError
    from kvpool.errors import RegionError as RegionError
    from kvpool.keys import KeyBatch as KeyBatch
    from kvpool.keys import Namespace as Namespace
    from kvpool.outcomes import LoadResult as LoadResult
    from kvpool.outcomes import LookupResult as LookupResult
    from kvpool.outcomes import MissReason as MissReason
    from kvpool.outcomes import StoreResult as StoreResult
    from kvpool.pool import Pool as Pool
    from kvpool.region import Geometry as Geometry
    from kvpool.region import Region as Region
    from kvpool.report import Counters as Counters
    from kvpool.report import PrefillCurve as PrefillCurve
    from kvpool.spec import PoolSpec as PoolSpec

_HOME = {
    "BufferShapeError": "errors",
    "Counters": "report",
    "Geometry": "region",
    "KeyBatch": "keys",
    "KvpoolError": "errors",
    "LoadResult": "outcomes",
    "LookupResult": "outcomes",
    "ManifestError": "errors",
    "MediumUnavailable": "errors",
    "MissReason": "outcomes",
    "Namespace": "keys",
    "NamespaceError": "errors",
    "PageLayout": "buffers",
    "Pages": "buffers",
    "Pool": "pool",
    "PoolSpec": "spec",
    "PrefillCurve": "report",
    "Region": "region",
    "RegionError": "errors",
    "StoreResult": "outcomes",
}
__all__ = sorted(_HOME)  # pyright: ignore
__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'kvpool' has no attribute {name!r}")
    return getattr(import_module(f"kvpool.{_HOME[name]}"), name)
