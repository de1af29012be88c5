"""What is rendered for a pool."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvpool.spec import PoolSpec
from kvpool_operator.assign import Node, assign
from kvpool_operator.desired import desired
from kvpool_operator.names import LABEL_MAX, NAMESPACE_LABEL, POOL_LABEL, outside
from pool_objects import CXL, DRAM, SETTINGS, pool

Object = dict[str, Any]


def made(**spec: Any) -> dict[str, list[Object]]:
    wanted = pool(**spec)
    assignment = assign([Node("a"), Node("b")], [], shared=wanted.shared, hosts=wanted.spec.hosts)
    found: dict[str, list[Object]] = {}
    for body in desired(wanted, SETTINGS, assignment):
        found.setdefault(body["kind"], []).append(body)
    return found


def pod(**spec: Any) -> Object:
    return made(**spec)["DaemonSet"][0]["spec"]["template"]["spec"]


def test_the_daemons_limit_covers_the_dram_tiers() -> None:
    resources = pod()["containers"][0]["resources"]
    assert resources == {
        "requests": {"cpu": "100m", "memory": "192Mi"},
        "limits": {"memory": "576Mi"},
    }
    own = {"resources": {"requests": {"memory": "1Gi"}, "limits": {"memory": "2Gi", "cpu": "1"}}}
    resources = pod(daemon=own)["containers"][0]["resources"]
    assert resources["requests"]["memory"] == "1088Mi"
    assert resources["limits"] == {"memory": "2112Mi", "cpu": "1"}


def test_huge_pages_are_asked_for_and_mounted() -> None:
    tiers = [{**DRAM, "hugePages": True, "capacity": "64Mi"}]
    container = pod(tiers=tiers)["containers"][0]
    assert container["resources"]["limits"]["hugepages-2Mi"] == "64Mi"
    assert container["resources"]["limits"]["memory"] == "512Mi"
    assert "/kvpool-huge/prefix" in [mount["mountPath"] for mount in container["volumeMounts"]]
    assert made(tiers=tiers)["KVPoolNode"][0]["spec"]["manifest"]["spec"]["tiers"][0]["source"] == {
        "path": "/kvpool-huge/prefix/dram.region"
    }


def test_the_daemon_has_no_power_but_root_of_its_own_files() -> None:
    spec = pod()
    assert spec["containers"][0]["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert spec["securityContext"]["runAsGroup"] == 64000


def test_only_a_device_makes_the_daemon_privileged() -> None:
    tiers = [{**CXL, "source": {"path": "/dev/dax0.0"}}]
    spec = pod(tiers=tiers)
    assert spec["containers"][0]["securityContext"]["privileged"] is True
    assert {"path": "/dev/dax0.0", "type": "CharDevice"} in [v.get("hostPath") for v in spec["volumes"]]
    assert len(made(tiers=tiers)["PersistentVolume"]) == 1, "no pod gets a device by a mount"


def test_everything_says_which_pool_it_belongs_to() -> None:
    for bodies in made().values():
        for body in bodies:
            assert body["metadata"]["labels"][POOL_LABEL] == "prefix"
            assert body["metadata"]["labels"][NAMESPACE_LABEL] == "team"
            outside_of_it = body["metadata"].get("namespace") != "team"
            assert ("ownerReferences" in body["metadata"]) != outside_of_it, body["kind"]


def test_engines_and_daemons_read_the_same_valid_manifest() -> None:
    objects = made(paused=False, nodeSelector={"x": "y"})
    text = objects["ConfigMap"][0]["data"]["pool.yaml"]
    spec = PoolSpec.from_text(text)
    assert spec == PoolSpec.from_object(objects["KVPoolNode"][0]["spec"]["manifest"])
    assert [str(t.source and t.source.path) for t in spec.tiers] == [
        "/kvpool/prefix/dram.region",
        "/dev/shm/shared/prefix",
    ]
    assert "nodeSelector" not in objects["KVPoolNode"][0]["spec"]["manifest"]["spec"]
    config = json.loads(objects["ConfigMap"][0]["data"]["vllm.json"])
    assert config["kv_connector_extra_config"] == {"pool": "prefix"}


def test_a_change_that_daemons_do_not_see_does_not_touch_their_objects() -> None:
    before, after = made(), made(tolerations=[{"operator": "Exists"}])
    assert before["KVPoolNode"] == after["KVPoolNode"]
    assert before["DaemonSet"] != after["DaemonSet"]
    policy = made(eviction={"highWatermark": 90, "lowWatermark": 80})
    assert policy["DaemonSet"] == before["DaemonSet"], "a policy needs no restart"
    assert policy["KVPoolNode"] != before["KVPoolNode"]


@pytest.mark.parametrize("name", ["p", "p" * 52])
def test_names_outside_of_the_namespace_fit_and_differ(name: str) -> None:
    assert len(outside("n" * 63, name, "t" * 63)) <= LABEL_MAX
    assert outside("a-b", "c") != outside("a", "b-c")
    assert outside("n" * 60, "a") != outside("n" * 60, "b")


def test_hosts_are_shards_only_where_a_tier_is_shared() -> None:
    assert [n["spec"]["host"] for n in made()["KVPoolNode"]] == [0, 1]
    assert [n["spec"]["host"] for n in made(tiers=[DRAM])["KVPoolNode"]] == [0, 0]
