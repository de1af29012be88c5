"""What a KVPool asks for in a cluster: its checked spec, with the places that containers see."""

from __future__ import annotations

import copy
import posixpath
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvpool.paths import is_device_path
from kvpool.spec import PoolSpec, TierSpec
from kvpool_operator.names import API_VERSION, DEVICE_DIR, GROUP_ID, NODE_DIR, RUNTIME_DIR

# What only the operator has a use for: a change of these is no change for the daemons.
OPERATOR_FIELDS = ("paused", "nodeSelector", "tolerations", "priorityClassName", "daemon")
HUGE_DIR = "/dev/hugepages/kvpool"  # on every node
HUGE_MOUNT = "/kvpool-huge"


@dataclass(frozen=True, slots=True)
class Settings:
    """What the operator was started with, as far as pools see it."""

    image: str
    namespace: str  # where the daemons run: the operator's own, for they need what `restricted` forbids
    group_id: int = GROUP_ID
    priority_class: str = ""
    pull_policy: str = "IfNotPresent"
    pull_secrets: tuple[str, ...] = ()
    driver: bool = False  # whether the DRA driver is installed


@dataclass(frozen=True, slots=True)
class PoolObject:
    """A KVPool of the cluster whose spec keeps all rules."""

    namespace: str
    name: str
    uid: str
    generation: int
    spec: PoolSpec
    raw: Mapping[str, Any] = field(default_factory=dict)  # its .spec

    @classmethod
    def from_object(cls, body: Mapping[str, Any]) -> PoolObject:
        """Raises: ManifestError when the spec breaks a rule (a CRD of another version let it through)."""
        metadata = body["metadata"]
        wanted = {key: body.get(key) for key in ("apiVersion", "kind", "metadata", "spec")}
        # Annotations and labels of other tools are none of ours, and no reason to refuse a pool.
        wanted["metadata"] = {"name": metadata["name"], "namespace": metadata["namespace"]}
        return cls(
            namespace=metadata["namespace"],
            name=metadata["name"],
            uid=metadata["uid"],
            generation=int(metadata.get("generation", 0)),
            spec=PoolSpec.from_object(wanted, source=f"KVPool {metadata['namespace']}/{metadata['name']}"),
            raw=body["spec"],
        )

    @property
    def shared(self) -> bool:
        """Whether nodes share a tier: then each needs a shard of its own in it."""
        return any(tier.shared for tier in self.spec.tiers)

    @property
    def folder(self) -> str:
        """Where the pool's files are in every container."""
        return f"{RUNTIME_DIR}/{self.name}"

    @property
    def node_folder(self) -> str:
        """... and on the node."""
        return f"{NODE_DIR}/{self.namespace}/{self.name}"

    @property
    def huge_folder(self) -> str:
        return f"{HUGE_DIR}/{self.namespace}/{self.name}"

    @property
    def huge(self) -> list[TierSpec]:
        """The tiers in huge pages that have no path of their own."""
        return [tier for tier in self.spec.tiers if tier.huge_pages and not placed_path(tier)]

    @property
    def placed(self) -> list[TierSpec]:
        """The tiers whose path the manifest gives."""
        return [tier for tier in self.spec.tiers if placed_path(tier)]

    @property
    def devices(self) -> list[TierSpec]:
        """Of the placed ones those on a device."""
        return [tier for tier in self.placed if is_device_path(Path(placed_path(tier)))]

    @property
    def claimed(self) -> list[TierSpec]:
        """The tiers whose memory a DeviceClass hands out, by a resource claim."""
        return [tier for tier in self.spec.tiers if tier.source and tier.source.device_class]

    @property
    def by_claim(self) -> bool:
        """Whether engines get the pool by a resource claim: a device needs more than a mount."""
        return bool(self.claimed or self.devices)

    def claimed_path(self, tier: str) -> str:
        """Where containers see what was claimed for a tier."""
        return tier_device(self.name, tier)

    def manifest(self) -> dict[str, Any]:
        """The manifest that daemons and engines read: every tier has the path that containers see."""
        body = {
            key: value for key, value in copy.deepcopy(dict(self.raw)).items() if key not in OPERATOR_FIELDS
        }
        for tier in body["tiers"]:
            if (tier.get("source") or {}).get("deviceClass"):
                tier["source"] = {"path": self.claimed_path(tier["name"])}
            if tier["medium"] == "DRAM" and not (tier.get("source") or {}).get("path"):
                tier["source"] = {"path": self.region_path(tier["name"], bool(tier.get("hugePages")))}
        return {
            "apiVersion": API_VERSION,
            "kind": "KVPool",
            "metadata": {"name": self.name, "namespace": self.namespace},
            "spec": body,
        }

    def region_path(self, tier: str, huge: bool = False) -> str:
        return f"{HUGE_MOUNT}/{self.name}/{tier}.region" if huge else f"{self.folder}/{tier}.region"

    @property
    def memory_bytes(self) -> int:
        """What the DRAM tiers take of a node's memory: it is charged to the daemon, which fills it in."""
        return sum(t.capacity_bytes for t in self.spec.tiers if t.medium == "DRAM" and not t.huge_pages)

    @property
    def huge_bytes(self) -> int:
        return sum(t.capacity_bytes for t in self.spec.tiers if t.medium == "DRAM" and t.huge_pages)


def placed_path(tier: TierSpec) -> str:
    """The path that the manifest gives to a tier; empty when it gives none."""
    return (tier.source.path or "") if tier.source else ""


def tier_device(pool: str, tier: str) -> str:
    """The place of a claimed tier in containers, the same on every node and for every kind of memory."""
    return f"{DEVICE_DIR}/{pool}/{tier}"


def parent(path: str) -> str:
    return posixpath.dirname(path)
