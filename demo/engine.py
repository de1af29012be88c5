"""One vLLM engine in a process of its own, driven by lines of JSON: commands on stdin, answers on a pipe.

The engine runs in this very process, without helpers, so that a time measured here has no process switches in
it. Its log goes to stderr.
"""

from __future__ import annotations

import gc
import json
import os
import random
import statistics
import sys
import time
from typing import Any

TOKEN_FIRST = 3  # below are the special tokens of the demo's model


class Engine:
    def __init__(self, config: dict[str, Any]) -> None:
        from vllm import LLM

        transfer = None
        if config["pool"] is not None:
            transfer = {
                "kv_connector": "KVPoolConnector",
                "kv_connector_module_path": "kvpool_connector.vllm",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {"pool": config["pool"], "host": config["host"]},
            }
        self.llm = LLM(
            model=config["model"],
            dtype=config["dtype"],
            max_model_len=config["max_tokens"],
            block_size=config["block_tokens"],
            max_num_seqs=4,
            enforce_eager=True,
            skip_tokenizer_init=True,
            disable_log_stats=False,
            distributed_executor_backend="uni",
            kv_transfer_config=transfer,
        )
        self.vocabulary = self.llm.llm_engine.model_config.get_vocab_size()
        self._request_count = 0

    def prompt(self, name: str, tokens: int) -> list[int]:
        """The same tokens for the same name in every process."""
        return random.Random(name).choices(range(TOKEN_FIRST, min(self.vocabulary, 30000)), k=tokens)

    def generate(
        self, name: str, tokens: int, output_tokens: int, repeats: int, forget: bool
    ) -> dict[str, Any]:
        """Run one prompt `repeats` times. `forget`: empty the engine's own prefix cache before each."""
        times, cached, outputs = [], [], []
        for _ in range(repeats):
            if forget:
                self.llm.reset_prefix_cache()
            gc.collect()
            seconds, hit, output = self._once(self.prompt(name, tokens), output_tokens)
            times.append(seconds)
            cached.append(hit)
            outputs.append(output)
        return {
            "ttft_s": statistics.median(times),
            "ttft_each_s": times,
            "cached_tokens": min(cached),
            "outputs": outputs[0],
            "outputs_equal": all(output == outputs[0] for output in outputs),
        }

    def _once(self, prompt: list[int], output_tokens: int) -> tuple[float, int, list[int]]:
        from vllm import SamplingParams

        parameters = SamplingParams(
            temperature=0, max_tokens=output_tokens, ignore_eos=True, detokenize=False
        )
        engine = self.llm.llm_engine
        self._request_count += 1
        first: float | None = None
        started = time.perf_counter()
        engine.add_request(str(self._request_count), {"prompt_token_ids": prompt}, parameters)
        last: Any = None
        while engine.has_unfinished_requests():
            for output in engine.step():
                if first is None and output.outputs and output.outputs[0].token_ids:
                    first = time.perf_counter() - started
                last = output
        assert first is not None
        return first, int(last.num_cached_tokens or 0), list(last.outputs[0].token_ids)

    def metrics(self) -> dict[str, float]:
        return {
            metric.name: metric.value
            for metric in self.llm.get_metrics()
            if hasattr(metric, "value") and ("prefix_cache" in metric.name or "kvpool" in metric.name)
        }


def main() -> None:
    config = json.loads(sys.argv[1])
    answers = os.fdopen(config["answer_fd"], "w", buffering=1)
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(config["cache_gib"])
    engine = Engine(config)
    print(json.dumps({"ready": True}), file=answers)
    for line in sys.stdin:
        command = json.loads(line)
        kind = command.pop("kind")
        if kind == "generate":
            answer = engine.generate(**command)
        elif kind == "metrics":
            answer = engine.metrics()
        else:
            break
        print(json.dumps(answer), file=answers)
    engine.llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
