"""What the API says to a KVPool: the mistakes that `kvpool up` finds, defaults, and what cannot change."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from kube.apiserver import Answer, ApiServer
from kvpool import rules
from kvpool.spec import PoolSpec
from manifests import BAD, GOOD, Bad, Document, cxl, manifest, ssd, tier

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "docs" / "examples").glob("*.yaml"))


def pools(namespace: str) -> str:
    return f"/apis/kvpool.dev/v1alpha1/namespaces/{namespace}/kvpools"


# --- mistakes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.path)
def test_kvpool_with_a_mistake_is_refused_with_the_sentence_of_kvpool_up(crds: ApiServer, bad: Bad) -> None:
    answer = crds.create(pools("default"), bad.document, dry_run=True)
    assert not answer.ok
    assert (bad.api or bad.rule) in answer.message
    assert "evaluating rule" not in answer.message  # a rule that failed instead of judging


def test_kubectl_apply_shows_the_field_with_the_sentence(crds: ApiServer) -> None:
    document = manifest(tier(capacity="64GB"))
    done = crds.kubectl("apply", "-f", "-", stdin=json.dumps(document), check=False)
    assert done.returncode == 1
    assert "spec.tiers[0].capacity: Invalid value" in done.stderr
    assert rules.QUANTITY in done.stderr


@pytest.mark.parametrize("name", GOOD)
def test_kvpool_without_a_mistake_is_stored_and_what_is_stored_is_read(
    crds: ApiServer, namespace: str, name: str
) -> None:
    answer = crds.create(pools(namespace), GOOD[name])
    assert answer.ok, answer.message
    # With the API's defaults in it, it is the manifest that `kvpool up` reads without them.
    assert PoolSpec.from_object(answer.body).spec == PoolSpec.from_object(GOOD[name]).spec
    node = {
        "apiVersion": "kvpool.dev/v1alpha1",
        "kind": "KVPoolNode",
        "metadata": {"name": "p-0"},
        "spec": {
            "pool": "p",
            "nodeName": "n",
            "host": 0,
            "state": "Active",
            "manifest": PoolSpec.from_object(answer.body).to_object(),
        },
    }
    stored = crds.create(pools(namespace).replace("kvpools", "kvpoolnodes"), node)
    assert stored.ok, stored.message
    assert stored.body["spec"] == node["spec"]  # nothing pruned, nothing added


def test_defaults_are_filled_in(crds: ApiServer) -> None:
    spec = crds.create(pools("default"), manifest(), dry_run=True).body["spec"]
    assert spec == {
        "hosts": 1,
        "tiers": [
            {
                "name": "dram",
                "medium": "DRAM",
                "capacity": "64Gi",
                "optional": False,
                "shared": False,
                "hugePages": False,
            }
        ],
        "eviction": {"highWatermark": 95, "lowWatermark": 90},
        "verify": "always",
        "deletionPolicy": "Retain",
        "paused": False,
    }


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_are_accepted(crds: ApiServer, namespace: str, path: Path) -> None:
    crds.kubectl("apply", "--dry-run=server", "-n", namespace, "-f", str(path))


# --- what cannot change -------------------------------------------------------------------------------------

BEFORE = manifest(
    tier(minBlockSize="64Ki"),
    cxl(shared=True, extentSize="16Mi"),
    ssd(),
    hosts=2,
)


def changed(index: int | None, **fields: Any) -> Document:
    """BEFORE with other fields in that tier (in the spec when it is None); None takes a field out."""
    document = copy.deepcopy(BEFORE)
    target = document["spec"] if index is None else document["spec"]["tiers"][index]
    target.update(fields)
    for name in [name for name, value in fields.items() if value is None]:
        del target[name]
    return document


def replaced(api: ApiServer, namespace: str, after: Document) -> Answer:
    """What the API says when BEFORE is there and `after` is put in its place."""
    created = api.create(pools(namespace), BEFORE)
    assert created.ok, created.message
    return api.request("PUT", f"{pools(namespace)}/p", {**created.body, "spec": after["spec"]})


@pytest.mark.parametrize(
    ("after", "field", "sentence"),
    [
        (changed(0, medium="CXL", source={"path": "/x"}), "spec.tiers[0].medium", rules.TIER_FIXED),
        (changed(0, source={"path": "/x"}), "spec.tiers[0].source", rules.TIER_FIXED),
        (changed(1, source={"path": "/dev/dax1.0"}), "spec.tiers[1].source", rules.TIER_FIXED),
        (changed(2, source={"path": "/dev/sda"}), "spec.tiers[2].source", rules.TIER_FIXED),
        (changed(0, shared=True), "spec.tiers[0].shared", rules.TIER_FIXED),
        (changed(1, coherence="hardware"), "spec.tiers[1].coherence", rules.TIER_FIXED),
        (changed(0, coherence="software"), "spec.tiers[0].coherence", rules.TIER_FIXED),
        (changed(0, minBlockSize="128Ki"), "spec.tiers[0].minBlockSize", rules.TIER_FIXED),
        (changed(0, minBlockSize=None), "spec.tiers[0].minBlockSize", rules.TIER_FIXED),
        (changed(0, extentSize="16Mi"), "spec.tiers[0].extentSize", rules.TIER_FIXED),
        (changed(1, extentSize="32Mi"), "spec.tiers[1].extentSize", rules.TIER_FIXED),
        (changed(None, hosts=3), "spec.hosts", rules.HOSTS_FIXED),
        (changed(None, hosts=1), "spec.hosts", rules.HOSTS_FIXED),
    ],
)
def test_change_of_what_is_fixed_is_refused(
    crds: ApiServer, namespace: str, after: Document, field: str, sentence: str
) -> None:
    answer = replaced(crds, namespace, after)
    assert answer.code == 422
    assert f"{field}: Invalid value" in answer.message
    assert sentence in answer.message


@pytest.mark.parametrize(
    "after",
    [
        changed(0, capacity="128Gi"),
        changed(0, capacity="1Gi", optional=True),
        changed(0, minBlockSize=65536),  # the same size, written otherwise
        changed(0, coherence="hardware"),  # what it was without being said
        changed(1, coherence="software"),
        changed(2, name="other", source={"path": "/dev/sda"}),
        changed(0, name="other", minBlockSize=None, source={"path": "/dev/shm/x"}),
        changed(None, tiers=BEFORE["spec"]["tiers"][1:]),
        changed(None, tiers=[tier(name="hbm", medium="GPU"), *BEFORE["spec"]["tiers"]]),
        changed(None, tiers=BEFORE["spec"]["tiers"][:1], hosts=1),  # the shared tier goes
        changed(None, eviction={"highWatermark": 80, "lowWatermark": 70}, deletionPolicy="Delete"),
        changed(None, paused=True, nodeSelector={"a": "b"}, tolerations=[{"operator": "Exists"}]),
        changed(None, daemon={"image": "i", "resources": {"limits": {"memory": "1Gi"}}}),
    ],
)
def test_change_of_anything_else_is_accepted(crds: ApiServer, namespace: str, after: Document) -> None:
    answer = replaced(crds, namespace, after)
    assert answer.ok, answer.message


def test_hosts_of_a_pool_may_change_with_its_first_shared_tier(crds: ApiServer, namespace: str) -> None:
    assert crds.create(pools(namespace), manifest()).ok
    answer = crds.apply(f"{pools(namespace)}/p", manifest(tier(), cxl(shared=True), hosts=4))
    assert answer.ok, answer.message


# --- the CRDs -----------------------------------------------------------------------------------------------


def test_crds_are_structural_and_explained(crds: ApiServer) -> None:
    for crd in crds.get("crd")["items"]:
        bad = [c for c in crd["status"]["conditions"] if c["type"] == "NonStructuralSchema"]
        assert not bad
    text = crds.kubectl("explain", "kvpool.spec.tiers.capacity").stdout
    assert "64Gi (binary) or 64G (decimal)" in text


def test_crds_are_found_by_short_name_and_category(crds: ApiServer, namespace: str) -> None:
    assert crds.create(pools(namespace), manifest()).ok
    for name in ("kvp", "kvpool", "kvpools"):
        assert "kvpool.dev/p" in crds.kubectl("get", name, "-n", namespace, "-o", "name").stdout
        one = crds.kubectl("get", name, "p", "-n", namespace, "-o", "name").stdout
        assert one.strip() == "kvpool.kvpool.dev/p"
    assert "kvpool.dev/p" in crds.kubectl("get", "kvpool-all", "-n", namespace, "-o", "name").stdout


# --- status -------------------------------------------------------------------------------------------------

STATUS = yaml.safe_load("""
observedGeneration: 1
conditions:
- {type: Ready, status: 'True', observedGeneration: 1, reason: AllNodesReady, message: 2 of 2 nodes serve.,
   lastTransitionTime: '2026-01-02T03:04:05Z'}
