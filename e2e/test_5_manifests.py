"""What the apiserver refuses, with a sentence that says what to write."""

from __future__ import annotations

from typing import Any

import pytest

from kube import Kube, KubeError, Object
from pools import KVPool, cxl, dram
from release import NAMESPACE

PATH = "/dev/shm/shared/refused.region"


def spec(*tiers: Object, **more: Any) -> Object:
    return {"tiers": list(tiers), **more}


# name of the case -> (spec, a word of the sentence)
BAD: dict[str, tuple[Object, str]] = {
    "no tier": (spec(), "tiers"),
    "no capacity": (spec({"name": "dram", "medium": "DRAM"}), "capacity"),
    "no quantity": (spec(dram(capacity="64GB")), "64Gi"),
    "unknown medium": (spec({**dram(), "medium": "TAPE"}), "medium"),
    "unknown field": (spec(dram(), colour="red"), "colour"),
    "two tiers of a name": (spec(dram(), dram()), "name"),
    "watermarks exchanged": (
        spec(dram(), eviction={"highWatermark": 60, "lowWatermark": 90}),
        "lowWatermark",
    ),
    "shared without a path": (spec({**cxl(PATH), "source": {}}, hosts=2), "source"),
    "hosts without a shared tier": (spec(dram(), hosts=2), "shared"),
    "too many hosts": (spec(cxl(PATH), hosts=1000), "64"),
    "path that is not absolute": (spec(cxl("relative/path"), hosts=2), "path"),
}


def refusal(kube: Kube, *objects: Object) -> str:
    with pytest.raises(KubeError) as refused:
        kube.apply(*objects, dry_run=True)
    return str(refused.value)


@pytest.mark.parametrize("case", BAD)
def test_bad_manifest_is_refused_with_a_sentence(kube: Kube, release: str, case: str) -> None:
    wanted, word = BAD[case]
    said = refusal(kube, KVPool(kube, NAMESPACE, "bad", wanted).body())
    assert word in said


def test_name_that_is_too_long_is_refused(kube: Kube, release: str) -> None:
    said = refusal(kube, KVPool(kube, NAMESPACE, "n" * 53, spec(dram())).body())
    assert "52" in said


@pytest.mark.parametrize("change", [{"medium": "CXL"}, {"minBlockSize": "128Ki"}, {"extentSize": "4Mi"}])
def test_change_of_what_is_fixed_is_refused(kube: Kube, release: str, change: Object) -> None:
    # No node matches, so nothing is made for it.
    pool = KVPool(kube, NAMESPACE, "fixed", spec(dram(), nodeSelector={"e2e.kvpool.dev/none": "yes"}))
    pool.apply()
    try:
        changed = KVPool(kube, NAMESPACE, "fixed", {**pool.spec, "tiers": [{**dram(), **change}]})
        refusal(kube, changed.body())
    finally:
        pool.delete()
        pool.wait_gone()


def test_examples_are_accepted(kube: Kube, release: str) -> None:
    from release import ROOT

    for path in sorted((ROOT / "charts" / "kvpool").rglob("examples/*.yaml")):
        kube.kubectl("apply", "--dry-run=server", "-n", NAMESPACE, "-f", str(path))
    kube.kubectl("apply", "--dry-run=server", "-n", NAMESPACE, "-f", str(ROOT / "demo" / "pool.yaml"))
