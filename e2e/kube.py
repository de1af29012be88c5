"""What a test may know of the cluster: kubectl and helm, nothing else."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

Object = dict[str, Any]
T = TypeVar("T")


KUBELET_S = 20.0


class KubeError(Exception):
    """kubectl or helm refused; the message is theirs."""


class Timeout(AssertionError):
    """Something was not so in time; the message has what was seen instead."""


class Kube:
    """kubectl and helm against one cluster. `prefix` is the command that leads to where it can be reached."""

    def __init__(self, kubeconfig: Path, prefix: Sequence[str] = (), programs: Path | None = None) -> None:
        self._environment = os.environ | {"KUBECONFIG": str(kubeconfig)}
        self._prefix = list(prefix)
        self._programs = programs

    def _program(self, name: str) -> str:
        if self._programs is not None and (self._programs / name).exists():
            return str(self._programs / name)
        found = shutil.which(name)
        if found is None:
            raise KubeError(f"no {name} on the PATH; install it, or let `make cluster-up` build it")
        return found

    def _run(self, name: str, arguments: Sequence[str], text: str | None, seconds: float) -> tuple[str, str]:
        command = [*self._prefix, self._program(name), *arguments]
        try:
            done = subprocess.run(
                command,
                input=text,
                stdin=subprocess.DEVNULL if text is None else None,
                capture_output=True,
                text=True,
                check=False,
                env=self._environment,
                timeout=seconds,
            )
        except subprocess.TimeoutExpired:
            raise KubeError(f"{name} {' '.join(arguments)}: no answer within {seconds:.0f} s") from None
        if done.returncode:
            raise KubeError(f"{name} {' '.join(arguments)}: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout, done.stderr

    def kubectl(self, *arguments: str, text: str | None = None, seconds: float = 60) -> str:
        return self._run("kubectl", arguments, text, seconds)[0]

    def helm(self, *arguments: str, seconds: float = 180) -> str:
        return self._run("helm", arguments, None, seconds)[0]

    # --- objects --------------------------------------------------------------------------------------------

    def apply(self, *objects: Object, dry_run: bool = False) -> None:
        document = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
        options = ("--server-side", "--force-conflicts", "--field-manager=e2e")
        dry = ("--dry-run=server",) if dry_run else ()
        self.kubectl("apply", *options, *dry, "-f", "-", text=document)

    def find(self, kind: str, name: str, namespace: str = "") -> Object | None:
        where = ("-n", namespace) if namespace else ()
        text = self.kubectl("get", kind, name, *where, "-o", "json", "--ignore-not-found")
        found: Object | None = json.loads(text) if text.strip() else None
        return found

    def get(self, kind: str, name: str, namespace: str = "") -> Object:
        found = self.find(kind, name, namespace)
        assert found is not None, f"there is no {kind} {namespace}/{name}"
        return found

    def all(self, kind: str, namespace: str = "", selector: str = "") -> list[Object]:
        where = ("-n", namespace) if namespace else ("-A",)
        chosen = ("-l", selector) if selector else ()
        items: list[Object] = json.loads(self.kubectl("get", kind, *where, *chosen, "-o", "json"))["items"]
        return items

    def patch(self, kind: str, name: str, namespace: str, change: Mapping[str, Any]) -> None:
        self.kubectl("patch", kind, name, "-n", namespace, "--type=merge", "-p", json.dumps(change))

    def delete(self, kind: str, name: str, namespace: str = "", *, wait_s: float = 60) -> None:
        where = ("-n", namespace) if namespace else ()
        wait = ("--wait=true", f"--timeout={wait_s:.0f}s") if wait_s else ("--wait=false",)
        self.kubectl("delete", kind, name, *where, "--ignore-not-found", *wait, seconds=wait_s + 30)

    def exec(self, namespace: str, pod: str, *command: str, seconds: float = 60) -> str:
        """Run a command in a pod. A kubelet that has just started knows its pods later: it is asked again."""
        until = time.monotonic() + KUBELET_S
        while True:
            try:
                return self.kubectl("exec", "-n", namespace, pod, "--", *command, seconds=seconds)
            except KubeError as error:
                if "pod does not exist" not in str(error) or time.monotonic() > until:
                    raise
            time.sleep(1)

    def logs(self, namespace: str, pod: str, *options: str) -> str:
        return self.kubectl("logs", "-n", namespace, pod, *options)

    def raw(self, path: str) -> str:
        return self.kubectl("get", "--raw", path)

    # --- waiting --------------------------------------------------------------------------------------------

    def explain(self, namespace: str) -> str:
        """The state of a namespace for a failure's message."""
        parts = []
        for what in ("kvp,kvpn,ds,pods,pvc -o wide", "events --sort-by=.lastTimestamp"):
            try:
                parts.append(self.kubectl("get", "-n", namespace, *what.split()))
            except KubeError as error:
                parts.append(str(error))
        return "\n".join(part[-4000:] for part in parts)


def wait_for(what: str, seconds: float, look: Callable[[], T], *, every: float = 0.5) -> T:
    """The first true answer of `look`. An AssertionError or a refusal of kubectl counts as "not yet"."""
    begun = time.monotonic()
    seen: object = None
    while True:
        try:
            answer = look()
            if answer:
                return answer
            seen = answer
        except (AssertionError, KubeError) as error:
            seen = error
        if time.monotonic() - begun > seconds:
            raise Timeout(f"{what}: not so within {seconds:.0f} s; last seen: {str(seen)[-3000:]}")
        time.sleep(every)


def ready(body: Object | None) -> bool:
    """Whether a pod or a node says Ready."""
    conditions = ((body or {}).get("status") or {}).get("conditions") or []
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)
