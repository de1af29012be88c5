"""The webhook's certificate: an authority of our own in a Secret, so that all replicas serve the same."""

from __future__ import annotations

import base64
import datetime
import logging
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from kvpool_operator import kinds
from kvpool_operator.client import ApiError, Cluster

log = logging.getLogger("kvpool.operator")

VALID = datetime.timedelta(days=365)
RENEW_BEFORE = datetime.timedelta(days=60)
TRIES = 5


@dataclass(frozen=True, slots=True)
class Certificate:
    """PEM texts: the authority's certificate, the server's, its key."""

    ca: bytes
    cert: bytes
    key: bytes

    @property
    def not_after(self) -> datetime.datetime:
        return x509.load_pem_x509_certificate(self.cert).not_valid_after_utc

    def is_good(self, host: str, now: datetime.datetime) -> bool:
        """Whether it is for `host` and lasts for a while yet."""
        try:
            cert = x509.load_pem_x509_certificate(self.cert)
            cert.verify_directly_issued_by(x509.load_pem_x509_certificate(self.ca))
            names = cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
            key = serialization.load_pem_private_key(self.key, None)
            fits = key.public_key() == cert.public_key()
        except Exception:  # whatever lies in the Secret: it is replaced
            return False
        return (
            fits and host in names.get_values_for_type(x509.DNSName) and now < self.not_after - RENEW_BEFORE
        )

    def write(self) -> tuple[Path, Path, Path]:
        """Files for a server that reads files: (certificate, key, authority), readable by this user only."""
        folder = Path(tempfile.mkdtemp(prefix="kvpool-webhook-"))
        paths = (folder / "tls.crt", folder / "tls.key", folder / "ca.crt")
        for path, text in zip(paths, (self.cert, self.key, self.ca), strict=True):
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(fd, "wb") as file:
                file.write(text)
        return paths


def make(host: str, now: datetime.datetime) -> Certificate:
    """A new authority, and a certificate of its for `host`."""
    ca_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    ca_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kvpool-webhook-ca")])
    start, end = now - datetime.timedelta(hours=1), now + VALID
    ca = (
        x509.CertificateBuilder()
        .subject_name(ca_name)
        .issuer_name(ca_name)
        .public_key(ca_key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(end)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(ca_key, hashes.SHA256())
    )
    cert = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, host[:64])]))
        .issuer_name(ca_name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(end)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(host)]), critical=False)
        .add_extension(x509.ExtendedKeyUsage([x509.oid.ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    return Certificate(
        ca.public_bytes(pem),
        cert.public_bytes(pem),
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
    )


async def ensure(cluster: Cluster, namespace: str, secret: str, host: str) -> Certificate:
    """The certificate in the Secret; a new one is put there when it is missing, wrong or old.

    The Secret itself comes with the chart: the operator may then do with fewer rights.

    Raises:  ApiError when the Secret cannot be read or written.
    """
    for _ in range(TRIES):
        now = datetime.datetime.now(datetime.timezone.utc)
        found = await cluster.get(kinds.SECRET, namespace, secret)
        if found is None:
            raise ApiError(f"Secret {namespace}/{secret}", 404, "it does not exist; the chart makes it")
        data = found.get("data") or {}
        kept = Certificate(*(base64.b64decode(data.get(n, "")) for n in ("ca.crt", "tls.crt", "tls.key")))
        if kept.is_good(host, now):
            return kept
        new = make(host, now)
        texts = {"ca.crt": new.ca, "tls.crt": new.cert, "tls.key": new.key}
        patch = {
            "metadata": {"resourceVersion": found["metadata"]["resourceVersion"]},
            "data": {name: base64.b64encode(text).decode() for name, text in texts.items()},
        }
        try:
            await cluster.merge(kinds.SECRET, namespace, secret, patch)
        except ApiError as error:
            if error.code == 409:  # another replica was faster: take its one
                continue
            raise
        log.info("webhook_certificate_made host=%s until=%s", host, new.not_after.date())
        return new
    raise ApiError(f"Secret {namespace}/{secret}", 409, "it changes all the time")


async def publish(cluster: Cluster, configuration: str, ca: bytes) -> None:
    """Tell the API server which authority to trust for our webhooks."""
    found = await cluster.get(kinds.WEBHOOK, None, configuration)
    if found is None:
        log.warning("webhook_missing name=%s; no pod is given a pool by its label", configuration)
        return
    bundle = base64.b64encode(ca).decode()
    webhooks = found.get("webhooks") or []
    if all(webhook["clientConfig"].get("caBundle") == bundle for webhook in webhooks):
        return
    for webhook in webhooks:
        webhook["clientConfig"]["caBundle"] = bundle
    patch = {"metadata": {"resourceVersion": found["metadata"]["resourceVersion"]}, "webhooks": webhooks}
    await cluster.merge(kinds.WEBHOOK, None, configuration, patch)
    log.info("webhook_authority_published name=%s", configuration)
