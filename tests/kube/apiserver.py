"""A bare Kubernetes API on loopback: etcd beside kube-apiserver, with no node or controller behind them.

What it answers is what a cluster answers: schemas, defaults, CEL rules, server-side apply, access rights.
Nothing acts on the objects: a DaemonSet makes no pods, a namespace is never emptied, no owner's children are
collected.
"""

from __future__ import annotations

import base64
import ctypes
import http.client
import json
import os
import signal
import socket
import ssl
import subprocess
import time
import urllib.parse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Object = dict[str, Any]
SERVER_PROGRAMS = ("etcd", "kube-apiserver", "kubectl")
START_S = 90  # a busy machine of two cores needs 20
KUBECTL_S = 60


def programs_folder() -> Path:
    """Where the programs of Kubernetes lie, once e2e/cluster has built them."""
    cache = os.environ.get("KVPOOL_CACHE_DIR") or Path.home() / ".cache" / "kvpool"
    return Path(cache) / "cluster" / "bin"


def missing_programs(names: Sequence[str]) -> str | None:
    """What is not there, as a sentence; None when everything is."""
    folder = programs_folder()
    missing = [name for name in names if not os.access(folder / name, os.X_OK)]
    if not missing:
        return None
    return f"no {', '.join(missing)} in {folder}: e2e/cluster builds the programs of Kubernetes"


@dataclass(frozen=True)
class Answer:
    """What the API said: `body` is the object asked for, or a Status that says why not."""

    code: int
    body: Object

    @property
    def ok(self) -> bool:
        return self.code < 300

    @property
    def message(self) -> str:
        return "" if self.ok else str(self.body.get("message", ""))


class ApiFailed(AssertionError):
    """The API refused what a test needs."""


