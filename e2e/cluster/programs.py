"""The cluster's programs, built from Go modules."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from .places import HERE, ClusterError, Places, say

KUBERNETES = "v1.34.4"
GO_HOME = "/usr/local/go/bin"  # where Go's own installation puts it, which is not on everybody's PATH


@dataclass(frozen=True)
class Module:
    """A Go module, and the commands in it that are built. Each command is named as its folder."""

    path: str
    version: str
    commands: tuple[str, ...]
    version_variables: tuple[str, ...] = ()  # where the version is written, which a plain build leaves unset

    def flags(self) -> str:
        return " ".join(["-s", "-w", *(f"-X {name}={self.version}" for name in self.version_variables)])


MODULES = (
    Module(
        "k8s.io/kubernetes",
        KUBERNETES,
        tuple(
            f"cmd/{name}"
            for name in (
                "kube-apiserver",
                "kube-controller-manager",
                "kube-scheduler",
                "kubelet",
                "kube-proxy",
                "kubectl",
            )
        ),
    ),
    Module("go.etcd.io/etcd/server/v3", "v3.6.16", ("",)),
    Module(
        "github.com/containerd/containerd/v2",
        "v2.2.9",
        ("cmd/containerd", "cmd/containerd-shim-runc-v2", "cmd/ctr"),
        ("github.com/containerd/containerd/v2/version.Version",),
    ),
    Module(
        "sigs.k8s.io/cri-tools", "v1.37.0", ("cmd/crictl",), ("sigs.k8s.io/cri-tools/pkg/version.Version",)
    ),
    Module("helm.sh/helm/v3", "v3.22.0", ("cmd/helm",), ("helm.sh/helm/v3/internal/version.version",)),
    Module("github.com/coredns/coredns", "v1.14.7", (".",)),
)


def name_of(module: Module, command: str) -> str:
    if command in ("", "."):
        return {"go.etcd.io/etcd/server/v3": "etcd", "github.com/coredns/coredns": "coredns"}[module.path]
    return command.rpartition("/")[2]


def unbuilt(places: Places) -> dict[Module, list[str]]:
    """What has to be built. A program counts when it is there in the wanted version."""
    wanted: dict[Module, list[str]] = {}
    for module in MODULES:
        for command in module.commands:
            name = name_of(module, command)
            stamp = places.programs / ".versions" / name
            there = stamp.exists() and stamp.read_text().strip() == module.version
            if not there or not os.access(places.programs / name, os.X_OK):
                wanted.setdefault(module, []).append(command)
    return wanted


def build(places: Places) -> None:
    """Build what is not there yet: about 20 minutes on two cores with nothing cached, seconds afterwards."""
    wanted = unbuilt(places)
    if not wanted:
        return
    (places.programs / ".versions").mkdir(parents=True, exist_ok=True)
    count = sum(map(len, wanted.values()))
    say(f"building {count} programs from Go modules into {places.programs}")
    for module, commands in wanted.items():
        begun = time.monotonic()
        names = [name_of(module, command) for command in commands]
        with tempfile.TemporaryDirectory(prefix="kvpool-go-") as folder:
            _build(places, Path(folder), module, commands)
        for name in names:
            (places.programs / ".versions" / name).write_text(module.version + "\n")
        say(f"{module.path} {module.version}: {', '.join(names)} in {time.monotonic() - begun:.0f} s")


def _build(places: Places, folder: Path, module: Module, commands: Sequence[str]) -> None:
    environment = os.environ | {
        "PATH": f"{os.environ['PATH']}:{GO_HOME}",
        "GOFLAGS": "-mod=mod -buildvcs=false",
        "CGO_ENABLED": "0",
        "GOTOOLCHAIN": "local",
        "GOCACHE": str(places.cache / "go" / "build"),
        "GOMODCACHE": str(places.cache / "go" / "mod"),
    }
    # A module of our own that requires the wanted one. Never `go mod tidy` here: it asks for the test
    # dependencies of everybody.
    _go(folder, environment, "mod", "init", "kvpool.test/build")
    _go(folder, environment, "mod", "edit", "-require", f"{module.path}@{module.version}")
    flags = module.flags()
    if module.path == "k8s.io/kubernetes":
        _pin_staging(folder, environment, module)
        flags += _kubernetes_version_flags(module.version)
    build = ("build", "-trimpath", "-ldflags", flags, "-o")
    if module.path == "github.com/coredns/coredns":
        (folder / "main.go").write_bytes((HERE / "coredns" / "main.go").read_bytes())
        _go(folder, environment, *build, str(places.programs / "coredns"), ".")
    elif commands == [""]:
        _go(folder, environment, *build, str(places.programs / name_of(module, "")), module.path)
    else:
        packages = [f"{module.path}/{command}" for command in commands]
        _go(folder, environment, *build, f"{places.programs}/", *packages)


def _pin_staging(folder: Path, environment: Mapping[str, str], module: Module) -> None:
    """Give the parts of Kubernetes their real versions.

    Its go.mod asks for them as v0.0.0 and replaces them by folders of its own repository, which only holds
    within that repository.
    """
    known = _go(folder, environment, "mod", "download", "-json", f"{module.path}@{module.version}")
    text = Path(json.loads(known)["GoMod"]).read_text()
    parts = re.findall(r"^\s*(k8s\.io/[a-z0-9-]+) v0\.0\.0(?:\s+//.*)?$", text, re.MULTILINE)
    version = module.version.replace("v1.", "v0.", 1)
    edits = [f"-replace={part}={part}@{version}" for part in sorted(set(parts))]
    godebug = re.search(r"^godebug (\S+)$", text, re.MULTILINE)
    if godebug:
        edits.append(f"-godebug={godebug[1]}")
    _go(folder, environment, "mod", "edit", *edits)


def _kubernetes_version_flags(version: str) -> str:
    # Without these the server calls itself v0.0.0-master, and a chart's kubeVersion does not match.
    values = {
        "gitVersion": version,
        "gitMajor": "1",
        "gitMinor": version.split(".")[1],
        "gitTreeState": "archive",
        "gitCommit": "module",
        "buildDate": "1970-01-01T00:00:00Z",
    }
    packages = ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version")
    return "".join(f" -X {package}.{key}={value}" for package in packages for key, value in values.items())


def _go(folder: Path, environment: Mapping[str, str], *arguments: str) -> str:
    with _alive(f"go {arguments[0]} {arguments[-1]}"):
        done = subprocess.run(
            [shutil.which("go", path=environment["PATH"]) or "go", *arguments],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-15:])
        raise ClusterError(f"go {' '.join(arguments)} failed with exit code {done.returncode}:\n{tail}")
    return done.stdout


@contextmanager
def _alive(what: str) -> Iterator[None]:
    """Say every minute that a long step is still at work."""
    done = threading.Event()
    begun = time.monotonic()

    def tell() -> None:
        while not done.wait(60):
            say(f"still at it after {time.monotonic() - begun:.0f} s: {what}")

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield
    finally:
        done.set()
        teller.join()
