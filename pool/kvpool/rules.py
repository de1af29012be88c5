"""The rules of a KVPool manifest, one sentence each.

They are the messages of the CRD's CEL rules too (crds/kvpools.yaml; tests/chart compare the two): a user
reads the same words from `kvpool validate` and from `kubectl apply`. So a sentence stands alone, names fields
as the manifest does, and says what to write.
"""

from __future__ import annotations

from typing import Final

API_VERSION: Final = "kvpool.dev/v1alpha1"
KIND: Final = "KVPool"

HOSTS_MAX: Final = 64  # shards that a region can have
TIERS_MAX: Final = 16  # a lookup visits each one; more than a handful is a mistake
NAME_MAX: Final = 63  # a DNS label, because the name becomes part of file and object names
POOL_NAME_MAX: Final = (
    52  # objects made for a pool are called kvpool-NAME, and their pods' names have 6 characters more
)
NAME_PATTERN: Final = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
CAPACITY_MIN_BYTES: Final = 1 << 20  # "64" without a unit is 64 bytes: certainly not what was meant
BLOCK_MIN_BYTES: Final = 4096  # smaller ones would be more header and checksum than block
BLOCK_STEP_BYTES: Final = 64  # a slot is made of whole cache lines
DAX_STEP_BYTES: Final = 2 << 20  # a DAX device is mapped in huge pages
DAX_PREFIX: Final = "/dev/dax"
TOLERATIONS_MAX: Final = 16
LABELS_MAX: Final = 32
LABEL_KEY_MAX: Final = 317  # a DNS name, a slash and 63 more
RESOURCES_MAX: Final = 16
IMAGE_MAX: Final = 512
OBJECT_NAME_MAX: Final = 253  # what Kubernetes gives the name of an object
LABEL_KEY_PATTERN: Final = (
    r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$"
)
LABEL_VALUE_PATTERN: Final = r"^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$"
OBJECT_NAME_PATTERN: Final = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"
AMOUNT_PATTERN: Final = r"^[0-9]+([.][0-9]+)?(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?$"
AMOUNT_MAX: Final = 32
MEDIA: Final = ("GPU", "DRAM", "CXL", "SSD")  # in the order that tiers may have: fastest first

NAME: Final = "use at most 63 lower-case letters, digits and '-', with a letter or digit at both ends."
POOL_NAME: Final = NAME.replace(str(NAME_MAX), str(POOL_NAME_MAX))
QUANTITY: Final = "write a number with a unit, like 64Gi (binary) or 64G (decimal)."
QUANTITY_RANGE: Final = "a size is a whole number of bytes, at least 1 and less than 8192Pi."
TIERS_EMPTY: Final = "a pool needs at least one tier, like {name: dram, medium: DRAM, capacity: 64Gi}."
TIERS_TOO_MANY: Final = f"a pool has at most {TIERS_MAX} tiers."
TIERS_ORDER: Final = "tiers stand in the order GPU, DRAM, CXL, SSD (lookups try the first tier first)."
TIERS_UNIQUE_NAMES: Final = "each tier needs a name of its own."
TIERS_UNIQUE_PATHS: Final = "two tiers cannot use the same path."
CAPACITY_MIN: Final = "a tier needs a capacity of at least 1Mi; did you forget the unit (64Gi)?"
DAX_SIZE: Final = "the capacity of a tier on a DAX device must be a multiple of 2Mi."
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
HOSTS_FIXED: Final = (
    "hosts cannot change while a shared tier stays, because its region has a part for each host; "
    "delete the pool and apply it anew."
)
TIER_FIXED: Final = (
    "medium, source, shared, coherence, extentSize and minBlockSize of a tier cannot change; "
    "take the tier out, and add one with another name."
)
COHERENCE_MEDIUM: Final = "a GPU or SSD tier has no coherence to declare; leave it out."
HUGE_PAGES_MEDIUM: Final = (
    "hugePages is for DRAM tiers; leave it out (DAX devices map huge pages by themselves)."
)
WATERMARKS: Final = "eviction.lowWatermark must be below eviction.highWatermark."
WATERMARK_RANGE: Final = "a watermark is the percentage of a tier in use, 1 to 99."
EXTENT_SIZE: Final = "extentSize must not be more than the tier's capacity divided by hosts."
BLOCK_SIZE: Final = "minBlockSize must be a multiple of 64 bytes, at least 4Ki, and not more than extentSize."
LABELS_TOO_MANY: Final = f"a pool selects its nodes by at most {LABELS_MAX} labels."
LABEL_KEY: Final = "write a key as labels and taints have it, like example.com/role."
LABEL_VALUE: Final = "a label's value has at most 63 letters, digits, '-', '_' and '.'."
DEVICE_CLASS: Final = "write the name of a DeviceClass, like cxl-dax."
PRIORITY_CLASS: Final = "write the name of a PriorityClass, like system-node-critical."
TOLERATIONS_TOO_MANY: Final = f"a pool has at most {TOLERATIONS_MAX} tolerations."
TOLERATION_EXISTS: Final = "a toleration with operator: Exists takes no value; leave one of the two out."
TOLERATION_KEY: Final = "a toleration without a key fits every taint; write operator: Exists with it."
TOLERATION_SECONDS: Final = "tolerationSeconds needs effect: NoExecute."
IMAGE: Final = "write the name of an image without spaces, like localhost/kvpool:0.1.0."
AMOUNT: Final = "write an amount as pods do, like 500m, 2 or 1Gi."
RESOURCES_TOO_MANY: Final = f"a pod asks for at most {RESOURCES_MAX} resources."
REQUEST_LIMIT: Final = "a request must not be more than the limit of the same name."
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
