"""The chart as helm renders it: what it makes, what it refuses, what it may do."""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
import yaml

if TYPE_CHECKING:
    from chart.conftest import Helm

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts" / "kvpool"
SNAPSHOTS = Path(__file__).with_name("snapshots")
Object = dict[str, Any]

# The values with which the chart is tried; ci/default-values.yaml is what a user gets who says nothing.
CASES = {
    path.name.removesuffix("-values.yaml"): yaml.safe_load(path.read_text())
    for path in sorted((CHART / "ci").glob("*-values.yaml"))
}
each_case = pytest.mark.parametrize("case", CASES)


def named(objects: list[Object], kind: str, name: str) -> Object:
    (found,) = (o for o in objects if o["kind"] == kind and o["metadata"]["name"] == name)
    return found


def kinds(objects: list[Object]) -> set[str]:
    return {body["kind"] for body in objects}


def pods(objects: list[Object]) -> Iterator[tuple[str, Object]]:
    """The name and the spec of every pod that the chart makes."""
    for body in objects:
        if body["kind"] == "Pod":
            yield body["metadata"]["name"], body["spec"]
        elif body["kind"] in ("Deployment", "Job"):
            yield body["metadata"]["name"], body["spec"]["template"]["spec"]


# --- what is rendered ---------------------------------------------------------------------------------------


@each_case
def test_lint_has_nothing_to_say(helm: Helm, case: str) -> None:
    assert helm.lint(CASES[case]) == []


def texts_of(helm: Helm, case: str) -> dict[str, str]:
    """What each template renders to, without empty lines; the CRDs by name only."""
    found = {}
    for path, text in sorted(helm.files(CASES[case]).items()):
        if path.endswith("crds.yaml"):
            text = "\n".join(f"# {name}" for name in re.findall(r"^  name: (.*)$", text, re.MULTILINE))
        found[path] = "\n".join(line.rstrip() for line in text.splitlines() if line.strip())
    return found


def snapshot(helm: Helm, case: str) -> str:
    """What is rendered; of all cases but the default, how it differs from the default."""
    default, now = texts_of(helm, "default"), texts_of(helm, case)
    if case == "default":
        return "".join(f"--- # {path}\n{text}\n" for path, text in default.items() if text)
    lines = []
    for path, text in now.items():
        if not text and default[path]:
            lines.append(f"--- # {path}: nothing")
        elif text != default[path]:
            lines.append(f"--- # {path}")
            difference = difflib.unified_diff(default[path].splitlines(), text.splitlines(), n=1, lineterm="")
            lines += list(difference)[2:]
    return "".join(f"{line}\n" for line in lines)


