"""Two vLLM engines share one pool: the second one reuses what the first one computed, checked token by token.

    make demo               rows at 512, 2,048, 8,192 and 16,384 tokens
    SMALL=1 make demo       rows at 512 and 2,048 tokens
    MODEL=path make demo    with a model of your own; CACHE_GIB=8 when 2 GiB of KV cache are too little

Four engines, each a process of its own: one without a pool (the tokens that are right, the cold times and, as
the yardstick, its own prefix cache), A on host 0 (computes and stores), then B on host 1 and A again in a new
process. The last two and the yardstick are measured in turns, so that a busy machine disturbs all three
alike.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from environment import ROOT, SetupError, cache_folder, make_engine_environment
from model import SHAPES

DEMO = Path(__file__).resolve().parent
MANIFEST = DEMO / "pool.yaml"
REGION = Path("/dev/shm/kvpool.demo")  # as in the manifest
RESULT = ROOT / "demo.json"
BLOCK_TOKENS = 32
CHECKED_TOKENS = 16  # greedy tokens that are compared; the model's own choice depends on every block before
START_TIMEOUT_S = 600


@dataclass(frozen=True)
class Row:
    """Prompts of one length. Each is distinct, so that no block of one is a block of another."""

    tokens: int
    prompts: int
    rounds: int  # hits of each prompt that are timed, in turns over the engines

    def names(self) -> list[str]:
        return [f"demo/{self.tokens}/{i}" for i in range(self.prompts)]


# Long prompts are few, because each is computed twice, and many rounds cost little.
FULL = (Row(512, 3, 5), Row(2048, 3, 5), Row(8192, 2, 6), Row(16384, 1, 9))
SMALL = (Row(512, 3, 5), Row(2048, 3, 5))

started = time.monotonic()


def say(text: str) -> None:
    print(f"[{time.monotonic() - started:6.1f} s] {text}", flush=True)


class Engine:
    """A running engine process (engine.py)."""

    def __init__(self, python: Path, name: str, log_folder: Path, **config: Any) -> None:
        self.name = name
        self.log = log_folder / f"{name}.log"
        reader, writer = os.pipe()
        environment = os.environ | {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                [python, DEMO / "engine.py", json.dumps({**config, "answer_fd": writer})],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=(writer,),
                env=environment,
                cwd=log_folder,
                text=True,
            )
        os.close(writer)
        self._answers = os.fdopen(reader)

    def wait(self) -> None:
        begun = time.monotonic()
        self._read()
        say(f"{self.name}: ready after {time.monotonic() - begun:.0f} s")

    def generate(self, name: str, tokens: int, **how: Any) -> dict[str, Any]:
        how = {"output_tokens": CHECKED_TOKENS, "repeats": 1, "forget": False} | how
        return self._ask(kind="generate", name=name, tokens=tokens, **how)

    def metrics(self) -> dict[str, float]:
        return self._ask(kind="metrics")

    def stop(self) -> None:
        with contextlib.suppress(OSError):
            self._send(kind="stop")
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _ask(self, **command: Any) -> dict[str, Any]:
        self._send(**command)
        return self._read()

    def _send(self, **command: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()

    def _read(self) -> dict[str, Any]:
        line = self._answers.readline()
        if not line:
            code = self._process.wait()
            tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-25:])
            raise SetupError(
                f"{self.name} ended with exit code {code}. The end of its log ({self.log}):\n{tail}"
            )
        answer: dict[str, Any] = json.loads(line)
        return answer


def kvpool(*arguments: str) -> str:
    """Run the command line of this checkout's environment."""
    done = subprocess.run(
        [sys.executable, "-m", "kvpool", *arguments],
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    if done.returncode:
        raise SetupError(f"kvpool {' '.join(arguments)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


@contextlib.contextmanager
def running_pool(name: str, hosts: int) -> Iterator[None]:
    """The pool of the manifest with a daemon for each host; taken down at the end, with its memory."""
    if REGION.exists():
        # Left by a run that was interrupted. Its blocks would be hits where nothing was computed in this run.
        kvpool("up", "--file", str(MANIFEST))
        kvpool("down", name, "--delete")
    try:
        for host in range(hosts):
            kvpool("up", "--file", str(MANIFEST), "--host", str(host))
            say(f"pool {name}: host {host} is ready")
        yield
    finally:
        kvpool("down", name, "--delete", "--force")


def measure(rows: tuple[Row, ...], start: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """All runs; the rows of demo.json, and details for the curious."""
    plain, first = start("plain", None), start("engine-A", 0)
    plain.wait()
    first.wait()
    for engine in (plain, first):
        warm_up(engine)
    right, cold, stored = {}, {}, {}
    for row in rows:
        for name in row.names():
            answer = plain.generate(name, row.tokens)
            right[name], cold[name] = answer["outputs"], answer["ttft_s"]
            answer = first.generate(name, row.tokens)
            stored[name] = answer
            say(f"{row.tokens:6} tokens: cold {cold[name]:.3f} s, with storing {answer['ttft_s']:.3f} s")
    first.stop()

    other, again = start("engine-B", 1), start("engine-A-again", 0)
    other.wait()
    again.wait()
    for engine in (other, again):
        warm_up(engine)
    result = []
    hits: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        times: dict[str, list[float]] = {"own": [], "same": [], "cross": []}
        first_times: dict[str, list[float]] = {"same": [], "cross": []}
        cached: dict[str, list[int]] = {"own": [], "same": [], "cross": []}
        equal = True
        for name in row.names():
            # The first time of a block in a process is told apart: its pages are not mapped yet.
            for key, engine in (("cross", other), ("same", again)):
                answer = engine.generate(name, row.tokens, forget=True)
                equal &= answer["outputs"] == right[name]
                first_times[key].append(answer["ttft_s"])
            equal &= stored[name]["outputs"] == right[name]
            for turn in range(row.rounds):
                order = [("own", plain, False), ("same", again, True), ("cross", other, True)]
                for key, engine, forget in order[turn % 3 :] + order[: turn % 3]:
                    answer = engine.generate(name, row.tokens, output_tokens=1, forget=forget)
                    times[key].append(answer["ttft_s"])
                    cached[key].append(answer["cached_tokens"])
                    equal &= answer["outputs"] == right[name][:1]
        shareable = (row.tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        if min(cached["own"]) < shareable:
            say(f"{row.tokens:6} tokens: CACHE_GIB={cache_gib()} is too small for the yardstick")
        hits[str(row.tokens)] = times
        middle = {key: statistics.median(values) for key, values in times.items()}
        result.append(
            {
                "prompt_tokens": row.tokens,
                "ttft_cold_s": statistics.median(cold[name] for name in row.names()),
                "ttft_local_prefix_hit_s": middle["own"],
                "ttft_hit_same_host_s": middle["same"],
                "ttft_hit_cross_host_s": middle["cross"],
                "external_hit_tokens": min(cached["cross"]),
                "shareable_tokens": shareable,
                "tokens_equal": equal,
                "ttft_first_hit_same_host_s": statistics.median(first_times["same"]),
                "ttft_first_hit_cross_host_s": statistics.median(first_times["cross"]),
                "sharing_gap": middle["cross"] / middle["same"] - 1,
            }
        )
        say(
            f"{row.tokens:6} tokens: own prefix cache {middle['own']:.4f} s, "
            f"same host {middle['same']:.4f} s, other host {middle['cross']:.4f} s"
        )
    details = {"ttft_each_s": hits, "engine_B": other.metrics(), "engine_A_again": again.metrics()}
    for engine in (plain, other, again):
        engine.stop()
    return result, details


def cache_gib() -> int:
    """Memory of each engine's own KV cache. It must hold all prompts at once, or the yardstick is none."""
    return int(os.environ.get("CACHE_GIB") or 2)


def warm_up(engine: Engine) -> None:
    """Twice a prompt that is in no row: the first requests of a process pay for what is made on first use."""
    for _ in range(2):
        engine.generate(f"warm-up/{engine.name}", 8 * BLOCK_TOKENS)


def table(rows: list[dict[str, Any]]) -> str:
    head = (
        "tokens",
        "cold s",
        "own cache s",
        "same host s",
        "other host s",
        "cold/other",
        "other/own",
        "gap",
        "hit tokens",
        "equal",
    )
    body = [
        (
            f"{row['prompt_tokens']:,}",
            f"{row['ttft_cold_s']:.3f}",
            f"{row['ttft_local_prefix_hit_s']:.4f}",
            f"{row['ttft_hit_same_host_s']:.4f}",
            f"{row['ttft_hit_cross_host_s']:.4f}",
            f"{row['ttft_cold_s'] / row['ttft_hit_cross_host_s']:.1f}x",
            f"{row['ttft_hit_cross_host_s'] / row['ttft_local_prefix_hit_s']:.2f}x",
            f"{100 * row['sharing_gap']:+.1f} %",
            f"{row['external_hit_tokens']:,}",
            "yes" if row["tokens_equal"] else "NO",
        )
        for row in rows
    ]
    widths = [max(len(line[i]) for line in [head, *body]) for i in range(len(head))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in [head, *body]
    )


def run() -> int:
    small = os.environ.get("SMALL", "") not in ("", "0")
    rows = SMALL if small else FULL
    folder = cache_folder() / "demo"
    folder.mkdir(parents=True, exist_ok=True)
    python = make_engine_environment(say)
    model = os.environ.get("MODEL") or ""
    if not model:
        model = str(folder / "model")
        say(f"model: Qwen2 type, {SHAPES['demo'].parameters / 1e6:.0f} M random parameters, in {model}")
        subprocess.run(
            [python, DEMO / "model.py", model, "--shape", "demo"], check=True, stdout=subprocess.DEVNULL
        )
    kvpool("status")  # the checkout's own environment works
    free = shutil.disk_usage("/dev/shm").free
    if free < 4 << 30:
        raise SetupError(
            f"/dev/shm has {free / 2**30:.1f} GiB free, it needs 4. Enlarge it, or change demo/pool.yaml."
        )

    def start(name: str, host: int | None) -> Engine:
        return Engine(
            python,
            name,
            folder,
            model=model,
            dtype=os.environ.get("DTYPE", "float32" if "MODEL" not in os.environ else "auto"),
            max_tokens=max(row.tokens for row in rows) + 2 * CHECKED_TOKENS,
            block_tokens=BLOCK_TOKENS,
            cache_gib=cache_gib(),
            pool=None if host is None else "demo",
            host=host,
        )

    with running_pool("demo", hosts=2):
        result, details = measure(rows, start)
        status = json.loads(kvpool("status", "demo", "--output", "json"))["pools"][0]
    pool = {key: status[key] for key in ("lookups", "hits", "hit_rate", "misses")}
    document = {"pool": pool, "rows": result, "model": model, "small": small, "details": details}
    RESULT.write_text(json.dumps(document, indent=1) + "\n")
    print()
    print(table(result))
    print()
    print(
        f"pool: {pool['lookups']:,} blocks asked for, {pool['hits']:,} served, "
        f"hit rate {pool['hit_rate']:.1%}, misses {pool['misses']}"
    )
    print(f"written: {RESULT}")
    if not all(row["tokens_equal"] for row in result):
        print("FAILED: tokens differ from the run without a pool", file=sys.stderr)
        return 1
    return 0


def main() -> None:
    try:
        sys.exit(run())
    except SetupError as error:
        sys.exit(f"demo: {error}")


if __name__ == "__main__":
    main()
