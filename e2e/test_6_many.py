"""Many pools at once."""

from __future__ import annotations

import json
import time

import pytest

from kube import Kube, Object, wait_for
from pools import API_VERSION, CHILDREN, NAMESPACE_LABEL, dram
from release import NAMESPACE, OPERATOR, SYSTEM, Facts, wait_operator

NOWHERE = {"e2e.kvpool.dev/none": "yes"}


def bodies(prefix: str, count: int) -> list[Object]:
    """Pools that select no node: the operator has all of its work with them, and the nodes have none."""
    return [
        {
            "apiVersion": API_VERSION,
            "kind": "KVPool",
            "metadata": {"name": f"{prefix}-{number}", "namespace": NAMESPACE, "labels": {"e2e": prefix}},
            "spec": {"tiers": [dram(capacity="32Mi")], "nodeSelector": NOWHERE, "deletionPolicy": "Delete"},
        }
        for number in range(count)
    ]


def all_observed(kube: Kube, prefix: str, count: int) -> bool:
    pools = kube.all("kvpools.kvpool.dev", NAMESPACE, f"e2e={prefix}")
    done = [
        pool
        for pool in pools
        if (pool.get("status") or {}).get("observedGeneration") == pool["metadata"]["generation"]
        and any(c["reason"] == "NoNodes" for c in pool["status"]["conditions"])
    ]
    assert len(done) == count, f"{len(done)} of {count} pools have a status"
    return True


def delete_all(kube: Kube, prefix: str) -> None:
    kube.kubectl(
        "delete", "kvpools.kvpool.dev", "-n", NAMESPACE, "-l", f"e2e={prefix}", "--timeout=90s", seconds=120
    )
    selector = f"{NAMESPACE_LABEL}={NAMESPACE}"

    def gone() -> bool:
        left = [b["metadata"]["name"] for b in kube.all(CHILDREN, selector=selector)]
        left = [name for name in left if f"-{prefix}-" in name]
        assert not left, f"{len(left)} are still there: {left[:5]}"
        return True

    wait_for("nothing of them is left", 60, gone)


def test_50_pools_come_and_go(kube: Kube, release: str, facts: Facts) -> None:
    begun = time.monotonic()
    kube.apply(*bodies("many", 50))
    wait_for("50 pools have a status", 60, lambda: all_observed(kube, "many", 50))
    made = time.monotonic() - begun
    begun = time.monotonic()
    delete_all(kube, "many")
    facts.tell(pools_50={"made_s": round(made, 1), "deleted_s": round(time.monotonic() - begun, 1)})


@pytest.mark.kills_operator
def test_fresh_operator_reconciles_100_pools_and_then_is_silent(
    kube: Kube, release: str, facts: Facts
) -> None:
    scale = ("scale", "deploy", "-n", SYSTEM, "-l", OPERATOR)
    kube.kubectl(*scale, "--replicas=0")
    kube.apply(*bodies("hundred", 100))
    kube.kubectl(*scale, "--replicas=1")
    wait_operator(kube)
    begun = time.monotonic()
    wait_for("100 pools have a status", 60, lambda: all_observed(kube, "hundred", 100))
    seconds = time.monotonic() - begun

    def silent() -> bool:
        """15 s without a write. Before that, Kubernetes itself binds a hundred claims to their volumes."""
        before = writes(kube)
        time.sleep(15)
        written = {key: count - before.get(key, 0) for key, count in writes(kube).items()}
        written = {key: count for key, count in written.items() if count}
        assert not written, f"writes while nothing changed: {written}"
        return True

    wait_for("nothing is written when nothing changes", 75, silent)
    facts.tell(pools_100={"reconciled_s": round(seconds, 1), "writes_in_15_s_of_rest": 0})
    assert seconds < 30
    kube.kubectl(*scale, "--replicas=2")
    delete_all(kube, "hundred")


def writes(kube: Kube) -> dict[str, float]:
    """What the apiserver counted of writes to what the operator owns; leases and events are not its."""
    found: dict[str, float] = {}
    wanted = {"kvpools", "kvpoolnodes", "daemonsets", "configmaps", "services", "serviceaccounts", "roles",
              "rolebindings", "networkpolicies", "persistentvolumes", "persistentvolumeclaims"}  # fmt: skip
    for line in kube.raw("/metrics").splitlines():
        if not line.startswith("apiserver_request_total{"):
            continue
        labels, _, value = line.removeprefix("apiserver_request_total{").rpartition("} ")
        known = dict(pair.split("=", 1) for pair in labels.replace('"', "").split(","))
        if known["verb"] in ("POST", "PUT", "PATCH", "APPLY", "DELETE") and known["resource"] in wanted:
            key = json.dumps([known["verb"], known["resource"], known.get("subresource", "")])
            found[key] = found.get(key, 0) + float(value)
    return found
