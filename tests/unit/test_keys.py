"""Namespaces and keys: what makes blocks interchangeable, and nothing else, changes the keys."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from kvpool.errors import NamespaceError
from kvpool.keys import HASH_BYTES, KEY_BYTES, KeyBatch, Namespace
from strategies import block_hash, keys_of, namespace

# A value of every field that differs from the one that strategies.namespace() gives.
OTHER: dict[str, object] = {
    "model": "other",
    "weights": "0" * 64,
    "dtype": "float16",
    "kv_layout": "HND",
    "block_tokens": 32,
    "block_bytes": 8192,
    "hash_scheme": "sha256 seed 1",
    "tp_rank": 1,
    "tp_size": 4,
    "pp_rank": 1,
    "pp_size": 4,
    "cache_group": "1",
    "tenant": "b",
    "extra": {"lora": "x"},
}
BASE: dict[str, object] = {"tp_size": 2, "pp_size": 2}


@pytest.mark.parametrize("field", sorted(OTHER))
def test_namespace_any_field_differs_digest_and_keys_differ(field: str) -> None:
    a = namespace(**BASE)
    b = namespace(**{**BASE, field: OTHER[field]})
    assert a != b
    assert a.digest != b.digest
    assert keys_of(a, [0]).packed != keys_of(b, [0]).packed


def test_namespace_equal_fields_equal_digest() -> None:
    a, b = namespace(extra={"x": "1", "y": "2"}), namespace(extra={"y": "2", "x": "1"})
    assert a == b
    assert hash(a) == hash(b)
    assert a.digest == b.digest
    assert len(a.digest) == 32


def test_namespace_digest_is_the_one_of_format_1() -> None:
    """Other processes and later builds find what was stored under it."""
    assert namespace(4096).digest.hex() == "2c425f693604922b32a5ee049b4e2639bd5eca51961a14fbccc725ef22aa9845"
    assert (
        keys_of(namespace(4096), [7]).packed.hex()
        == "6a6dfa3b7a9152a0d6a21403b4325e4b83e774a98955f500e97d9defb9b197dd"
    )


def test_namespace_field_values_cannot_run_into_each_other() -> None:
    assert namespace(extra={"a": "b,c"}).digest != namespace(extra={"a": "b", "c": ""}).digest
    assert namespace(model="a", weights="bc").digest != namespace(model="ab", weights="c").digest
    assert namespace(extra={"model": "x"}).digest != namespace().digest


def test_namespace_describe_shows_everything_but_the_tenant() -> None:
    shown = namespace(tenant="secret-tenant", extra={"lora": "x"}).describe()
    assert "secret-tenant" not in str(shown)
    assert shown["lora"] == "x"
    assert shown["block_bytes"] == 4096
    assert set(OTHER) - {"tenant", "extra"} <= set(shown)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"block_bytes": 0}, "block_bytes is 0; it must be 1 or more"),
        ({"block_bytes": -4096}, "block_bytes is -4096"),
        ({"block_tokens": 0}, "block_tokens is 0"),
        ({"tp_rank": 2, "tp_size": 2}, r"tp_rank 2 is not in 0\.\.1"),
        ({"tp_rank": -1}, "tp_rank -1 is not in"),
        ({"pp_rank": 1}, r"pp_rank 1 is not in 0\.\.0"),
    ],
)
def test_namespace_impossible_value_is_named(fields: dict[str, object], message: str) -> None:
    with pytest.raises(NamespaceError, match=message):
        namespace(**{"block_bytes": 4096, **fields})  # type: ignore[arg-type]


def test_keys_are_sha256_of_tag_namespace_and_hash() -> None:
    keys = keys_of(namespace(), range(5))
    assert len(keys) == 5
    assert len(keys.packed) == 5 * KEY_BYTES
    assert len({keys.packed[i : i + KEY_BYTES] for i in range(0, len(keys.packed), KEY_BYTES)}) == 5
    assert hashlib.sha256().digest_size == KEY_BYTES == HASH_BYTES


def test_keys_from_a_sequence_or_packed_are_the_same() -> None:
    ns, hashes = namespace(), [block_hash(i) for i in range(4)]
    packed = b"".join(hashes)
    for given in (tuple(hashes), packed, bytearray(packed), memoryview(packed)):
        assert KeyBatch.from_hashes(ns, given).packed == KeyBatch.from_hashes(ns, hashes).packed


@pytest.mark.parametrize("length", [0, 8, 16, 31, 33, 64])
def test_keys_hash_of_another_length_is_refused_and_named(length: int) -> None:
    with pytest.raises(NamespaceError, match=f"block hash 1 has {length} bytes, expected 32.*SHA-256"):
        KeyBatch.from_hashes(namespace(), [block_hash(0), b"x" * length])


def test_keys_packed_hashes_not_whole_are_refused() -> None:
    with pytest.raises(NamespaceError, match="65 bytes are not a whole number of 32-byte hashes"):
        KeyBatch.from_hashes(namespace(), b"x" * 65)


def test_keys_slices_and_selections_keep_the_namespace() -> None:
    keys = keys_of(namespace(), range(6))
    assert keys[2:4].packed == keys_of(namespace(), [2, 3]).packed
    assert keys[-2:].packed == keys_of(namespace(), [4, 5]).packed
    assert len(keys[4:2]) == len(keys[9:]) == 0
    assert keys.select([5, 0, 5]).packed == keys_of(namespace(), [5, 0, 5]).packed
    assert keys[1:].namespace == keys.select([]).namespace == namespace()
    with pytest.raises(NamespaceError, match="without a step"):
        keys[::2]


@pytest.mark.parametrize(("wrong", "kind"), [("x" * 32, "str"), (7, "int"), (None, "NoneType")])
def test_key_batch_hash_that_is_not_bytes_is_named(wrong: object, kind: str) -> None:
    hashes: list[Any] = [block_hash(0), wrong]
    with pytest.raises(NamespaceError, match=f"block hash 1 is of type {kind}, expected 32 bytes"):
        KeyBatch.from_hashes(namespace(), hashes)


def test_keys_of_nothing_are_an_empty_batch() -> None:
    assert len(KeyBatch.from_hashes(namespace(), [])) == len(KeyBatch.from_hashes(namespace(), b"")) == 0


def test_namespace_survives_as_a_dictionary_key() -> None:
    seen: dict[Namespace, int] = {namespace(extra={"a": "b"}): 1}
    assert seen[namespace(extra={"a": "b"})] == 1
