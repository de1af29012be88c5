"""What makes two blocks interchangeable: namespaces, and the keys of blocks in them (DESIGN 2)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from kvpool import _native
from kvpool.errors import NamespaceError

KEY_BYTES = 32
HASH_BYTES = 32
_FORMAT = "kvpool namespace, version 1"


@dataclass(frozen=True)
class Namespace:
    """Everything that must be equal for two blocks to be interchangeable. Its digest is part of every key.

    `block_bytes` is the size of one block of one rank, all layers of the cache group together. `weights` is a
    fingerprint of the weights, not their name. `hash_scheme` names the engine's block hash with its seed:
    equal tokens must give equal hashes in every process that shares the namespace. `tenant` keeps tenants
    apart; it is in the digest but never in `describe()`.
    """

    model: str
    weights: str
    dtype: str
    kv_layout: str
    block_tokens: int
    block_bytes: int
    hash_scheme: str
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    cache_group: str = "0"
    tenant: str = ""
    extra: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("block_tokens", "block_bytes"):
            if getattr(self, name) <= 0:
                raise NamespaceError(f"namespace: {name} is {getattr(self, name)}; it must be 1 or more")
        for rank, size in (("tp_rank", "tp_size"), ("pp_rank", "pp_size")):
            if not 0 <= getattr(self, rank) < getattr(self, size):
                raise NamespaceError(
                    f"namespace: {rank} {getattr(self, rank)} is not in 0..{getattr(self, size) - 1} "
                    f"({size} {getattr(self, size)})"
                )

    def describe(self) -> dict[str, str | int]:
        """What people may see: every field but the tenant."""
        known: dict[str, str | int] = {
            "model": self.model,
            "weights": self.weights,
            "dtype": self.dtype,
            "kv_layout": self.kv_layout,
            "block_tokens": self.block_tokens,
            "block_bytes": self.block_bytes,
            "hash_scheme": self.hash_scheme,
            "tp_rank": self.tp_rank,
            "tp_size": self.tp_size,
            "pp_rank": self.pp_rank,
            "pp_size": self.pp_size,
            "cache_group": self.cache_group,
        }
        return known | {k: v for k, v in sorted(self.extra.items()) if k not in known}

    @cached_property
    def digest(self) -> bytes:
        """32 bytes: SHA-256 over a canonical form of all fields."""
        everything = [_FORMAT, self.describe(), sorted(self.extra.items()), self.tenant]
        return hashlib.sha256(json.dumps(everything, sort_keys=True, separators=(",", ":")).encode()).digest()

    def __hash__(self) -> int:
        return hash(self.digest)


@dataclass(frozen=True, slots=True)
class KeyBatch:
    """The keys of a batch of blocks, packed: n x 32 bytes. Slicing gives a batch."""

    namespace: Namespace
    packed: bytes

    @classmethod
    def from_hashes(cls, namespace: Namespace, hashes: Sequence[bytes] | bytes) -> KeyBatch:
        """Keys of the engine's block hashes: 32 bytes each, as a sequence or packed.

        Raises: NamespaceError for a hash that is not 32 bytes long: a shorter one, padded, could collide.
        """
        if not isinstance(hashes, (bytes, bytearray, memoryview)):
            try:
                for i, h in enumerate(hashes):
                    if len(h) != HASH_BYTES:
                        raise NamespaceError(
                            f"block hash {i} has {len(h)} bytes, expected {HASH_BYTES}. "
                            "Set the engine's hash algorithm to a SHA-256 one."
                        )
                hashes = b"".join(hashes)
            except TypeError:
                raise _not_bytes(hashes) from None
        if len(hashes) % HASH_BYTES:
            raise NamespaceError(
                f"packed block hashes: {len(hashes)} bytes are not a whole number of {HASH_BYTES}-byte hashes"
            )
        return cls(namespace, _native.make_keys(namespace.digest, bytes(hashes)))

    def __len__(self) -> int:
        return len(self.packed) // KEY_BYTES

    def __getitem__(self, part: slice) -> KeyBatch:
        start, stop, stride = part.indices(len(self))
        if stride != 1:
            raise NamespaceError("a batch of keys can only be sliced without a step")
        return KeyBatch(self.namespace, self.packed[start * KEY_BYTES : max(start, stop) * KEY_BYTES])

    def select(self, indices: Sequence[int]) -> KeyBatch:
        """The keys at `indices`, in that order."""
        p = self.packed
        return KeyBatch(self.namespace, b"".join(p[i * KEY_BYTES : (i + 1) * KEY_BYTES] for i in indices))


def _not_bytes(hashes: Sequence[object]) -> NamespaceError:
    """Names the first hash that is something else than bytes."""
    for i, h in enumerate(hashes):
        if not isinstance(h, (bytes, bytearray, memoryview)):
            return NamespaceError(
                f"block hash {i} is of type {type(h).__name__}, expected {HASH_BYTES} bytes"
            )
    return NamespaceError(f"block hashes cannot be joined, expected {HASH_BYTES} bytes each")
