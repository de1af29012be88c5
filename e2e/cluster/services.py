"""What runs in a machine: command lines and configuration files, as pure functions."""

from __future__ import annotations

import json
import resource
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from .places import CONTROL_PLANE_IP, DNS_IP, SERVICE_RANGE, Places

PKI = "/run/machine/pki"
PAUSE_IMAGE = "localhost/pause:1"


@dataclass(frozen=True)
class Service:
    """A program and its configuration files, by their paths in the machine."""

    command: tuple[str, ...]
    files: Mapping[str, str] = field(default_factory=dict)


def of_machine(places: Places, machine: str, gates: str = "") -> dict[str, Service]:
    """The services of a machine, in the order in which they are started."""
    gate = (f"--feature-gates={gates}",) if gates else ()
    if machine == "cp":
        return {
            "etcd": _etcd(),
            "apiserver": _apiserver(gate),
            "controller-manager": _controller_manager(gate),
            "scheduler": _scheduler(gate),
            "coredns": _coredns(),
        }
    return {
        "containerd": _containerd(places, machine),
        "kubelet": _kubelet(places, machine, gate),
        "proxy": _proxy(machine),
    }


def _etcd() -> Service:
    client, peer = "http://127.0.0.1:2379", "http://127.0.0.1:2380"
    return Service(
        (
            "etcd",
            "--data-dir=/var/lib/etcd",
            "--unsafe-no-fsync",
            "--log-level=warn",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
        )
    )


def _apiserver(gate: tuple[str, ...]) -> Service:
    return Service(
        (
            "kube-apiserver",
            "--etcd-servers=http://127.0.0.1:2379",
            f"--advertise-address={CONTROL_PLANE_IP}",
            "--secure-port=6443",
            f"--service-cluster-ip-range={SERVICE_RANGE}",
            f"--client-ca-file={PKI}/ca.crt",
            f"--tls-cert-file={PKI}/apiserver.crt",
            f"--tls-private-key-file={PKI}/apiserver.key",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction",
            "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
            f"--service-account-key-file={PKI}/sa.pub",
            f"--service-account-signing-key-file={PKI}/sa.key",
            f"--kubelet-client-certificate={PKI}/admin.crt",
            f"--kubelet-client-key={PKI}/admin.key",
            f"--kubelet-certificate-authority={PKI}/ca.crt",
            "--kubelet-preferred-address-types=InternalIP",
            "--allow-privileged=true",
            # Webhooks are called at the addresses of pods, which need no kube-proxy here.
            "--enable-aggregator-routing=true",
            # Pods leave a node that is gone after 20 s instead of 300 s.
            "--default-not-ready-toleration-seconds=20",
            "--default-unreachable-toleration-seconds=20",
            *gate,
        )
    )


def _controller_manager(gate: tuple[str, ...]) -> Service:
    return Service(
        (
            "kube-controller-manager",
            f"--kubeconfig={PKI}/controller-manager.kubeconfig",
            f"--service-account-private-key-file={PKI}/sa.key",
            f"--root-ca-file={PKI}/ca.crt",
            f"--cluster-signing-cert-file={PKI}/ca.crt",
            f"--cluster-signing-key-file={PKI}/ca.key",
            "--use-service-account-credentials",
            "--leader-elect=false",
            "--flex-volume-plugin-dir=/var/lib/flexvolume",
            # A node that is gone is NotReady after 16 s instead of 50 s.
            "--node-monitor-period=2s",
            "--node-monitor-grace-period=16s",
            *gate,
        )
    )


def _scheduler(gate: tuple[str, ...]) -> Service:
    return Service(
        ("kube-scheduler", f"--kubeconfig={PKI}/scheduler.kubeconfig", "--leader-elect=false", *gate)
    )


def _coredns() -> Service:
    path = "/run/machine/Corefile"
    text = f"""\
.:53 {{
  bind {CONTROL_PLANE_IP}
  errors
  kubernetes cluster.local in-addr.arpa ip6.arpa {{
    kubeconfig {PKI}/coredns.kubeconfig
    ttl 5
  }}
  template ANY ANY {{
    rcode NXDOMAIN
  }}
}}
"""
    return Service(("coredns", "-conf", path), {path: text})


