"""The status API of this machine's pools as a process: `python -m kvpool.api`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from kvpool.api import server
from kvpool.api.local import LocalSource
from kvpool.api.service import Service
from kvpool.errors import KvpoolError


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM. Returns the exit code: 0 after a signal, 1 for a failure."""
    parser = argparse.ArgumentParser(prog="kvpool.api", description=__doc__)
    parser.add_argument("--listen", default="127.0.0.1", help="address; other than loopback needs a token")
    parser.add_argument("--port", type=int, default=server.DEFAULT_PORT, help="0 takes a free one")
    parser.add_argument(
        "--token-file", help=f"file with a token that every request needs; else {server.TOKEN_ENV}"
    )
    parser.add_argument(
        "--allow-host", action="append", default=[], help="another name by which it may be asked"
    )
    given = parser.parse_args(arguments)
    server.start_logging()
    try:
        access = server.access_for(given.listen, server.static_token(given.token_file))
        hosts = server.hosts_for(given.listen, given.allow_host)
        service = Service(LocalSource(), access=access, hosts=hosts)
        server.serve(service, server.listening(given.listen, given.port))
    except KvpoolError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
