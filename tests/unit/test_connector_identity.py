"""Engines that could be served wrong blocks are refused with what to set; what differs keeps blocks apart."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvpool_connector import identity
from kvpool_connector.settings import Settings, SettingsError


class FullAttentionSpec(SimpleNamespace):
    """Named as the engine's: specs are told apart by their class."""


class SlidingWindowSpec(SimpleNamespace):
    pass


class MambaSpec(SimpleNamespace):
    pass


def group(spec: Any) -> SimpleNamespace:
    return SimpleNamespace(kv_cache_spec=spec, layer_names=["layers.0"])


def cache(*specs: Any, **more: Any) -> SimpleNamespace:
    return SimpleNamespace(
        kv_cache_groups=[group(spec) for spec in specs or (FullAttentionSpec(block_size=32),)], **more
    )


def config(**changes: Any) -> SimpleNamespace:
    """An engine's configuration that is fine, with dotted changes."""
    whole = SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1),
        cache_config=SimpleNamespace(cache_dtype="auto", prefix_caching_hash_algo="sha256"),
        kv_transfer_config=SimpleNamespace(kv_load_failure_policy="recompute"),
        speculative_config=None,
        load_config=SimpleNamespace(load_format="auto", download_dir=None),
        model_config=SimpleNamespace(
            model="/nowhere/model",
            revision=None,
            dtype="torch.bfloat16",
            quantization=None,
            max_model_len=4096,
            hf_config=SimpleNamespace(hidden_size=64, rope_parameters={"rope_type": "default"}),
        ),
    )
    for path, value in changes.items():
        *parents, last = path.split("__")
        target: Any = whole
        for name in parents:
            target = getattr(target, name)
        setattr(target, last, value)
    return whole


def test_plain_engine_is_accepted() -> None:
    identity.refuse_unsupported(config(), cache(), loads=True)


@pytest.mark.parametrize(
    ("changes", "specs", "message"),
    [
        ({"parallel_config__pipeline_parallel_size": 2}, (), "Set --pipeline-parallel-size 1"),
        ({"parallel_config__decode_context_parallel_size": 2}, (), "Set --decode-context-parallel-size 1"),
        ({"parallel_config__prefill_context_parallel_size": 4}, (), "Set --prefill-context-parallel-size 1"),
        (
            {},
            (FullAttentionSpec(block_size=32), SlidingWindowSpec(block_size=32)),
            "2 KV cache groups (FullAttentionSpec, SlidingWindowSpec)",
        ),
        ({}, (MambaSpec(block_size=32),), "kind MambaSpec is not supported"),
        ({}, (SlidingWindowSpec(block_size=32),), "--disable-hybrid-kv-cache-manager"),
        ({}, (FullAttentionSpec(block_size=32, non_causal=True),), "attends to later tokens"),
        ({"cache_config__cache_dtype": "int8_per_token_head"}, (), "--kv-cache-dtype int8_per_token_head"),
        ({"cache_config__calculate_kv_scales": True}, (), "--calculate-kv-scales"),
        ({"speculative_config": SimpleNamespace(method="eagle3")}, (), "speculative method 'eagle3'"),
        (
            {"kv_transfer_config__kv_load_failure_policy": "fail"},
            (),
            'Set "kv_load_failure_policy": "recompute"',
        ),
    ],
)
def test_engine_that_cannot_work_is_refused(changes: dict[str, Any], specs: Any, message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        identity.refuse_unsupported(config(**changes), cache(*specs), loads=True)
    assert message in str(caught.value)


def test_engine_that_only_stores_may_fail_loads() -> None:
    failing = config(kv_transfer_config__kv_load_failure_policy="fail")
    identity.refuse_unsupported(failing, cache(), loads=False)


def test_drafting_without_kv_is_accepted() -> None:
    identity.refuse_unsupported(
        config(speculative_config=SimpleNamespace(method="ngram")), cache(), loads=True
    )


def test_uniform_group_of_full_attention_is_accepted() -> None:
    spec = SimpleNamespace(block_size=32, kv_cache_specs={"a": FullAttentionSpec(), "b": FullAttentionSpec()})
    identity.refuse_unsupported(config(), cache(spec), loads=True)
    spec.kv_cache_specs["c"] = MambaSpec()
    with pytest.raises(SettingsError, match="MambaSpec"):
        identity.refuse_unsupported(config(), cache(spec), loads=True)


def scheme(
    algorithm: str = "sha256", environment: dict[str, str] | None = None, seed: str | None = "s"
) -> str:
    engine = config(cache_config__prefix_caching_hash_algo=algorithm)
    return identity.hash_scheme(engine, 32, environment=environment or {}, fixed_seed=seed)


def test_hash_scheme_tells_algorithm_and_seed_apart() -> None:
    schemes = {scheme(), scheme("sha256_cbor"), scheme(seed="t"), scheme(environment={"PYTHONHASHSEED": "0"})}
    assert len(schemes) == 4
    assert scheme() == scheme()
    assert scheme(environment={"PYTHONHASHSEED": "0"}) == scheme(
        environment={"PYTHONHASHSEED": "0"}, seed=None
    )
    assert "secret" not in scheme(environment={"PYTHONHASHSEED": "secret"})


@pytest.mark.parametrize("environment", [{}, {"PYTHONHASHSEED": "random"}])
def test_random_seed_is_refused(environment: dict[str, str]) -> None:
    with pytest.raises(SettingsError, match="Set PYTHONHASHSEED=0"):
        scheme(environment=environment, seed=None)


@pytest.mark.parametrize("algorithm", ["xxhash", "xxhash_cbor", "builtin"])
def test_weak_hash_is_refused(algorithm: str) -> None:
    with pytest.raises(SettingsError, match="--prefix-caching-hash-algo sha256_cbor"):
        scheme(algorithm, {"PYTHONHASHSEED": "0"})


def test_block_of_several_hashes() -> None:
    assert identity.block_tokens(config(), cache(hash_block_size=16)) == (32, 16)
    assert identity.block_tokens(config(), cache(hash_block_size=None)) == (32, 32)
    with pytest.raises(SettingsError, match="32 tokens are not made of hashes over 24"):
        identity.block_tokens(config(), cache(hash_block_size=24))


def test_weights_without_files_must_be_named() -> None:
    with pytest.raises(SettingsError, match="weights_fingerprint"):
        identity.weights(config(), Settings("p"))
    a = identity.weights(config(), Settings("p", weights_fingerprint="v1"))
    b = identity.weights(config(), Settings("p", weights_fingerprint="v2"))
    assert a != b


def test_random_weights_of_a_dummy_load_must_be_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"x" * 100)
    real = config(model_config__model=str(tmp_path))
    assert identity.weights(real, Settings("p"))
    real.load_config.load_format = SimpleNamespace(value="dummy")
    with pytest.raises(SettingsError, match="load format dummy"):
        identity.weights(real, Settings("p"))


