"""The daemon as a process of its own: what `kvpool up` starts. It needs no command-line packages."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence

from kvpool.daemon.log import log_to_stderr
from kvpool.daemon.loop import log, serve
from kvpool.errors import KvpoolError
from kvpool.paths import manifest_path
from kvpool.provision import plan, real_regions
from kvpool.provision.observe import observe
from kvpool.provision.plan import Skip, refusals
from kvpool.spec import PoolSpec


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve a pool that is provisioned already. Returns the exit code: 0 after SIGTERM, 1 for a failure."""
    parser = argparse.ArgumentParser(prog="kvpool.daemon", description=__doc__)
    parser.add_argument("name", help="the pool's name")
    parser.add_argument("--host", type=int, default=0, help="host number")
    parser.add_argument("--ready-fd", type=int, help="where to write 'ready', or the error, as a line")
    given = parser.parse_args(arguments)
    log_to_stderr()
    tell = _Teller(given.ready_fd)
    try:
        _serve(given.name, given.host, tell)
    except KvpoolError as error:
        log.error("failed pool=%s host=%d error=%r", given.name, given.host, str(error))
        tell(str(error))
        return 1
    return 0


def _serve(name: str, host: int, tell: _Teller) -> None:
    spec = PoolSpec.from_file(manifest_path(name))
    actions = plan(spec, host, observe(spec, host, real_regions().inspect))
    refused = refusals(actions)
    if refused is not None:
        raise refused
    skipped = {action.tier: action.reason for action in actions if isinstance(action, Skip)}
    serve(spec, host, skipped, ready=lambda: tell("ready"), refused=lambda why: tell(f"not ready: {why}"))


class _Teller:
    """Tells whoever waits how the start went: once, for its number may be another file's afterwards."""

    def __init__(self, fd: int | None) -> None:
        self._fd = fd

    def __call__(self, text: str) -> None:
        fd, self._fd = self._fd, None
        if fd is None:
            return
        with contextlib.suppress(OSError):  # nobody waits any more
            os.write(fd, text.encode() + b"\n")
            os.close(fd)


if __name__ == "__main__":
    sys.exit(main())
