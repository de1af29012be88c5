"""Runs vLLM engines for the tests. Runs in the engine's environment, not in the checkout's.

Importing vLLM takes longer than starting a tiny engine. So this process imports it once and forks: every
engine is a process of its own, with nothing of another engine in it. Jobs come as lines of JSON on stdin,
results go to the file descriptor in argv[1]; whatever the engines print goes to stderr.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
import traceback
from typing import Any

BLOCK_TOKENS = 32

os.environ.update(
    VLLM_NO_USAGE_STATS="1",
    HF_HUB_OFFLINE="1",
    VLLM_CPU_KVCACHE_SPACE="1",
)


def prompt(spec: dict[str, Any]) -> list[int]:
    """Tokens from a seed; `head` gives another prompt's first tokens."""
    tokens = [random.Random(f"token {spec['seed']} {i}").randrange(3, 300) for i in range(spec["tokens"])]
    if "head" in spec:
        tokens[: spec["head"]["tokens"]] = prompt(spec["head"])
    return tokens


class Notes:
    """The namespaces, and the last request's hashes, so that a test can find its blocks in the region."""

    def __init__(self) -> None:
        self.namespaces: list[dict[str, Any]] | None = None
        self.hashes: list[str] | None = None

    def follow_sessions(self) -> None:
        """Listens to the scheduler's session, which lives in this process."""
        from kvpool_connector.session import SchedulerSession

        begin, open_request = SchedulerSession.__init__, SchedulerSession.open_request

        def note_namespaces(session: Any, pool: Any, namespaces: Any, **options: Any) -> None:
            self.namespaces = [n.describe() | {"extra": dict(n.extra)} for n in namespaces]
            begin(session, pool, namespaces, **options)

        def note_hashes(session: Any, request_id: str, hashes: Any, prompt_tokens: int) -> None:
            self.hashes = [block_hash.hex() for block_hash in hashes[:]]
            open_request(session, request_id, hashes, prompt_tokens)

        SchedulerSession.__init__ = note_namespaces  # type: ignore[method-assign]
        SchedulerSession.open_request = note_hashes  # type: ignore[method-assign]


def counters(llm: Any) -> dict[str, float]:
    wanted = ("kvpool", "external_prefix_cache", "num_preemptions")
    found: dict[str, float] = {}
    for metric in llm.get_metrics():
        if hasattr(metric, "value") and any(part in metric.name for part in wanted):
            labels = {k: v for k, v in (metric.labels or {}).items() if k == "reason"}
            name = metric.name.removeprefix("vllm:") + "".join(f"[{v}]" for v in labels.values())
            found[name] = found.get(name, 0) + metric.value
    return found


def run_engine(job: dict[str, Any]) -> dict[str, Any]:
    os.environ.update(job.get("env", {}))
    from vllm import LLM, SamplingParams

    notes = Notes()
    notes.follow_sessions()
    transfer = None
    if job["connector"] is not None:
        transfer = {
            "kv_connector": "KVPoolConnector",
            "kv_connector_module_path": "kvpool_connector.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": job["connector"],
            **job.get("transfer", {}),
        }
    options = {
        "max_model_len": 1024,
        "max_num_seqs": 4,
        "block_size": BLOCK_TOKENS,
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "disable_log_stats": False,
    } | job["options"]
    llm = LLM(**options, kv_transfer_config=transfer)
    results = []
    for step in job["steps"]:
        before = counters(llm)
        parameters = SamplingParams(
            temperature=0,
            max_tokens=step.get("new_tokens", 16),
            ignore_eos=True,
            detokenize=False,
            skip_reading_prefix_cache=step.get("skip_reading"),
        )
        requests = []
        for spec in step["prompts"]:
            request: dict[str, Any] = {"prompt_token_ids": prompt(spec)}
            if "salt" in spec:
                request["cache_salt"] = spec["salt"]
            requests.append(request)
        began = time.perf_counter()
        outputs = llm.generate(requests, parameters, use_tqdm=False)
        seconds = time.perf_counter() - began
        after = counters(llm)
        results.append(
            {
                "tokens": [list(output.outputs[0].token_ids) for output in outputs],
                "cached_tokens": [output.num_cached_tokens or 0 for output in outputs],
                "counts": {k: v - before.get(k, 0) for k, v in after.items() if v != before.get(k, 0)},
                "hashes": notes.hashes,
                "seconds": seconds,
            }
        )
    llm.llm_engine.engine_core.shutdown()
    return {"steps": results, "namespaces": notes.namespaces}


def run_job(job: dict[str, Any]) -> dict[str, Any]:
    try:
        return run_engine(job)
    except BaseException as error:
        traceback.print_exc()
        chain = [error]
        while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None:
            chain.append(cause)
        return {"error": " / ".join(f"{type(e).__name__}: {e}" for e in chain)}


def fork_and_run(job: dict[str, Any]) -> bytes:
    """The job's result, as one line; run in a child of its own."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        with os.fdopen(writer, "w") as out:
            json.dump(run_job(job), out)
        sys.stderr.flush()
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as answer:
        result = answer.read()
    _, status = os.waitpid(child, 0)
    return result or json.dumps({"error": f"the engine's process ended with status {status}"}).encode()


def main() -> None:
    # What engines import while they start; done here once.
    import vllm.v1.engine.core
    import vllm.v1.executor.multiproc_executor
    import vllm.v1.executor.uniproc_executor
    import vllm.v1.worker.cpu_worker  # noqa: F401
    from vllm import LLM  # noqa: F401

    with os.fdopen(int(sys.argv[1]), "wb", buffering=0) as out:
        out.write(b"ready\n")
        for line in sys.stdin:
            out.write(fork_and_run(json.loads(line)) + b"\n")


if __name__ == "__main__":
    main()