def digest(engine: Any, layout: identity.CacheLayout | None = None, **changes: Any) -> bytes:
    arguments: dict[str, Any] = {
        "tp_rank": 0,
        "block": 32,
        "scheme": "s",
        "weights": "w",
        "version": "0.32.0",
    } | changes
    layout = layout or identity.CacheLayout("LBHNC", ["1*(2,32,64)"] * 4, 65536, "CPU_ATTN")
    return identity.namespace(engine, Settings("p"), layout, **arguments).digest


def test_whatever_changes_the_bytes_changes_the_namespace() -> None:
    layout = identity.CacheLayout
    same = digest(config())
    others = {
        digest(config(model_config__dtype="torch.float16")),
        digest(config(cache_config__cache_dtype="fp8")),
        digest(config(model_config__quantization="awq")),
        digest(config(parallel_config__tensor_parallel_size=2)),
        digest(config(parallel_config__tensor_parallel_size=2), tp_rank=1),
        digest(config(), weights="other"),
        digest(config(), scheme="other"),
        digest(config(), block=64),
        digest(config(), version="0.33.0"),
        digest(config(), layout("BLHNC", ["1*(2,32,64)"] * 4, 65536, "CPU_ATTN")),
        digest(config(), layout("LBHNC", ["1*(4,32,32)"] * 4, 65536, "CPU_ATTN")),
        digest(config(), layout("LBHNC", ["1*(2,32,64)"] * 3 + ["1*(4,32,32)"], 65536, "CPU_ATTN")),
        digest(config(), layout("LBHNC", ["1*(2,32,64)"] * 4, 65536, "FLASH_ATTN")),
        digest(config(), layout("LBHNC", ["1*(2,32,64)"] * 4, 131072, "CPU_ATTN")),
    }
    assert len(others) == 14
    assert same not in others
    assert digest(config()) == same
    assert digest(config(), version="0.32.5") == same


def test_length_limit_counts_only_where_positions_depend_on_it() -> None:
    assert digest(config(model_config__max_model_len=100)) == digest(config())
    stretched = {"rope_type": "longrope", "factor": 4}
    a = config(model_config__hf_config__rope_parameters=stretched)
    b = config(model_config__hf_config__rope_parameters=stretched, model_config__max_model_len=100)
    assert digest(a) != digest(b)


def test_folder_of_the_model_is_not_part_of_its_name(tmp_path: Path) -> None:
    for parent in ("a", "b"):
        (tmp_path / parent / "model").mkdir(parents=True)
    assert digest(config(model_config__model=str(tmp_path / "a" / "model"))) == digest(
        config(model_config__model=str(tmp_path / "b" / "model"))
    )
