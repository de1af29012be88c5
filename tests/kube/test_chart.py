"""The chart against a real API: what it renders is accepted, and grants what is needed, no more."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from kube.apiserver import ApiServer, missing_programs
from kube.charts import CHART, Helm, Object

CASES = sorted((CHART / "ci").glob("*-values.yaml"))
SYSTEM = "chart-system"
ELSEWHERE = {"monitoring.coreos.com/v1", "cert-manager.io/v1"}  # kinds that this API does not have


@pytest.fixture(scope="module")
def helm(apiserver: ApiServer) -> Helm:
    missing = missing_programs(["helm"])
    if missing:
        pytest.skip(missing)
    for name in (SYSTEM, "team-a", "team-b"):
        apiserver.kubectl("create", "namespace", name)
        apiserver.kubectl("label", "namespace", name, "pod-security.kubernetes.io/warn=restricted")
    return Helm(apiserver, SYSTEM)


@pytest.fixture(scope="module")
def installed(helm: Helm) -> Iterator[Helm]:
    helm.install()
    yield helm
    helm.uninstall()


@pytest.mark.parametrize("case", CASES, ids=lambda path: path.stem)
def test_template_is_accepted_by_the_api(helm: Helm, apiserver: ApiServer, case: Path) -> None:
    text = helm.template("-f", str(case))
    bodies = [body for body in yaml.safe_load_all(text) if body and body["apiVersion"] not in ELSEWHERE]
    assert bodies
    done = apiserver.kubectl(
        *("apply", "--server-side", "--force-conflicts", "--dry-run=server", "--validate=strict", "-f", "-"),
        stdin="\n---\n".join(json.dumps(body) for body in bodies),
    )
    # Of the security level, of old versions. The DRA driver has folders of its node, and only that is said.
    warned = [line for line in done.stderr.splitlines() if "Warning" in line]
    expected = sum(body["kind"] == "DaemonSet" for body in bodies)
    assert len(warned) == expected, done.stderr
    assert all("hostPath" in line and "privileged" not in line for line in warned), done.stderr


def test_install_upgrade_and_uninstall_keep_the_crds(helm: Helm, apiserver: ApiServer) -> None:
    helm.install()
    pool = {
        "apiVersion": "kvpool.dev/v1alpha1",
        "kind": "KVPool",
        "metadata": {"name": "kept", "namespace": SYSTEM},
        "spec": {"tiers": [{"name": "dram", "medium": "DRAM", "capacity": "1Gi"}]},
    }
    apiserver.kubectl("wait", "--for=condition=Established", "crd/kvpools.kvpool.dev", "--timeout=30s")
    apiserver.kubectl("apply", "-f", "-", stdin=json.dumps(pool))
    # What the operator writes into objects of the chart outlives an upgrade.
    secret, webhook = "kvpool-webhook", f"kvpool-{SYSTEM}"
    apiserver.kubectl("patch", "secret", secret, "-n", SYSTEM, "-p", '{"data":{"tls.key":"eA=="}}')
    apiserver.kubectl(
        "patch",
        "mutatingwebhookconfiguration",
        webhook,
        "--type=json",
        '-p=[{"op":"add","path":"/webhooks/0/clientConfig/caBundle","value":"Q0E="}]',
    )
    helm.install("--set", "operator.replicas=3", "--set", "webhook.timeoutSeconds=7")
    assert apiserver.get("deployment", "kvpool-operator", "-n", SYSTEM)["spec"]["replicas"] == 3
    assert apiserver.get("secret", secret, "-n", SYSTEM)["data"] == {"tls.key": "eA=="}
    client = apiserver.get("mutatingwebhookconfiguration", webhook)["webhooks"][0]
    assert (client["clientConfig"]["caBundle"], client["timeoutSeconds"]) == ("Q0E=", 7)
    helm.uninstall()
    assert apiserver.get("kvp", "kept", "-n", SYSTEM)["spec"]["tiers"][0]["capacity"] == "1Gi"
    left = apiserver.kubectl(
        "get", "clusterrole,clusterrolebinding,mutatingwebhookconfiguration", "-o", "name"
    ).stdout
    assert "kvpool" not in left
    helm.install()  # and the kept CRDs are taken up again
    helm.uninstall()


def test_helm_test_program_tells_who_answers(apiserver: ApiServer) -> None:
    # The API speaks TLS, as the webhook does.
    program = CHART / "files" / "test.py"
    address = apiserver.url.replace("127.0.0.1", "localhost")
    done = subprocess.run(
        [sys.executable, str(program), address], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, f"{address} answers\n")


# --- rights -------------------------------------------------------------------------------------------------

ALL = ("get", "list", "watch", "create", "patch", "delete")
OPERATOR = f"system:serviceaccount:{SYSTEM}:kvpool-operator"
API = f"system:serviceaccount:{SYSTEM}:kvpool-api"
MAY = [
    *((OPERATOR, verb, "kvpools.kvpool.dev", "any") for verb in ("get", "list", "watch", "patch")),
    (OPERATOR, "patch", "kvpools.kvpool.dev/status", "any"),
    *((OPERATOR, verb, "kvpoolnodes.kvpool.dev", "any") for verb in ALL),
    *((OPERATOR, verb, "daemonsets.apps", SYSTEM) for verb in ALL),
    *((OPERATOR, verb, "daemonsets.apps", "") for verb in ("list", "watch")),
    *((OPERATOR, verb, "configmaps", "any") for verb in ALL),
    *((OPERATOR, verb, "services", SYSTEM) for verb in ALL),
    *((OPERATOR, verb, "serviceaccounts", SYSTEM) for verb in ALL),
    *((OPERATOR, verb, "persistentvolumeclaims", "any") for verb in ALL),
    *((OPERATOR, verb, "persistentvolumes", "") for verb in ALL),
    *((OPERATOR, verb, "networkpolicies.networking.k8s.io", SYSTEM) for verb in ALL),
    *((OPERATOR, verb, "roles.rbac.authorization.k8s.io", "any") for verb in ALL),
    *((OPERATOR, verb, "rolebindings.rbac.authorization.k8s.io", "any") for verb in ALL),
    *((OPERATOR, verb, "nodes", "") for verb in ("get", "list", "watch")),
    (OPERATOR, "create", "events", "any"),
    (OPERATOR, "create", "leases.coordination.k8s.io", SYSTEM),
    (OPERATOR, "update", "leases.coordination.k8s.io/kvpool-operator", SYSTEM),
    (OPERATOR, "patch", "leases.coordination.k8s.io/kvpool-operator", SYSTEM),
    (OPERATOR, "get", "secrets/kvpool-webhook", SYSTEM),
    (OPERATOR, "patch", "secrets/kvpool-webhook", SYSTEM),
    (
        OPERATOR,
        "patch",
        f"mutatingwebhookconfigurations.admissionregistration.k8s.io/kvpool-{SYSTEM}",
        "",
    ),
    *((API, verb, "kvpools.kvpool.dev", "any") for verb in ("get", "list", "watch")),
    *((API, verb, "kvpoolnodes.kvpool.dev", "any") for verb in ("get", "list", "watch")),
    (API, "create", "tokenreviews.authentication.k8s.io", ""),
    (API, "create", "subjectaccessreviews.authorization.k8s.io", ""),
]
MAY_NOT = [
    (OPERATOR, "get", "secrets", "any"),
    (OPERATOR, "list", "secrets", SYSTEM),
    (OPERATOR, "get", "secrets/other", SYSTEM),
    (OPERATOR, "create", "pods", "any"),
    (OPERATOR, "create", "daemonsets.apps", "any"),
    (OPERATOR, "delete", "services", "any"),
    (OPERATOR, "create", "serviceaccounts", "any"),
    (OPERATOR, "create", "pods/exec", "any"),
    (OPERATOR, "delete", "kvpools.kvpool.dev", "any"),
    (OPERATOR, "patch", "nodes", ""),
    (OPERATOR, "update", "leases.coordination.k8s.io/other", SYSTEM),
    (OPERATOR, "create", "leases.coordination.k8s.io", "any"),
    (OPERATOR, "create", "clusterroles.rbac.authorization.k8s.io", ""),
    (OPERATOR, "patch", "mutatingwebhookconfigurations.admissionregistration.k8s.io/other", ""),
    (OPERATOR, "create", "mutatingwebhookconfigurations.admissionregistration.k8s.io", ""),
    (API, "patch", "kvpools.kvpool.dev", "any"),
    (API, "get", "secrets", SYSTEM),
    (API, "get", "configmaps", SYSTEM),
    (API, "list", "pods", "any"),
]


def may(api: ApiServer, user: str, verb: str, resource: str, namespace: str) -> bool:
    """Whether the API lets `user`; resource is PLURAL[.GROUP][/NAME], or /SUBRESOURCE for a known one."""
    kind, _, rest = resource.partition("/")
    plural, _, group = kind.partition(".")
    subresource = rest if rest in ("status", "exec") else ""
    attributes = {
        "verb": verb,
        "group": group,
        "resource": plural,
        "subresource": subresource,
        "name": "" if subresource else rest,
        "namespace": namespace,
    }
    body = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "spec": {"user": user, "groups": ["system:authenticated"], "resourceAttributes": attributes},
    }
    answer = api.create("/apis/authorization.k8s.io/v1/subjectaccessreviews", body)
    assert answer.ok, answer.message
    return bool(answer.body["status"]["allowed"])


@pytest.mark.usefixtures("installed")
def test_accounts_may_do_what_they_have_to(apiserver: ApiServer) -> None:
    assert [case for case in MAY if not may(apiserver, *case)] == []


@pytest.mark.usefixtures("installed")
def test_accounts_may_do_no_more(apiserver: ApiServer) -> None:
    assert [case for case in MAY_NOT if may(apiserver, *case)] == []


@pytest.mark.usefixtures("installed")
def test_operator_can_hand_on_the_rights_of_a_daemon_and_no_others(apiserver: ApiServer) -> None:
    def try_role(rules: list[Object]) -> subprocess.CompletedProcess[str]:
        role = {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "Role",
            "metadata": {"name": "kvpool-p", "namespace": "team-a"},
            "rules": rules,
        }
        return apiserver.kubectl(
            *("apply", "--server-side", "--dry-run=server", f"--as={OPERATOR}", "-f", "-"),
            stdin=json.dumps(role),
            check=False,
        )

    nodes = {"apiGroups": ["kvpool.dev"], "resources": ["kvpoolnodes"], "verbs": ["get", "list", "watch"]}
    status = {
        "apiGroups": ["kvpool.dev"],
        "resources": ["kvpoolnodes/status"],
        "verbs": ["get", "patch", "update"],
    }
    done = try_role([nodes, status])
    assert done.returncode == 0, done.stderr
    secrets = {"apiGroups": [""], "resources": ["secrets"], "verbs": ["get"]}
    assert "attempting to grant RBAC permissions not currently held" in try_role([nodes, secrets]).stderr


def test_namespaced_operator_may_nothing_elsewhere(helm: Helm, apiserver: ApiServer) -> None:
    helm.install("--set", "operator.namespaces={team-a,team-b}")
    try:
        for namespace, allowed in (("team-a", True), ("team-b", True), ("default", False), ("", False)):
            assert may(apiserver, OPERATOR, "list", "kvpools.kvpool.dev", namespace) is allowed
            assert may(apiserver, OPERATOR, "patch", "configmaps", namespace) is allowed
            assert may(apiserver, OPERATOR, "watch", "daemonsets.apps", namespace) is allowed
            assert not may(apiserver, OPERATOR, "patch", "daemonsets.apps", namespace)
            assert may(apiserver, API, "list", "kvpools.kvpool.dev", namespace) is allowed
        assert may(apiserver, OPERATOR, "list", "nodes", "")
        for resource in ("daemonsets.apps", "kvpools.kvpool.dev"):
            assert may(apiserver, OPERATOR, "patch", resource, SYSTEM)
    finally:
        helm.uninstall()
