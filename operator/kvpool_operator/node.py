"""The node's daemon in a pod: `python -m kvpool_operator.node`. It serves one pool on one node.

Environment: KVPOOL_POOL, KVPOOL_NAMESPACE (the pool's), NODE_NAME, POD_NAME, KVPOOL_RUNTIME_DIR.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence

from kvpool import __version__
from kvpool.daemon.log import log_to_stderr
from kvpool.errors import KvpoolError
from kvpool.paths import pool_dir
from kvpool_operator.nodes.board import Board
from kvpool_operator.nodes.cluster import Identity
from kvpool_operator.nodes.keeper import Keeper
from kvpool_operator.nodes.talk import Talk

log = logging.getLogger("kvpool.node")

HTTP_PORT = 9464
# Regions, locks and reports are for the daemon's user and group; engines are given the group.
UMASK = 0o007
GOODBYE_S = 5.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM. Returns the exit code: 0 after it, 1 when the daemon cannot do its work."""
    parser = argparse.ArgumentParser(prog="kvpool_operator.node", description=__doc__)
    parser.add_argument("--port", type=int, default=HTTP_PORT, help="of /healthz, /readyz and /metrics")
    parser.add_argument("--address", default="", help="to listen at; all when left out")
    given = parser.parse_args(arguments)
    log_to_stderr()
    os.umask(UMASK)
    try:
        identity = identity_of(os.environ)
    except KvpoolError as error:
        log.error("failed error=%r", str(error))
        return 1
    board = Board()
    keeper = Keeper(board, identity.pool)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: keeper.stop())
    log.info("starting pool=%s node=%s version=%s", identity.pool, identity.node, __version__)
    talk = Talk(
        board,
        identity,
        version=__version__,
        started_at=time.time(),
        address=given.address,
        port=given.port,
        failed=keeper.stop,
    )
    talk.start()
    try:
        keeper.run()
    finally:
        talk.stop(GOODBYE_S)
    log.info("stopped pool=%s node=%s", identity.pool, identity.node)
    return 1 if talk.failure else 0


def identity_of(environment: Mapping[str, str]) -> Identity:
    """Who this daemon is. Raises: KvpoolError that names the variable."""
    found = {}
    for name in ("KVPOOL_NAMESPACE", "KVPOOL_POOL", "NODE_NAME", "POD_NAME"):
        found[name] = environment.get(name, "")
        if not found[name]:
            raise KvpoolError(
                f"{name} is not set. The operator's DaemonSet sets it; by hand, see the module's text."
            )
    pool_dir(found["KVPOOL_POOL"])  # a name that can be one
    return Identity(found["KVPOOL_NAMESPACE"], found["KVPOOL_POOL"], found["NODE_NAME"], found["POD_NAME"])


if __name__ == "__main__":
    sys.exit(main())
