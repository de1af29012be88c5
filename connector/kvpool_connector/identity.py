"""Which vLLM engines may use the pool, and what must be equal for two of them to share blocks.

Works on the engine's configuration objects as they are, without importing the engine. Whatever is missing in
an older or newer version has a default here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvpool import Namespace

from .fingerprint import find_weights, fingerprint
from .settings import Settings, SettingsError

# Cache groups whose blocks hold the whole KV of their tokens and depend on nothing but the tokens before.
WHOLE_BLOCK_SPECS = frozenset({"FullAttentionSpec", "MLAAttentionSpec"})
# 32-byte hashes that cannot be made to collide. The others are shorter, too.
CRYPTOGRAPHIC_HASHES = frozenset({"sha256", "sha256_cbor"})
# Drafting that keeps no KV of its own. What every other kind puts into the cache depends on later tokens.
DRAFTS_WITHOUT_KV = frozenset({"ngram", "ngram_gpu", "suffix"})
# KV cache types whose scales are constants of the model or absent.
PLAIN_CACHE_TYPES = frozenset(
    {"auto", "float32", "float16", "half", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2"}
)
# Ways to stretch positions that look at the engine's length limit.
LENGTH_DEPENDENT_ROPE = frozenset({"longrope", "su", "dynamic", "dynamic_alpha"})


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """What the worker sees of its own cache."""

    name: str  # the engine's name of the layout, such as LBHNC
    insides: Sequence[str]  # one a layer, see pages.Layer
    block_bytes: int
    attention: str  # backend, and the instruction set where it matters


def refuse_unsupported(config: Any, cache_config: Any, *, loads: bool) -> None:
    """Raises SettingsError for an engine that could be served wrong blocks, or that would fail requests."""
    parallel = config.parallel_config
    for name, option in (
        ("pipeline_parallel_size", "--pipeline-parallel-size"),
        ("decode_context_parallel_size", "--decode-context-parallel-size"),
        ("prefill_context_parallel_size", "--prefill-context-parallel-size"),
    ):
        if getattr(parallel, name, 1) > 1:
            raise SettingsError(
                f"kvpool: {name}={getattr(parallel, name)} is not supported: a block's KV would be "
                "spread over ranks that do not know of each other's failed loads. "
                f"Set {option} 1, or leave the connector out."
            )
    _refuse_groups(cache_config)
    _refuse_cache_types(config)
    speculative = getattr(config, "speculative_config", None)
    method = getattr(speculative, "method", None)
    if speculative is not None and method not in DRAFTS_WITHOUT_KV:
        raise SettingsError(
            f"kvpool: speculative method {method!r} keeps KV that depends on tokens behind the block: "
            f"equal hashes do not mean equal blocks. Use {', '.join(sorted(DRAFTS_WITHOUT_KV))}, or none."
        )
    policy = getattr(config.kv_transfer_config, "kv_load_failure_policy", "recompute")
    if loads and policy != "recompute":
        raise SettingsError(
            f"kvpool: kv_load_failure_policy is {policy!r}: a request whose block was damaged or evicted "
            'would end with an error. Set "kv_load_failure_policy": "recompute" in --kv-transfer-config '
            "(with MultiConnector: there, and again in this connector's own entry)."
        )


def _refuse_groups(cache_config: Any) -> None:
    groups = cache_config.kv_cache_groups
    if len(groups) != 1:
        kinds = sorted({type(group.kv_cache_spec).__name__ for group in groups})
        raise SettingsError(
            f"kvpool: the model has {len(groups)} KV cache groups ({', '.join(kinds)}); this version "
            "supports one group of full attention. Models that mix in sliding windows work with "
            "--disable-hybrid-kv-cache-manager; models with recurrent layers (Mamba) do not work yet."
        )
    for spec in _layer_specs(groups[0].kv_cache_spec):
        kind = type(spec).__name__
        if kind not in WHOLE_BLOCK_SPECS:
            raise SettingsError(
                f"kvpool: KV cache of kind {kind} is not supported: its blocks lack KV of their tokens. "
                f"Supported: {', '.join(sorted(WHOLE_BLOCK_SPECS))}. A sliding-window model works with "
                "--disable-hybrid-kv-cache-manager."
            )
        if getattr(spec, "non_causal", False):
            raise SettingsError(
                "kvpool: the model attends to later tokens; its blocks cannot be shared by prefix."
            )


def _layer_specs(spec: Any) -> list[Any]:
    """The specs of the group's layers: one for all, or a uniform type with one for each."""
    by_layer = getattr(spec, "kv_cache_specs", None)
    return list(by_layer.values()) if isinstance(by_layer, Mapping) else [spec]


def _refuse_cache_types(config: Any) -> None:
    cache_type = str(config.cache_config.cache_dtype)
    if cache_type not in PLAIN_CACHE_TYPES:
        raise SettingsError(
            f"kvpool: --kv-cache-dtype {cache_type} is not supported: its scales may lie outside the blocks. "
            f"Use one of {', '.join(sorted(PLAIN_CACHE_TYPES))}."
        )
    if getattr(config.cache_config, "calculate_kv_scales", False):
        raise SettingsError(
            "kvpool: --calculate-kv-scales makes scales from an engine's first requests: its blocks mean "
            "something else to every other engine. Leave it out, and use a model that brings its scales."
        )


