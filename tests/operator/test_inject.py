"""An engine's pod and what the webhook makes of it."""

from __future__ import annotations

from typing import Any

import pytest

from kvpool_operator.inject import inject
from kvpool_operator.names import CONTAINERS_ANNOTATION, INJECTED_ANNOTATION, POOL_LABEL, SKIPPED_ANNOTATION
from pool_objects import CXL, pool_body

Object = dict[str, Any]


def pod(annotations: Object | None = None, **container: Any) -> Object:
    return {
        "metadata": {"labels": {POOL_LABEL: "prefix"}, "annotations": annotations or {}},
        "spec": {
            "containers": [{"name": "engine", "image": "x", **container}, {"name": "side", "image": "y"}]
        },
    }


def test_every_container_gets_claims_and_environment_and_the_pod_the_group() -> None:
    made = inject(pod(), pool_body())
    assert made["metadata"]["annotations"] == {INJECTED_ANNOTATION: "prefix"}
    assert made["spec"]["securityContext"]["supplementalGroups"] == [64000]
    claims = [volume["persistentVolumeClaim"]["claimName"] for volume in made["spec"]["volumes"]]
    assert claims == ["kvpool-prefix", "kvpool-prefix-cxl"]
    for container in made["spec"]["containers"]:
        assert [m["mountPath"] for m in container["volumeMounts"]] == [
            "/kvpool/prefix",
            "/dev/shm/shared/prefix",
        ]
        env = {variable["name"]: variable["value"] for variable in container["env"]}
        assert env["KVPOOL_RUNTIME_DIR"] == "/kvpool"
        assert env["PYTHONHASHSEED"] == "0"
        assert '"pool": "prefix"' in env["KVPOOL_KV_TRANSFER_CONFIG"]


def test_doing_it_twice_is_doing_it_once() -> None:
    once = inject(pod(), pool_body())
    assert inject(once, pool_body()) == once


def test_what_the_user_set_stays() -> None:
    given = [{"name": "PYTHONHASHSEED", "value": "7"}, {"name": "X", "value": "$(KVPOOL_POOL)"}]
    engine = inject(pod(env=given), pool_body())["spec"]["containers"][0]
    assert engine["env"][-2:] == given, "ours come first, so that theirs can refer to them"
    assert [v["name"] for v in engine["env"]].count("PYTHONHASHSEED") == 1


def test_the_annotation_picks_containers() -> None:
    made = inject(pod({CONTAINERS_ANNOTATION: "engine"}), pool_body())
    assert "volumeMounts" not in made["spec"]["containers"][1]


@pytest.mark.parametrize(
    ("change", "body", "reason"),
    [
        ({}, None, "there is no KVPool prefix in this namespace; create it, then this pod again."),
        (
            {"annotations": {CONTAINERS_ANNOTATION: "nobody"}},
            pool_body(),
            "annotation kvpool.dev/containers names nobody; the pod has the containers engine, side.",
        ),
        (
            {"volumeMounts": [{"name": "mine", "mountPath": "/kvpool/prefix/"}]},
            pool_body(),
            "container engine mounts something else at /kvpool/prefix/ already.",
        ),
        (
            {},
            pool_body(tiers=[{**CXL, "source": {"path": "/dev/dax0.0"}}]),
            "KVPool prefix lies on /dev/dax0.0: a pod gets a device by a resource claim only, and the DRA "
            "driver is not installed (dra.enabled in the chart).",
        ),
    ],
)
def test_a_pod_that_cannot_have_the_pool_is_left_alone_with_the_reason(
    change: Object, body: Object | None, reason: str
) -> None:
    given = pod(**change)
    made = inject(given, body)
    assert made["metadata"]["annotations"][SKIPPED_ANNOTATION] == reason
    assert made["spec"] == given["spec"]
