"""Manifests of any shape: a valid one survives writing and reading, a wrong one gets sentences."""

from __future__ import annotations

import contextlib
import copy
import time
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool import rules
from kvpool.errors import ManifestError
from kvpool.quantity import format_quantity, parse_quantity
from kvpool.spec import InvalidManifest, PoolSpec

quick = settings(max_examples=60, deadline=None)  # the machine of a test is often a busy one
names = st.from_regex(rules.NAME_PATTERN, fullmatch=True).filter(lambda name: len(name) <= rules.NAME_MAX)
sizes = st.integers(min_value=rules.CAPACITY_MIN_BYTES, max_value=1 << 50)


@st.composite
def manifests(draw: st.DrawFn) -> dict[str, Any]:
    """A valid manifest."""
    media = sorted(
        draw(st.lists(st.sampled_from(["DRAM", "CXL"]), min_size=1, max_size=6)), key=rules.MEDIA.index
    )
    tier_names = draw(st.lists(names, min_size=len(media), max_size=len(media), unique=True))
    shared = [draw(st.booleans()) for _ in media]
    hosts = draw(st.integers(1, rules.HOSTS_MAX)) if any(shared) else 1
    tiers: list[dict[str, Any]] = []
    for index, medium in enumerate(media):
        tier: dict[str, Any] = {"name": tier_names[index], "medium": medium}
        tier["capacity"] = format_quantity(draw(sizes))
        if medium == "CXL":
            tier["source"] = {"path": f"/mnt/{index}"}
        if shared[index]:
            tier["shared"] = True
        if draw(st.booleans()):
            tier["coherence"] = draw(st.sampled_from(["hardware", "software"]))
        tiers.append(tier)
    low, high = sorted(draw(st.lists(st.integers(1, 99), min_size=2, max_size=2, unique=True)))
    spec = {"hosts": hosts, "tiers": tiers, "eviction": {"lowWatermark": low, "highWatermark": high}}
    return {
        "apiVersion": rules.API_VERSION,
        "kind": rules.KIND,
        "metadata": {"name": draw(names)[: rules.POOL_NAME_MAX].rstrip("-")},
        "spec": spec,
    }


@given(manifests())
@quick
def test_valid_manifest_survives_being_written_and_read(document: dict[str, Any]) -> None:
    spec = PoolSpec.from_text(yaml.safe_dump(document))
    assert PoolSpec.from_text(spec.to_yaml()) == spec


junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.just("64Gi"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


def places(document: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value in `document`."""
    found = [path] if path else []
    if isinstance(document, dict | list):
        for key, value in document.items() if isinstance(document, dict) else enumerate(document):
            found += places(value, (*path, key))
    return found


@given(manifests(), st.data())
@quick
def test_manifest_with_junk_anywhere_is_read_or_refused_with_sentences(
    document: dict[str, Any], data: st.DataObject
) -> None:
    wrong = copy.deepcopy(document)
    *way, last = data.draw(st.sampled_from(places(document)))
    target = wrong
    for step in way:
        target = target[step]
    target[last] = data.draw(junk)
    try:
        spec = PoolSpec.from_object(wrong)
    except InvalidManifest as error:
        for problem in error.problems:
            assert problem.message[-1] in ".?", problem
    else:
        assert PoolSpec.from_text(spec.to_yaml()) == spec


@given(st.text(alphabet=st.characters(codec="utf-8"), max_size=200))
@quick
def test_any_text_is_read_or_refused(text: str) -> None:
    with contextlib.suppress(ManifestError):
        PoolSpec.from_text(text)


@given(st.integers(1, (1 << 63) - 1))
@quick
def test_quantity_written_and_read_is_the_same(count_bytes: int) -> None:
    assert parse_quantity(format_quantity(count_bytes)) == count_bytes


@pytest.mark.parametrize("form", ["[{}]", "{{a: {0}, b: {0}, c: {0}}}", "{{<<: [{}]}}"])
def test_manifest_of_aliases_that_multiply_is_refused_soon(form: str) -> None:
    """Nine of nine of nine ...: a few hundred bytes that say a billion values."""
    lines = ["a0: &a0 {x: y}"]
    for i in range(1, 12):
        lines.append(
            f"a{i}: &a{i} " + form.format(", ".join([f"*a{i - 1}"] * 9) if "0" not in form else f"*a{i - 1}")
        )
    start = time.monotonic()
    with pytest.raises(ManifestError, match=r"more than|deeper than|does not fit"):
        PoolSpec.from_text("\n".join(lines))
    assert time.monotonic() - start < 20


@pytest.mark.parametrize("value", ['!!int ""', "!!bool x", "!!timestamp x", "0x" + "f" * 6000, "9" * 9000])
def test_manifest_with_a_value_that_the_reader_cannot_make_is_refused(value: str) -> None:
    with pytest.raises(ManifestError, match=r"\.( \(line \d\))?$"):
        PoolSpec.from_text("apiVersion: kvpool.dev/v1alpha1\nspec: {hosts: " + value + "}")
