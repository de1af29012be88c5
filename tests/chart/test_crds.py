"""One schema in four places: crds/, the pydantic reader, the chart's copy, the tables of the docs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from kvpool import rules
from kvpool.spec.manifest import Body

ROOT = Path(__file__).resolve().parents[2]
CRDS = sorted((ROOT / "crds").glob("*.yaml"))
Schema = dict[str, Any]

# What a schema finds by itself: the API says these in words of its own.
OF_THE_SCHEMA = {
    rules.TIERS_TOO_MANY,
    rules.TOLERATIONS_TOO_MANY,
    rules.LABELS_TOO_MANY,
    rules.RESOURCES_TOO_MANY,
}


def crd(name: str) -> Schema:
    loaded: Schema = yaml.safe_load((ROOT / "crds" / f"{name}.yaml").read_text())
    return loaded


def version(document: Schema) -> Schema:
    (only,) = document["spec"]["versions"]
    return dict(only)


def schema_of(name: str) -> Schema:
    return dict(version(crd(name))["schema"]["openAPIV3Schema"])


def walk(schema: Schema, path: str = "") -> Iterator[tuple[str, Schema]]:
    """Every schema inside `schema`, with its path."""
    yield path, schema
    for name, field in schema.get("properties", {}).items():
        yield from walk(field, f"{path}.{name}".lstrip("."))
    if "items" in schema:
        yield from walk(schema["items"], f"{path}[]")
    if isinstance(schema.get("additionalProperties"), dict):
        yield from walk(schema["additionalProperties"], f"{path}[*]")


# --- pydantic -----------------------------------------------------------------------------------------------

SAME = (
    "type",
    "enum",
    "minimum",
    "maximum",
    "minItems",
    "maxItems",
    "maxLength",
    "maxProperties",
    "required",
)
SIZE = "x-kubernetes-int-or-string"


def resolved(schema: Schema, root: Schema) -> Schema:
    """The pydantic schema in the shape of a CRD's: no references, no null, no named patterns of keys."""
    if "anyOf" in schema:
        (kept,) = (option for option in schema["anyOf"] if option.get("type") != "null")
        schema = {**schema, **kept}
        schema.pop("anyOf")
    if "$ref" in schema:
        target = root["$defs"][schema["$ref"].rpartition("/")[2]]
        schema = {**target, **{key: value for key, value in schema.items() if key != "$ref"}}
    if "patternProperties" in schema:
        (values,) = schema["patternProperties"].values()
        schema = {**schema, "additionalProperties": resolved(values, root)}
    if "properties" in schema:
        inner = {name: resolved(field, root) for name, field in schema["properties"].items()}
        schema = {**schema, "properties": inner}
    if "items" in schema:
        schema = {**schema, "items": resolved(schema["items"], root)}
    return schema


def facts(schema: Schema) -> Schema:
    """What the two have to agree on. Null and an empty value are how pydantic writes 'left out'."""
    found = {key: schema[key] for key in SAME if key in schema}
    if SIZE in schema:
        found[SIZE] = True
    if "required" in found:
        found["required"] = sorted(found["required"])
    default = schema.get("default")
    empty = default is None or (
        isinstance(default, dict) and not any(v is not None for v in default.values())
    )
    return found if empty else {**found, "default": default}


def test_crd_has_the_fields_defaults_and_limits_of_the_reader() -> None:
    model = Body.model_json_schema(by_alias=True)
    expected = {path: facts(schema) for path, schema in walk(resolved(model, model))}
    found = {path: facts(schema) for path, schema in walk(schema_of("kvpools")["properties"]["spec"])}
    assert found.keys() == expected.keys()
    for path, schema in expected.items():
        assert found[path] == schema, path


def test_crd_patterns_are_those_of_the_reader() -> None:
    model = Body.model_json_schema(by_alias=True)
    declared = dict(walk(schema_of("kvpools")["properties"]["spec"]))
    for path, schema in walk(resolved(model, model)):
        if "pattern" in schema:
            texts = [rule["rule"] for rule in declared[path].get("x-kubernetes-validations", [])]
            written = schema["pattern"].replace("\t", "\\t").replace("\n", "\\n")
            assert any(f"matches('{written}')" in text for text in texts), path


def test_crd_sentences_are_those_of_the_reader() -> None:
    said = {
        rule["message"]
        for _, schema in walk(schema_of("kvpools"))
        for rule in schema.get("x-kubernetes-validations", [])
    }
    known = {
        value
        for name, value in vars(rules).items()
        if name.isupper() and isinstance(value, str) and value[-1:] in (".", "?")
    }
    assert said == known - OF_THE_SCHEMA