- {type: Degraded, status: 'False', observedGeneration: 1, reason: AsDeclared, message: '',
   lastTransitionTime: '2026-01-02T03:04:05Z'}
nodes: {desired: 2, ready: 2, outOfDate: 0}
nodesReady: 2/2
tiers:
- {name: dram, medium: DRAM, capacityBytes: 68719476736, usedBytes: 1288490188, blocks: 19660, evictions: 3,
   lookups: 1000, hits: 974, hitRate: '97.4'}
capacity: 64Gi
used: 1.2Gi
blocks: 19660
lookups: 1000
hits: 974
hitRate: '97.4'
misses: {never-stored: 20, evicted: 6}
""")


def test_status_by_server_side_apply_is_shown_in_the_columns(crds: ApiServer, namespace: str) -> None:
    assert crds.create(pools(namespace), manifest()).ok
    body = {
        "apiVersion": rules.API_VERSION,
        "kind": rules.KIND,
        "metadata": {"name": "p"},
        "status": STATUS,
    }
    answer = crds.apply(f"{pools(namespace)}/p/status", body, manager="kvpool-operator")
    assert answer.ok, answer.message
    assert answer.body["status"] == STATUS
    assert answer.body["metadata"]["generation"] == 1
    head, row = crds.kubectl("get", "kvp", "-n", namespace).stdout.splitlines()
    assert head.split() == ["NAME", "READY", "NODES", "CAPACITY", "USED", "HIT", "%", "AGE"]
    assert row.split()[:6] == ["p", "True", "2/2", "64Gi", "1.2Gi", "97.4"]
    wide = crds.kubectl("get", "kvp", "-n", namespace, "-o", "wide").stdout
    assert "AllNodesReady" in wide
    assert "2 of 2 nodes serve." in wide


def test_status_same_again_writes_nothing(crds: ApiServer, namespace: str) -> None:
    assert crds.create(pools(namespace), manifest()).ok
    body = {**manifest(), "status": STATUS}
    del body["spec"]
    once = crds.apply(f"{pools(namespace)}/p/status", body, manager="kvpool-operator").body
    again = crds.apply(f"{pools(namespace)}/p/status", body, manager="kvpool-operator").body
    assert again["metadata"]["resourceVersion"] == once["metadata"]["resourceVersion"]


def test_status_of_a_node_is_its_daemons_and_the_spec_the_operators(crds: ApiServer, namespace: str) -> None:
    path = pools(namespace).replace("kvpools", "kvpoolnodes") + "/p-0"
    head = {"apiVersion": rules.API_VERSION, "kind": "KVPoolNode", "metadata": {"name": "p-0"}}
    spec = {
        "pool": "p",
        "nodeName": "n",
        "host": 0,
        "state": "Active",
        "adopt": [{"shard": 1, "epoch": 2}],
        "manifest": manifest(),
    }
    status = yaml.safe_load("""
    observedGeneration: 1
    ready: false
    message: waits for host 1.
    version: 0.1.0
    podName: kvpool-p-abcde
    startedAt: '2026-01-02T03:04:05Z'
    updatedAt: '2026-01-02T03:04:05Z'
    host: 0
    removed: false
    conditions:
    - {type: CoherenceVerified, status: Unknown, reason: Waiting, message: '',
       lastTransitionTime: '2026-01-02T03:04:05Z'}
    tiers:
    - {name: cxl, medium: CXL, capacityBytes: 1, usedBytes: 1, blocks: 1, evictions: 0, lookups: 1, hits: 1,
       storedBlocks: 1, shards: [{shard: 0, owner: 0, epoch: 0, settled: true, usedBytes: 1, blocks: 1}]}
    lookups: 1
    hits: 1
    misses: {never-stored: 1}
    skippedTiers: {hbm: no GPU here}
    events: [{type: Warning, reason: Damage, tier: cxl, message: m, at: '2026-01-02T03:04:05Z'}]
    problems: [p]
    """)
    created = crds.apply(path, {**head, "spec": spec}, manager="kvpool-operator")
    assert created.ok, created.message
    applied = crds.apply(f"{path}/status", {**head, "status": status}, manager="kvpool-node")
    assert applied.ok, applied.message
    assert applied.body["status"] == status
    assert applied.body["spec"] == spec
    assert crds.apply(path, {**head, "spec": {**spec, "state": "Draining"}}, manager="kvpool-operator").ok
    assert crds.request("GET", path).body["status"] == status
    columns = crds.kubectl("get", "kvpn", "-n", namespace).stdout.splitlines()[1].split()
    assert columns[:5] == ["p-0", "p", "n", "Draining", "false"]
