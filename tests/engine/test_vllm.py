"""Separate vLLM engines over one pool: one reuses what another computed, and the tokens stay the same.

Engines are slow to start. So one engine goes through several situations, and each test looks at one of them.
"""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import pytest

from kvpool import KeyBatch, Namespace, Pool
from kvpool.report import Counters

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]

BLOCK_TOKENS = 32

# 275 tokens are 8 whole blocks and a rest. Each prompt has a seed of its own: no two share a block by chance.
LONG = {"seed": "long", "tokens": 275}
OTHER_TAIL = {"seed": "tail", "tokens": 290, "head": {"seed": "long", "tokens": 256}}
SHORT = {"seed": "short", "tokens": 130}
LONGER_THAN_SHORT = {"seed": "grown", "tokens": 400, "head": {"seed": "short", "tokens": 130}}
GROWN = {"seed": "more", "tokens": 420, "head": LONGER_THAN_SHORT}
SALTED = LONG | {"salt": "red"}
STAGED = {"seed": "staged", "tokens": 140}
CROWD = [{"seed": f"crowd {i}", "tokens": 200} for i in range(4)]
DAMAGED = {"sync": {"seed": "damaged 1", "tokens": 275}, "async": {"seed": "damaged 2", "tokens": 275}}

ONE_PROCESS = {
    "env": {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
    "options": {"distributed_executor_backend": "uni"},
}
# Few enough blocks that four growing requests do not fit, and one has to give way.
TIGHT = {"num_gpu_blocks_override": 30, "max_model_len": 512}


def shareable(prompt: dict[str, Any]) -> int:
    """Tokens in whole blocks that an engine can take from elsewhere: one token is always left to compute."""
    return (prompt["tokens"] - 1) // BLOCK_TOKENS * BLOCK_TOKENS


def step(*prompts: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"prompts": list(prompts), **more}


# The situations, in the order in which every engine goes through them. What is damaged is another prompt in
# each mode, because the first engine that computes it again may heal it.
SITUATIONS = {
    "same prompt": step(LONG),
    "other tail": step(OTHER_TAIL),
    "first part": step(SHORT),
    "own cache not empty": step(GROWN),
    "other salt": step(SALTED),
    "own cache not wanted": step(LONG, skip_reading=True),
    "preempted": step(*CROWD, new_tokens=60),
    "damaged": step(DAMAGED["sync"]),
    "damaged, async": step(DAMAGED["async"]),
}
ONLY_IN = {"damaged": "sync", "damaged, async": "async"}
# What the storing engine computes: the prompts above, as far as others shall find them.
STORED = [LONG, LONGER_THAN_SHORT, *DAMAGED.values(), *CROWD]


class Engines:
    """Runs engines and keeps what came out, so that a run is shared by the tests that look at it."""

    def __init__(self, driver: Any, models: dict[str, str], manifest: Path) -> None:
        self._driver = driver
        self._models = models
        self.manifest = manifest
        self._runs: dict[str, dict[str, Any]] = {}

    def run(
        self,
        name: str,
        steps: list[dict[str, Any]],
        *,
        pool: dict[str, Any] | None = None,
        base: dict[str, Any] = ONE_PROCESS,
        model: str = "right",
        **options: Any,
    ) -> dict[str, Any]:
        if name not in self._runs:
            connector = None if pool is None else {"pool": str(self.manifest), **pool}
            merged = {"model": self._models[model], "dtype": "float32"} | base["options"] | options
            job = {"env": base["env"], "options": merged, "connector": connector, "steps": steps}
            self._runs[name] = self._driver.run(job)
        result = self._runs[name]
        assert "error" not in result, f"{name}: {result['error']}\n{self._driver.tail()}"
        return result

    def situations(self, name: str, mode: str | None = None, **how: Any) -> dict[str, dict[str, Any]]:
        """Results by situation; of one mode, or all."""
        chosen = {k: v for k, v in SITUATIONS.items() if mode is None or ONLY_IN.get(k, mode) == mode}
        result = self.run(name, list(chosen.values()), **TIGHT, **how)
        return dict(zip(chosen, result["steps"], strict=True))

    def counters(self) -> Counters:
        with Pool.open(self.manifest, host=0, role="tool") as pool:
            return pool.counters()


@pytest.fixture(scope="module")
def engines(driver: Any, models: dict[str, str], manifest: Path) -> Engines:
    return Engines(driver, models, manifest)


@pytest.fixture(scope="module")
def right(engines: Engines) -> dict[str, dict[str, Any]]:
    """The tokens without a pool."""
    return engines.situations("plain")


@pytest.fixture(scope="module")
def stored(engines: Engines) -> dict[str, Any]:
    """Engine A, on host 0, has computed and stored; then a byte of some blocks was flipped in the medium."""
    result = engines.run("A", [step(prompt) for prompt in STORED], pool={"host": 0})
    for prompt in DAMAGED.values():
        hashes = result["steps"][STORED.index(prompt)]["hashes"]
        flip_byte(engines.manifest, result["namespaces"][0], bytes.fromhex(hashes[3]))
    return result


def flip_byte(manifest: Path, described: dict[str, Any], block_hash: bytes) -> None:
    """Damage one stored block, in the medium and behind everybody's back."""
    namespace = Namespace(**{k: v for k, v in described.items() if k not in described["extra"]})
    with Pool.open(manifest, host=0, role="tool") as pool:
        block = bytearray(namespace.block_bytes)
        assert pool.load(KeyBatch.from_hashes(namespace, block_hash), [block], count=False).hit_count == 1
        path = pool.tiers[0].path  # type: ignore[attr-defined]
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as medium:
        at = medium.find(bytes(block))  # whole: a part of it may be a part of another rank's block too
        assert at >= 0
        medium[at + 1031] ^= 0x10


@pytest.fixture(scope="module", params=["sync", "async"])
def reused(
    request: pytest.FixtureRequest, engines: Engines, stored: dict[str, Any], right: Any
) -> tuple[str, dict[str, dict[str, Any]]]:
    """Engine B, on host 1, after A; once with loads in the step and once beside the steps."""
    mode = request.param
    # What the first one stored would be hits of the second one, where the tests expect none.
    quiet = {"store": "none"} if mode == "sync" else {}
    return mode, engines.situations(f"B {mode}", mode, pool={"host": 1, "load": mode, **quiet})


# ---- one engine stores, another one reuses ----


def test_engine_without_hits_gives_the_right_tokens_and_stores(stored: dict[str, Any], right: Any) -> None:
    assert stored["steps"][0]["tokens"] == right["same prompt"]["tokens"]
    assert stored["steps"][0]["counts"]["kvpool_stored_blocks"] == shareable(LONG) // BLOCK_TOKENS
    assert stored["steps"][0]["cached_tokens"] == [0]


@pytest.mark.parametrize("situation", list(SITUATIONS))
def test_tokens_are_those_without_a_pool(reused: Any, right: Any, situation: str) -> None:
    if situation not in reused[1]:
        pytest.skip(f"a situation of {ONLY_IN[situation]} loads")
    assert reused[1][situation]["tokens"] == right[situation]["tokens"]


def test_whole_prompt_is_hit_across_hosts(reused: Any) -> None:
    result = reused[1]["same prompt"]
    assert result["counts"]["external_prefix_cache_hits"] >= 0.95 * shareable(LONG)
    assert result["cached_tokens"] == [shareable(LONG)]
    assert result["counts"]["kvpool_hit_blocks"] == shareable(LONG) // BLOCK_TOKENS


def test_common_prefix_is_hit(reused: Any) -> None:
    """The blocks come out of B's own cache by now: the same prompt brought them there."""
    result = reused[1]["other tail"]
    assert result["cached_tokens"] == [256]
    assert "kvpool_hit_blocks" not in result["counts"]


def test_external_blocks_follow_the_own_cached_ones(reused: Any) -> None:
    assert reused[1]["first part"]["counts"]["external_prefix_cache_hits"] == shareable(SHORT)
    result = reused[1]["own cache not empty"]
    external = shareable(LONGER_THAN_SHORT) - shareable(SHORT)
    assert result["counts"]["external_prefix_cache_hits"] == external
    assert result["cached_tokens"] == [shareable(LONGER_THAN_SHORT)]


def test_other_salt_shares_nothing(reused: Any) -> None:
    result = reused[1]["other salt"]
    assert result["cached_tokens"] == [0]
    assert "external_prefix_cache_hits" not in result["counts"]


def test_request_that_wants_no_cached_blocks_gets_none(reused: Any) -> None:
    result = reused[1]["own cache not wanted"]
    assert result["cached_tokens"] == [0]
    assert "kvpool_hit_blocks" not in result["counts"]
    assert "kvpool_missed_blocks[never-stored]" not in result["counts"]


def test_damaged_block_is_found_and_computed_again(reused: Any) -> None:
    counts = reused[1]["damaged" if reused[0] == "sync" else "damaged, async"]["counts"]
    assert counts["kvpool_failed_blocks"] == 1
    assert counts["kvpool_missed_blocks[failed-checksum]"] == 1
    assert counts["kvpool_hit_blocks"] == shareable(LONG) // BLOCK_TOKENS - 1


def test_preempted_requests_go_on(reused: Any, right: Any) -> None:
    assert right["preempted"]["counts"]["num_preemptions"] >= 1
    result = reused[1]["preempted"]
    assert result["counts"]["num_preemptions"] >= 1
    assert result["counts"]["kvpool_hit_blocks"] >= 4 * (shareable(CROWD[0]) // BLOCK_TOKENS)


# ---- other ways to hold and to move the same blocks ----


def test_staged_copies_are_hits_with_the_right_tokens(
    engines: Engines, stored: dict[str, Any], right: Any
) -> None:
    result = engines.run("staged", [step(LONG), step(STAGED)], pool={"host": 1, "staging": "always"})
    assert result["steps"][0]["tokens"] == right["same prompt"]["tokens"]
    assert result["steps"][0]["cached_tokens"] == [shareable(LONG)]
    assert result["steps"][1]["counts"]["kvpool_stored_blocks"] == shareable(STAGED) // BLOCK_TOKENS
    # What was stored through staging is what a direct copy takes: no engine knows how it came there.
    direct = engines.run("after staged", [step(STAGED)], pool={"host": 0})
    assert direct["steps"][0]["cached_tokens"] == [shareable(STAGED)]
    assert direct["steps"][0]["tokens"] == result["steps"][1]["tokens"]


def test_other_weights_of_the_same_name_hit_nothing(engines: Engines, stored: dict[str, Any]) -> None:
    before = engines.counters()
    result = engines.run("other weights", [step(LONG)], pool={"host": 1}, model="other")
    plain = engines.run("other weights, plain", [step(LONG)], model="other")
    assert result["steps"][0]["tokens"] == plain["steps"][0]["tokens"]
    assert result["steps"][0]["cached_tokens"] == [0]
    after = engines.counters()
    assert after.hits == before.hits
    assert after.misses.get("wrong-namespace", 0) - before.misses.get("wrong-namespace", 0) == 8


def test_bfloat16_is_reused_across_hosts(engines: Engines) -> None:
    steps = [step(LONG), step(OTHER_TAIL)]
    plain = engines.run("bfloat16, plain", steps, dtype="bfloat16")
    first = engines.run("bfloat16, A", steps[:1], pool={"host": 0}, dtype="bfloat16")
    second = engines.run("bfloat16, B", steps[::-1], pool={"host": 1}, dtype="bfloat16")
    assert first["steps"][0]["tokens"] == plain["steps"][0]["tokens"]
    assert [s["tokens"] for s in second["steps"][::-1]] == [s["tokens"] for s in plain["steps"]]
    assert second["steps"][0]["counts"]["external_prefix_cache_hits"] == 256


# A worker for each of two ranks, in processes of their own.
TWO_RANKS = {
    "env": {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "0|1"},
    "options": {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"},
}


def test_two_ranks_are_reused_across_hosts(engines: Engines) -> None:
    plain = engines.run("two ranks, plain", [step(LONG), step(DAMAGED["sync"])], base=TWO_RANKS)
    first = engines.run("two ranks, A", [step(LONG), step(DAMAGED["sync"])], pool={"host": 0}, base=TWO_RANKS)
    assert [s["tokens"] for s in first["steps"]] == [s["tokens"] for s in plain["steps"]]
    # Each rank has objects of its own.
    assert first["steps"][0]["counts"]["kvpool_stored_blocks"] == 2 * (shareable(LONG) // BLOCK_TOKENS)
    assert len(first["namespaces"]) == 2
    # Damage a block of one rank: both compute it again, and neither may store what was computed without it.
    flip_byte(engines.manifest, first["namespaces"][1], bytes.fromhex(first["steps"][1]["hashes"][3]))
    second = engines.run(
        "two ranks, B",
        [step(LONG), step(DAMAGED["sync"])],
        pool={"host": 1, "load": "sync"},
        base=TWO_RANKS,
    )
    assert [s["tokens"] for s in second["steps"]] == [s["tokens"] for s in plain["steps"]]
    assert second["steps"][0]["counts"]["external_prefix_cache_hits"] == shareable(LONG)
    assert second["steps"][1]["counts"]["kvpool_failed_blocks"] == 1


# ---- what is refused at start ----


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ({"transfer": {"kv_load_failure_policy": "fail"}}, '"kv_load_failure_policy": "recompute"'),
        ({"options": {"prefix_caching_hash_algo": "xxhash"}}, "--prefix-caching-hash-algo sha256_cbor"),
        ({"connector": {"pool": "no-such-pool"}}, "no-such-pool"),
        ({"connector": {"host": 5}}, "host 5 does not exist"),
        ({"connector": {"minimum": 5}}, "minimum: not a setting"),
        ({"options": {"load_format": "dummy"}}, "weights_fingerprint"),
    ],
    ids=["failure policy", "hash", "pool", "host", "setting", "weights"],
)
def test_engine_that_cannot_work_says_what_to_set(
    driver: Any, models: dict[str, str], manifest: Path, case: dict[str, Any], message: str
) -> None:
    result = driver.run(
        {
            "env": ONE_PROCESS["env"],
            "options": {"model": models["right"], "dtype": "float32"}
            | ONE_PROCESS["options"]
            | case.get("options", {}),
            "connector": {"pool": str(manifest)} | case.get("connector", {}),
            "transfer": case.get("transfer", {}),
            "steps": [],
        }
    )
    assert message in result.get("error", "the engine started")