@dataclass
class ApiServer:
    """One etcd and one kube-apiserver, with its files in `folder`."""

    folder: Path
    port: int = 0
    _processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    _connection: http.client.HTTPSConnection | None = None

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    @property
    def kubeconfig(self) -> Path:
        """Of a user who may do everything."""
        return self.folder / "admin.kubeconfig"

    @property
    def log(self) -> Path:
        return self.folder / "kube-apiserver.log"

    # --- life -----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Both programs, on ports that are free now; returns when the API is ready."""
        _certificates(self.folder)
        etcd, peer, self.port = free_ports(3)
        self._write_kubeconfig()
        self._run("etcd", *etcd_flags(self.folder, etcd, peer))
        self._run("kube-apiserver", *apiserver_flags(self.folder, etcd, self.port))
        deadline = time.monotonic() + START_S
        while not self._is_ready():
            dead = [str(p.args[0]) for p in self._processes if p.poll() is not None]  # type: ignore[index]
            if dead or time.monotonic() > deadline:
                tail = "".join(path.read_text()[-1500:] for path in sorted(self.folder.glob("*.log")))
                raise ApiFailed(f"{dead or 'the API'} did not come up in {START_S} s:\n{tail}")
            time.sleep(0.2)

    def stop(self) -> None:
        """Ends what `start` started, by its pid."""
        self._disconnect()
        for process in reversed(self._processes):
            process.terminate()
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._processes.clear()

    def _run(self, program: str, *flags: str) -> None:
        with (self.folder / f"{program}.log").open("wb") as log:
            process = subprocess.Popen(
                [str(programs_folder() / program), *flags],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
        self._processes.append(process)

    def _is_ready(self) -> bool:
        try:
            ready = self.request("GET", "/readyz").code == 200
            # What is made at start and everything else needs.
            return ready and self.request("GET", "/api/v1/namespaces/default").ok
        except (OSError, http.client.HTTPException):
            self._disconnect()
            return False

    def _write_kubeconfig(self) -> None:
        def data(name: str) -> str:
            return base64.b64encode((self.folder / name).read_bytes()).decode()

        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [
                {
                    "name": "test",
                    "cluster": {"server": self.url, "certificate-authority-data": data("ca.crt")},
                }
            ],
            "users": [
                {
                    "name": "admin",
                    "user": {
                        "client-certificate-data": data("admin.crt"),
                        "client-key-data": data("admin.key"),
                    },
                }
            ],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "admin"}}],
            "current-context": "test",
        }
        self.kubeconfig.write_text(json.dumps(config))  # JSON is YAML

    # --- use ------------------------------------------------------------------------------------------------

    def request(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        content_type: str = "application/json",
        query: Mapping[str, str] | None = None,
    ) -> Answer:
        """One request over a kept connection, a few milliseconds; refusals are answers, not exceptions."""
        if self._connection is None:
            context = ssl.create_default_context(cafile=str(self.folder / "ca.crt"))
            context.load_cert_chain(self.folder / "admin.crt", self.folder / "admin.key")
            self._connection = http.client.HTTPSConnection(
                "127.0.0.1", self.port, timeout=KUBECTL_S, context=context
            )
        target = f"{path}?{urllib.parse.urlencode(query)}" if query else path
        payload = None if body is None else json.dumps(body)
        self._connection.request(method, target, payload, {"Content-Type": content_type})
        response = self._connection.getresponse()
        text = response.read()
        is_json = "json" in response.headers.get("Content-Type", "")
        return Answer(response.status, json.loads(text) if is_json else {"message": text.decode()})

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def create(self, path: str, body: object, *, dry_run: bool = False) -> Answer:
        """POST, strict about unknown fields as kubectl is."""
        query = {"fieldValidation": "Strict", **({"dryRun": "All"} if dry_run else {})}
        return self.request("POST", path, body, query=query)

    def apply(self, path: str, body: object, *, manager: str = "test", force: bool = True) -> Answer:
        """Server-side apply of one object (or of its status, when `path` ends so)."""
        query = {
            "fieldManager": manager,
            "force": str(force).lower(),
            "fieldValidation": "Strict",
        }
        return self.request("PATCH", path, body, content_type="application/apply-patch+yaml", query=query)

    def kubectl(
        self, *arguments: str, stdin: str | None = None, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run kubectl against this API; with `check`, a failure is a failed test with its stderr."""
        done = subprocess.run(
            [str(programs_folder() / "kubectl"), "--kubeconfig", str(self.kubeconfig), *arguments],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=KUBECTL_S,
            check=False,
            # Discovery is cached by address, and the next test run may get the same port.
            env={**os.environ, "KUBECACHEDIR": str(self.folder / "kubectl-cache")},
        )
        if check and done.returncode:
            raise ApiFailed(f"kubectl {' '.join(arguments)}: {done.stderr.strip()}")
        return done

    def get(self, *arguments: str) -> Any:
        """`kubectl get ... -o json`, parsed."""
        return json.loads(self.kubectl("get", *arguments, "-o", "json").stdout)


def free_ports(count: int) -> list[int]:
    """Ports of loopback that nobody uses now."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports: list[int] = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def etcd_flags(folder: Path, port: int, peer_port: int) -> list[str]:
    client, peer = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{peer_port}"
    return [
        f"--data-dir={folder / 'etcd'}",
        "--unsafe-no-fsync",  # nothing of a test has to outlive it
        "--log-level=warn",
        f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=default={peer}",
    ]


def apiserver_flags(folder: Path, etcd_port: int, port: int) -> list[str]:
    return [
        f"--etcd-servers=http://127.0.0.1:{etcd_port}",
        "--bind-address=127.0.0.1",
        "--advertise-address=127.0.0.1",
        "--endpoint-reconciler-type=none",  # which refuses to publish a loopback address
        f"--secure-port={port}",
        "--service-cluster-ip-range=10.96.0.0/16",
        f"--client-ca-file={folder / 'ca.crt'}",
        f"--tls-cert-file={folder / 'server.crt'}",
        f"--tls-private-key-file={folder / 'server.key'}",
        "--authorization-mode=Node,RBAC",
        "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
        f"--service-account-key-file={folder / 'sa.pub'}",
        f"--service-account-signing-key-file={folder / 'sa.key'}",
        # No controller makes the default account of a namespace, without which this refuses every pod.
        "--disable-admission-plugins=ServiceAccount",
        "--allow-privileged=true",
    ]


def _certificates(folder: Path) -> None:
    """An authority, and what it signs: the server's certificate and an administrator's."""

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], check=True, capture_output=True, cwd=folder)

    ec = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl("req", "-x509", *ec, "-days", "2", "-subj", "/CN=test-ca", "-keyout", "ca.key", "-out", "ca.crt")
    for name, subject, names in (
        ("server", "/CN=kube-apiserver", "IP:127.0.0.1,DNS:localhost"),
        ("admin", "/O=system:masters/CN=admin", ""),
    ):
        extensions = "extendedKeyUsage=serverAuth,clientAuth\n" + (f"subjectAltName={names}" if names else "")
        (folder / f"{name}.ext").write_text(extensions)
        openssl("req", *ec, "-subj", subject, "-keyout", f"{name}.key", "-out", f"{name}.csr")
        signing = ("-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2")
        openssl(
            "x509", "-req", "-in", f"{name}.csr", *signing, "-extfile", f"{name}.ext", "-out", f"{name}.crt"
        )
    openssl("genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-out", "sa.key")
    openssl("pkey", "-in", "sa.key", "-pubout", "-out", "sa.pub")


def _die_with_parent() -> None:
    """A killed pytest leaves nothing behind."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
