"""Keys, certificates and kubeconfigs of a cluster."""

from __future__ import annotations

import base64
import subprocess
import tempfile
from pathlib import Path

from .places import CONTROL_PLANE_IP, ClusterError, Places

CURVE = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
SERVER_NAMES = ",".join(
    [
        f"IP:{CONTROL_PLANE_IP}",
        "IP:127.0.0.1",
        "IP:10.96.0.1",
        "DNS:localhost",
        *("DNS:kubernetes" + tail for tail in ("", ".default", ".default.svc", ".default.svc.cluster.local")),
    ]
)
CLIENTS = {  # certificate -> subject
    "admin": "/O=system:masters/CN=admin",
    "controller-manager": "/CN=system:kube-controller-manager",
    "scheduler": "/CN=system:kube-scheduler",
    "coredns": "/CN=system:coredns",
    "proxy": "/CN=system:kube-proxy",
}


def make(places: Places) -> None:
    """Everything that is not there yet."""
    folder = places.pki
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    if not (folder / "ca.crt").exists():
        where = ("-keyout", f"{folder}/ca.key", "-out", f"{folder}/ca.crt")
        _openssl("req", "-x509", *CURVE, "-days", "3650", "-subj", f"/CN={places.name}", *where)
    if not (folder / "sa.key").exists():
        _openssl(
            "genpkey",
            "-algorithm",
            "EC",
            "-pkeyopt",
            "ec_paramgen_curve:prime256v1",
            "-out",
            f"{folder}/sa.key",
        )
        # The apiserver reads no public key out of a private one of this kind.
        _openssl("pkey", "-in", f"{folder}/sa.key", "-pubout", "-out", f"{folder}/sa.pub")
    _certificate(folder, "apiserver", "/CN=kube-apiserver", SERVER_NAMES)
    for name, subject in CLIENTS.items():
        _certificate(folder, name, subject)
        _kubeconfig(places, name, folder / f"{name}.kubeconfig")
    for node in places.node_names:
        _certificate(
            folder,
            node,
            f"/O=system:nodes/CN=system:node:{node}",
            f"IP:{places.address(node)},DNS:{node}",
        )
        _kubeconfig(places, node, folder / f"{node}.kubeconfig")
    _kubeconfig(places, "admin", places.kubeconfig)


def needed_by(machine: str) -> list[str]:
    """The files that a machine gets; a node has no key but its own and the proxy's."""
    if machine == "cp":
        names = ["apiserver.crt", "apiserver.key", "admin.crt", "admin.key", "sa.key", "sa.pub", "ca.key"]
        names += [f"{name}.kubeconfig" for name in ("controller-manager", "scheduler", "coredns")]
        return ["ca.crt", *names]
    return ["ca.crt", f"{machine}.crt", f"{machine}.key", f"{machine}.kubeconfig", "proxy.kubeconfig"]


def _certificate(folder: Path, name: str, subject: str, names: str = "") -> None:
    if (folder / f"{name}.crt").exists():
        return
    key, request, out = (str(folder / f"{name}.{kind}") for kind in ("key", "csr", "crt"))
    _openssl("req", *CURVE, "-subj", subject, "-keyout", key, "-out", request)
    with tempfile.NamedTemporaryFile("w") as extensions:
        extensions.write("extendedKeyUsage=serverAuth,clientAuth\n")
        extensions.write(f"subjectAltName={names}\n" if names else "")
        extensions.flush()
        authority = ("-CA", f"{folder}/ca.crt", "-CAkey", f"{folder}/ca.key", "-CAcreateserial")
        end = ("-days", "3650", "-extfile", extensions.name, "-out", out)
        _openssl("x509", "-req", "-in", request, *authority, *end)
    Path(request).unlink()


def _kubeconfig(places: Places, certificate: str, out: Path) -> None:
    def encoded(name: str) -> str:
        return base64.b64encode((places.pki / name).read_bytes()).decode()

    cluster = (
        f'{{server: "https://{CONTROL_PLANE_IP}:6443", certificate-authority-data: {encoded("ca.crt")}}}'
    )
    certificate_data = encoded(f"{certificate}.crt")
    user = (
        f"{{client-certificate-data: {certificate_data}, client-key-data: {encoded(f'{certificate}.key')}}}"
    )
    lines = [
        "apiVersion: v1",
        "kind: Config",
        f"clusters: [{{name: {places.name}, cluster: {cluster}}}]",
        f"users: [{{name: {certificate}, user: {user}}}]",
        f"contexts: [{{name: {places.name}, context: {{cluster: {places.name}, user: {certificate}}}}}]",
        f"current-context: {places.name}",
    ]
    out.touch(mode=0o600)
    out.write_text("\n".join(lines) + "\n")


def _openssl(*arguments: str) -> None:
    done = subprocess.run(["openssl", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ClusterError(f"openssl {' '.join(arguments)} failed:\n{done.stderr.strip()}")
