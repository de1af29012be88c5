"""The manifest reader: what it accepts, and what it says to each kind of mistake."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

from kvpool.errors import ManifestError
from kvpool.quantity import format_quantity, human_bytes, parse_quantity
from kvpool.spec import InvalidManifest, PoolSpec
from manifests import BAD, GOOD, Bad, cxl, manifest, tier

DESIGN_EXAMPLE = """
apiVersion: kvpool.dev/v1alpha1
kind: KVPool
metadata: {name: prefix-pool}
spec:
  nodeSelector: {kvpool.dev/member: "true"}
  tiers:                               # in lookup order
  - {name: hbm,  medium: GPU,  capacity: 8Gi,   optional: true}
  - {name: dram, medium: DRAM, capacity: 64Gi}
  - {name: cxl,  medium: CXL,  capacity: 512Gi, shared: true, coherence: software,
     source: {deviceClass: cxl-dax}}   # or {path: /dev/dax0.0}
  - {name: ssd,  medium: SSD,  capacity: 2Ti,   source: {hostPath: /var/lib/kvpool}}
  eviction: {highWatermark: 95, lowWatermark: 90}
  verify: always                       # always | sampled | off
  deletionPolicy: Retain
"""


def mistakes(document: object) -> dict[str, str]:
    with pytest.raises(InvalidManifest) as caught:
        PoolSpec.from_object(document)
    return {problem.path: problem.message for problem in caught.value.problems}


def only_mistake(document: object) -> tuple[str, str]:
    found = mistakes(document)
    assert len(found) == 1, found
    return next(iter(found.items()))


# --- what is right ------------------------------------------------------------------------------------------


def test_from_text_design_example_is_read() -> None:
    spec = PoolSpec.from_text(DESIGN_EXAMPLE)
    assert (spec.name, spec.hosts, spec.deletion_policy) == ("prefix-pool", 1, "Retain")
    assert [t.name for t in spec.tiers] == ["hbm", "dram", "cxl", "ssd"]
    assert spec.tier("cxl").capacity_bytes == 512 << 30
    assert spec.tier("hbm").optional
    assert (spec.eviction.high_watermark, spec.eviction.low_watermark) == (95, 90)


def test_to_yaml_read_back_is_equal() -> None:
    spec = PoolSpec.from_text(DESIGN_EXAMPLE)
    assert PoolSpec.from_text(spec.to_yaml()) == spec


def test_from_object_as_kept_by_a_cluster_is_read() -> None:
    document = manifest()
    document["metadata"] |= {"uid": "1-2", "resourceVersion": "7", "managedFields": [{}], "generation": 3}
    document["status"] = {"conditions": []}
    assert "uid" not in PoolSpec.from_object(document).to_yaml()


@pytest.mark.parametrize(
    ("fields", "mode"),
    [
        ({"medium": "DRAM"}, "hardware"),
        ({"medium": "DRAM", "shared": True}, "hardware"),
        ({"medium": "CXL", "source": {"path": "/dev/dax0.0"}}, "hardware"),
        ({"medium": "CXL", "source": {"path": "/dev/dax0.0"}, "shared": True}, "software"),
        ({"medium": "DRAM", "shared": True, "coherence": "software"}, "software"),
    ],
)
def test_coherence_mode_undeclared_is_software_for_shared_cxl_only(fields: dict[str, Any], mode: str) -> None:
    assert PoolSpec.from_object(manifest(tier(**fields))).tiers[0].coherence_mode == mode


def test_shards_shared_tier_has_one_for_each_host() -> None:
    spec = PoolSpec.from_object(manifest(tier(), cxl(shared=True), hosts=3))
    dram, shared = spec.tiers
    assert (spec.shards(dram), spec.shard_of(dram, 2)) == (1, 0)
    assert (spec.shards(shared), spec.shard_of(shared, 2)) == (3, 2)


# --- mistakes: the field, what is wrong, what to write ------------------------------------------------------


def test_message_of_one_mistake_is_path_problem_and_advice() -> None:
    text = DESIGN_EXAMPLE.replace("64Gi", "64GB")
    with pytest.raises(ManifestError) as caught:
        PoolSpec.from_text(text, source="pool.yaml")
    assert str(caught.value) == (
        'pool.yaml: spec.tiers[1].capacity: "64GB" is not a quantity; '
        "write a number with a unit, like 64Gi (binary) or 64G (decimal). (line 9)"
    )


def test_message_of_several_mistakes_lists_all_in_the_order_of_the_file() -> None:
    text = (
        DESIGN_EXAMPLE.replace("64Gi", "64GB").replace("SSD", "DISK").replace("name: prefix", "name: Prefix")
    )
    with pytest.raises(InvalidManifest) as caught:
        PoolSpec.from_text(text, source="pool.yaml")
    lines = str(caught.value).splitlines()
    assert lines[0] == "pool.yaml: 3 mistakes:"
    assert [line.split(": ")[0].strip() for line in lines[1:]] == [
        "metadata.name",
        "spec.tiers[1].capacity",
        "spec.tiers[3].medium",
    ]


def test_rules_between_tiers_are_checked_beside_a_wrong_tier() -> None:
    found = mistakes(manifest(cxl(name="a", capacity="1XB"), cxl(name="b"), tier(name="b")))
    assert set(found) == {"spec.tiers[0].capacity", "spec.tiers[2].medium", "spec.tiers[2].name"}


@pytest.mark.parametrize(
    ("document", "path", "said"),
    [
        (manifest(host=2), "spec.host", 'no such field; did you mean "hosts"?'),
        (
            manifest(tier(high_watermark=9)),
            "spec.tiers[0].high_watermark",
            "belongs to spec.eviction.highWatermark",
        ),
        (
            manifest(tier(source={"path": "/a", "capacity": "1Gi"})),
            "spec.tiers[0].source.capacity",
            "spec.tiers[]",
        ),
        (manifest(eviction={"policy": "lru"}), "spec.eviction.policy", "has highWatermark, lowWatermark."),
        (manifest(tier(medium="dram")), "spec.tiers[0].medium", 'did you mean "DRAM"?'),
        (
            manifest(tier(medium="TAPE")),
            "spec.tiers[0].medium",
            '"TAPE" is not known; write GPU, DRAM, CXL or SSD.',
        ),
        (manifest(tier(name="My Tier")), "spec.tiers[0].name", "lower-case letters"),
        (manifest(tier(name=7)), "spec.tiers[0].name", 'a number, expected a text; write "7" in quotes.'),
        (manifest(tier(shared="true")), "spec.tiers[0].shared", "write it without quotes"),
        (manifest(hosts="2"), "spec.hosts", "write it without quotes"),
        (manifest(hosts=0), "spec.hosts", "1 to 64"),
        (manifest(hosts=65), "spec.hosts", "1 to 64"),
        (manifest(hosts=2), "spec.hosts", "set shared: true on one of them, or hosts: 1"),
        (manifest(tier(capacity=64)), "spec.tiers[0].capacity", "did you forget the unit"),
        (manifest(tier(capacity=None)), "spec.tiers[0].capacity", "is empty; write a number with a unit"),
        (manifest(tier(source="/dev/shm/x")), "spec.tiers[0].source", "write source: {path: /dev/dax0.0}."),
        (manifest(tier(source={})), "spec.tiers[0].source", "exactly one of"),
        (
            manifest(cxl(source={"path": "/a", "deviceClass": "b"})),
            "spec.tiers[0].source",
            "path and deviceClass",
        ),
        (manifest(tier(source={"path": "a/b"})), "spec.tiers[0].source.path", "absolute path"),
        (manifest(tier(source={"path": "/a/../b"})), "spec.tiers[0].source.path", "absolute path"),
        (manifest(tier(source={"hostPath": "/a"})), "spec.tiers[0].source", "a DRAM tier takes source.path"),
        (manifest(cxl(source=None)), "spec.tiers[0].source", "/dev/dax0.0"),
        (manifest(cxl(source={"hostPath": "/a"})), "spec.tiers[0].source.hostPath", "write source.path"),
        (manifest(tier(medium="SSD")), "spec.tiers[0].source", "source.hostPath"),
        (manifest(tier(medium="GPU", source={"path": "/a"})), "spec.tiers[0].source", "leave source out"),
        (manifest(tier(medium="GPU", shared=True)), "spec.tiers[0].shared", "only CXL and DRAM"),
        (manifest(tier(medium="GPU", coherence="software")), "spec.tiers[0].coherence", "leave it out"),
        (manifest(cxl(hugePages=True)), "spec.tiers[0].hugePages", "for DRAM tiers"),
        (manifest(tier(extentSize="128Gi")), "spec.tiers[0].extentSize", "128Gi is too large"),
        (manifest(tier(minBlockSize=1000)), "spec.tiers[0].minBlockSize", "at least 4Ki"),
        (manifest(tier(minBlockSize=5000)), "spec.tiers[0].minBlockSize", "multiple of 64 bytes"),
        (manifest(tier(minBlockSize="65Gi")), "spec.tiers[0].minBlockSize", "not more than extentSize"),
        (manifest(cxl(), tier()), "spec.tiers[1].medium", "order GPU, DRAM, CXL, SSD"),
        (manifest(tier(), tier()), "spec.tiers[1].name", '"dram" is the name of tiers[0] too'),
        (manifest(cxl(), cxl(name="b")), "spec.tiers[1].source.path", "used by tiers[0] too"),
        (manifest(eviction={"highWatermark": 100}), "spec.eviction.highWatermark", "1 to 99"),
        (manifest(eviction={"lowWatermark": 95}), "spec.eviction", "low 95, high 95"),
        (manifest(verify="sampled"), "spec.verify", "not in this version"),
        (manifest(verify=False), "spec.verify", "YAML reads as false"),
        (manifest(deletionPolicy="delete"), "spec.deletionPolicy", 'did you mean "Delete"?'),
        (manifest(nodeSelector={"a": True}), "spec.nodeSelector.a", 'write "true" in quotes'),
        (manifest() | {"kind": "KvPool"}, "kind", '"KvPool" is not known; write KVPool.'),
        (manifest() | {"apiVersion": "v1"}, "apiVersion", "write kvpool.dev/v1alpha1."),
        (manifest() | {"tiers": []}, "tiers", "belongs to spec.tiers"),
        (manifest() | {"metadata": {}}, "metadata.name", "is missing; write name: prefix-pool."),
        (manifest() | {"spec": None}, "spec", "is empty; write spec: {tiers: "),
        ({**manifest(), "spec": {"tiers": []}}, "spec.tiers", "a pool needs at least one tier"),
        (manifest(*[tier(name=f"t{i}") for i in range(17)]), "spec.tiers", "has 17 entries"),
    ],
)
def test_from_object_one_mistake_is_named_with_its_path(document: object, path: str, said: str) -> None:
    where, message = only_mistake(document)
    assert where == path
    assert said in message
    assert message[-1] in ".?"


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.path)
def test_from_object_what_the_api_refuses_is_refused_with_the_same_sentence(bad: Bad) -> None:
    # tests/kube/test_manifests.py shows the other half.
    where, message = only_mistake(bad.document)
    assert where == bad.path
    assert bad.rule in message


@pytest.mark.parametrize("name", GOOD)
def test_from_object_what_the_api_accepts_is_read(name: str) -> None:
    spec = PoolSpec.from_object(GOOD[name])
    assert PoolSpec.from_text(spec.to_yaml()) == spec


def test_examples_of_the_docs_are_valid() -> None:
    folder = Path(__file__).resolve().parents[2] / "docs" / "examples"
    names = [PoolSpec.from_file(path).name for path in folder.glob("*.yaml") if path.stem != "engine"]
    assert names == ["prefix-pool"] * 3


@pytest.mark.parametrize("field", ["name", "medium", "capacity"])
def test_from_object_missing_field_of_tier_is_named_with_an_example(field: str) -> None:
    given = tier()
    del given[field]
    where, message = only_mistake(manifest(given))
    assert where == f"spec.tiers[0].{field}"
    assert message.startswith(f"is missing; write {field}: ")


def test_from_object_no_mapping_is_refused() -> None:
    assert mistakes(["a"])


def test_from_object_never_fails_otherwise() -> None:
    # Whatever stands in a field, the answer is a list of mistakes and no traceback.
    junk: list[object] = [None, 0, -1, 1.5, "", "x", True, [], [1], {}, {"a": {}}, "9" * 99, [[]], {1: 2}]
    fields = ["hosts", "tiers", "eviction", "verify", "deletionPolicy", "nodeSelector"]
    documents: list[object] = [*junk, *(manifest() | {"spec": value} for value in junk)]
    documents += [manifest(**{field: value}) for field in fields for value in junk if field != "tiers"]
    documents += [{**manifest(), "spec": {"tiers": value}} for value in junk]
    documents += [
        manifest(tier(**{field: value})) for field in tier(source=1, extentSize=1) for value in junk
    ]
    for document in documents:
        with contextlib.suppress(InvalidManifest):
            PoolSpec.from_object(document)


# --- the text -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no manifest in it"),
        ("---\n", "no manifest in it"),
        ("a: [1", "not YAML"),
        ("a: 1\n---\nb: 2\n", "2 documents, expected one"),
        ("a: 1\nb: 2\na: 3\n", '"a" is given twice, on lines 1 and 3'),
        ("&a [*a]", "deeper than"),
        ("a: \x01", "not YAML"),
        ("? [1, 2]\n: 3", "not YAML"),
        ("1: 2", "expected a text as the key"),
        ("[" * 5000, "nested too deep"),
    ],
)
def test_from_text_bad_text_is_refused(text: str, said: str) -> None:
    with pytest.raises(ManifestError, match=r"^p\.yaml: ") as caught:
        PoolSpec.from_text(text, source="p.yaml")
    assert said in str(caught.value)


def test_from_text_separators_around_the_document_are_fine() -> None:
    assert PoolSpec.from_text(f"---\n{DESIGN_EXAMPLE}\n---\n").name == "prefix-pool"


def test_from_file_missing_binary_or_folder_is_a_manifest_error(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "missing", tmp_path / "binary", tmp_path):
        with pytest.raises(ManifestError, match="KVPool manifest"):
            PoolSpec.from_file(path)


# --- quantities ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "count_bytes"),
    [
        ("64Gi", 64 << 30),
        ("1.5Gi", 3 << 29),
        ("500M", 500_000_000),
        ("2k", 2000),
        ("1Ti", 1 << 40),
        ("3T", 3 * 10**12),
        ("4096", 4096),
        (4096, 4096),
    ],
)
def test_parse_quantity_good(text: object, count_bytes: int) -> None:
    assert parse_quantity(text) == count_bytes


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("64GB", "write a number with a unit, like 64Gi (binary) or 64G (decimal)."),
        ("64 GiB", "like 64Gi (binary) or 64G (decimal)."),
        ("12g", "like 12Gi (binary) or 12G (decimal)."),
        ("7kb", "like 7Ki (binary) or 7k (decimal)."),
        ("2K", "like 2Ki (binary) or 2k (decimal)."),
        ("1,5Gi", "like 1.5Gi (binary)"),
        ("lots", "write a number with a unit, like 64Gi"),
        ("-1Gi", "write a number with a unit"),
        ("", "write a number with a unit"),
        ("0Gi", "not more than zero"),
        (-4, "not more than zero"),
        ("0.3", "a whole number of bytes"),
        ("9000000Ti", "cannot be addressed"),
        (True, "is not a quantity"),
        (1.5, "is not a quantity"),
        (None, "is empty"),
        ("\u0661Gi", "is not a quantity"),
    ],
)
def test_parse_quantity_bad_says_what_to_write(text: object, said: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_quantity(text)
    assert said in str(caught.value)


def test_format_quantity_is_exact_and_short() -> None:
    for text in ("64Gi", "1536Mi", "500M", "4097", "3k", "1Ti"):
        assert format_quantity(parse_quantity(text)) == text


def test_human_bytes() -> None:
    assert [human_bytes(n) for n in (0, 1023, 1536, 5 << 20, 3 << 40)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "5.0 MiB",
        "3.0 TiB",
    ]