def block_tokens(config: Any, cache_config: Any) -> tuple[int, int]:
    """(tokens of a block, tokens of one of the engine's hashes)."""
    block = int(cache_config.kv_cache_groups[0].kv_cache_spec.block_size)
    hashed = int(getattr(cache_config, "hash_block_size", None) or block)
    if block % hashed:
        raise SettingsError(f"kvpool: blocks of {block} tokens are not made of hashes over {hashed} tokens.")
    return block, hashed


def hash_scheme(
    config: Any, hashed_tokens: int, *, environment: Mapping[str, str], fixed_seed: str | None
) -> str:
    """What the engine's block hashes are made with. `fixed_seed`: the version's own seed, None if random.

    Raises SettingsError when another process would make other hashes of the same tokens.
    """
    algorithm = str(config.cache_config.prefix_caching_hash_algo)
    if algorithm not in CRYPTOGRAPHIC_HASHES:
        raise SettingsError(
            f"kvpool: --prefix-caching-hash-algo {algorithm}: its hashes differ between processes or can be "
            "made to collide. Set --prefix-caching-hash-algo sha256_cbor in every engine of the pool."
        )
    seed = environment.get("PYTHONHASHSEED", fixed_seed)
    if seed is None or seed == "random":
        raise SettingsError(
            "kvpool: this engine starts its block hashes from a random number: no other process finds its "
            "blocks. Set PYTHONHASHSEED=0 (or another number, the same everywhere) in the environment of "
            "every engine of the pool."
        )
    short = hashlib.sha256(seed.encode()).hexdigest()[:12]
    return f"vllm/{algorithm}/{hashed_tokens}/{short}"


def weights(config: Any, settings: Settings) -> str:
    """Fingerprint of the model's files and configuration, or what the user gave."""
    model = config.model_config
    description = _as_dict(model.hf_config)
    if settings.weights_fingerprint is not None:
        return f"given/{settings.weights_fingerprint}/{fingerprint((), description)[:16]}"
    load = getattr(config, "load_config", None)
    load_format = str(
        getattr(getattr(load, "load_format", "auto"), "value", getattr(load, "load_format", "auto"))
    )
    files = []
    if load_format != "dummy":
        files = find_weights(
            str(model.model),
            revision=getattr(model, "revision", None),
            cache_folder=getattr(load, "download_dir", None),
        )
    if not files:
        raise SettingsError(
            f"kvpool: no weight files of {model.model!r} (load format {load_format}) on this machine to tell "
            "them from others of the same name. Set kv_connector_extra_config.weights_fingerprint to "
            "something that changes with the weights, such as the commit of the checkpoint."
        )
    return fingerprint(files, description, settings.weights_check)


def namespace(
    config: Any,
    settings: Settings,
    layout: CacheLayout,
    *,
    tp_rank: int,
    block: int,
    scheme: str,
    weights: str,
    version: str,
) -> Namespace:
    """Everything that makes this rank's blocks interchangeable with another engine's."""
    model = config.model_config
    name = str(model.model)
    insides = sorted(set(layout.insides))
    # All layers alike is the rule; where not, the order matters and its digest stands for it.
    detail = (
        insides[0]
        if len(insides) == 1
        else hashlib.sha256("\n".join(layout.insides).encode()).hexdigest()[:16]
    )
    return Namespace(
        model=Path(name).name if Path(name).is_dir() else name,
        weights=weights,
        dtype=f"{str(model.dtype).removeprefix('torch.')}/{config.cache_config.cache_dtype}",
        kv_layout=f"{layout.name}/{len(layout.insides)}x{detail}",
        block_tokens=block,
        block_bytes=layout.block_bytes,
        tp_rank=tp_rank,
        tp_size=int(config.parallel_config.tensor_parallel_size),
        hash_scheme=scheme,
        tenant=settings.tenant,
        extra={
            # A minor version may pack the same shape in another way.
            "engine": "vllm-" + ".".join(version.split(".")[:2]),
            "attention": layout.attention,
            "quantization": str(getattr(model, "quantization", None) or "none"),
            **_length(model),
        },
    )


def _length(model: Any) -> dict[str, str]:
    description = _as_dict(getattr(model, "hf_text_config", model.hf_config))
    rope = description.get("rope_parameters") or description.get("rope_scaling") or {}
    kinds = {str(rope.get("rope_type") or rope.get("type") or "")} | {
        str(part.get("rope_type", "")) for part in rope.values() if isinstance(part, Mapping)
    }
    return {"length": str(model.max_model_len)} if kinds & LENGTH_DEPENDENT_ROPE else {}


def _as_dict(config: Any) -> dict[str, Any]:
    to_dict = getattr(config, "to_dict", None)
    plain = to_dict() if callable(to_dict) else dict(vars(config))
    loaded: dict[str, Any] = json.loads(json.dumps(plain, sort_keys=True, default=str))
    return loaded
