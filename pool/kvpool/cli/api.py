"""`kvpool api`, and the status API that `kvpool up` starts beside the daemons."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Annotated
from urllib.parse import urlsplit

import typer

from kvpool import paths
from kvpool.api import DEFAULT_PORT
from kvpool.cli import output as out
from kvpool.daemon.lock import holder, stop
from kvpool.errors import KvpoolError, WrongUse

PORT_ENV = "KVPOOL_API_PORT"
NEEDED = ("fastapi", "uvicorn", "prometheus_client")
START_S = 20.0
END_S = 10.0

PortOption = Annotated[
    int | None,
    typer.Option(
        "--api",
        metavar="PORT",
        min=0,
        max=65535,
        help=f"Port of the status API on 127.0.0.1; else {PORT_ENV} (off for none), else {DEFAULT_PORT}.",
        show_default=False,
    ),
]
NoApiOption = Annotated[bool, typer.Option("--no-api", help="Start no status API.")]


@dataclass(frozen=True, slots=True)
class Wanted:
    """Where the API is to be served; `asked` when somebody said so, and wants to know when it cannot be."""

    port: int
    asked: bool


def wanted(port: int | None, no_api: bool) -> Wanted | None:
    """What the options and the environment say; None for no API.

    Raises:  WrongUse for a port that is none, KvpoolError when the API was asked for and its packages are
             missing.
    """
    if no_api and port is not None:
        raise WrongUse("--api and --no-api contradict each other; give one of them.")
    if no_api:
        return None
    if port is None and os.environ.get(PORT_ENV) == "off":
        return None
    if port is None:
        port = _port_of_environment()
    result = Wanted(DEFAULT_PORT if port is None else port, asked=port is not None)
    missing = _missing()
    if missing and result.asked:
        raise KvpoolError(missing)
    return result


def _port_of_environment() -> int | None:
    given = os.environ.get(PORT_ENV, "")
    if given in ("", "off"):
        return None
    if not given.isdecimal() or int(given) > 65535:
        raise WrongUse(f"{PORT_ENV} is not a port; set it to a number up to 65535, or to off.")
    return int(given)


def _missing() -> str:
    absent = [name for name in NEEDED if find_spec(name) is None]
    if not absent:
        return ""
    needed = ", ".join(absent)
    return f"the status API needs {needed}: pip install '.[api]' in a checkout, into this environment."


def start(asked: Wanted | None) -> str | None:
    """The URL of this machine's status API, which is started when it does not run; None when it cannot be.

    Why not is a note, and no failure: the pool is up without it.
    """
    if asked is None:
        return None
    missing = _missing()
    if missing:
        out.note(f"no status API: {missing} Or leave it out with --no-api.")
        return None
    try:
        url = _running()
        if url is None:
            return _started(asked.port)
        if asked.port not in (0, urlsplit(url).port) and asked.asked:
            out.note(f"the status API already runs at {url}, for all pools of this machine")
        return url
    except KvpoolError as error:
        out.note(f"no status API: {error}")
        return None


def stop_when_idle() -> bool:
    """Ends the API when no daemon of any pool runs on this machine."""
    locks = paths.runtime_dir().glob("*/daemon.h*.lock")
    if any(holder(lock) is not None for lock in locks):
        return False
    return stop(paths.api_lock_path(), END_S, kill=True) is not None


def _running() -> str | None:
    if holder(paths.api_lock_path()) is None:
        return None
    try:
        return paths.api_address_path().read_text().strip() or None
    except OSError:
        return None


def _started(port: int) -> str:
    """Start it in the background. The socket is made here: what is wrong with it is said here."""
    from kvpool.api import server  # late: the packages may be missing

    try:
        listener = server.listening("127.0.0.1", port, "--api")
    except KvpoolError:
        deadline = time.monotonic() + 2  # another `kvpool up` may be just starting it
        while time.monotonic() < deadline:
            if url := _running():
                return url
            time.sleep(0.05)
        raise
    with listener:
        url = server.url_of(listener)
        environment = os.environ | {paths.RUNTIME_ENV: str(paths.runtime_dir())}
        with open(paths.api_log_path(), "ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "kvpool.api", "--companion", str(listener.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                pass_fds=(listener.fileno(),),
                cwd="/",
                env=environment,
            )
    deadline = time.monotonic() + START_S
    while holder(paths.api_lock_path()) != process.pid:
        if process.poll() is not None:
            if url := _running():
                return url
            raise KvpoolError(f"it ended while it started; see {paths.api_log_path()}")
        if time.monotonic() > deadline:
            process.terminate()
            raise KvpoolError(f"it did not start within {START_S:g} s; see {paths.api_log_path()}")
        time.sleep(0.02)
    process.returncode = 0  # it outlives us on purpose
    return url


@out.reports_errors
def api(
    listen: Annotated[
        str, typer.Option("--listen", help="Address; other than loopback needs a token.")
    ] = "127.0.0.1",
    port: Annotated[
        int | None,
        typer.Option(
            "--port",
            min=0,
            max=65535,
            help=f"0 takes a free one; else {PORT_ENV}, else {DEFAULT_PORT}.",
            show_default=False,
        ),
    ] = None,
    token_file: Annotated[
        str | None,
        typer.Option("--token-file", help="File with a token that each request needs.", show_default=False),
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-host",
            metavar="NAME",
            help="Another name by which it may be asked on loopback; may be repeated.",
            show_default=False,
        ),
    ] = None,
    redis: Annotated[
        str | None,
        typer.Option("--redis", metavar="URL", help="Keep the history there; else KVPOOL_API_REDIS."),
    ] = None,
    trusted_proxy: Annotated[
        list[str] | None,
        typer.Option(
            "--trusted-proxy",
            metavar="ADDRESS",
            help="A proxy whose X-Forwarded-For says who asks, like 10.0.0.0/8; may be repeated.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Serve the status API of this machine's pools here, until Ctrl-C.

    `kvpool up` starts it by itself, on loopback. This is for another address, or for a service manager.
    """
    missing = _missing()
    if missing:
        raise KvpoolError(missing)
    from kvpool.api import server
    from kvpool.api.local import LocalSource
    from kvpool.api.service import Service

    server.start_logging()
    proxies = server.proxies_for(trusted_proxy or [])
    access = server.access_for(listen, server.static_token(token_file))
    history = server.history_for(redis)
    if port is None:
        port = _port_of_environment()
    listener = server.listening(listen, DEFAULT_PORT if port is None else port)
    service = Service(
        LocalSource(),
        history=history,
        access=access,
        hosts=server.hosts_for(listen, allow_host or []),
        open_metrics=server.open_metrics_for(listen),
    )
    out.note(f"status API: {server.url_of(listener)}")
    server.serve(service, listener, proxies)
