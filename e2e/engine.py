"""One real vLLM engine in a pod that was given a pool: runs a few prompts, prints one line of JSON, ends.

python engine.py MODEL PROMPTS TOKENS
"""

from __future__ import annotations

import json
import os
import random
import sys
from typing import Any

BLOCK_TOKENS = 32
FIRST, LAST = 3, 300  # tokens of the demo's model that are no special ones


def prompt(name: str, tokens: int) -> list[int]:
    """The same tokens for the same name in every engine."""
    return random.Random(name).choices(range(FIRST, LAST), k=tokens)


def main(model: str, prompts: int, tokens: int) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=model,
        dtype="float32",
        max_model_len=tokens + 64,
        block_size=BLOCK_TOKENS,
        max_num_seqs=2,
        enforce_eager=True,
        skip_tokenizer_init=True,
        disable_log_stats=False,
        distributed_executor_backend="uni",
        kv_transfer_config=json.loads(os.environ["KVPOOL_KV_TRANSFER_CONFIG"]),
    )
    parameters = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
    outputs = []
    for number in range(prompts):
        (answer,) = llm.generate(
            {"prompt_token_ids": prompt(f"e2e/{number}", tokens)}, parameters, use_tqdm=False
        )
        outputs.append(list(answer.outputs[0].token_ids))
    metrics: dict[str, float] = {}
    for metric in llm.get_metrics():
        if hasattr(metric, "value") and ("external_prefix_cache" in metric.name or "kvpool" in metric.name):
            metrics[metric.name] = metrics.get(metric.name, 0) + metric.value
    llm.llm_engine.engine_core.shutdown()
    return {"outputs": outputs, "metrics": metrics, "block_tokens": BLOCK_TOKENS}


if __name__ == "__main__":
    result = main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    print(f"RESULT {json.dumps(result)}", flush=True)
