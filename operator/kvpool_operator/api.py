"""The status API of a cluster as a process: `python -m kvpool_operator.api`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from kvpool.api import server
from kvpool.api.access import Access, OpenAccess, TokenAccess
from kvpool.api.service import Service
from kvpool.errors import KvpoolError
from kvpool_operator.access import KubernetesAccess
from kvpool_operator.source import ClusterSource


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM. Returns the exit code: 0 after a signal, 1 for a failure."""
    parser = argparse.ArgumentParser(prog="kvpool_operator.api", description=__doc__)
    parser.add_argument("--listen", default="0.0.0.0", help="address")
    parser.add_argument("--port", type=int, default=server.DEFAULT_PORT)
    parser.add_argument(
        "--namespace", action="append", default=[], help="only pools of this namespace; may be repeated"
    )
    parser.add_argument(
        "--auth",
        choices=("kubernetes", "token", "none"),
        default="kubernetes",
        help="kubernetes: tokens of the cluster, with the right to list kvpools; token: the one of "
        f"--token-file or {server.TOKEN_ENV}; none: everybody, on loopback only",
    )
    parser.add_argument("--token-file", help="file with the token of --auth token")
    parser.add_argument(
        "--open-metrics",
        action="store_true",
        help="/metrics without a token, for a network that is closed otherwise",
    )
    parser.add_argument("--redis", metavar="URL", help=f"keep the history there; else {server.REDIS_ENV}")
    parser.add_argument(
        "--trusted-proxy", action="append", default=[], metavar="ADDRESS", help=server.PROXY_HELP
    )
    given = parser.parse_args(arguments)
    server.start_logging()
    try:
        source = ClusterSource(namespaces=given.namespace)
        service = Service(
            source,
            history=server.history_for(given.redis),
            access=_access(given.auth, given.listen, given.token_file, source),
            hosts=server.hosts_for(given.listen, []) if given.auth == "none" else None,
            open_metrics=given.open_metrics or given.auth == "none",
        )
        proxies = server.proxies_for(given.trusted_proxy)
        server.serve(service, server.listening(given.listen, given.port), proxies)
    except KvpoolError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


def _access(kind: str, listen: str, token_file: str | None, source: ClusterSource) -> Access:
    """Raises: KvpoolError when what is asked for is not safe, or lacks its token."""
    if kind == "kubernetes":
        return KubernetesAccess(lambda: source.cluster)
    if kind == "none":
        if not server.is_loopback(listen):
            raise KvpoolError(f"--auth none is for loopback, and {listen} can be reached from elsewhere.")
        return OpenAccess()
    token = server.static_token(token_file)
    if token is None:
        raise KvpoolError(f"--auth token needs --token-file or {server.TOKEN_ENV}.")
    try:
        return TokenAccess(token)
    except ValueError as error:
        raise KvpoolError(f"{error}.") from None


if __name__ == "__main__":
    sys.exit(main())
