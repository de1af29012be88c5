"""The sharing gap: the time to the first token when a block was stored by the own node, and by the other one.

Real vLLM in a pod on each node, in memory that a DeviceClass handed out. Both engines live through all of it
and take turns, and each measures what itself and what the other one has stored: what is different between the
two engines, and what the machine does beside, is in both sides of the ratio.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from claims import claimed
from cluster.cluster import Cluster
from kube import Kube, Object, ready, wait_for
from pools import LABEL, START_S, KVPool, scripts
from release import NAMESPACE, Facts, Target
from test_2_engine import ROOT, engine
from test_2_engine import environment as environment
from test_7_dra import driver as driver

POOL = "gap"
LENGTHS = (513, 1025, 2049)  # one token more than whole blocks: all but that one can be had from the pool
REPEATS = 16
# What this is measured against: two nodes over CXL memory composed by a DRA driver, as their authors report.
REFERENCE = {
    "times_faster_than_cold": "5.5 to 36.6",
    "external_hit_rate": "95.4 to 99.5",
    "gap_of_medians": "1.01 to 1.04",
}
ENGINE_S = 240
JOB_S = 120


@dataclass
class Engine:
    """One engine's pod; its jobs are files."""

    kube: Kube
    name: str
    jobs: int = 0

    def measure(self, prompt: str, tokens: int) -> Object:
        text = json.dumps({"prompt": prompt, "tokens": tokens})
        number, self.jobs = self.jobs, self.jobs + 1
        word = (
            f"echo '{text}' >/scratch/new && mv /scratch/new /scratch/job.{number}; "
            f"until test -e /scratch/answer.{number}; do sleep 0.1; done; cat /scratch/answer.{number}"
        )
        said = self.kube.exec(NAMESPACE, self.name, "sh", "-c", word, seconds=JOB_S)
        answer: Object = json.loads(said)
        return answer


@pytest.fixture(scope="module")
def pool(driver: str, target: Target) -> Iterator[KVPool]:
    # No DRAM tier: what the own node has stored would be found in it, and not in the region.
    spec = {"hosts": 2, "tiers": [claimed(capacity="160Mi")], "deletionPolicy": "Delete"}
    made = KVPool(target.kube, NAMESPACE, POOL, spec)
    made.apply()
    made.wait_settled(START_S, nodes=2)
    yield made
    made.delete()
    made.wait_gone()


@pytest.fixture(scope="module")
def engines(
    pool: KVPool, target: Target, own: Cluster, environment: tuple[str, str]
) -> Iterator[list[Engine]]:
    packages, _ = environment
    model = own.places.cache / "demo" / "model-demo"
    python = next(own.places.cache.glob("vllm-*/bin/python"))
    subprocess.run(
        [python, ROOT / "demo" / "model.py", model, "--shape", "demo"], check=True, capture_output=True
    )
    for file in model.iterdir():
        file.chmod(0o644)
    place = str(Path("/cache") / model.relative_to(own.places.cache))
    made = []
    for node in target.nodes:
        body = engine(f"gap-{node}", node, target.image, packages, place)
        body["metadata"]["labels"][LABEL] = POOL
        (container,) = body["spec"]["containers"]
        container["command"] = ["/usr/bin/python3", "/client/gap.py", place, str(max(LENGTHS))]
        container["env"].append({"name": "OMP_NUM_THREADS", "value": "1"})
        target.kube.apply(scripts(NAMESPACE), body)
        made.append(Engine(target.kube, body["metadata"]["name"]))
    for one in made:

        def is_ready(name: str = one.name) -> bool:
            body = target.kube.get("pod", name, NAMESPACE)
            assert body["status"].get("phase") != "Failed", target.kube.logs(NAMESPACE, name)[-3000:]
            return ready(body) and "READY" in target.kube.logs(NAMESPACE, name)

        wait_for(f"engine {one.name} is ready", ENGINE_S, is_ready, every=2)
    yield made
    for one in made:  # before the volume that they use goes
        target.kube.delete("pod", one.name, NAMESPACE)


def test_sharing_gap_of_two_nodes(engines: list[Engine], facts: Facts) -> None:
    rows = []
    for tokens in LENGTHS:
        cold, outputs = [], {}
        for index, one in enumerate(engines):  # what each has stored
            answer = one.measure(f"gap/{tokens}/{index}", tokens)
            assert answer["hits"] == 0, answer
            cold.append(answer["ttft_s"])
            outputs[index] = answer["output"]
        time.sleep(1)
        own: list[float] = []
        other: list[float] = []
        pairs: list[float] = []
        queries = hits = 0.0
        for turn in range(REPEATS):
            seconds = {}
            for reader in (0, 1) if turn % 2 else (1, 0):
                for stored in (reader, 1 - reader) if turn // 2 % 2 else (1 - reader, reader):
                    answer = engines[reader].measure(f"gap/{tokens}/{stored}", tokens)
                    assert answer["output"] == outputs[stored], "another token than without the pool"
                    queries, hits = queries + answer["queries"], hits + answer["hits"]
                    seconds[reader, stored] = answer["ttft_s"]
            own += [seconds[0, 0], seconds[1, 1]]
            other += [seconds[0, 1], seconds[1, 0]]
            pairs += [seconds[0, 1] / seconds[0, 0], seconds[1, 0] / seconds[1, 1]]
        middle = statistics.median
        row = {
            "tokens": tokens,
            "cold_s": round(middle(cold), 4),
            "own_node_hit_s": round(middle(own), 5),
            "other_node_hit_s": round(middle(other), 5),
            "gap_of_medians": round(middle(other) / middle(own), 4),
            "gap_median_of_pairs": round(middle(pairs), 4),
            "times_faster_than_cold": round(middle(cold) / middle(other), 1),
            "external_hit_rate": round(100 * hits / queries, 2),
            "repeats": len(pairs),
        }
        print(row)
        rows.append(row)
        facts.tell(dra_sharing_gap=rows, dra_sharing_gap_reference=REFERENCE)
        assert hits / queries >= 0.995, row
        assert middle(other) < middle(cold), row
