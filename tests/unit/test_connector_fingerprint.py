"""Weights with equal bytes have equal fingerprints; others do not."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path

import pytest

from kvpool_connector.fingerprint import SAMPLE_BYTES, find_weights, fingerprint, weight_files

CONFIG = {"hidden_size": 64, "rope_theta": 10000.0}
TENSOR_BYTES = 20 * SAMPLE_BYTES


def safetensors(path: Path, tensors: dict[str, bytes]) -> Path:
    header, offset = {}, 0
    for name, data in tensors.items():
        header[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    head = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(head)) + head + b"".join(tensors.values()))
    return path


def tensors(seed: int = 0) -> dict[str, bytes]:
    return {f"layer.{i}": random.Random(seed * 100 + i).randbytes(TENSOR_BYTES) for i in range(4)}


def of(folder: Path, **options: object) -> str:
    return fingerprint(weight_files(folder), CONFIG, **options)  # type: ignore[arg-type]


def test_equal_files_in_other_folders_are_the_same_weights(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        safetensors(tmp_path / name / "model.safetensors", tensors())
    assert of(tmp_path / "a") == of(tmp_path / "b")
    assert of(tmp_path / "a") != of(tmp_path / "a", thoroughness="full")


@pytest.mark.parametrize("changed", ["layer.0", "layer.3"])
def test_one_tensor_trained_further_is_other_weights(tmp_path: Path, changed: str) -> None:
    safetensors(tmp_path / "model.safetensors", tensors())
    before = of(tmp_path)
    safetensors(tmp_path / "model.safetensors", tensors() | {changed: tensors(1)[changed]})
    assert of(tmp_path) != before


def test_one_byte_escapes_the_samples_but_not_the_full_check(tmp_path: Path) -> None:
    path = safetensors(tmp_path / "model.safetensors", tensors())
    sampled, full = of(tmp_path), of(tmp_path, thoroughness="full")
    data = bytearray(path.read_bytes())
    data[-2 * SAMPLE_BYTES] ^= 1  # between the last two samples of the last tensor
    path.write_bytes(data)
    assert of(tmp_path) == sampled
    assert of(tmp_path, thoroughness="full") != full


def test_configuration_counts_but_not_where_it_came_from() -> None:
    assert fingerprint((), CONFIG) != fingerprint((), CONFIG | {"rope_theta": 1e6})
    noise = {"_name_or_path": "/elsewhere", "transformers_version": "9"}
    assert fingerprint((), CONFIG) == fingerprint((), CONFIG | noise)
    assert fingerprint((), {"text": CONFIG}) == fingerprint((), {"text": CONFIG | noise})


def test_formats_without_an_index_are_sampled_over_the_file(tmp_path: Path) -> None:
    data = bytearray(random.Random(3).randbytes(300 * SAMPLE_BYTES))
    (tmp_path / "pytorch_model.bin").write_bytes(data)
    before = of(tmp_path)
    data[100 * SAMPLE_BYTES : 140 * SAMPLE_BYTES] = random.Random(4).randbytes(40 * SAMPLE_BYTES)
    (tmp_path / "pytorch_model.bin").write_bytes(data)
    assert of(tmp_path) != before


@pytest.mark.parametrize("head", [b"", b"1234", struct.pack("<Q", 1 << 60), struct.pack("<Q", 4) + b"{}  "])
def test_damaged_header_is_no_error(tmp_path: Path, head: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(head)
    assert len(of(tmp_path)) == 64


def test_what_is_no_weight_file_does_not_count(tmp_path: Path) -> None:
    safetensors(tmp_path / "model.safetensors", tensors())
    before = of(tmp_path)
    for name in ("tokenizer.json", "training_args.bin", "README.md"):
        (tmp_path / name).write_bytes(b"x")
    assert of(tmp_path) == before


def test_find_weights_takes_folders_and_files(tmp_path: Path) -> None:
    file = safetensors(tmp_path / "model.safetensors", tensors())
    assert find_weights(str(tmp_path)) == [file]
    assert find_weights(str(file)) == [file]
    assert find_weights(str(tmp_path / "missing")) == []
