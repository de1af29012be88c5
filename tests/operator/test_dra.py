"""The DRA driver's pure parts: what a claim says, what it gets, which slices memories have."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

pytest.importorskip("grpc", reason="no grpcio in this environment: pip install '.[operator]'")

from kvpool.cxl import Composed, Device, Memory
from kvpool_operator.dra import cdi, pools, regions, slices, wire
from kvpool_operator.dra.allocation import ClaimRef, PoolRef, allocation_of
from kvpool_operator.dra.checkpoint import Checkpoint, Record
from kvpool_operator.dra.parameters import (
    API_VERSION,
    NotYet,
    PoolParameters,
    Refused,
    RegionParameters,
    TierRef,
    parse,
)
from kvpool_operator.names import DRIVER, region_uuid
from pool_objects import CXL, DRAM, pool, pool_body

Object = dict[str, Any]
UID = "0b5b7a2e-0000-4000-8000-00000000000a"
REF = ClaimRef("team-a", "kv", UID)
GIB = 1 << 30


def claim(*results: tuple[str, str], parameters: Object | None = None, request: str = "kvpool") -> Object:
    found = [{"driver": DRIVER, "request": request, "pool": p, "device": d} for p, d in results]
    config = [{"source": "FromClaim", "opaque": {"driver": DRIVER, "parameters": parameters}}]
    allocation = {"devices": {"results": found, "config": config if parameters is not None else []}}
    return {"metadata": {"uid": UID}, "status": {"allocation": allocation}}


def region_parameters(**more: Any) -> Object:
    return {"apiVersion": API_VERSION, "kind": "RegionParameters", **more}


def pool_parameters(**more: Any) -> Object:
    return {"apiVersion": API_VERSION, "kind": "PoolParameters", **more}


# --- parameters ---------------------------------------------------------------------------------------------


def test_parameters_of_a_region_are_read() -> None:
    tier = {"namespace": "team-a", "name": "prefix", "tier": "cxl"}
    given = region_parameters(size="64Gi", granularity=1024, align="1Gi", deletionPolicy="Delete", pool=tier)
    assert parse(given) == RegionParameters(64 * GIB, 1024, GIB, "Delete", TierRef("team-a", "prefix", "cxl"))
    assert parse(region_parameters()) == RegionParameters()
    assert parse(pool_parameters(role="reader")) == PoolParameters("reader")


@pytest.mark.parametrize(
    ("document", "said"),
    [
        (None, "is no object"),
        ("x", "is no object"),
        ({}, "is not known; expected apiVersion"),
        ({"apiVersion": API_VERSION, "kind": "Other"}, 'kind "Other" is not known'),
        (pool_parameters(role="root"), "engine or reader"),
        (pool_parameters(role=["engine"]), "engine or reader"),
        (pool_parameters(path="/etc"), '"path" is not known'),
        (region_parameters(size="64GB"), "parameters.size"),
        (region_parameters(size=True), "parameters.size"),
        (region_parameters(size=-1), "parameters.size"),
        (region_parameters(size="9" * 80), "parameters.size"),
        (region_parameters(granularity=300), "parameters.granularity"),
        (region_parameters(align="3Mi"), "parameters.align"),
        (region_parameters(deletionPolicy="Maybe"), "Retain or Delete"),
        (region_parameters(pool="prefix"), "write pool:"),
        (region_parameters(pool={"namespace": "a", "name": "b"}), "parameters.pool.tier is missing"),
        (
            region_parameters(pool={"namespace": "a", "name": "../../etc", "tier": "c"}),
            "parameters.pool.name",
        ),
        (region_parameters(pool={"namespace": "a", "name": "b\n", "tier": "c"}), "parameters.pool.name"),
        (region_parameters(pool={"namespace": "a", "name": "b", "tier": "c", "d": 1}), "is not known"),
    ],
)
def test_parameters_that_are_wrong_are_refused_with_their_place(document: Any, said: str) -> None:
    with pytest.raises(Refused, match=re.escape(said)):
        parse(document)


# --- what a claim was given ---------------------------------------------------------------------------------


def seat(namespace: str = "team-a", name: str = "prefix", uid: str = "u-1") -> tuple[str, str]:
    return PoolRef(namespace, name, uid).device_pool, "seat-000"


def test_allocation_of_a_pool_and_of_a_region() -> None:
    found = allocation_of(REF, claim(seat(), parameters=pool_parameters()))
    assert found.pool == PoolRef("team-a", "prefix", "u-1")
    assert found.parameters == PoolParameters()
    two = claim(("memory/0x10", "memory"), ("memory/0x9", "memory"), request="region/new-2")
    assert allocation_of(REF, two).serials == ("0x9", "0x10")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (None, "is gone"),
        ({**claim(seat()), "metadata": {"uid": "another"}}, "was made anew"),
        (claim(), "no device"),
        (claim(seat(), seat(name="other")), "more than one seat"),
        (claim(seat(), ("memory/0x1", "memory")), "more than one seat"),
        (claim(seat(), parameters=region_parameters()), "for claims of a KVPool"),
        (claim(("memory/0x1", "memory"), parameters=pool_parameters()), "for claims of a KVPool"),
        (claim(seat(), parameters=pool_parameters(x=1)), "is not known"),
    ],
)
def test_allocation_that_cannot_be_prepared_is_refused(body: Object | None, said: str) -> None:
    with pytest.raises(Refused, match=re.escape(said)):
        allocation_of(REF, body)


# --- pools --------------------------------------------------------------------------------------------------


def body_of(**changes: Any) -> Object:
    body = pool_body()
    body["metadata"] |= {"namespace": "team-a", "name": "prefix", "uid": "u-1", **changes}
    return body


@pytest.mark.parametrize(
    ("wanted", "body", "said"),
    [
        (PoolRef("team-b", "prefix", "u-1"), body_of(namespace="team-b"), "own namespace only"),
        (PoolRef("team-a", "prefix", "u-1"), None, "is gone"),
        (PoolRef("team-a", "prefix", "u-0"), body_of(), "was made anew"),
        (
            PoolRef("team-a", "prefix", "u-1"),
            body_of(deletionTimestamp="2026-01-01"),
            "being deleted",
        ),
    ],
)
def test_a_pool_that_a_claim_may_not_have_is_refused(wanted: PoolRef, body: Object | None, said: str) -> None:
    with pytest.raises(Refused, match=said):
        pools.usable_pool(REF, wanted, body)


CLASSED = {**CXL, "shared": True, "source": {"deviceClass": "cxl-dax"}}


def composed(path: str | None, *, of: str = "cxl", memories: tuple[str, ...] = ("0x1",)) -> Composed:
    wanted = pool()
    device = Device(path, GIB, 2 << 20) if path else None
    return Composed(region_uuid(wanted.namespace, wanted.name, of), memories, GIB, 256, device)


def test_a_pool_gives_folder_tiers_environment_and_group() -> None:
    wanted = pool(tiers=[DRAM, CLASSED], hosts=2)
    found = pools.given(REF, wanted, "engine", [composed("/dev/dax1.0")], 64000)
    assert found.mounts == (cdi.Mount(wanted.node_folder, "/kvpool/prefix"),)
    assert found.nodes == (cdi.Node("/dev/dax1.0", "/dev/kvpool/prefix/cxl"),)
    assert dict(found.environment)["KVPOOL_POOL"] == "prefix"
    assert found.group_id == 64000
    of_file = pools.given(REF, wanted, "engine", [composed("/srv/cxl/x.dax")], 64000)
    assert cdi.Mount("/srv/cxl/x.dax", "/dev/kvpool/prefix/cxl") in of_file.mounts


def test_a_reader_can_write_nothing() -> None:
    wanted = pool(tiers=[DRAM, CLASSED], hosts=2)
    found = pools.given(REF, wanted, "reader", [composed("/dev/dax1.0")], 64000)
    assert all(place.read_only for place in (*found.mounts, *found.nodes))


def test_a_pool_whose_region_is_not_here_is_refused_for_now() -> None:
    wanted = pool(tiers=[DRAM, CLASSED], hosts=2)
    for there in ([], [composed("/dev/dax1.0", of="other")], [composed(None)]):
        with pytest.raises(NotYet, match="tried again"):
            pools.given(REF, wanted, "engine", there, 64000)


@pytest.mark.parametrize("path", ["/dev/sda", "/dev/mem", "/dev/dax0.0/../mem", "/dev/dax0"])
def test_a_pool_on_any_other_device_is_refused(path: str) -> None:
    assert not regions.is_dax(path)
    if ".." not in path:
        wanted = pool(tiers=[DRAM, {**CXL, "source": {"path": path}}])
        with pytest.raises(Refused, match="DAX devices"):
            pools.given(REF, wanted, "engine", [], 64000)


# --- regions ------------------------------------------------------------------------------------------------


def memories(*sizes: int) -> list[Memory]:
    return [Memory(f"0x{number}", f"mem{number}", size) for number, size in enumerate(sizes, 1)]


def of_memories(*serials: str) -> Any:
    return allocation_of(REF, claim(*((f"memory/{serial}", "memory") for serial in serials)))


def test_a_region_is_of_whole_memories_in_one_order() -> None:
    found = regions.wanted(REF, of_memories("0x2", "0x1"), RegionParameters(), memories(GIB, GIB), [])
    assert (found.memories, found.size_bytes) == (("0x1", "0x2"), 2 * GIB)
    small = regions.wanted(REF, of_memories("0x1"), RegionParameters(), memories(101 << 20), [])
    assert small.size_bytes == 100 << 20, "a whole number of mappings"


def test_a_region_that_exists_is_taken_as_it_is() -> None:
    parameters = RegionParameters(tier=TierRef(pool().namespace, "prefix", "cxl"))
    there = composed("/dev/dax1.0", memories=("0x2", "0x1"))
    found = regions.wanted(REF, of_memories("0x1", "0x2"), parameters, memories(GIB, GIB), [there])
    assert (found.uuid, found.memories, found.size_bytes) == (there.uuid, ("0x2", "0x1"), GIB)


def test_a_region_that_cannot_be_used_is_left_to_the_backend() -> None:
    parameters = RegionParameters(tier=TierRef(pool().namespace, "prefix", "cxl"))
    uuid = composed(None).uuid
    for there in (Composed(uuid, (), 5, 256, None, "lost"), Composed(uuid, ("0x9",), 0, 256, None, "bad")):
        found = regions.wanted(REF, of_memories("0x1"), parameters, memories(GIB), [there])
        assert (found.uuid, found.memories, found.size_bytes) == (uuid, ("0x1",), GIB)


@pytest.mark.parametrize(
    ("serials", "parameters", "said"),
    [
        (("0x7",), RegionParameters(), "sees no CXL memory 0x7"),
        (("0x1",), RegionParameters(size_bytes=2 * GIB), "parameters.size is 2Gi"),
        (("0x1",), RegionParameters(tier=TierRef("team-a", "prefix", "cxl")), "lies on 0x2"),
    ],
)
def test_a_region_that_cannot_be_had_is_refused(
    serials: tuple[str, ...], parameters: RegionParameters, said: str
) -> None:
    there = Composed(region_uuid("team-a", "prefix", "cxl"), ("0x2",), GIB, 256, None)
    with pytest.raises(Refused, match=said):
        regions.wanted(REF, of_memories(*serials), parameters, memories(GIB, GIB), [there])


# --- CDI and checkpoint -------------------------------------------------------------------------------------


def test_cdi_file_has_one_device_named_by_the_claim(tmp_path: Path) -> None:
    folder = cdi.Folder(tmp_path / "cdi")
    given = cdi.Given((cdi.Mount("/a", "/b", True),), (cdi.Node("/dev/dax0.0", "/dev/x"),), (("K", "v"),), 7)
    folder.write(UID, given)
    folder.write(UID, given)
    assert folder.uids() == {UID}
    assert list(folder.unfinished()) == []
    made = cdi.spec(UID, given)
    (device,) = made["devices"]
    edits = device["containerEdits"]
    assert f"{made['kind']}={device['name']}" == cdi.device_name(UID) == f"dra.kvpool.dev/claim={UID}"
    assert edits["env"] == ["K=v"]
    assert edits["mounts"][0]["options"][0] == "ro"
    assert edits["deviceNodes"][0]["permissions"] == "rw"
    assert edits["additionalGids"] == [7]
    folder.remove(UID)
    folder.remove(UID)
    assert folder.uids() == set()


def test_checkpoint_keeps_records_and_takes_damage_for_nothing(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path)
    record = Record(REF, "prepared", of_memories("0x1").results, str(UUID(int=5)), "Delete")
    checkpoint.write(record)
    assert Checkpoint(tmp_path).read(UID) == record
    (tmp_path / "claims" / f"{UID}.json").write_text('{"version": 1, "ref"')
    assert checkpoint.read(UID) is None
    checkpoint.remove(UID)
    checkpoint.remove(UID)
    assert checkpoint.uids() == set()
    with pytest.raises(ValueError, match="no uid"):
        checkpoint.read("../../etc/passwd")


# --- slices -------------------------------------------------------------------------------------------------

A, B = (slices.Host(name, f"host-{name}", "uid-of-class") for name in "ab")
MEMORY = Memory("0xc1", "mem0", GIB)


def hosts(body: Object) -> list[str]:
    (term,) = body["spec"]["nodeSelector"]["nodeSelectorTerms"]
    found: list[str] = term["matchExpressions"][0]["values"]
    return found


def region_in(body: Object) -> str:
    return str(body["spec"]["devices"][0]["attributes"]["region"]["string"])


def test_two_nodes_share_the_slice_of_a_memory() -> None:
    first = slices.with_host(None, MEMORY, None, A)
    both = slices.with_host(first, MEMORY, None, B)
    assert (hosts(first), hosts(both)) == (["host-a"], ["host-a", "host-b"])
    assert [o["uid"] for o in both["metadata"]["ownerReferences"]] == ["uid-of-class"]
    assert (first["spec"]["pool"]["generation"], both["spec"]["pool"]["generation"]) == (1, 2)
    for host in (A, B):
        again = slices.with_host(both, MEMORY, None, host)
        assert slices.same(both, again)
        assert again["spec"]["pool"]["generation"] == 2
    left = slices.without_host(both, "host-a")
    assert left is not None
    assert hosts(left) == ["host-b"]
    assert slices.without_host(left, "host-b") is None


def test_only_the_node_that_told_of_a_region_takes_it_back() -> None:
    region = Composed(UUID(int=5), ("0xc1",), GIB, 256, None)
    there = slices.with_host(slices.with_host(None, MEMORY, None, A), MEMORY, None, B)
    told = slices.with_host(there, MEMORY, region, A)
    assert region_in(told) == str(UUID(int=5))
    assert slices.same(told, slices.with_host(told, MEMORY, None, B)), "it has not composed it yet"
    assert slices.same(told, slices.with_host(told, MEMORY, region, B))
    gone = slices.with_host(told, MEMORY, None, A)
    assert region_in(gone) == "none"
    assert gone["spec"]["pool"]["generation"] == told["spec"]["pool"]["generation"] + 1
    without = slices.without_host(told, "host-a")
    assert without is not None
    assert region_in(slices.with_host(without, MEMORY, None, B)) == "none", "who told of it is gone"


@pytest.mark.parametrize(
    "memory", [Memory("0x1", "m", 1, healthy=False), Memory("a/b", "m", 1), Memory("0x1", "m", 0)]
)
def test_memory_that_cannot_be_handed_out_has_no_slice(memory: Memory) -> None:
    assert not slices.usable(memory)


# --- the wire -----------------------------------------------------------------------------------------------


def api(path: str) -> str:
    cache = Path(os.environ.get("KVPOOL_CACHE_DIR") or Path.home() / ".cache" / "kvpool")
    found = sorted(cache.glob(f"go/mod/k8s.io/kubelet@*/pkg/apis/{path}/api.proto"))
    if not found:
        pytest.skip("no module k8s.io/kubelet here: e2e/cluster brings it when it builds Kubernetes")
    return found[-1].read_text()


@pytest.mark.parametrize(
    ("package", "path"),
    [
        (wire.REGISTRATION, "pluginregistration/v1"),
        (wire.DRA, "dra/v1"),
        (wire.HEALTH, "dra-health/v1alpha1"),
    ],
)
def test_names_and_numbers_are_those_of_the_kubelet(package: wire.Package, path: str) -> None:
    text = re.sub(r"//.*|\[.*?\]", "", api(path))
    assert re.findall(r"^package ([\w.]+);", text, re.MULTILINE) == [package.name]
    theirs = {}
    for name, inside in re.findall(r"message (\w+) \{(.*?)\n?\}", text, re.DOTALL):
        fields = re.findall(r"(repeated )?(map<string, *(\w+)>|[\w]+)\s+(\w+)\s*=\s*(\d+)", inside)
        theirs[name] = tuple(
            (field, int(number), f"={value}" if value else f"{'*' if many else ''}{kind}")
            for many, kind, value, field, number in fields
        )
    for name, fields in package.messages.items():  # a later version may have more fields
        assert set(fields) <= set(theirs[name]), name
    methods = {
        name: (request, f"{'*' if stream else ''}{answer}")
        for name, request, stream, answer in re.findall(
            r"rpc (\w+) *\((\w+)\)\s*returns *\((stream )?(\w+)\)", text
        )
    }
    assert methods == dict(package.methods)
    assert re.findall(r"service (\w+)", text) == [package.service]


def test_messages_survive_the_wire() -> None:
    made = wire.message(wire.DRA, "NodePrepareResourcesResponse")()
    made.claims["u"].devices.add(pool_name="p", device_name="d", cdi_device_ids=["k=c"])
    made.claims["v"].error = "no"
    read = wire.message(wire.DRA, "NodePrepareResourcesResponse").FromString(made.SerializeToString())
    assert list(read.claims["u"].devices[0].cdi_device_ids) == ["k=c"]
    assert read.claims["v"].error == "no"
