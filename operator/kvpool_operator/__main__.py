"""The operator as a process: `python -m kvpool_operator`."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence

import kopf

from kvpool_operator import certs
from kvpool_operator.app import Operator
from kvpool_operator.client import ApiError, Cluster
from kvpool_operator.handlers import add_webhook, registry, settings
from kvpool_operator.health import serve
from kvpool_operator.lease import Lease
from kvpool_operator.manifest import Settings
from kvpool_operator.names import GROUP_ID
from kvpool_operator.release import release

log = logging.getLogger("kvpool.operator")

STOP_S = 10.0


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="kvpool_operator", description="The kvpool operator.")
    made.add_argument(
        "--namespace", action="append", default=[], help="watch this namespace only; may be repeated (all)"
    )
    made.add_argument("--image", required=True, help="image of the nodes' daemons")
    made.add_argument("--pull-policy", default="IfNotPresent", help="imagePullPolicy of the daemons")
    made.add_argument("--pull-secret", action="append", default=[], help="imagePullSecret; may be repeated")
    made.add_argument("--priority-class", default="", help="priorityClassName of the daemons")
    made.add_argument("--group", type=int, default=GROUP_ID, help="group that owns regions and folders")
    made.add_argument(
        "--lease-namespace",
        default=os.environ.get("POD_NAMESPACE", "default"),
        help="the operator's own namespace: its lease, its webhook, the daemons",
    )
    made.add_argument("--webhook-service", default="", help="Service of the webhook; empty: no webhook")
    made.add_argument("--webhook-port", type=int, default=9443)
    made.add_argument("--webhook-secret", default="kvpool-webhook", help="Secret that keeps its certificate")
    made.add_argument("--webhook-configuration", default="kvpool", help="MutatingWebhookConfiguration")
    made.add_argument(
        "--webhook-cert-dir",
        default="",
        help="tls.crt, tls.key, ca.crt of cert-manager, not the Secret",
    )
    made.add_argument(
        "--dra", action="store_true", help="the DRA driver is installed: pools can be had by claims"
    )
    made.add_argument("--health-port", type=int, default=8080)
    made.add_argument("--metrics-port", type=int, default=8081)
    made.add_argument(
        "--release",
        action="store_true",
        help="uninstall: take the lease, take the finalizers off all pools, end",
    )
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    given = parser().parse_args(arguments)
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
    logging.getLogger("kopf").setLevel(logging.WARNING)
    try:
        return asyncio.run(_release(given) if given.release else _run(given))
    except KeyboardInterrupt:
        return 0


async def _release(given: argparse.Namespace) -> int:
    cluster = await Cluster.connect()
    try:
        await release(cluster, given.lease_namespace, given.namespace, driver=given.dra)
    finally:
        await cluster.close()
    return 0


async def _run(given: argparse.Namespace) -> int:
    cluster = await Cluster.connect()
    wanted = Settings(
        image=given.image,
        namespace=given.lease_namespace,
        group_id=given.group,
        priority_class=given.priority_class,
        pull_policy=given.pull_policy,
        pull_secrets=tuple(given.pull_secret),
        driver=given.dra,
    )
    namespaces = watched_namespaces(given)
    operator = Operator(cluster, wanted, namespaces)
    ready, stop = asyncio.Event(), asyncio.Event()
    runners = await serve(
        given.health_port,
        given.metrics_port,
        alive=lambda: operator.watches.dead,
        ready=lambda: "" if ready.is_set() else "the watches are not connected yet",
        metrics=operator.metrics.registry,
    )
    identity = f"{os.environ.get('POD_NAME') or socket.gethostname()}-{os.getpid()}"
    try:
        server = await _webhook(cluster, given)
        handlers = registry(operator.cache, operator.changed, given.dra)
        if server is not None:
            add_webhook(handlers, operator.cache, operator.metrics, given.group, given.dra)
        watching = kopf.operator(
            registry=handlers,
            settings=settings(server, given.dra),
            standalone=True,
            clusterwide=not namespaces,
            namespaces=namespaces,
            ready_flag=ready,
            stop_flag=stop,
        )
        parts = [
            asyncio.ensure_future(watching),
            asyncio.ensure_future(operator.run()),
            asyncio.ensure_future(Lease(cluster, given.lease_namespace, identity, operator.lead).run()),
        ]
        signals = asyncio.ensure_future(_stop_on_signals(ready, stop))
        done, _ = await asyncio.wait([*parts, signals], return_when=asyncio.FIRST_COMPLETED)
        # The lease first: while kopf closes its watches, another replica acts already.
        for part in (parts[2], parts[1]):
            part.cancel()
            await asyncio.gather(part, return_exceptions=True)
        stop.set()
        await asyncio.wait([parts[0]], timeout=STOP_S)
        for part in (*parts, signals):
            part.cancel()
        await asyncio.gather(*parts, signals, return_exceptions=True)
        for part in done:
            if not part.cancelled():
                part.result()  # raises what it ended with
        return 0  # a signal: kopf ends then
    finally:
        for runner in runners:
            await runner.cleanup()
        await cluster.close()


def watched_namespaces(given: argparse.Namespace) -> list[str]:
    """Those of the pools, and the operator's own, where the daemons run. None: all of the cluster's."""
    return sorted({*given.namespace, given.lease_namespace}) if given.namespace else []


async def _stop_on_signals(ready: asyncio.Event, stop: asyncio.Event) -> None:
    """kopf takes the signals when it starts; once it is ready they are ours again."""
    await ready.wait()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await stop.wait()


async def _webhook(cluster: Cluster, given: argparse.Namespace) -> kopf.WebhookServer | None:
    """The server of the webhook; None when it is switched off."""
    if not given.webhook_service:
        return None
    if given.webhook_cert_dir:
        files = [f"{given.webhook_cert_dir}/{name}" for name in ("tls.crt", "tls.key", "ca.crt")]
        return kopf.WebhookServer(
            port=given.webhook_port, certfile=files[0], pkeyfile=files[1], cafile=files[2]
        )
    host = f"{given.webhook_service}.{given.lease_namespace}.svc"
    try:
        made = await certs.ensure(cluster, given.lease_namespace, given.webhook_secret, host)
        await certs.publish(cluster, given.webhook_configuration, made.ca)
    except ApiError as error:
        log.error("webhook_off error=%r; pods are not given pools by their label", str(error))
        return None
    cert, key, ca = made.write()
    return kopf.WebhookServer(port=given.webhook_port, certfile=cert, pkeyfile=key, cafile=ca)


if __name__ == "__main__":
    sys.exit(main())
