"""The chart, installed into the API of a test by the real helm."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kube.apiserver import ApiServer, programs_folder

CHART = Path(__file__).resolve().parents[2] / "charts" / "kvpool"
Object = dict[str, Any]


@dataclass(frozen=True)
class Helm:
    """helm against one API, and one release in one namespace."""

    api: ApiServer
    namespace: str
    release: str = "kvpool"

    def __call__(self, *arguments: str) -> str:
        done = subprocess.run(
            [str(programs_folder() / "helm"), *arguments, "--namespace", self.namespace],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            env={
                **os.environ,
                "KUBECONFIG": str(self.api.kubeconfig),
                "HOME": str(self.api.folder),
                "KUBECACHEDIR": str(self.api.folder / "kubectl-cache"),
            },
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def install(self, *more: str) -> None:
        """Or upgrade. Without --wait, and without hooks, which are pods: nothing runs here.

        Other tests may have brought the CRDs, hence --take-ownership.
        """
        command = ("upgrade", "--install", self.release, str(CHART), "--no-hooks", "--take-ownership")
        self(*command, *more)

    def uninstall(self) -> None:
        self("uninstall", self.release, "--no-hooks", "--ignore-not-found")

    def template(self, *more: str) -> str:
        return self("template", self.release, str(CHART), "--kube-version", "1.34.0", *more)

    def kubeconfig_of(self, account: str, folder: Path) -> Path:
        """A kubeconfig of a ServiceAccount of the release, with a token as its pods have one."""
        token = self.api.kubectl("create", "token", account, "-n", self.namespace).stdout.strip()
        config = json.loads(self.api.kubeconfig.read_text())
        config["users"][0]["user"] = {"token": token}
        path = folder / f"{account}.kubeconfig"
        path.write_text(json.dumps(config))
        return path


@contextmanager
def running(helm: Helm, folder: Path, name: str, chosen: dict[str, object]) -> Iterator[Path]:
    """A program as the chart's Deployment `name` starts it, as its ServiceAccount; gives its log.

    `chosen` are arguments that are other ones here, where ports may be taken.
    """
    deployment = helm.api.get("deployment", name, "-n", helm.namespace)
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    arguments = [a for a in container["args"] if a.partition("=")[0] not in chosen]
    arguments += [f"{flag}={value}" for flag, value in chosen.items()]
    log = folder / f"{name}.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, *container["command"][1:], *arguments],
            env={
                **os.environ,
                "KUBECONFIG": str(helm.kubeconfig_of(name, folder)),
                "POD_NAME": "operator",
                "POD_NAMESPACE": helm.namespace,
            },
            stdout=out,
            stderr=out,
        )
    try:
        yield log
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        finally:
            process.kill()
            process.wait()
