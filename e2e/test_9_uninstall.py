"""The end of a release: nothing is stuck, nothing is left but what was asked to stay. Runs last."""

from __future__ import annotations

import pytest

from kube import Kube, wait_for
from pools import LABEL, START_S, Client, KVPool, dram
from release import NAMESPACE, OPERATOR, RELEASE, SYSTEM, Facts, Target, install


@pytest.mark.kills_operator
def test_uninstall_with_a_pool_leaves_nothing_stuck(
    kube: Kube, target: Target, release: str, facts: Facts
) -> None:
    pool = KVPool(kube, NAMESPACE, "last", {"tiers": [dram(capacity="32Mi")], "deletionPolicy": "Delete"})
    pool.apply()
    pool.wait_settled(START_S, nodes=2)
    client = Client(pool, target.nodes[0], target.image).start()
    client.store("last", 8)
    kube.helm("uninstall", RELEASE, "--namespace", SYSTEM, "--wait", "--timeout=120s")
    wait_for("the operator's pods are gone", 60, lambda: not kube.all("pods", SYSTEM, OPERATOR))
    for kind in ("mutatingwebhookconfigurations", "validatingwebhookconfigurations", "clusterroles"):
        left = [b["metadata"]["name"] for b in kube.all(kind) if "kvpool" in b["metadata"]["name"]]
        assert not left, f"{kind}: {left}"
    client.must_hit("last", 8)  # what runs goes on
    client.stop()
    # Definitions and pools stay, by the chart's crds.keep; a person can delete them without an operator.
    kube.kubectl("delete", "kvpools.kvpool.dev", "--all", "-n", NAMESPACE, "--timeout=60s", seconds=90)
    for namespace in (NAMESPACE, SYSTEM):  # the daemons, which served until now, go with the second
        kube.kubectl("delete", "namespace", namespace, "--timeout=90s", seconds=120)
    kube.kubectl("delete", "pv", "-l", LABEL, "--timeout=30s")
    kube.kubectl("delete", "crd", "kvpools.kvpool.dev", "kvpoolnodes.kvpool.dev", "--timeout=60s", seconds=90)
    terminating = [
        f"{b['kind']}/{b['metadata']['name']}"
        for b in kube.all("ns,pv,crd")
        if "deletionTimestamp" in b["metadata"]
    ]
    assert not terminating
    facts.tell(uninstall="clean")


@pytest.mark.kills_operator
def test_release_installs_again_after_it(target: Target, kube: Kube, release: str) -> None:
    install(target)
    kube.helm("uninstall", RELEASE, "--namespace", SYSTEM, "--wait", "--timeout=120s")