@each_case
def test_render_is_as_recorded(helm: Helm, case: str) -> None:
    path = SNAPSHOTS / f"{case}.{'yaml' if case == 'default' else 'diff'}"
    now = snapshot(helm, case)
    if os.environ.get("KVPOOL_UPDATE_SNAPSHOTS"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(now)
    recorded = path.read_text() if path.exists() else ""
    assert now == recorded, (
        "look at the difference; if it is meant: KVPOOL_UPDATE_SNAPSHOTS=1 make check-chart"
    )


def test_render_crds_are_the_source_with_keep(helm: Helm) -> None:
    for keep in (True, False):
        found = [o for o in helm.objects({"crds": {"keep": keep}}) if o["kind"] == "CustomResourceDefinition"]
        assert len(found) == 2
        for body in found:
            source = yaml.safe_load((ROOT / "crds" / f"{body['spec']['names']['plural']}.yaml").read_text())
            assert body["spec"] == source["spec"]
            annotations = body["metadata"].get("annotations") or {}
            assert annotations == ({"helm.sh/resource-policy": "keep"} if keep else {})


def test_render_without_crds_has_none(helm: Helm) -> None:
    assert "CustomResourceDefinition" not in kinds(helm.objects({"crds": {"enabled": False}}))


def test_render_minimal_has_only_the_operator(helm: Helm) -> None:
    assert kinds(helm.objects(CASES["minimal"])) == {"Deployment", "Service", "Pod"}


def test_render_monitoring_is_off_by_default(helm: Helm) -> None:
    assert not kinds(helm.objects()) & {"ServiceMonitor", "PodMonitor", "PrometheusRule"}
    found = kinds(helm.objects(CASES["monitoring"]))
    assert found >= {"ServiceMonitor", "PodMonitor", "PrometheusRule"}
    both = helm.objects({"monitoring": {"podMonitor": {"enabled": True}}, **CASES["dra"]})
    watched = [body["spec"]["selector"]["matchLabels"] for body in both if body["kind"] == "PodMonitor"]
    assert [labels["app.kubernetes.io/component"] for labels in watched] == ["daemon", "dra"]


def test_render_two_releases_of_one_name_share_no_cluster_object(helm: Helm) -> None:
    def cluster_objects(namespace: str) -> set[tuple[str, str]]:
        return {
            (body["kind"], body["metadata"]["name"])
            for body in helm.objects({"crds": {"enabled": False}}, namespace=namespace)
            if "namespace" not in body["metadata"]
        }

    assert cluster_objects("one")
    assert not cluster_objects("one") & cluster_objects("two")


def test_render_long_release_name_makes_names_that_fit(helm: Helm) -> None:
    for body in helm.objects(name="r" * 53, namespace="n" * 63):
        limit = 63 if body["kind"] in ("Service", "Pod", "Job") else 253
        assert len(body["metadata"]["name"]) <= limit, body["metadata"]["name"]


def test_notes_say_what_a_release_can_do(helm: Helm) -> None:
    notes = helm.files()["kvpool/templates/NOTES.txt"]
    assert "kvpool.dev/pool: prefix-pool" in notes
    assert "serves the KVPools of every namespace" in notes
    assert "helm test -n sys kvpool" in notes
    notes = helm.files({"webhook": {"enabled": False}, "crds": {"keep": False}})["kvpool/templates/NOTES.txt"]
    assert "the webhook is off" in notes
    assert "deletes every KVPool" in notes


# --- every object -------------------------------------------------------------------------------------------

LABELS = (
    "helm.sh/chart",
    "app.kubernetes.io/name",
    "app.kubernetes.io/instance",
    "app.kubernetes.io/component",
    "app.kubernetes.io/version",
    "app.kubernetes.io/managed-by",
)


@each_case
def test_every_object_has_labels_and_the_release_namespace(helm: Helm, case: str) -> None:
    extra = CASES[case].get("commonLabels", {})
    allowed = {"sys", *CASES[case].get("operator", {}).get("namespaces", [])}
    for body in helm.objects(CASES[case]):
        labels = body["metadata"]["labels"]
        assert all(label in labels for label in LABELS), body["metadata"]["name"]
        assert extra.items() <= labels.items()
        assert body["metadata"].get("namespace", "sys") in allowed


@each_case
def test_every_pod_passes_the_restricted_level(helm: Helm, case: str) -> None:
    found = list(pods(helm.objects(CASES[case])))
    assert found
    for name, spec in found:
        assert spec["securityContext"]["runAsNonRoot"], name
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert not any(spec.get(field) for field in ("hostNetwork", "hostPID", "hostIPC")), name
        assert not any("hostPath" in volume for volume in spec.get("volumes", [])), name
        for container in spec["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }, name
            assert container["resources"]["limits"]["memory"], name
            assert container["resources"]["requests"]["cpu"], name


@each_case
def test_every_long_lived_pod_has_probes(helm: Helm, case: str) -> None:
    for body in helm.objects(CASES[case]):
        if body["kind"] == "Deployment":
            (container,) = body["spec"]["template"]["spec"]["containers"]
            for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                assert container[probe]["httpGet"]["port"] in {port["name"] for port in container["ports"]}


@each_case
def test_every_selector_finds_a_pod_of_the_chart(helm: Helm, case: str) -> None:
    objects = helm.objects(CASES[case])
    pod_labels = [
        body["spec"]["template"]["metadata"]["labels"] for body in objects if body["kind"] == "Deployment"
    ]
    services = [body for body in objects if body["kind"] == "Service"]
    for body in services:
        fits = [labels for labels in pod_labels if body["spec"]["selector"].items() <= labels.items()]
        assert len(fits) == 1, body["metadata"]["name"]
    for body in objects:
        if body["kind"] == "ServiceMonitor":
            wanted = body["spec"]["selector"]["matchLabels"].items()
            (service,) = (s for s in services if wanted <= s["metadata"]["labels"].items())
            ports = {port["name"] for port in service["spec"]["ports"]}
            assert body["spec"]["endpoints"][0]["port"] in ports


@each_case
def test_every_image_is_the_one_of_the_values(helm: Helm, case: str) -> None:
    image = CASES[case].get("image", {})
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    tail = f"@{image['digest']}" if image.get("digest") else f":{version}"
    wanted = image.get("repository", "localhost/kvpool") + tail
    for name, spec in pods(helm.objects(CASES[case])):
        assert [container["image"] for container in spec["containers"]] == [wanted], name
        secrets = [{"name": secret} for secret in image.get("pullSecrets", [])]
        assert spec.get("imagePullSecrets", []) == secrets, name


@each_case
def test_every_argument_is_one_that_the_program_knows(helm: Helm, case: str) -> None:
    programs = {"kvpool_operator": "__main__.py", "kvpool_operator.api": "api.py"}
    for name, spec in pods(helm.objects(CASES[case])):
        (container,) = spec["containers"]
        if container["command"][1] != "-m":
            continue
        source = ROOT / "operator" / "kvpool_operator" / programs[container["command"][2]]
        if source.exists():
            known = set(re.findall(r'"(--[a-z-]+)"', source.read_text()))
            given = {argument.partition("=")[0] for argument in container["args"]}
            assert given <= known, name


# --- rights -------------------------------------------------------------------------------------------------


@each_case
def test_rights_have_no_wildcards_and_reach_no_secret_but_the_own(helm: Helm, case: str) -> None:
    for body in helm.objects(CASES[case]):
        for rule in body.get("rules", []) if body["kind"] in ("Role", "ClusterRole") else []:
            values = [*rule["apiGroups"], *rule["resources"], *rule["verbs"]]
            assert "*" not in values, body["metadata"]["name"]
            assert not {"escalate", "bind", "impersonate"} & set(rule["verbs"])
            assert not {"pods/exec", "clusterroles", "clusterrolebindings"} & set(rule["resources"])
            if "secrets" in rule["resources"]:
                assert rule["resourceNames"] == ["kvpool-webhook"]


def test_rights_namespaced_operator_has_only_cluster_objects_cluster_wide(helm: Helm) -> None:
    objects = helm.objects(CASES["namespaced"])
    role = named(objects, "ClusterRole", "kvpool-sys-operator")
    assert {resource for rule in role["rules"] for resource in rule["resources"]} == {
        "nodes",
        "persistentvolumes",
        "mutatingwebhookconfigurations",
    }
    bound = {
        body["metadata"]["namespace"]
        for body in objects
        if body["kind"] == "RoleBinding" and body["metadata"]["name"] == "kvpool-operator-pools"
    }
    assert bound == {"team-a", "team-b"}
    (container,) = named(objects, "Deployment", "kvpool-operator")["spec"]["template"]["spec"]["containers"]
    assert [a for a in container["args"] if a.startswith("--namespace")] == [
        "--namespace=team-a",
        "--namespace=team-b",
    ]
    webhook = named(objects, "MutatingWebhookConfiguration", "kvpool-sys")["webhooks"][0]
    assert webhook["namespaceSelector"]["matchExpressions"][0]["values"] == ["team-a", "team-b"]


def test_rights_of_the_operator_cover_what_it_hands_on(helm: Helm) -> None:
    # The API refuses a Role with rights that its maker does not have.
    role = named(helm.objects(), "ClusterRole", "kvpool-sys-operator")
    held = {(r, verb) for rule in role["rules"] for r in rule["resources"] for verb in rule["verbs"]}
    daemon = {("kvpoolnodes", verb) for verb in ("get", "list", "watch")}
    daemon |= {("kvpoolnodes/status", verb) for verb in ("get", "patch", "update")}
    assert daemon <= held


def test_rights_api_only_reads(helm: Helm) -> None:
    role = named(helm.objects(), "ClusterRole", "kvpool-sys-api")
    for rule in role["rules"]:
        reads = rule["verbs"] == ["get", "list", "watch"] and rule["apiGroups"] == ["kvpool.dev"]
        asks = rule["verbs"] == ["create"] and rule["resources"][0] in (
            "tokenreviews",
            "subjectaccessreviews",
        )
        assert reads or asks


# --- the webhook --------------------------------------------------------------------------------------------


def test_webhook_sees_only_pods_with_the_label_and_no_daemon(helm: Helm) -> None:
    webhook = named(helm.objects(), "MutatingWebhookConfiguration", "kvpool-sys")["webhooks"][0]
    assert webhook["failurePolicy"] == "Ignore"
    assert webhook["objectSelector"]["matchExpressions"] == [
        {"key": "kvpool.dev/pool", "operator": "Exists"},
        {"key": "app.kubernetes.io/managed-by", "operator": "NotIn", "values": ["kvpool-operator"]},
    ]
    assert webhook["rules"][0]["operations"] == ["CREATE"]


def test_webhook_certificate_of_cert_manager_is_mounted_and_no_right_to_its_secret_given(helm: Helm) -> None:
    objects = helm.objects(CASES["cert-manager"])
    certificate = named(objects, "Certificate", "kvpool-webhook")
    assert certificate["spec"]["dnsNames"][0] == "kvpool-webhook.sys.svc"
    assert certificate["spec"]["issuerRef"] == {"kind": "ClusterIssuer", "name": "internal"}
    (container,) = named(objects, "Deployment", "kvpool-operator")["spec"]["template"]["spec"]["containers"]
    assert "--webhook-cert-dir=/certificate" in container["args"]
    assert {"name": "certificate", "mountPath": "/certificate", "readOnly": True} in container["volumeMounts"]
    granted = {
        resource
        for body in objects
        if body["kind"] in ("Role", "ClusterRole")
        for rule in body["rules"]
        for resource in rule["resources"]
    }
    assert not granted & {"secrets", "mutatingwebhookconfigurations"}
    without = {"webhook": {"certManager": {"enabled": True}}}
    assert named(helm.objects(without), "Issuer", "kvpool-webhook")["spec"] == {"selfSigned": {}}


# --- the DRA driver -----------------------------------------------------------------------------------------


def driver_pod(helm: Helm, values: Object) -> Object:
    (found,) = (body for body in helm.objects(values) if body["kind"] == "DaemonSet")
    pod: Object = found["spec"]["template"]["spec"]
    return pod


def test_driver_is_off_by_default_and_has_no_rights_then(helm: Helm) -> None:
    objects = helm.objects()
    assert not kinds(objects) & {"DaemonSet", "DeviceClass", "ValidatingAdmissionPolicy"}
    assert "resource.k8s.io" not in json.dumps(objects)


def test_driver_has_only_the_folders_and_powers_that_it_needs(helm: Helm) -> None:
    pod = driver_pod(helm, CASES["dra"])
    (container,) = pod["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not any(pod.get(field) for field in ("hostNetwork", "hostPID", "hostIPC"))
    assert {v["hostPath"]["path"] for v in pod["volumes"] if "hostPath" in v} == {
        "/var/lib/kubelet/plugins/dra.kvpool.dev",
        "/var/lib/kubelet/plugins_registry",
        "/var/run/cdi",
        "/dev/shm/kvpool",
        "/mnt/cxl",
    }
    assert {m["mountPath"] for m in container["volumeMounts"] if m.get("readOnly")} == {"/dev/shm/kvpool"}
    source = (ROOT / "operator" / "kvpool_operator" / "dra" / "__main__.py").read_text()
    known = set(re.findall(r'"(--[a-z-]+)"', source))
    assert {argument.partition("=")[0] for argument in container["args"]} <= known
    assert container["resources"]["limits"]["memory"]
    assert pod["nodeSelector"]["kvpool.dev/cxl"] == "yes"


def test_driver_is_privileged_only_for_the_machines_own_memory(helm: Helm) -> None:
    pod = driver_pod(helm, {"dra": {"enabled": True, "backend": "sysfs"}})
    assert pod["containers"][0]["securityContext"]["privileged"]
    paths = {v["hostPath"]["path"] for v in pod["volumes"] if "hostPath" in v}
    assert {"/dev", "/sys", "/run/kvpool"} <= paths


def test_driver_rights_reach_claims_only_where_pools_are_served(helm: Helm) -> None:
    values = {**CASES["namespaced"], "dra": CASES["dra"]["dra"]}
    objects = helm.objects(values)
    role = named(objects, "ClusterRole", "kvpool-sys-dra")
    assert {r for rule in role["rules"] for r in rule["resources"]} == {
        "nodes",
        "deviceclasses",
        "resourceslices",
    }
    bound = {
        body["metadata"]["namespace"]
        for body in objects
        if body["kind"] == "RoleBinding" and body["metadata"]["name"].startswith("kvpool-dra")
    }
    assert bound == {"sys", "team-a", "team-b"}


# --- values -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"operators": {}}, "additional properties 'operators' not allowed"),
        ({"operator": {"replica": 3}}, "at '/operator': additional properties 'replica' not allowed"),
        ({"operator": {"replicas": 0}}, "at '/operator/replicas'"),
        ({"operator": {"replicas": "2"}}, "at '/operator/replicas': got string, want integer"),
        ({"operator": {"namespaces": "team-a"}}, "at '/operator/namespaces': got string, want array"),
        ({"operator": {"namespaces": ["a", "a"]}}, "at '/operator/namespaces'"),
        (
            {"operator": {"resources": {"limits": {"memory": "1GB"}}}},
            "at '/operator/resources/limits/memory'",
        ),
        ({"image": {"digest": "abc"}}, "at '/image/digest'"),
        ({"image": {"repository": ""}}, "at '/image/repository'"),
        ({"image": {"pullPolicy": "Sometimes"}}, "'Always', 'IfNotPresent', 'Never'"),
        ({"webhook": {"failurePolicy": "Maybe"}}, "value must be one of 'Ignore', 'Fail'"),
        ({"crds": {"keep": "yes"}}, "at '/crds/keep': got string, want boolean"),
        ({"daemon": {"image": "x"}}, "at '/daemon': additional properties 'image' not allowed"),
        ({"webhook": {"port": 8080}}, "webhook.port 8080 is taken by the operator's own health and metrics"),
        (
            {"webhook": {"certManager": {"issuerRef": {"name": "i"}}}},
            "set it to true, or leave issuerRef out",
        ),
        ({"dra": {"enabled": True}}, "write into dra.backend where CXL memory comes from"),
        ({"dra": {"backend": "file:/a/../b"}}, "at '/dra/backend'"),
        ({"dra": {"backend": "file:cxl"}}, "at '/dra/backend'"),
        (
            {"dra": {"enabled": True, "backend": "sysfs", "serviceAccount": {"create": False}}},
            "into dra.serviceAccount.name",
        ),
        ({"operator": {"serviceAccount": {"create": False}}}, "into operator.serviceAccount.name"),
        ({"api": {"serviceAccount": {"create": False}}}, "into api.serviceAccount.name"),
        ({"image": {"tag": "1", "digest": f"sha256:{'0' * 64}"}}, "leave image.tag out"),
    ],
)
def test_values_wrong_are_refused_with_their_place(helm: Helm, values: Object, said: str) -> None:
    with pytest.raises(Exception, match=re.escape(said)):
        helm.files(values)


def test_values_schema_is_closed_but_for_what_is_handed_on(helm: Helm) -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    handed_on = {
        "properties.global",
        "definitions.resources.properties.claims.items",
        "definitions.environment.items",
        "definitions.tolerations.items",
        "properties.operator.properties.affinity",
        "properties.api.properties.affinity",
        "properties.dra.properties.affinity",
        "properties.webhook.properties.namespaceSelector.properties.matchExpressions.items",
    }
    open_ones = set()

    def visit(node: Any, path: str) -> None:
        if isinstance(node, dict):
            if node.get("type") == "object" and "additionalProperties" not in node:
                open_ones.add(path)
            for key, value in node.items():
                visit(value, f"{path}.{key}".lstrip("."))

    visit(schema, "")
    assert open_ones == handed_on


def test_values_each_has_a_row_and_each_row_a_value(generate: ModuleType) -> None:
    text = (CHART / "values.yaml").read_text()
    rows = {".".join(path) for path, _ in generate.commented(text)}
    leaves = set()

    def visit(value: Any, path: str) -> None:
        if isinstance(value, dict) and value and path not in rows:
            for key, inner in value.items():
                visit(inner, f"{path}.{key}".lstrip("."))
        else:
            leaves.add(path)

    visit(yaml.safe_load(text), "")
    assert leaves == rows


# --- what is inside of files --------------------------------------------------------------------------------


def test_dashboard_asks_only_for_metrics_of_kvpool(helm: Helm) -> None:
    config = named(helm.objects(CASES["monitoring"]), "ConfigMap", "kvpool-dashboard")
    dashboard = json.loads(config["data"]["kvpool.json"])
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert len(asked) > 8
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    assert all(panel["description"] for panel in dashboard["panels"])
    for expression in asked:
        assert _metrics_in(expression) <= metrics_that_there_are(), expression


def test_alerts_ask_only_for_metrics_of_kvpool_and_say_what_to_do(helm: Helm) -> None:
    rule = named(helm.objects(CASES["monitoring"]), "PrometheusRule", "kvpool")
    (group,) = rule["spec"]["groups"]
    assert len(group["rules"]) >= 5
    for alert in group["rules"]:
        assert _metrics_in(alert["expr"]) <= metrics_that_there_are(), alert["alert"]
        assert alert["labels"]["severity"] in ("info", "warning", "critical")
        assert alert["annotations"]["summary"].endswith(".")
        assert alert["annotations"]["description"].endswith(".")


def _metrics_in(expression: str) -> set[str]:
    return set(re.findall(r"\bkvpool_[a-z0-9_]+", expression))


def metrics_that_there_are() -> set[str]:
    """Every metric of the operator, the daemons and the API, from the code; counters end in _total."""
    sources = [ROOT / "operator" / "kvpool_operator" / name for name in ("metrics.py", "nodes/metrics.py")]
    sources.append(ROOT / "pool" / "kvpool" / "api" / "metrics.py")
    if not all(path.exists() for path in sources):
        pytest.skip("no metrics of the operator and the daemons yet")
    found: set[str] = set()
    for text in (path.read_text() for path in sources):
        found |= set(re.findall(r'"(kvpool_[a-z0-9_]+)"', text))
        for prefix in re.findall(r'f"(kvpool_[a-z0-9_]+)\{name\}"', text):  # a table of names
            found |= {prefix + name for name in re.findall(r'^\s*\(?"([a-z_]+)",', text, re.MULTILINE)}
    return found | {f"{name}_total" for name in found}
