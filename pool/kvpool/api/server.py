"""The process that serves the API: where it listens, who may ask, and a clean end."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Sequence
from pathlib import Path

import uvicorn

from kvpool.api import DEFAULT_PORT as DEFAULT_PORT
from kvpool.api.access import Access, OpenAccess, TokenAccess
from kvpool.api.app import create_app
from kvpool.api.guard import LOOPBACK_NAMES
from kvpool.api.history import History, MemoryHistory
from kvpool.api.service import Service
from kvpool.daemon.log import log_to_stderr
from kvpool.errors import KvpoolError, WrongUse
from kvpool.quantity import shown

TOKEN_ENV = "KVPOOL_API_TOKEN"
REDIS_ENV = "KVPOOL_API_REDIS"
END_S = 3  # what is still open after so long is cut off


def start_logging() -> None:
    """What happens goes to standard error, as the daemon's does."""
    log_to_stderr()


def is_loopback(address: str) -> bool:
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def static_token(path: str | None) -> str | None:
    """The token in a file, else in the environment. Raises: KvpoolError for a file that cannot be read."""
    if path is None:
        return os.environ.get(TOKEN_ENV) or None
    try:
        return Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise KvpoolError(f"{path}: {error}. Expected a file that holds the API's token.") from None


def access_for(address: str, token: str | None) -> Access:
    """Open on loopback, with the token elsewhere.

    Raises:  KvpoolError when others could read without a token.
    """
    if token is not None:
        try:
            return TokenAccess(token)
        except ValueError as error:
            raise KvpoolError(f"{error}.") from None
    if is_loopback(address):
        return OpenAccess()
    raise KvpoolError(
        f"{address} can be reached from other machines: set {TOKEN_ENV} or --token-file, "
        "or listen on 127.0.0.1."
    )


def open_metrics_for(address: str) -> bool:
    """Whether /metrics is read without a token: on loopback, where a Prometheus of this machine asks."""
    return is_loopback(address)


def history_for(given: str | None) -> History:
    """In Redis when --redis gives a URL, else when the environment has one, else in memory.

    Raises:  WrongUse for a URL that is none, KvpoolError when the package is missing.
    """
    url = given or os.environ.get(REDIS_ENV)
    if not url:
        return MemoryHistory()
    try:
        from kvpool.api.shared_history import RedisHistory  # late: a package of its own

        return RedisHistory(url)
    except ImportError:
        raise KvpoolError(
            "a history in Redis needs its client: pip install '.[redis]' in a checkout of kvpool."
        ) from None
    except ValueError:
        name = "--redis" if given else REDIS_ENV
        raise WrongUse(f"{name} is no URL of a Redis; write one like redis://HOST:6379/0.") from None


PROXY_HELP = "a proxy whose X-Forwarded-For says who asks, like 10.0.0.0/8; may be repeated"


def hosts_for(address: str, allowed: list[str]) -> frozenset[str] | None:
    """The names by which the API may be asked: any, unless it is open to whoever reaches it."""
    return LOOPBACK_NAMES | frozenset(allowed) if is_loopback(address) else None


def listening(address: str, port: int, option: str = "--port") -> socket.socket:
    """A socket that listens. Raises: KvpoolError when the port is taken; `option` chooses another."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise KvpoolError(
            f"the status API cannot listen on {address} port {port}: {error.strerror}. "
            f"Choose another with {option}."
        ) from None
    return listener


def url_of(listener: socket.socket) -> str:
    """How the API is asked, from this machine."""
    address, port = listener.getsockname()[:2]
    return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"


def proxies_for(given: Sequence[str]) -> str:
    """Whose X-Forwarded-For is believed, for uvicorn. Raises: WrongUse for what is no address."""
    for proxy in given:
        try:
            ipaddress.ip_network(proxy, strict=False)
        except ValueError:
            raise WrongUse(
                f"--trusted-proxy {shown(proxy)} is no address. Write one like 10.0.0.7, or 10.0.0.0/8."
            ) from None
    return ",".join(given)


def config_of(service: Service, proxies: str = "") -> uvicorn.Config:
    """How the API is served; `proxies` comes from `proxies_for`."""
    return uvicorn.Config(
        create_app(service),
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=END_S,
        timeout_keep_alive=30,
        limit_concurrency=None,
        h11_max_incomplete_event_size=32 * 1024,
        proxy_headers=bool(proxies),
        forwarded_allow_ips=proxies,
    )


def serve(service: Service, listener: socket.socket, proxies: str = "") -> None:
    """Answer requests until SIGTERM or SIGINT."""
    uvicorn.Server(config_of(service, proxies)).run(sockets=[listener])
