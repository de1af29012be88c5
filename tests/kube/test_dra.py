"""The DRA driver against a real Kubernetes API: its rights, its slices, claims that it prepares and refuses.

The kubelet's part is played by calls to the driver's sockets; e2e/test_7_dra.py has the real one.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("grpc", reason="no grpcio in this environment: pip install '.[operator]'")

import grpc

from kube.apiserver import ApiServer
from kube.charts import Helm
from kube.kubelets import NODES, SLICES, Driver, driver_release, make_claim, of_tier
from kube.nodes import until
from kvpool.region import Geometry, Region
from kvpool_operator.dra.parameters import API_VERSION
from kvpool_operator.names import region_uuid

Object = dict[str, Any]
SYSTEM = "dra-system"
ROUNDS = int(os.environ.get("KVPOOL_DRA_ROUNDS") or 500)
KILLS = 0.05  # of the calls


@pytest.fixture(scope="module")
def helm(apiserver: ApiServer) -> Iterator[Helm]:
    with driver_release(apiserver, SYSTEM) as made:
        yield made


@pytest.fixture
def driver(helm: Helm, folder: Path) -> Iterator[Driver]:
    made = Driver(helm.kubeconfig_of("kvpool-dra", folder), folder, NODES[0], SYSTEM).start()
    made.register()
    yield made
    made.stop()
    # Seen when the test has failed.
    print(made.cdi_files(), made.records(), made.regions(), made.log.read_text()[-6000:], sep="\n")
    helm.api.kubectl("delete", "resourceslices", "-l", "kvpool.dev/memory")


def claim_path(claim: Object) -> str:
    metadata = claim["metadata"]
    where = f"/apis/resource.k8s.io/v1/namespaces/{metadata['namespace']}/resourceclaims"
    return f"{where}/{metadata['name']}"


def delete_claim(api: ApiServer, claim: Object) -> None:
    """No controller takes its finalizer off here."""
    path = claim_path(claim)
    api.request(
        "PATCH", path, {"metadata": {"finalizers": None}}, content_type="application/merge-patch+json"
    )
    answer = api.request("DELETE", path)
    assert answer.ok, answer.message


def told(api: ApiServer, claim: Object) -> Object:
    """The condition on the claim, once the driver has written it."""

    def look() -> Any:
        devices = (api.request("GET", claim_path(claim)).body.get("status") or {}).get("devices") or []
        return devices and devices[0]["conditions"][0]

    said: Object = until(look, what="a condition on the claim")
    return said


def memory_slices(api: ApiServer) -> list[Object]:
    found: list[Object] = api.request("GET", SLICES, query={"labelSelector": "kvpool.dev/memory"}).body[
        "items"
    ]
    return sorted(found, key=lambda body: str(body["metadata"]["name"]))


# --- the driver ---------------------------------------------------------------------------------------------


def test_memories_are_published_after_registration_and_shared_by_nodes(helm: Helm, driver: Driver) -> None:
    found = until(
        lambda: [s for s in memory_slices(helm.api) if s["spec"]["pool"]["generation"]], what="slices"
    )
    until(lambda: len(memory_slices(helm.api)) == 2, what="a slice for each memory")
    assert found[0]["spec"]["driver"] == "dra.kvpool.dev"
    assert found[0]["metadata"]["ownerReferences"][0]["kind"] == "DeviceClass"
    second = driver.folder / "second"
    second.mkdir()
    other = Driver(driver.kubeconfig, second, NODES[1], SYSTEM, cxl=driver.memory_folder).start()
    try:
        other.register()

        def both() -> bool:
            seen = [s["spec"]["nodeSelector"]["nodeSelectorTerms"] for s in memory_slices(helm.api)]
            return len(seen) == 2 and all(t[0]["matchExpressions"][0]["values"] == list(NODES) for t in seen)

        until(both, what="both nodes in each slice")
        assert sorted(driver.health()) == [("memory/0x1", 1), ("memory/0x2", 1)]
    finally:
        other.stop()
    assert not driver.forbidden() + other.forbidden()


def test_region_claim_lives_from_prepare_to_the_claims_end(helm: Helm, driver: Driver) -> None:
    claim = make_claim(
        helm.api,
        SYSTEM,
        "region",
        [("memory/0x1", "memory"), ("memory/0x2", "memory")],
        of_tier(size="100Mi"),
        {"kvpool.dev/deletion-policy": "Delete"},
    )
    uid = claim["metadata"]["uid"]
    first = driver.prepare(claim)[uid]
    assert first["error"] == ""
    assert [device[3] for device in first["devices"]] == [[f"dra.kvpool.dev/claim={uid}"], []]
    assert driver.prepare(claim)[uid] == first
    (name,) = driver.cdi_files()
    spec = json.loads((driver.folder / "cdi" / name).read_text())
    (mount,) = spec["devices"][0]["containerEdits"]["mounts"]
    uuid = str(region_uuid("team", "prefix", "cxl"))
    assert mount["containerPath"] == "/dev/kvpool/prefix/cxl"
    assert Path(mount["hostPath"]).name == f"{uuid}.dax"
    assert Path(mount["hostPath"]).stat().st_size == 128 << 20, "all of both memories"
    said = told(helm.api, claim)
    assert (said["type"], said["status"]) == ("Ready", "True")

    def region_is(wanted: str) -> bool:
        regions = [s["spec"]["devices"][0]["attributes"]["region"]["string"] for s in memory_slices(helm.api)]
        return regions == [wanted] * 2

    until(lambda: region_is(uuid), what="the memories say what lies on them")
    assert driver.unprepare(claim) == {uid: ""}
    assert driver.unprepare(claim) == {uid: ""}
    assert driver.cdi_files() == []
    assert driver.regions() == [f"{uuid}.dax", f"{uuid}.json"], "the claim is still there"
    delete_claim(helm.api, claim)
    until(lambda: not driver.regions() and not driver.records(), what="nothing is left")
    until(lambda: region_is("none"), what="the memories are free")
    assert not driver.forbidden()


def test_retained_region_stays_and_is_found_again(helm: Helm, driver: Driver) -> None:
    for turn in ("one", "two"):
        claim = make_claim(helm.api, SYSTEM, turn, [("memory/0x1", "memory")], of_tier())
        assert driver.prepare(claim)[claim["metadata"]["uid"]]["error"] == ""
        file = driver.memory_folder / "regions" / f"{region_uuid('team', 'prefix', 'cxl')}.dax"
        if turn == "one":
            with file.open("r+b") as region:
                region.write(b"blocks")
        assert file.read_bytes()[:6] == b"blocks"
        driver.unprepare(claim)
        delete_claim(helm.api, claim)
        until(lambda: not driver.records(), what="no record is left")
    claim = make_claim(helm.api, SYSTEM, "three", [("memory/0x1", "memory")], of_tier(pool="other"))
    uid = claim["metadata"]["uid"]
    error = driver.prepare(claim)[uid]["error"]
    assert "memory 0x1 is in region" in error
    assert told(helm.api, claim)["message"] == f"node {NODES[0]}: {error}"
    assert driver.unprepare(claim) == {uid: ""}
    delete_claim(helm.api, claim)


def test_region_of_no_pool_goes_with_its_claim_but_for_a_pools_blocks(helm: Helm, driver: Driver) -> None:
    for turn, formatted in (("plain", False), ("blocks", True)):
        claim = make_claim(helm.api, SYSTEM, turn, [("memory/0x1", "memory")])
        assert driver.prepare(claim)[claim["metadata"]["uid"]]["error"] == ""
        (name, _) = driver.regions()
        if formatted:
            path = driver.memory_folder / "regions" / name
            Region.format(path, Geometry(16 << 20), force=True)
        driver.unprepare(claim)
        delete_claim(helm.api, claim)
        until(lambda: not driver.records(), what="no record is left")
        assert bool(driver.regions()) == formatted


@pytest.fixture
def pool(helm: Helm, namespace: str) -> Iterator[Object]:
    """A KVPool that is served on this machine, as far as the driver can see."""
    tiers = [{"name": "dram", "medium": "DRAM", "capacity": "64Mi"}]
    body = {
        "apiVersion": "kvpool.dev/v1alpha1",
        "kind": "KVPool",
        "metadata": {"name": "prefix", "namespace": namespace},
        "spec": {"tiers": tiers},
    }
    made = helm.api.create(f"/apis/kvpool.dev/v1alpha1/namespaces/{namespace}/kvpools", body)
    assert made.ok, made.message
    served = Path("/dev/shm/kvpool") / namespace
    (served / "prefix").mkdir(parents=True)
    yield made.body
    shutil.rmtree(served)
    helm.api.kubectl("delete", "kvp", "prefix", "-n", namespace, "--wait=false", check=False)


def seat(pool: Object) -> tuple[str, str]:
    metadata = pool["metadata"]
    return f"pool/{metadata['namespace']}/{metadata['name']}/{metadata['uid']}", "seat-000"


def test_pool_claim_gives_the_pool_to_its_own_namespace_only(
    helm: Helm, driver: Driver, pool: Object, namespace: str
) -> None:
    helm.api.kubectl("create", "namespace", f"{namespace}-thief")
    role = {"apiVersion": API_VERSION, "kind": "PoolParameters", "role": "reader"}
    mine = make_claim(helm.api, namespace, "mine", [seat(pool)], role)
    theirs = make_claim(helm.api, f"{namespace}-thief", "theirs", [seat(pool)])
    answers = driver.prepare(mine, theirs)
    assert answers[mine["metadata"]["uid"]]["error"] == ""
    error = answers[theirs["metadata"]["uid"]]["error"]
    assert "a claim gets pools of its own namespace only" in error
    said = told(helm.api, theirs)
    assert (said["status"], said["reason"]) == ("False", "Refused")
    assert error in said["message"]
    (name,) = driver.cdi_files()
    edits = json.loads((driver.folder / "cdi" / name).read_text())["devices"][0]["containerEdits"]
    assert edits["mounts"][0]["containerPath"] == "/kvpool/prefix"
    assert edits["mounts"][0]["options"][0] == "ro"
    assert edits["additionalGids"] == [64000]
    assert "KVPOOL_POOL=prefix" in edits["env"]
    counted = driver.metrics()
    assert counted['kvpool_dra_prepares_total{result="done"}'] == 1
    assert counted['kvpool_dra_prepares_total{result="refused"}'] == 1
    assert counted["kvpool_dra_prepared_claims"] == 1
    assert counted["kvpool_dra_prepare_duration_seconds_count"] == 2
    for claim in (mine, theirs):
        driver.unprepare(claim)
    assert driver.metrics()['kvpool_dra_unprepares_total{result="done"}'] == 2
    assert driver.cdi_files() == driver.records() == []


def test_pool_that_is_being_deleted_or_was_made_anew_is_refused(
    helm: Helm, driver: Driver, pool: Object, namespace: str
) -> None:
    path = f"/apis/kvpool.dev/v1alpha1/namespaces/{namespace}/kvpools/prefix"
    merge = "application/merge-patch+json"
    before = make_claim(helm.api, namespace, "before", [seat(pool)])
    assert driver.prepare(before)[before["metadata"]["uid"]]["error"] == ""
    assert helm.api.request("PATCH", path, {"metadata": {"finalizers": ["t/t"]}}, content_type=merge).ok
    assert helm.api.request("DELETE", path).ok
    late = make_claim(helm.api, namespace, "late", [seat(pool)])
    assert "is being deleted" in driver.prepare(late)[late["metadata"]["uid"]]["error"]
    # What a running pod has, its kubelet may ask for again.
    assert driver.prepare(before)[before["metadata"]["uid"]]["error"] == ""
    assert helm.api.request("PATCH", path, {"metadata": {"finalizers": None}}, content_type=merge).ok
    assert "is gone" in driver.prepare(late)[late["metadata"]["uid"]]["error"]
    driver.unprepare(before)


def test_pod_that_comes_before_its_pool_is_served_here_waits_for_it(
    helm: Helm, driver: Driver, pool: Object, namespace: str
) -> None:
    served = Path("/dev/shm/kvpool") / namespace / "prefix"
    served.rmdir()
    claim = make_claim(helm.api, namespace, "early", [seat(pool)])
    threading.Timer(2, served.mkdir).start()
    assert driver.prepare(claim)[claim["metadata"]["uid"]]["error"] == ""
    driver.unprepare(claim)


def test_claim_of_another_namespace_gets_no_memory_by_itself(
    helm: Helm, driver: Driver, namespace: str
) -> None:
    claim = make_claim(helm.api, namespace, "raw", [("memory/0x1", "memory")])
    uid = claim["metadata"]["uid"]
    assert "get no CXL memory by itself" in driver.prepare(claim)[uid]["error"]
    assert driver.cdi_files() == driver.records() == driver.regions() == []
    asked = {"metadata": {**claim["metadata"], "uid": "../../../../etc/passwd"}}
    assert "is no uid" in driver.prepare(asked)["../../../../etc/passwd"]["error"]
    assert "is no uid" in driver.unprepare(asked)["../../../../etc/passwd"]


def test_new_instance_takes_over_while_the_old_one_still_runs(helm: Helm, driver: Driver) -> None:
    claim = make_claim(helm.api, SYSTEM, "rolling", [("memory/0x1", "memory")], of_tier())
    uid = claim["metadata"]["uid"]
    answer = driver.prepare(claim)[uid]
    newer = Driver(driver.kubeconfig, driver.folder, NODES[0], SYSTEM, uid="pod-2").start()
    try:
        assert newer.register()["name"] == "dra.kvpool.dev"
        assert newer.prepare(claim)[uid] == driver.prepare(claim)[uid] == answer
        driver.stop()
        assert not driver.registration.exists()
        assert not driver.endpoint.exists()
        assert newer.unprepare(claim) == {uid: ""}
        assert newer.cdi_files() == []
    finally:
        newer.stop()
    delete_claim(helm.api, claim)


def test_leftovers_of_a_killed_driver_are_removed_at_the_next_start(helm: Helm, driver: Driver) -> None:
    claim = make_claim(
        helm.api,
        SYSTEM,
        "leftover",
        [("memory/0x1", "memory")],
        of_tier(deletionPolicy="Delete"),
    )
    assert driver.prepare(claim)[claim["metadata"]["uid"]]["error"] == ""
    driver.kill()
    stray = "00000000-0000-4000-8000-000000000000"
    (driver.folder / "cdi" / f"dra.kvpool.dev-claim_{stray}.json").write_text("{}")
    (driver.folder / "cdi" / "other-vendor.json").write_text("{}")
    delete_claim(helm.api, claim)
    driver.start().register()
    until(lambda: driver.cdi_files() == ["other-vendor.json"], what="only the other vendor's file is left")
    until(lambda: not driver.regions() and not driver.records(), what="no region and no record is left")


def test_prepare_and_unprepare_with_random_kills_leave_nothing(
    helm: Helm, driver: Driver, pool: Object, namespace: str
) -> None:
    seed = int(os.environ.get("KVPOOL_SEED") or random.randrange(1 << 32))
    print(f"seed={seed} rounds={ROUNDS}; again: KVPOOL_SEED={seed}")
    dice = random.Random(seed)
    kills = 0

    def asked(act: Any, claim: Object) -> None:
        """Until it is answered, as a kubelet does; sometimes the driver is killed in the midst of it."""
        nonlocal kills
        if dice.random() < KILLS:
            kills += 1
            _killed_within(driver, act, claim, dice.uniform(0, 0.03))
        answer = act(claim)[claim["metadata"]["uid"]]
        assert (answer if isinstance(answer, str) else answer["error"]) == ""

    for turn in range(ROUNDS):
        if turn % 2:
            policy = dice.choice(["Retain", "Delete"]) if turn % 10 == 1 else "Delete"
            parameters = of_tier(pool="storm", deletionPolicy="Delete")
            annotations = {"kvpool.dev/deletion-policy": policy}
            claim = make_claim(
                helm.api, SYSTEM, f"storm-{turn}", [("memory/0x1", "memory")], parameters, annotations
            )
        else:
            claim = make_claim(helm.api, namespace, f"storm-{turn}", [seat(pool)])
        asked(driver.prepare, claim)
        assert len(driver.cdi_files()) == 1
        asked(driver.unprepare, claim)
        assert driver.cdi_files() == []
        delete_claim(helm.api, claim)
    last = make_claim(helm.api, SYSTEM, "last", [("memory/0x1", "memory")], of_tier(pool="storm"))
    merge = {"metadata": {"annotations": {"kvpool.dev/deletion-policy": "Delete"}}}
    answer = helm.api.request("PATCH", claim_path(last), merge, content_type="application/merge-patch+json")
    assert answer.ok, answer.message
    asked(driver.prepare, last)
    asked(driver.unprepare, last)
    delete_claim(helm.api, last)
    until(lambda: not driver.records() and not driver.regions(), what="no record and no region is left")
    assert driver.cdi_files() == []
    mounts = Path("/proc/self/mounts").read_text()
    assert str(driver.folder) not in mounts
    assert kills > 0 or ROUNDS < 100
    print(f"rounds={ROUNDS} kills={kills} cdi_files=0 records=0 regions=0")


def _killed_within(driver: Driver, act: Any, claim: Object, after_s: float) -> None:
    """Kill the driver while it may be at work on a call, and start it again."""
    killer = threading.Timer(after_s, driver.kill)
    killer.start()
    with contextlib.suppress(grpc.RpcError):
        act(claim)
    killer.join()
    driver.start().register()
