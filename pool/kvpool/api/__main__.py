"""The status API of this machine's pools as a process: `python -m kvpool.api`."""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack

from kvpool import paths
from kvpool.api import server
from kvpool.api.local import LocalSource
from kvpool.api.service import Service
from kvpool.daemon.lock import DaemonLock
from kvpool.errors import KvpoolError, WrongUse

LOOK_S = 10.0  # how often it is seen whether the machine still has pools


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM. Returns the exit code: 0 after a signal, 1 for a failure, 2 for wrong use."""
    parser = argparse.ArgumentParser(prog="kvpool.api", description=__doc__)
    parser.add_argument("--listen", default="127.0.0.1", help="address; other than loopback needs a token")
    parser.add_argument("--port", type=int, default=server.DEFAULT_PORT, help="0 takes a free one")
    parser.add_argument(
        "--token-file", help=f"file with a token that every request needs; else {server.TOKEN_ENV}"
    )
    parser.add_argument(
        "--allow-host", action="append", default=[], help="another name by which it may be asked"
    )
    parser.add_argument("--companion", type=int, metavar="FD", help=argparse.SUPPRESS)
    parser.add_argument("--redis", metavar="URL", help=f"keep the history there; else {server.REDIS_ENV}")
    parser.add_argument(
        "--trusted-proxy", action="append", default=[], metavar="ADDRESS", help=server.PROXY_HELP
    )
    given = parser.parse_args(arguments)
    server.start_logging()
    try:
        proxies = server.proxies_for(given.trusted_proxy)
        with ExitStack() as closing:
            if given.companion is None:
                listener = server.listening(given.listen, given.port)
            else:
                listener = socket.socket(fileno=given.companion)
                _accompany(listener, closing)
            access = server.access_for(given.listen, server.static_token(given.token_file))
            hosts = server.hosts_for(given.listen, given.allow_host)
            service = Service(
                LocalSource(),
                history=server.history_for(given.redis),
                access=access,
                hosts=hosts,
                open_metrics=server.open_metrics_for(given.listen),
            )
            server.serve(service, listener, proxies)
    except KvpoolError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return 2 if isinstance(error, WrongUse) else 1
    return 0


def _accompany(listener: socket.socket, closing: ExitStack) -> None:
    """Be the one that `kvpool up` starts: one a runtime directory, ending when its pools are gone.

    Raises:  RegionBusyError when there is one already.
    """
    lock = DaemonLock(paths.api_lock_path())
    closing.callback(lock.close)
    paths.api_address_path().write_text(server.url_of(listener) + "\n")
    closing.callback(paths.api_address_path().unlink, missing_ok=True)
    ending = threading.Event()
    closing.callback(ending.set)

    def watch() -> None:
        while not ending.wait(LOOK_S):
            if not paths.pool_names():
                os.kill(os.getpid(), signal.SIGTERM)
                return

    threading.Thread(target=watch, name="kvpool-api-end", daemon=True).start()


if __name__ == "__main__":
    sys.exit(main())
