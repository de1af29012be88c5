"""Real vLLM engines in `restricted` pods, given the pool by label: stored on one node, hit on the other.

The engine's environment is too large for an image here: an administrator's volume, read-only, brings it in.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.cluster import Cluster
from kube import Object, wait_for
from pools import HOSTNAME, LABEL, RESTRICTED, KVPool, counted, scripts, wait_stable_counts
from release import NAMESPACE, Facts, Target

POOL = "engines"
ROOT = Path(__file__).resolve().parents[1]
PROMPTS, TOKENS = 3, 512
VOLUME = "e2e-engine"
ENGINE_S = 240


@pytest.fixture(scope="module")
def environment(own: Cluster, target: Target, release: str) -> Iterator[tuple[str, str]]:
    """The places of packages and model in the pods, below a claim that is bound to the host's cache."""
    sys.path.insert(0, str(ROOT / "demo"))
    from environment import make_engine_environment

    python = make_engine_environment(print)
    cache = own.places.cache
    model = cache / "demo" / "model-tiny"
    subprocess.run(
        [python, ROOT / "demo" / "model.py", model, "--shape", "tiny"], check=True, capture_output=True
    )
    for file in model.iterdir():  # engines in pods are somebody else
        file.chmod(0o644)
    where = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        check=True,
        capture_output=True,
        text=True,
    )
    packages = Path(where.stdout.strip())
    if not packages.is_relative_to(cache):
        pytest.skip(f"the engine's environment {packages} is not in {cache}, which is what the nodes have")
    claim = {"storageClassName": "", "accessModes": ["ReadOnlyMany"]}
    size = {"storage": "10Gi"}
    target.kube.apply(
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": VOLUME},
            "spec": {
                **claim,
                "capacity": size,
                "hostPath": {"path": "/mnt/cache", "type": "Directory"},
                "claimRef": {"namespace": NAMESPACE, "name": VOLUME},
            },
        },
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": VOLUME, "namespace": NAMESPACE},
            "spec": {**claim, "volumeName": VOLUME, "resources": {"requests": size}},
        },
    )
    yield str(Path("/cache") / packages.relative_to(cache)), str(Path("/cache") / model.relative_to(cache))
    target.kube.delete("pvc", VOLUME, NAMESPACE)
    target.kube.delete("pv", VOLUME)


def engine(name: str, node: str, image: str, packages: str, model: str) -> Object:
    values = {
        "PYTHONPATH": packages,
        "HOME": "/scratch",
        "VLLM_CACHE_ROOT": "/scratch/vllm",
        "XDG_CACHE_HOME": "/scratch",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    container = {
        "name": "engine",
        "image": image,
        # The image's own Python, without kvpool's packages: the engine's environment has its own kvpool.
        "command": ["/usr/bin/python3", "/client/engine.py", model, str(PROMPTS), str(TOKENS)],
        "env": [{"name": key, "value": value} for key, value in values.items()],
        "securityContext": {**RESTRICTED, "readOnlyRootFilesystem": True},
        "resources": {"requests": {"memory": "2Gi"}, "limits": {"memory": "4Gi"}},
        "volumeMounts": [
            {"name": "cache", "mountPath": "/cache", "readOnly": True},
            {"name": "script", "mountPath": "/client"},
            {"name": "scratch", "mountPath": "/scratch"},
            {"name": "scratch", "mountPath": "/tmp"},
            {"name": "memory", "mountPath": "/dev/shm"},
        ],
    }
    spec = {
        "restartPolicy": "Never",
        "nodeSelector": {HOSTNAME: node},
        "automountServiceAccountToken": False,
        "containers": [container],
        "volumes": [
            {"name": "cache", "persistentVolumeClaim": {"claimName": VOLUME, "readOnly": True}},
            {"name": "script", "configMap": {"name": "e2e-scripts"}},
            {"name": "scratch", "emptyDir": {}},
            {"name": "memory", "emptyDir": {"medium": "Memory"}},
        ],
    }
    metadata = {"name": name, "namespace": NAMESPACE, "labels": {LABEL: POOL, "e2e": "client"}}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def run_engine(pool: KVPool, name: str, node: str, target: Target, places: tuple[str, str]) -> Object:
    kube = pool.kube
    kube.apply(scripts(NAMESPACE), engine(name, node, target.image, *places))

    def ended() -> str:
        phase: str = kube.get("pod", name, NAMESPACE)["status"].get("phase", "")
        return phase if phase in ("Succeeded", "Failed") else ""

    phase = wait_for(f"engine {name} ends", ENGINE_S, ended, every=2)
    log = kube.logs(NAMESPACE, name)
    assert phase == "Succeeded", log[-4000:]
    kube.delete("pod", name, NAMESPACE)
    (line,) = [line for line in log.splitlines() if line.startswith("RESULT ")]
    answer: Object = json.loads(line.removeprefix("RESULT "))
    return answer


def external(answer: Object) -> tuple[float, float]:
    """Tokens that the engine asked its connector for, and those that it got."""
    metrics = answer["metrics"]
    return (
        metrics.get("vllm:external_prefix_cache_queries", 0),
        metrics.get("vllm:external_prefix_cache_hits", 0),
    )


def test_vllm_pod_hits_what_a_vllm_pod_on_another_node_stored(
    main_pool: KVPool, target: Target, environment: tuple[str, str], facts: Facts
) -> None:
    a, b = target.nodes
    start = wait_stable_counts(main_pool)
    stored = run_engine(main_pool, "engine-a", a, target, environment)
    assert external(stored)[1] == 0, stored["metrics"]
    before = wait_stable_counts(main_pool)
    hit = run_engine(main_pool, "engine-b", b, target, environment)
    after = wait_stable_counts(main_pool)
    shareable = PROMPTS * ((TOKENS - 1) // stored["block_tokens"]) * stored["block_tokens"]
    assert hit["outputs"] == stored["outputs"]
    assert external(hit)[1] == shareable, hit["metrics"]
    lookups, hits = counted(before, after)
    # What the engine says that it got, in tokens, is what the pool says that it served, in blocks.
    assert hits * stored["block_tokens"] == external(hit)[1], (before, after, hit["metrics"])
    total_lookups, total_hits = counted(start, after)
    facts.tell(
        engine={
            "external_hit_tokens": external(hit)[1],
            "external_query_tokens": external(hit)[0],
            "shareable_tokens": shareable,
            "outputs_equal": True,
            "pool_lookups": lookups,
            "pool_hits": hits,
            "pool_hit_rate": after["hitRate"],
            "pool_hit_rate_of_both_engines": round(100 * total_hits / total_lookups, 1),
        }
    )
