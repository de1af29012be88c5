"""A real vLLM engine in a pod that measures the time to the first token, one prompt whenever it is told.

    python gap.py MODEL TOKENS_MAX

Reads jobs from /scratch/job.N (N from 0), one line of JSON each: {"prompt": NAME, "tokens": N}.
Answers in /scratch/answer.N: seconds to the first token, tokens that were asked of the pool and that it gave.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from engine import BLOCK_TOKENS, prompt

SCRATCH = Path("/scratch")
POLL_S = 0.02
WORDS = ("vllm:external_prefix_cache_queries", "vllm:external_prefix_cache_hits")


def main(model: str, tokens_max: int) -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=model,
        dtype="float32",
        max_model_len=tokens_max + 64,
        max_num_batched_tokens=tokens_max + 64,
        block_size=BLOCK_TOKENS,
        max_num_seqs=2,
        enforce_eager=True,
        skip_tokenizer_init=True,
        disable_log_stats=False,
        distributed_executor_backend="uni",
        kv_transfer_config=json.loads(os.environ["KVPOOL_KV_TRANSFER_CONFIG"]),
    )
    one = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)

    def counted() -> list[float]:
        found = {metric.name: metric.value for metric in llm.get_metrics() if metric.name in WORDS}
        return [found.get(word, 0) for word in WORDS]

    def measure(job: dict[str, Any]) -> dict[str, Any]:
        llm.reset_prefix_cache()  # what the engine remembers by itself
        before, asked = counted(), {"prompt_token_ids": prompt(job["prompt"], job["tokens"])}
        begun = time.perf_counter()
        (answer,) = llm.generate(asked, one, use_tqdm=False)
        seconds = time.perf_counter() - begun
        queries, hits = (now - then for now, then in zip(counted(), before, strict=True))
        return {
            "ttft_s": seconds,
            "queries": queries,
            "hits": hits,
            "output": list(answer.outputs[0].token_ids),
        }

    measure({"prompt": "warm-up", "tokens": 8 * BLOCK_TOKENS})
    print("READY", flush=True)
    number = 0
    while True:
        job = SCRATCH / f"job.{number}"
        while not job.exists():
            time.sleep(POLL_S)
        given = json.loads(job.read_text())
        if given.get("end"):
            break
        making = SCRATCH / "making"
        making.write_text(json.dumps(measure(given)))
        making.rename(SCRATCH / f"answer.{number}")
        number += 1
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
