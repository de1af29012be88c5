"""A fingerprint of a model's weights: equal for equal files, different when any tensor was trained further.

Reading tens of gigabytes at each start would take longer than the pool saves, so the default reads a few
pages of every tensor. A change of a few values in one tensor can escape that; `full` reads every byte.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz")
# Files with such endings that hold no weights.
NOT_WEIGHTS = frozenset({"training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth"})
# Keys of a model's configuration that do not change what it computes.
CONFIG_NOISE = frozenset({"_name_or_path", "_commit_hash", "transformers_version"})

SAMPLE_BYTES = 4096
SAMPLES_PER_TENSOR = 3
# For formats without an index of tensors: this many samples over the whole file.
SAMPLES_PER_FILE = 256
# A safetensors header names every tensor; real ones are some MB, anything above this is not such a file.
HEADER_BYTES_MAX = 100 << 20
READ_BYTES = 1 << 22

Thoroughness = Literal["sampled", "full"]


def weight_files(folder: Path) -> list[Path]:
    """The weight files of a model folder, in order of their names."""
    return sorted(
        path
        for path in folder.iterdir()
        if path.suffix in WEIGHT_SUFFIXES and path.name not in NOT_WEIGHTS and path.is_file()
    )


def fingerprint(
    files: Iterable[Path], config: Mapping[str, Any], thoroughness: Thoroughness = "sampled"
) -> str:
    """Hex digest over the files' sizes and content and over the configuration, not over folders' names."""
    digest = hashlib.sha256(f"kvpool-weights-1:{thoroughness}".encode())
    digest.update(_canonical(config))
    for path in files:
        size = path.stat().st_size
        digest.update(f"\0{path.name}\0{size}\0".encode())
        with path.open("rb", buffering=0) as file:
            if thoroughness == "full":
                while chunk := file.read(READ_BYTES):
                    digest.update(chunk)
                continue
            for start, length in _samples(path, file.read(8), size):
                file.seek(start)
                digest.update(file.read(length))
    return digest.hexdigest()


def _canonical(config: Mapping[str, Any]) -> bytes:
    return json.dumps(_without_noise(config), sort_keys=True, default=str, separators=(",", ":")).encode()


def _without_noise(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _without_noise(item) for key, item in value.items() if key not in CONFIG_NOISE}
    return value


def _samples(path: Path, head: bytes, size: int) -> Iterator[tuple[int, int]]:
    """The (start, length) pieces of a file that count, beginning with its header."""
    if path.suffix == ".safetensors" and len(head) == 8:
        (header_bytes,) = struct.unpack("<Q", head)
        ranges = _tensor_ranges(path, header_bytes, size)
        if ranges is not None:
            yield 0, 8 + header_bytes
            for start, end in ranges:
                yield from _spread(8 + header_bytes + start, 8 + header_bytes + end, SAMPLES_PER_TENSOR)
            return
    yield from _spread(0, size, SAMPLES_PER_FILE)


def _tensor_ranges(path: Path, header_bytes: int, size: int) -> list[tuple[int, int]] | None:
    """Where the tensors lie behind the header; None when this is not the header of such a file."""
    if header_bytes > min(HEADER_BYTES_MAX, size - 8):
        return None
    with path.open("rb") as file:
        file.seek(8)
        text = file.read(header_bytes)
    try:
        entries = json.loads(text).items()
        ranges = [tuple(entry["data_offsets"]) for name, entry in entries if name != "__metadata__"]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None
    right = all(
        len(r) == 2 and all(type(n) is int for n in r) and 0 <= r[0] <= r[1] <= size - 8 - header_bytes
        for r in ranges
    )
    return sorted(ranges) if right else None


def _spread(start: int, end: int, count: int) -> Iterator[tuple[int, int]]:
    """`count` pieces from the beginning to the end of a range, or the whole of a short one."""
    if end - start <= count * SAMPLE_BYTES:
        yield start, end - start
        return
    last = end - SAMPLE_BYTES
    for i in range(count):
        yield start + (last - start) * i // (count - 1), SAMPLE_BYTES


def find_weights(model: str, *, revision: str | None = None, cache_folder: str | None = None) -> list[Path]:
    """The weight files of a model: a folder, one file, or the name of one that was downloaded from the hub.

    Empty when there are none that can be read here.
    """
    path = Path(model)
    if path.is_file():
        return [path]
    if not path.is_dir():
        try:
            from huggingface_hub import snapshot_download

            path = Path(
                snapshot_download(model, revision=revision, cache_dir=cache_folder, local_files_only=True)
            )
        except Exception:  # not downloaded, not a hub name, no such package: there are no files here
            return []
    return weight_files(path)
