"""What a machine must have to carry the cluster."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

# program -> the Debian package that has it
PROGRAMS = {
    "buildah": "buildah",
    "conntrack": "conntrack",
    "debootstrap": "debootstrap",
    "ebtables": "ebtables",
    "ethtool": "ethtool",
    "gcc": "gcc",
    "ip": "iproute2",
    "iptables": "iptables",
    "nft": "nftables",
    "nsenter": "util-linux",
    "openssl": "openssl",
    "runc": "runc",
    "socat": "socat",
}
BRIDGE = Path("/usr/lib/cni/bridge")
HIERARCHIES = ("cpu", "cpuacct", "cpuset", "memory", "devices", "freezer", "blkio", "pids")
CANNOT = 77  # exit code of "this machine cannot do it", in contrast to "it failed"


def missing(built: bool) -> list[str]:
    """Sentences, empty when all is here. `built`: the cluster's programs are there, so Go is not needed."""
    found = []
    if os.geteuid() != 0:
        found.append("root: namespaces, mounts and cgroups are made (run as root, or in a VM of your own)")
    lacking = {package for name, package in PROGRAMS.items() if not _has(name)}
    if not BRIDGE.exists():
        lacking.add("containernetworking-plugins")
    if lacking:
        line = "apt-get install --no-install-recommends " + " ".join(sorted(lacking))
        found.append(f"programs: on Debian {line}")
    if not built and not _has("go"):
        found.append("Go 1.26 or newer with a module proxy: Kubernetes is built from its Go modules")
    absent = [name for name in HIERARCHIES if not Path("/sys/fs/cgroup", name).is_dir()]
    if absent:
        found.append(
            f"cgroup v1 hierarchies {', '.join(absent)} in /sys/fs/cgroup (a v1 or hybrid layout; v2 alone "
            "is not supported by these scripts)"
        )
    return found


def _has(program: str) -> bool:
    folders = (os.environ.get("PATH", ""), "/usr/sbin", "/sbin", "/usr/local/go/bin")
    return shutil.which(program, path=":".join(folders)) is not None
