"""The DRA driver of a node: `python -m kvpool_operator.dra`.

Environment: NODE_NAME, POD_NAMESPACE (the operator's), POD_UID.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from kvpool.cxl import ComposeError, open_backend
from kvpool_operator.client import Cluster
from kvpool_operator.dra.cdi import Folder
from kvpool_operator.dra.checkpoint import Checkpoint
from kvpool_operator.dra.leftovers import Leftovers
from kvpool_operator.dra.metrics import Metrics
from kvpool_operator.dra.plugin import Plugin
from kvpool_operator.dra.prepare import Preparer, Settings
from kvpool_operator.dra.slices import Publisher
from kvpool_operator.health import serve
from kvpool_operator.names import DRIVER, GROUP_ID

log = logging.getLogger("kvpool.dra")

# Regions belong to the group, and to nobody else.
UMASK = 0o007


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="kvpool_operator.dra", description=__doc__)
    made.add_argument("--backend", required=True, help="sysfs, or file:/FOLDER")
    made.add_argument("--group", type=int, default=GROUP_ID, help="group that owns regions and folders")
    made.add_argument(
        "--region-namespace",
        action="append",
        default=[],
        help="a namespace whose claims may have CXL memory without a pool; may be repeated (none)",
    )
    made.add_argument("--kubelet", type=Path, default=Path("/var/lib/kubelet"), help="folder of the kubelet")
    made.add_argument("--cdi", type=Path, default=Path("/var/run/cdi"), help="folder of CDI files")
    made.add_argument("--health-port", type=int, default=8082)
    made.add_argument("--metrics-port", type=int, default=8083)
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    given = parser().parse_args(arguments)
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
    os.umask(UMASK)
    missing = [name for name in ("NODE_NAME", "POD_NAMESPACE", "POD_UID") if not os.environ.get(name)]
    if missing:
        log.error("failed error=%r", f"{', '.join(missing)} not set; the chart's DaemonSet sets it.")
        return 1
    try:
        return asyncio.run(_run(given))
    except ComposeError as error:
        log.error("failed error=%r", str(error))
        return 1


async def _run(given: argparse.Namespace) -> int:
    backend = open_backend(given.backend)
    node = os.environ["NODE_NAME"]
    cluster = await Cluster.connect()
    settings = Settings(node, os.environ["POD_NAMESPACE"], frozenset(given.region_namespace), given.group)
    publisher = Publisher(cluster, backend, node)
    folder = given.kubelet / "plugins" / DRIVER
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint = Checkpoint(folder)
    preparer = Preparer(cluster, backend, checkpoint, Folder(given.cdi), settings)
    leftovers = Leftovers(preparer)

    def changed() -> None:
        publisher.wake()
        leftovers.wake()

    preparer.changed = changed
    metrics = Metrics(lambda: len(checkpoint.uids()))
    plugin = Plugin(preparer, cluster, given.kubelet, os.environ["POD_UID"], metrics)
    runners = await serve(
        given.health_port,
        given.metrics_port,
        alive=lambda: plugin.problem,
        ready=lambda: "" if plugin.registered.is_set() else "the kubelet has not registered this driver yet",
        metrics=metrics.registry,
    )
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await plugin.start()
    # The scheduler learns of devices only when the kubelet knows who prepares them: else the first pods come
    # too early, and wait for the kubelet's next try.
    parts = [
        asyncio.ensure_future(_when_registered(plugin, publisher)),
        asyncio.ensure_future(leftovers.run()),
    ]
    stopped = asyncio.ensure_future(stop.wait())
    try:
        done, _ = await asyncio.wait([*parts, stopped], return_when=asyncio.FIRST_COMPLETED)
        for part in done:
            part.result()  # raises what it ended with
        return 0
    finally:
        await plugin.stop()
        for part in (*parts, stopped):
            part.cancel()
        await asyncio.gather(*parts, stopped, return_exceptions=True)
        for runner in runners:
            await runner.cleanup()
        checkpoint.close()
        await cluster.close()


async def _when_registered(plugin: Plugin, publisher: Publisher) -> None:
    await plugin.registered.wait()
    await publisher.run()


if __name__ == "__main__":
    sys.exit(main())
