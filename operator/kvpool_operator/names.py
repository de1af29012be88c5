"""Every name that the operator gives: objects, labels, annotations, conditions, reasons.

A condition's type says when it is True; a reason is one CamelCase word that users and alerts can match
(docs/kubernetes.md has what to do about each).
"""

from __future__ import annotations

import hashlib
from typing import Final
from uuid import UUID, uuid5

from kvpool import rules

API_VERSION: Final = rules.API_VERSION
GROUP: Final = API_VERSION.partition("/")[0]
FIELD_MANAGER: Final = "kvpool-operator"
NODE_FIELD_MANAGER: Final = "kvpool-node"
FINALIZER: Final = "kvpool.dev/pool"
LEASE: Final = "kvpool-operator"

POOL_LABEL: Final = "kvpool.dev/pool"
NAMESPACE_LABEL: Final = "kvpool.dev/namespace"  # the pool's: not all that belongs to it lies there
NODE_LABEL: Final = "kvpool.dev/node"
CONTAINERS_ANNOTATION: Final = "kvpool.dev/containers"
INJECTED_ANNOTATION: Final = "kvpool.dev/injected"
SKIPPED_ANNOTATION: Final = "kvpool.dev/injection-skipped"
ACCOUNT_ANNOTATION: Final = "kvpool.dev/account"  # uid of the ServiceAccount whose tokens a pod has
APPLIED_ANNOTATION: Final = "kvpool.dev/applied"  # digest of what was applied: equal means nothing to do

POLICY_ANNOTATION: Final = "kvpool.dev/deletion-policy"  # on the claim of a region: the pool's, as it is now

DRIVER: Final = "dra.kvpool.dev"  # of resource claims, and the domain of its devices' attributes
POOL_CLASS: Final = "kvpool"  # the DeviceClass of pools
MEMORY_CLASS: Final = "cxl-dax"  # the chart's DeviceClass of CXL memory; there may be others
MEMORY_LABEL: Final = "kvpool.dev/memory"  # of the ResourceSlice of a CXL memory: its serial number
NO_REGION: Final = "none"  # what a memory says of its region when there is none
POOL_REQUEST: Final = "kvpool"  # the name of the claim in a pod that was given a pool

METRICS_PORT: Final = 9464  # of a node's daemon
RUNTIME_DIR: Final = "/kvpool"  # in every container that uses a pool
NODE_DIR: Final = "/dev/shm/kvpool"  # on every node; its pages are memory, and are charged to the daemon
DEVICE_DIR: Final = "/dev/kvpool"  # in every container: what was composed for a tier
GROUP_ID: Final = 64000  # owns the regions; engines get it as a supplemental group
LABEL_MAX: Final = 63

# Condition types.
READY: Final = "Ready"  # every desired node serves the pool
PROGRESSING: Final = "Progressing"  # something is being rolled out, made or removed
DEGRADED: Final = "Degraded"  # the pool serves, with less than was declared
DRAINING: Final = "Draining"  # a node gives its blocks away, or the pool is being deleted
COHERENCE_VERIFIED: Final = "CoherenceVerified"  # hosts were seen to see each other's stores as declared
CONDITIONS: Final = (READY, PROGRESSING, DEGRADED, DRAINING, COHERENCE_VERIFIED)

# Reasons. Ready:
ALL_NODES_READY: Final = "AllNodesReady"
NODES_NOT_READY: Final = "NodesNotReady"
NO_NODES: Final = "NoNodes"
INVALID_SPEC: Final = "InvalidSpec"
DELETING: Final = "Deleting"
# Progressing:
ROLLING_OUT: Final = "RollingOut"
SETTLED: Final = "Settled"
PAUSED: Final = "Paused"
APPLY_FAILED: Final = "ApplyFailed"
# Degraded:
AS_DECLARED: Final = "AsDeclared"
TIER_MISSING: Final = "TierMissing"
TOO_MANY_NODES: Final = "TooManyNodes"
NODE_PROBLEM: Final = "NodeProblem"
SHARDS_ADOPTED: Final = "ShardsAdopted"
# Draining:
NOT_DRAINING: Final = "NotDraining"
NODE_CORDONED: Final = "NodeCordoned"
NODE_GONE: Final = "NodeGone"
# CoherenceVerified:
VERIFIED: Final = "Verified"
NOT_SHARED: Final = "NotShared"
NOT_TESTED: Final = "NotTested"
TEST_FAILED: Final = "TestFailed"

REASONS: Final = {
    READY: (ALL_NODES_READY, NODES_NOT_READY, NO_NODES, INVALID_SPEC, DELETING),
    PROGRESSING: (SETTLED, ROLLING_OUT, PAUSED, APPLY_FAILED, INVALID_SPEC, DELETING),
    DEGRADED: (
        AS_DECLARED,
        NODES_NOT_READY,
        TIER_MISSING,
        TOO_MANY_NODES,
        NODE_PROBLEM,
        SHARDS_ADOPTED,
        INVALID_SPEC,
    ),
    DRAINING: (NOT_DRAINING, NODE_CORDONED, NODE_GONE, DELETING),
    COHERENCE_VERIFIED: (VERIFIED, NOT_SHARED, NOT_TESTED, TEST_FAILED),
}

# Reasons of events that are no conditions' reasons.
EVENT_REMOVAL_INCOMPLETE: Final = "RemovalIncomplete"
EVENT_SHARD_HANDED_OVER: Final = "ShardHandedOver"


def child(pool: str, part: str = "") -> str:
    """The name of an object that belongs to `pool`."""
    return f"kvpool-{pool}-{part}" if part else f"kvpool-{pool}"


def outside(namespace: str, pool: str, part: str = "") -> str:
    """The name of an object of `pool` that does not lie in the pool's namespace: at most 63 characters.

    Namespace 'a-b' with pool 'c' and 'a' with 'b-c' must differ, hence the digest.
    """
    digest = hashlib.sha256(f"{namespace}/{pool}/{part}".encode()).hexdigest()[:8]
    readable = f"kvpool-{namespace}-{pool}{f'-{part}' if part else ''}"
    return f"{readable[: LABEL_MAX - 9].rstrip('-')}-{digest}"


_REGIONS: Final = UUID("1f9f4a0c-7a52-5b0e-8d0b-5e3c7c1c9d42")


def region_uuid(namespace: str, pool: str, tier: str) -> UUID:
    """The region of a tier: the same on every node, and for a pool that is made again under its name."""
    return uuid5(_REGIONS, f"{namespace}/{pool}/{tier}")


def label_value(text: str) -> str:
    """`text` as the value of a label; names that are too long end in their digest."""
    if len(text) <= LABEL_MAX:
        return text
    return f"{text[:50].rstrip('-.')}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
