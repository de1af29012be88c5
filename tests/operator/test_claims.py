"""What is made for a pool where the DRA driver is installed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvpool_operator.assign import Node, assign
from kvpool_operator.claims import SEATS, not_to_be_had
from kvpool_operator.desired import desired
from kvpool_operator.inject import inject
from kvpool_operator.names import POLICY_ANNOTATION, POOL_LABEL, SKIPPED_ANNOTATION, region_uuid
from pool_objects import CXL, DRAM, SETTINGS, pool, pool_body

Object = dict[str, Any]
DRIVEN = replace(SETTINGS, driver=True)
CLASSED = {**CXL, "shared": True, "source": {"deviceClass": "cxl-dax"}}
CLASSED_TIERS = [DRAM, CLASSED]


def made(settings: Any = DRIVEN, **spec: Any) -> dict[str, list[Object]]:
    wanted = pool(**spec)
    assignment = assign([Node("a"), Node("b")], [], shared=wanted.shared, hosts=wanted.spec.hosts)
    found: dict[str, list[Object]] = {}
    for body in desired(wanted, settings, assignment):
        found.setdefault(body["kind"], []).append(body)
    return found


def test_without_the_driver_nothing_of_it_is_made() -> None:
    assert not {"ResourceClaim", "ResourceClaimTemplate", "ResourceSlice"} & set(made(SETTINGS))


def test_a_pool_is_equal_seats_on_the_nodes_that_serve_it() -> None:
    (found,) = made(nodeSelector={"kv": "yes"})["ResourceSlice"]
    spec, wanted = found["spec"], pool()
    assert "namespace" not in found["metadata"]
    assert len(spec["devices"]) == SEATS
    assert len({device["name"] for device in spec["devices"]}) == SEATS
    assert spec["devices"][7]["attributes"]["seat"] == {"int": 7}
    assert spec["pool"]["name"] == f"pool/{wanted.namespace}/{wanted.name}/{wanted.uid}"
    (term,) = spec["nodeSelector"]["nodeSelectorTerms"]
    assert {"key": "kv", "operator": "In", "values": ["yes"]} in term["matchExpressions"]


def test_the_template_asks_for_a_seat_of_this_very_pool() -> None:
    (found,) = made()["ResourceClaimTemplate"]
    wanted = pool()
    (request,) = found["spec"]["spec"]["devices"]["requests"]
    (selector,) = request["exactly"]["selectors"]
    assert f'.namespace == "{wanted.namespace}"' in selector["cel"]["expression"]
    assert f'.pool == "{wanted.name}"' in selector["cel"]["expression"]
    assert found["metadata"]["name"] == f"kvpool-{wanted.name}"
    assert found["metadata"]["ownerReferences"]


def test_all_daemons_share_one_claim_for_a_tier_of_a_device_class() -> None:
    found = made(tiers=CLASSED_TIERS, hosts=2)
    (claim,) = found["ResourceClaim"]
    wanted = pool(tiers=CLASSED_TIERS, hosts=2)
    uuid = str(region_uuid(wanted.namespace, wanted.name, "cxl"))
    assert claim["metadata"]["namespace"] == SETTINGS.namespace
    (request,) = claim["spec"]["devices"]["requests"]
    alternatives = request["firstAvailable"]
    assert [a["name"] for a in alternatives[:4]] == ["kept-1", "kept-2", "kept-4", "kept-8"]
    assert all(uuid in a["selectors"][0]["cel"]["expression"] for a in alternatives[:4])
    assert [a["count"] for a in alternatives[4:]] == [1, 2, 4, 8]
    pod = found["DaemonSet"][0]["spec"]["template"]["spec"]
    assert pod["resourceClaims"] == [{"name": "cxl", "resourceClaimName": claim["metadata"]["name"]}]
    (container,) = pod["containers"]
    assert container["resources"]["claims"] == [{"name": "cxl"}]
    assert "privileged" not in container["securityContext"]
    assert found["KVPoolNode"][0]["spec"]["manifest"]["spec"]["tiers"][1]["source"] == {
        "path": "/dev/kvpool/prefix/cxl"
    }


def test_the_claims_policy_is_the_pools_as_it_is_now() -> None:
    for policy in ("Retain", "Delete"):
        (claim,) = made(tiers=CLASSED_TIERS, hosts=2, deletionPolicy=policy)["ResourceClaim"]
        assert claim["metadata"]["annotations"][POLICY_ANNOTATION] == policy


def test_a_device_class_without_the_driver_or_for_one_node_is_refused_with_the_way_out() -> None:
    wanted = pool(tiers=CLASSED_TIERS, hosts=2)
    assert not_to_be_had(wanted, DRIVEN) == ""
    assert "dra.enabled=true" in not_to_be_had(wanted, SETTINGS)
    own = pool(tiers=[DRAM, {**CLASSED, "shared": False}])
    assert "shared: true" in not_to_be_had(own, DRIVEN)


def engine() -> Object:
    container = {"name": "engine", "resources": {"limits": {"cpu": "1"}, "claims": [{"name": "gpu"}]}}
    spec = {"containers": [container], "resourceClaims": [{"name": "gpu", "resourceClaimName": "g"}]}
    return {"metadata": {"labels": {POOL_LABEL: "prefix"}}, "spec": spec}


@pytest.mark.parametrize("source", [{"deviceClass": "cxl-dax"}, {"path": "/dev/dax0.0"}])
def test_an_engine_gets_such_a_pool_by_one_claim_and_no_volume(source: Object) -> None:
    body = pool_body(hosts=2, tiers=[DRAM, {**CLASSED, "source": source}])
    pod = inject(engine(), body, driver=True)
    assert pod["spec"]["resourceClaims"] == [
        {"name": "gpu", "resourceClaimName": "g"},
        {"name": "kvpool", "resourceClaimTemplateName": "kvpool-prefix"},
    ]
    (container,) = pod["spec"]["containers"]
    assert container["resources"] == {
        "limits": {"cpu": "1"},
        "claims": [{"name": "gpu"}, {"name": "kvpool"}],
    }
    assert pod["spec"]["volumes"] == []
    assert container["volumeMounts"] == []
    assert {v["name"] for v in container["env"]} >= {"KVPOOL_POOL", "KVPOOL_KV_TRANSFER_CONFIG"}
    assert inject(pod, body, driver=True) == pod


def test_an_engine_gets_no_claim_where_there_is_no_driver() -> None:
    pod = inject(engine(), pool_body(hosts=2, tiers=CLASSED_TIERS))
    assert "dra.enabled" in pod["metadata"]["annotations"][SKIPPED_ANNOTATION]
