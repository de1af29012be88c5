"""The rules of a KVPool manifest, one sentence each.

They are the messages of the CRD's CEL rules too: a user reads the same words from `kvpool validate` and from
`kubectl apply`. So a sentence stands alone, names fields as the manifest does, and says what to write.
"""

from __future__ import annotations

from typing import Final

API_VERSION: Final = "kvpool.dev/v1alpha1"
KIND: Final = "KVPool"

HOSTS_MAX: Final = 64  # shards that a region can have
TIERS_MAX: Final = 16  # a lookup visits each one; more than a handful is a mistake
NAME_MAX: Final = 63  # a DNS label, because the name becomes part of file and object names
NAME_PATTERN: Final = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
CAPACITY_MIN_BYTES: Final = 1 << 20  # "64" without a unit is 64 bytes: certainly not what was meant
BLOCK_MIN_BYTES: Final = 4096  # smaller ones would be more header and checksum than block
BLOCK_STEP_BYTES: Final = 64  # a slot is made of whole cache lines
MEDIA: Final = ("GPU", "DRAM", "CXL", "SSD")  # in the order that tiers may have: fastest first

NAME: Final = "use at most 63 lower-case letters, digits and '-', with a letter or digit at both ends."
TIERS_EMPTY: Final = "a pool needs at least one tier, like {name: dram, medium: DRAM, capacity: 64Gi}."
TIERS_TOO_MANY: Final = f"a pool has at most {TIERS_MAX} tiers."
TIERS_ORDER: Final = "tiers stand in the order GPU, DRAM, CXL, SSD (lookups try the first tier first)."
TIERS_UNIQUE_NAMES: Final = "each tier needs a name of its own."
TIERS_UNIQUE_PATHS: Final = "two tiers cannot use the same path."
CAPACITY_MIN: Final = "a tier needs a capacity of at least 1Mi; did you forget the unit (64Gi)?"
HOSTS_RANGE: Final = f"hosts is the number of hosts that share the pool, 1 to {HOSTS_MAX}."
SOURCE_ONE_OF: Final = "source takes exactly one of path, deviceClass and hostPath."
SOURCE_CXL: Final = (
    "a CXL tier needs source.path (a DAX device like /dev/dax0.0, or a file on DAX) or source.deviceClass."
)
SOURCE_SSD: Final = "an SSD tier needs source.hostPath (a directory) or source.path (a file or block device)."
SOURCE_DRAM: Final = "a DRAM tier takes source.path (a file on /dev/shm or hugetlbfs), or no source at all."
SOURCE_GPU: Final = "a GPU tier takes its memory from the engine's own GPU; leave source out."
SOURCE_HOST_PATH: Final = "source.hostPath is for SSD tiers; write source.path."
PATH_MAX: Final = 3072  # bytes; what the kernel takes, less what is put behind
PATH_PART_MAX: Final = 240
PATH_SIZE: Final = f"a path has at most {PATH_MAX} bytes, {PATH_PART_MAX} between two '/', and no zero byte."
PATH_ABSOLUTE: Final = "write an absolute path without '.', '..' or '//' in it."
SHARED_MEDIUM: Final = "only CXL and DRAM tiers can be shared; leave shared out."
HOSTS_SHARED: Final = "hosts above 1 needs a shared tier; set shared: true on one of them, or hosts: 1."
COHERENCE_MEDIUM: Final = "a GPU or SSD tier has no coherence to declare; leave it out."
HUGE_PAGES_MEDIUM: Final = (
    "hugePages is for DRAM tiers; leave it out (DAX devices map huge pages by themselves)."
)
WATERMARKS: Final = "eviction.lowWatermark must be below eviction.highWatermark."
WATERMARK_RANGE: Final = "a watermark is the percentage of a tier in use, 1 to 99."
EXTENT_SIZE: Final = "extentSize must not be more than the tier's capacity divided by hosts."
BLOCK_SIZE: Final = "minBlockSize must be a multiple of 64 bytes, at least 4Ki, and not more than extentSize."
VERIFY_ALWAYS: Final = (
    "this version checks every block that it serves; write verify: always, or leave it out."
)

# Sentences for what a schema checks (types, missing and unknown fields), by kind of mistake.
MISSING: Final = "is missing"
MISSING_EXAMPLE: Final[dict[str, str]] = {
    "apiVersion": f"apiVersion: {API_VERSION}",
    "kind": f"kind: {KIND}",
    "metadata": "metadata: {name: prefix-pool}",
    "metadata.name": "name: prefix-pool",
    "spec": "spec: {tiers: [{name: dram, medium: DRAM, capacity: 64Gi}]}",
    "spec.tiers": "tiers: [{name: dram, medium: DRAM, capacity: 64Gi}]",
    "spec.tiers[].name": "name: dram",
    "spec.tiers[].medium": f"medium: one of {', '.join(MEDIA)}",
    "spec.tiers[].capacity": "capacity: 64Gi",
    "spec.tiers[].source": "source: {path: /dev/dax0.0}",
}