def _containerd(places: Places, machine: str) -> Service:
    path = "/run/machine/containerd.toml"
    # restrict_oom_score_adj: without CAP_SYS_RESOURCE a container may not lower it, and would not start.
    # runc: crun refuses hybrid cgroups.
    text = f"""\
version = 3
[plugins.'io.containerd.cri.v1.images'.pinned_images]
  sandbox = "{PAUSE_IMAGE}"
[plugins.'io.containerd.cri.v1.runtime']
  restrict_oom_score_adj = true
  enable_cdi = true
  cdi_spec_dirs = ["/etc/cdi", "/var/run/cdi"]
  [plugins.'io.containerd.cri.v1.runtime'.cni]
    bin_dirs = ["/usr/lib/cni"]
    conf_dir = "/etc/cni/net.d"
  [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
      BinaryName = "runc"
      SystemdCgroup = false
"""
    bridge = {
        "type": "bridge",
        "bridge": "cni0",
        "isGateway": True,
        "hairpinMode": True,
        "ipam": {
            "type": "host-local",
            "ranges": [[{"subnet": places.pods(machine)}]],
            "routes": [{"dst": "0.0.0.0/0"}],
        },
    }
    ports = {"type": "portmap", "capabilities": {"portMappings": True}}
    network = {"cniVersion": "1.0.0", "name": "pods", "plugins": [bridge, ports]}
    return Service(
        ("containerd", "--config", path),
        {path: text, "/etc/cni/net.d/10-pods.conflist": json.dumps(network)},
    )


def _kubelet(places: Places, machine: str, gate: tuple[str, ...]) -> Service:
    path = "/run/machine/kubelet.yaml"
    lines = Path("/proc/meminfo").read_text().splitlines()
    total_kib = next(int(line.split()[1]) for line in lines if line.startswith("MemTotal"))
    configuration = {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
        "cgroupDriver": "cgroupfs",
        "failCgroupV1": False,
        "failSwapOn": False,
        "oomScoreAdj": 0,  # lower needs CAP_SYS_RESOURCE
        "maxOpenFiles": resource.getrlimit(resource.RLIMIT_NOFILE)[1],  # more needs it too
        "volumePluginDir": "/var/lib/kubelet/volume-plugins",
        "resolvConf": "/etc/resolv.conf",
        "clusterDNS": [DNS_IP],
        "clusterDomain": "cluster.local",
        "tlsCertFile": f"{PKI}/{machine}.crt",
        "tlsPrivateKeyFile": f"{PKI}/{machine}.key",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": f"{PKI}/ca.crt"},
        },
        "authorization": {"mode": "Webhook"},
        # Every node sees the whole machine's memory: each offers one part, and one part stays free.
        "systemReserved": {"memory": f"{total_kib * places.nodes // (places.nodes + 1)}Ki"},
        "evictionHard": {
            "memory.available": "100Mi",
            "nodefs.available": "1%",
            "imagefs.available": "1%",
            "nodefs.inodesFree": "1%",
        },
        # Images were loaded by hand and could not be pulled again.
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
        "nodeStatusUpdateFrequency": "4s",
        "nodeLeaseDurationSeconds": 12,
    }
    command = (
        "kubelet",
        f"--config={path}",
        f"--kubeconfig={PKI}/{machine}.kubeconfig",
        f"--hostname-override={machine}",
        f"--node-ip={places.address(machine)}",
        f"--node-labels=topology.kubernetes.io/zone=z{machine[1:]}",
    )
    return Service((*command, *gate), {path: json.dumps(configuration)})


def _proxy(machine: str) -> Service:
    path = "/run/machine/proxy.yaml"
    configuration = {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "nftables",
        "clientConnection": {"kubeconfig": f"{PKI}/proxy.kubeconfig"},
        "hostnameOverride": machine,
        "clusterCIDR": "10.244.0.0/16",
        "oomScoreAdj": 0,
        "conntrack": {"maxPerCore": 0},  # that limit is the whole machine's
    }
    return Service(("kube-proxy", f"--config={path}"), {path: json.dumps(configuration)})


CLUSTER_DNS = f"""\
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {{name: "system:coredns"}}
rules:
- {{apiGroups: [""], resources: [endpoints, services, pods, namespaces], verbs: [list, watch]}}
- {{apiGroups: [discovery.k8s.io], resources: [endpointslices], verbs: [list, watch]}}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {{name: "system:coredns"}}
roleRef: {{apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: "system:coredns"}}
subjects: [{{apiGroup: rbac.authorization.k8s.io, kind: User, name: "system:coredns"}}]
---
apiVersion: v1
kind: Service
metadata: {{name: kube-dns, namespace: kube-system, labels: {{k8s-app: kube-dns}}}}
spec:
  clusterIP: {DNS_IP}
  ports: [{{name: dns, port: 53, protocol: UDP}}, {{name: dns-tcp, port: 53, protocol: TCP}}]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {{name: kube-dns, namespace: kube-system, labels: {{kubernetes.io/service-name: kube-dns}}}}
addressType: IPv4
endpoints: [{{addresses: ["{CONTROL_PLANE_IP}"], conditions: {{ready: true}}}}]
ports: [{{name: dns, port: 53, protocol: UDP}}, {{name: dns-tcp, port: 53, protocol: TCP}}]
"""
