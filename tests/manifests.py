"""Manifests, right and wrong ones: a Kubernetes API with the CRD says the same to them as `kvpool up`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvpool import rules

Document = dict[str, Any]


def manifest(*tiers: Document, name: str = "p", **spec: Any) -> Document:
    """A manifest with these tiers (one DRAM tier when none is given)."""
    given = list(tiers) or [{"name": "dram", "medium": "DRAM", "capacity": "64Gi"}]
    return {
        "apiVersion": "kvpool.dev/v1alpha1",
        "kind": "KVPool",
        "metadata": {"name": name},
        "spec": {"tiers": given, **spec},
    }


def tier(**fields: Any) -> Document:
    return {"name": "dram", "medium": "DRAM", "capacity": "64Gi", **fields}


def cxl(**fields: Any) -> Document:
    return tier(**{"name": "cxl", "medium": "CXL", "source": {"path": "/dev/dax0.0"}, **fields})


def ssd(**fields: Any) -> Document:
    return tier(**{"name": "ssd", "medium": "SSD", "source": {"hostPath": "/var/lib/kvpool"}, **fields})


def toleration(**fields: Any) -> Document:
    return manifest(tolerations=[fields])


def resources(**fields: Any) -> Document:
    return manifest(daemon={"resources": fields})


@dataclass(frozen=True)
class Bad:
    """A manifest with one mistake. `path` is the field that `kvpool up` names, `rule` what both say.

    Where a schema finds the mistake (a type, a missing field, a word that is not in the list), the API has
    words of its own: then `api` is a part of them, and `rule` a part of what `kvpool up` says.
    """

    path: str
    rule: str
    document: Document
    api: str = ""


def without(document: Document, field: str) -> Document:
    return {key: value for key, value in document.items() if key != field}


BAD = [
    # --- metadata
    Bad("metadata.name", rules.POOL_NAME, manifest(name="p" * 53)),
    Bad("metadata.name", rules.POOL_NAME, manifest(name="a.b")),
    # --- spec
    Bad("spec.hosts", rules.HOSTS_RANGE, manifest(cxl(shared=True), hosts=0)),
    Bad("spec.hosts", rules.HOSTS_RANGE, manifest(cxl(shared=True), hosts=65)),
    Bad("spec.hosts", rules.HOSTS_SHARED, manifest(hosts=2)),
    Bad("spec.hosts", "a whole number", manifest(hosts="2"), api="must be of type integer"),
    Bad("spec.hots", "no such field", manifest(hots=2), api='unknown field "spec.hots"'),
    Bad("spec.tiers", rules.TIERS_EMPTY, {**manifest(), "spec": {"tiers": []}}),
    Bad("spec.tiers", rules.MISSING, {**manifest(), "spec": {}}, api="spec.tiers: Required value"),
    Bad(
        "spec.tiers",
        rules.TIERS_TOO_MANY,
        manifest(*[tier(name=f"t{i}") for i in range(17)]),
        api="must have at most 16 items",
    ),
    Bad("spec.tiers[1].medium", rules.TIERS_ORDER, manifest(cxl(), tier())),
    Bad("spec.tiers[2].medium", rules.TIERS_ORDER, manifest(tier(), ssd(), cxl())),
    Bad("spec.tiers[1].name", rules.TIERS_UNIQUE_NAMES, manifest(tier(), tier())),
    Bad("spec.tiers[1].source.path", rules.TIERS_UNIQUE_PATHS, manifest(cxl(), cxl(name="b"))),
    Bad("spec.eviction", rules.WATERMARKS, manifest(eviction={"lowWatermark": 95})),
    Bad("spec.eviction", rules.WATERMARKS, manifest(eviction={"lowWatermark": 50, "highWatermark": 50})),
    Bad("spec.eviction.highWatermark", rules.WATERMARK_RANGE, manifest(eviction={"highWatermark": 100})),
    Bad("spec.eviction.lowWatermark", rules.WATERMARK_RANGE, manifest(eviction={"lowWatermark": 0})),
    Bad("spec.verify", rules.VERIFY_ALWAYS, manifest(verify="sampled")),
    Bad("spec.verify", rules.VERIFY_ALWAYS, manifest(verify="off")),
    Bad("spec.verify", "is not known", manifest(verify="never"), api='"always", "sampled", "off"'),
    Bad("spec.deletionPolicy", "Retain or Delete", manifest(deletionPolicy="Keep"), api='"Retain", "Delete"'),
    # --- a tier
    Bad("spec.tiers[0].name", rules.NAME, manifest(tier(name="My Tier"))),
    Bad("spec.tiers[0].name", rules.NAME, manifest(tier(name=""))),
    Bad("spec.tiers[0].name", rules.NAME, manifest(tier(name="a" * 64)), api="may not be more than 63"),
    Bad("spec.tiers[0].name", rules.MISSING, manifest(without(tier(), "name")), api="name: Required value"),
    Bad("spec.tiers[0].medium", "GPU, DRAM, CXL or SSD", manifest(tier(medium="TAPE")), api='"GPU", "DRAM"'),
    Bad("spec.tiers[0].medium", rules.MISSING, manifest(without(tier(), "medium")), api="medium: Required"),
    Bad("spec.tiers[0].capacity", rules.QUANTITY, manifest(tier(capacity="64GB"))),
    Bad("spec.tiers[0].capacity", rules.QUANTITY, manifest(tier(capacity="lots"))),
    Bad(
        "spec.tiers[0].capacity",
        "like 65536Ki (binary)",
        manifest(tier(capacity="65536K")),
        api=rules.QUANTITY,
    ),
    Bad("spec.tiers[0].capacity", rules.QUANTITY, manifest(tier(capacity="-1Gi"))),
    Bad("spec.tiers[0].capacity", rules.QUANTITY, manifest(tier(capacity=""))),
    Bad("spec.tiers[0].capacity", rules.QUANTITY, manifest(tier(capacity="1e9"))),
    Bad("spec.tiers[0].capacity", rules.QUANTITY_RANGE, manifest(tier(capacity="0Gi"))),
    Bad("spec.tiers[0].capacity", rules.QUANTITY_RANGE, manifest(tier(capacity=-5))),
    Bad("spec.tiers[0].capacity", rules.QUANTITY_RANGE, manifest(tier(capacity="8192Pi"))),
    Bad("spec.tiers[0].capacity", rules.QUANTITY_RANGE, manifest(tier(capacity="1.0000001Gi"))),
    Bad("spec.tiers[0].capacity", rules.CAPACITY_MIN, manifest(tier(capacity=64))),
    Bad("spec.tiers[0].capacity", rules.CAPACITY_MIN, manifest(tier(capacity="1023Ki"))),
    Bad(
        "spec.tiers[0].capacity",
        rules.MISSING,
        manifest(without(tier(), "capacity")),
        api="capacity: Required",
    ),
    Bad("spec.tiers[0].capacity", rules.DAX_SIZE, manifest(cxl(capacity="64G"))),
    Bad("spec.tiers[0].capacity", rules.DAX_SIZE, manifest(cxl(capacity="3Mi"))),
    Bad(
        "spec.tiers[0].shared", "true or false", manifest(tier(shared="true")), api="must be of type boolean"
    ),
    Bad("spec.tiers[0].shared", rules.SHARED_MEDIUM, manifest(tier(medium="GPU", shared=True))),
    Bad("spec.tiers[0].shared", rules.SHARED_MEDIUM, manifest(ssd(shared=True))),
    Bad(
        "spec.tiers[0].coherence", rules.COHERENCE_MEDIUM, manifest(tier(medium="GPU", coherence="software"))
    ),
    Bad("spec.tiers[0].coherence", "hardware or software", manifest(tier(coherence="x")), api='"hardware"'),
    Bad("spec.tiers[0].hugePages", rules.HUGE_PAGES_MEDIUM, manifest(cxl(hugePages=True))),
    Bad("spec.tiers[0].extentSize", rules.EXTENT_SIZE, manifest(tier(extentSize="128Gi"))),
    Bad(
        "spec.tiers[0].extentSize",
        rules.EXTENT_SIZE,
        manifest(cxl(extentSize="48Gi", shared=True), hosts=2),
    ),
    Bad("spec.tiers[0].extentSize", rules.QUANTITY, manifest(tier(extentSize="x"))),
    Bad("spec.tiers[0].minBlockSize", rules.BLOCK_SIZE, manifest(tier(minBlockSize=1024))),
    Bad("spec.tiers[0].minBlockSize", rules.BLOCK_SIZE, manifest(tier(minBlockSize=5000))),
    Bad("spec.tiers[0].minBlockSize", rules.BLOCK_SIZE, manifest(tier(minBlockSize="65Gi"))),
    Bad(
        "spec.tiers[0].minBlockSize",
        rules.BLOCK_SIZE,
        manifest(cxl(minBlockSize="40Gi", shared=True), hosts=2),
    ),
    Bad(
        "spec.tiers[0].minBlockSize",
        rules.BLOCK_SIZE,
        manifest(tier(minBlockSize="2Mi", extentSize="1Mi")),
    ),
    # --- where a tier lies
    Bad("spec.tiers[0].source", rules.SOURCE_ONE_OF, manifest(tier(source={}))),
    Bad(
        "spec.tiers[0].source",
        rules.SOURCE_ONE_OF,
        manifest(cxl(source={"path": "/a", "deviceClass": "b"})),
    ),
    Bad("spec.tiers[0].source", rules.SOURCE_CXL, manifest(without(cxl(), "source"))),
    Bad("spec.tiers[0].source.hostPath", rules.SOURCE_HOST_PATH, manifest(cxl(source={"hostPath": "/a"}))),
    Bad("spec.tiers[0].source", rules.SOURCE_SSD, manifest(without(ssd(), "source"))),
    Bad("spec.tiers[0].source", rules.SOURCE_SSD, manifest(ssd(source={"deviceClass": "b"}))),
    Bad("spec.tiers[0].source", rules.SOURCE_DRAM, manifest(tier(source={"hostPath": "/a"}))),
    Bad("spec.tiers[0].source", rules.SOURCE_GPU, manifest(tier(medium="GPU", source={"path": "/a"}))),
    Bad("spec.tiers[0].source.deviceClass", rules.DEVICE_CLASS, manifest(cxl(source={"deviceClass": "A b"}))),
    *[
        Bad("spec.tiers[0].source.path", rules.PATH_ABSOLUTE, manifest(tier(source={"path": path})))
        for path in ("a/b", "/", "//a", "/a//b", "/a/", "/a/../b", "/a/.", "/..")
    ],
    Bad("spec.tiers[0].source.path", rules.PATH_SIZE, manifest(tier(source={"path": "/" + "a" * 241}))),
    Bad("spec.tiers[0].source.path", rules.PATH_SIZE, manifest(tier(source={"path": "/a\0b"}))),
    Bad(
        "spec.tiers[0].source.path",
        rules.PATH_SIZE,
        manifest(tier(source={"path": ("/" + "\u00e4" * 100) * 16})),
    ),
    Bad(
        "spec.tiers[0].source.path",
        rules.PATH_SIZE,
        manifest(tier(source={"path": ("/" + "a" * 200) * 16})),
        api="may not be more than 3072",
    ),
    # --- for the cluster
    Bad("spec.nodeSelector.a", rules.LABEL_VALUE, manifest(nodeSelector={"a": "x y"})),
    Bad("spec.nodeSelector.a b", rules.LABEL_KEY, manifest(nodeSelector={"a b": "x"})),
    Bad(
        "spec.nodeSelector",
        rules.LABELS_TOO_MANY,
        manifest(nodeSelector={f"k{i}": "" for i in range(33)}),
        api="must have at most 32 items",
    ),
    Bad("spec.priorityClassName", rules.PRIORITY_CLASS, manifest(priorityClassName="High!")),
    Bad("spec.paused", "true or false", manifest(paused="yes"), api="must be of type boolean"),
    Bad("spec.tolerations[0]", rules.TOLERATION_EXISTS, toleration(key="a", operator="Exists", value="b")),
    Bad("spec.tolerations[0]", rules.TOLERATION_KEY, toleration(effect="NoSchedule")),
    Bad("spec.tolerations[0]", rules.TOLERATION_SECONDS, toleration(key="a", tolerationSeconds=5)),
    Bad("spec.tolerations[0].key", rules.LABEL_KEY, toleration(key="a b", operator="Exists")),
    Bad("spec.tolerations[0].value", rules.LABEL_VALUE, toleration(key="a", value="b c")),
    Bad("spec.tolerations[0].effect", "NoExecute", toleration(key="a", effect="None"), api='"NoExecute"'),
    Bad(
        "spec.tolerations",
        rules.TOLERATIONS_TOO_MANY,
        manifest(tolerations=[{"operator": "Exists"}] * 17),
        api="must have at most 16 items",
    ),
    Bad("spec.daemon.image", rules.IMAGE, manifest(daemon={"image": "a b"})),
    Bad("spec.daemon.image", rules.IMAGE, manifest(daemon={"image": ""})),
    Bad("spec.daemon.resources.requests.cpu", rules.AMOUNT, resources(requests={"cpu": "many"})),
    Bad("spec.daemon.resources.limits.memory", rules.AMOUNT, resources(limits={"memory": "1GB"})),
    Bad("spec.daemon.resources.limits.a b", rules.LABEL_KEY, resources(limits={"a b": "1"})),
    Bad(
        "spec.daemon.resources",
        rules.REQUEST_LIMIT,
        resources(requests={"cpu": 2}, limits={"cpu": "1500m"}),
    ),
]

GOOD: dict[str, Document] = {
    "smallest": manifest(),
    "all tiers": manifest(
        tier(name="hbm", medium="GPU", capacity="8Gi", optional=True),
        tier(),
        cxl(shared=True, coherence="software", extentSize="16Mi", minBlockSize="64Ki"),
        cxl(name="cxl2", source={"deviceClass": "cxl-dax"}),
        ssd(),
        hosts=4,
    ),
    "sizes of every kind": manifest(
        *[
            tier(name=f"t{index}", capacity=size)
            for index, size in enumerate(
                [1048576, "1048576", "1.5Gi", "500M", "2000k", "1Ti", "3T", "8191Pi"]
            )
        ]
    ),
    "files": manifest(
        tier(source={"path": "/dev/hugepages/kvpool"}, hugePages=True),
        cxl(source={"path": "/mnt/d\u00e4x/a b/..region"}, capacity="3M"),
        ssd(source={"path": "/dev/nvme0n1"}),
    ),
    "longest name": manifest(name="p" * 52),
    "for the cluster": manifest(
        paused=True,
        nodeSelector={"kvpool.dev/member": "true", "disk": ""},
        priorityClassName="system-node-critical",
        tolerations=[
            {"operator": "Exists"},
            {
                "key": "example.com/cxl",
                "operator": "Equal",
                "value": "yes",
                "effect": "NoExecute",
                "tolerationSeconds": 60,
            },
        ],
        daemon={
            "image": "registry.example:5000/kvpool@sha256:0123",
            "resources": {
                "requests": {"cpu": "500m", "memory": "1.5Gi"},
                "limits": {"cpu": 2, "memory": "2Gi"},
            },
        },
        eviction={"highWatermark": 99, "lowWatermark": 1},
        deletionPolicy="Delete",
        verify="always",
    ),
}
