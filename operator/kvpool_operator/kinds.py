"""The kinds of objects that the operator reads and writes, each with its place in the API."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvpool_operator.names import API_VERSION


@dataclass(frozen=True, slots=True)
class Kind:
    api_version: str
    name: str
    plural: str
    namespaced: bool = True

    def path(self, namespace: str | None, name: str = "", subresource: str = "") -> str:
        """The URL path of an object, or without a name of the list."""
        root = f"/apis/{self.api_version}" if "/" in self.api_version else f"/api/{self.api_version}"
        within = f"/namespaces/{namespace}" if self.namespaced and namespace else ""
        parts = "".join(f"/{part}" for part in (name, subresource) if part)
        return f"{root}{within}/{self.plural}{parts}"

    @property
    def group(self) -> str:
        return self.api_version.rpartition("/")[0]

    @property
    def version(self) -> str:
        return self.api_version.rpartition("/")[2]


POOL = Kind(API_VERSION, "KVPool", "kvpools")
POOL_NODE = Kind(API_VERSION, "KVPoolNode", "kvpoolnodes")
NODE = Kind("v1", "Node", "nodes", namespaced=False)
POD = Kind("v1", "Pod", "pods")
EVENT = Kind("v1", "Event", "events")
CONFIG_MAP = Kind("v1", "ConfigMap", "configmaps")
SERVICE = Kind("v1", "Service", "services")
SECRET = Kind("v1", "Secret", "secrets")
SERVICE_ACCOUNT = Kind("v1", "ServiceAccount", "serviceaccounts")
VOLUME = Kind("v1", "PersistentVolume", "persistentvolumes", namespaced=False)
CLAIM = Kind("v1", "PersistentVolumeClaim", "persistentvolumeclaims")
ROLE = Kind("rbac.authorization.k8s.io/v1", "Role", "roles")
ROLE_BINDING = Kind("rbac.authorization.k8s.io/v1", "RoleBinding", "rolebindings")
NETWORK_POLICY = Kind("networking.k8s.io/v1", "NetworkPolicy", "networkpolicies")
DAEMON_SET = Kind("apps/v1", "DaemonSet", "daemonsets")
LEASE = Kind("coordination.k8s.io/v1", "Lease", "leases")
RESOURCE_CLAIM = Kind("resource.k8s.io/v1", "ResourceClaim", "resourceclaims")
RESOURCE_CLAIM_TEMPLATE = Kind("resource.k8s.io/v1", "ResourceClaimTemplate", "resourceclaimtemplates")
DEVICE_CLASS = Kind("resource.k8s.io/v1", "DeviceClass", "deviceclasses", namespaced=False)
RESOURCE_SLICE = Kind("resource.k8s.io/v1", "ResourceSlice", "resourceslices", namespaced=False)
WEBHOOK = Kind(
    "admissionregistration.k8s.io/v1",
    "MutatingWebhookConfiguration",
    "mutatingwebhookconfigurations",
    namespaced=False,
)

# What is made for a pool, in the order in which it is applied: what others need comes first.
CHILDREN = (
    SERVICE_ACCOUNT,
    ROLE,
    ROLE_BINDING,
    CONFIG_MAP,
    SERVICE,
    NETWORK_POLICY,
    VOLUME,
    CLAIM,
    POOL_NODE,
    RESOURCE_CLAIM_TEMPLATE,
    RESOURCE_SLICE,
    RESOURCE_CLAIM,
    DAEMON_SET,
)
# Of these the ones that exist only where the DRA driver is installed.
OF_DRIVER = (RESOURCE_CLAIM_TEMPLATE, RESOURCE_SLICE, RESOURCE_CLAIM)
# Objects whose spec never changes: they stay as they were made.
FIXED = (RESOURCE_CLAIM, RESOURCE_CLAIM_TEMPLATE)
BY_NAME = {kind.name: kind for kind in (*CHILDREN, POOL, NODE, POD, EVENT, SECRET, LEASE, WEBHOOK)}


def kind_of(body: Mapping[str, object]) -> Kind:
    """The kind of an object. Raises: KeyError for one that the operator has nothing to do with."""
    return BY_NAME[str(body["kind"])]