def test_crd_kind_and_version_are_those_of_the_reader() -> None:
    document = crd("kvpools")
    assert document["spec"]["names"]["kind"] == rules.KIND
    assert f"{document['spec']['group']}/{version(document)['name']}" == rules.API_VERSION


# --- what every CRD keeps -----------------------------------------------------------------------------------


@pytest.mark.parametrize("path", CRDS, ids=lambda path: path.stem)
def test_crd_every_list_map_and_text_has_a_limit(path: Path) -> None:
    # Without them the API refuses the rules, because it could not bound what they cost.
    problems = []
    for where, schema in walk(schema_of(path.stem)):
        kind = schema.get("type")
        if kind == "array" and not ("maxItems" in schema and "x-kubernetes-list-type" in schema):
            problems.append(f"{where}: maxItems, x-kubernetes-list-type")
        if isinstance(schema.get("additionalProperties"), dict) and "maxProperties" not in schema:
            problems.append(f"{where}: maxProperties")
        bounded = "maxLength" in schema or "enum" in schema or schema.get("format") == "date-time"
        if kind == "string" and not bounded and where not in ("apiVersion", "kind"):
            problems.append(f"{where}: maxLength")
        if SIZE in schema and "maxLength" not in schema:
            problems.append(f"{where}: maxLength")
    assert not problems


@pytest.mark.parametrize("path", CRDS, ids=lambda path: path.stem)
def test_crd_has_no_float_and_keeps_no_unknown_field(path: Path) -> None:
    for where, schema in walk(schema_of(path.stem)):
        assert schema.get("type") != "number", where
        assert "x-kubernetes-preserve-unknown-fields" not in schema, where


@pytest.mark.parametrize("path", CRDS, ids=lambda path: path.stem)
def test_crd_every_field_is_described(path: Path) -> None:
    bare = [
        where
        for where, schema in walk(schema_of(path.stem))
        if "description" not in schema
        and not where.endswith(("]", "metadata", "metadata.name"))
        and not where.startswith("spec.manifest.spec.")
    ]
    assert not bare


@pytest.mark.parametrize("path", CRDS, ids=lambda path: path.stem)
def test_crd_is_namespaced_with_short_name_category_and_status(path: Path) -> None:
    document = crd(path.stem)
    assert document["metadata"]["name"] == f"{path.stem}.kvpool.dev"
    assert document["spec"]["scope"] == "Namespaced"
    assert document["spec"]["names"]["categories"] == ["kvpool-all"]
    assert document["spec"]["names"]["shortNames"] == [{"kvpools": "kvp", "kvpoolnodes": "kvpn"}[path.stem]]
    assert version(document)["subresources"] == {"status": {}}


def test_crd_columns_are_what_a_person_asks_for() -> None:
    columns = version(crd("kvpools"))["additionalPrinterColumns"]
    shown = [column["name"] for column in columns if not column.get("priority")]
    assert shown == ["Ready", "Nodes", "Capacity", "Used", "Hit %", "Age"]


def test_node_manifest_has_the_fields_of_a_pool_without_rules_and_defaults(generate: ModuleType) -> None:
    manifest = schema_of("kvpoolnodes")["properties"]["spec"]["properties"]["manifest"]
    wanted = generate.bare(schema_of("kvpools")["properties"]["spec"])
    assert {k: v for k, v in manifest["properties"]["spec"].items() if k != "description"} == wanted


# --- copies -------------------------------------------------------------------------------------------------


def test_generated_files_are_up_to_date(generate: ModuleType) -> None:
    old = generate.outdated(dict(generate.generated()))
    assert not old, f"run 'make generate' and commit what it changes: {old}"


def test_chart_copy_of_the_crds_is_byte_by_byte_the_same() -> None:
    copies = sorted((ROOT / "charts" / "kvpool" / "files" / "crds").glob("*"))
    assert [path.name for path in copies] == [path.name for path in CRDS]
    assert [path.read_bytes() for path in copies] == [path.read_bytes() for path in CRDS]


def test_docs_table_has_every_field(generate: ModuleType) -> None:
    text = (ROOT / "docs" / "manifest.md").read_text()
    for path, schema, _ in generate.fields(schema_of("kvpools")["properties"]["spec"], "spec"):
        (row,) = (line for line in text.splitlines() if line.startswith(f"| `{path}` |"))
        assert schema["description"].strip() in row
        if "default" in schema:
            assert json.dumps(schema["default"]) in row
