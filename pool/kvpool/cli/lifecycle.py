"""`kvpool up`, `kvpool down` and the daemon that they start and stop."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from kvpool import paths
from kvpool.cli import api, target
from kvpool.cli import output as out
from kvpool.cli.output import Output, OutputOption
from kvpool.daemon.last_report import last_report
from kvpool.daemon.lock import holder, stop
from kvpool.daemon.log import log_to_stderr
from kvpool.daemon.loop import serve
from kvpool.errors import GeometryError, KvpoolError, RegionBusyError
from kvpool.provision import provision, real_regions
from kvpool.provision.plan import Action, Await, Format, Keep, Skip, in_this_version
from kvpool.provision.remove import region_paths, remove
from kvpool.quantity import human_bytes
from kvpool.regions_here import hosts_here, regions_of
from kvpool.spec import PoolSpec
from kvpool.users import refuse_strangers, serves_another, users_of

LOG_TAIL_BYTES = 2000
TERMINATE_S = 10.0


@out.reports_errors
def up(
    name: target.NameArgument = None,
    file: target.FileOption = None,
    host: target.HostOption = None,
    foreground: Annotated[
        bool,
        typer.Option("--foreground", help="Stay and be the daemon; for containers and service managers."),
    ] = False,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for other hosts and the daemon.")] = 60.0,
    api_port: api.PortOption = None,
    no_api: api.NoApiOption = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Make the regions of a pool where they are missing, start its daemon, and wait until it is ready.

    Regions that fit the manifest are kept with all their blocks. Run it again after a change of the manifest.
    The status API of this machine's pools is started beside it, unless it stays in the foreground.
    """
    # In the foreground only when it was asked for by option: whatever runs it may want one process.
    serving = None if foreground and api_port is None else api.wanted(api_port, no_api)
    target.one_of(name, file)
    spec = target.read_manifest(file) if file else target.pool(name, file)
    number = target.host_or_default(host, spec.name)
    before = _kept_manifest(spec.name)
    _refuse_moved(before, spec, number)
    refuse_strangers(spec, number)
    with _sigterm_ends(), out.byte_progress("making") as progress:
        actions = provision(spec, number, timeout_s=timeout, progress=progress, waiting=out.note)
    skipped = {action.tier: action.reason for action in actions if isinstance(action, Skip)}
    for tier, reason in skipped.items():
        out.note(f'warning: optional tier "{tier}" is left out: {reason}')
    for path in _left_behind(before, spec, number):
        out.note(
            f"warning: {path} is in the manifest no more, and keeps its blocks; remove the file to free them"
        )
    if foreground:
        log_to_stderr()
        serve(
            spec,
            number,
            skipped,
            ready=lambda: _print_up(spec, number, os.getpid(), actions, output, api.start(serving)),
            refused=lambda why: out.note(f"not ready: {why}"),
        )
        return
    lock = paths.daemon_lock_path(spec.name, number)
    running = holder(lock)
    lost = running is not None and serves_another(spec, number, running, skipped)
    if running is not None and before == spec and not lost:
        _print_up(spec, number, running, actions, output, api.start(serving))
        return
    if running is not None:
        why = "its region was removed or replaced" if lost else "the manifest has changed"
        out.note(f"{why}: starting the daemon anew")
        stop(lock, timeout)
    pid = _start_daemon(spec.name, number, timeout)
    _print_up(spec, number, pid, actions, output, api.start(serving))


@contextlib.contextmanager
def _sigterm_ends() -> Iterator[None]:
    """SIGTERM as an exception: else a half-made file stays, and a container's first process ignores it."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _left_behind(before: PoolSpec | None, after: PoolSpec, host: int) -> list[Path]:
    """The regions of the manifest that was in force before, which the new one does not name."""
    if before is None:
        return []
    now = region_paths(after, [host])
    return [path for path in region_paths(before, [host]) if path not in now and path.exists()]


def _refuse_moved(before: PoolSpec | None, after: PoolSpec, host: int) -> None:
    """Raises: GeometryError when a tier has its blocks at another path than the new manifest says."""
    kept = {tier.name: tier for tier in before.tiers} if before is not None else {}
    for index, tier in enumerate(after.tiers):
        old = kept.get(tier.name)
        if before is None or old is None or in_this_version(old) or in_this_version(tier):
            continue
        there, asked = paths.region_path(before, old, host), paths.region_path(after, tier, host)
        if old.source == tier.source or there == asked or not there.exists():
            continue
        if asked.exists() and there.samefile(asked):
            continue
        declared = old.source.path if old.source else None
        back = f"source.path: {declared}" if declared else "no source"
        raise GeometryError(
            f'tier "{tier.name}": its region is {there}, and spec.tiers[{index}].source is for {asked} now. '
            f"Nothing was changed. To keep its blocks write {back}; to give them up, run "
            f"'kvpool down {after.name} --delete' first, or write a tier of another name in its place."
        )


def _kept_manifest(name: str) -> PoolSpec | None:
    path = paths.manifest_path(name)
    return PoolSpec.from_file(path) if path.exists() else None


def _start_daemon(name: str, host: int, timeout_s: float) -> int:
    """Start the daemon in the background; returns its process id once it is ready."""
    reader, writer = os.pipe()
    log_path = paths.daemon_log_path(name, host)
    command = [sys.executable, "-m", "kvpool.daemon", name, "--host", str(host), "--ready-fd", str(writer)]
    # Its working directory is the root, so that it keeps no file system from being unmounted; a relative
    # runtime directory must then be said in full.
    environment = os.environ | {paths.RUNTIME_ENV: str(paths.runtime_dir())}
    try:
        with open(log_path, "ab") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                pass_fds=(writer,),
                cwd="/",
                env=environment,
            )
    except OSError as error:
        os.close(reader)
        raise KvpoolError(f"the daemon cannot be started: {error.strerror}: {error.filename}.") from None
    finally:
        os.close(writer)
    with open(reader, "rb") as said:
        ready = _read_line(said.fileno(), timeout_s)
    if ready == b"ready":
        process.returncode = 0  # it outlives us on purpose: no warning, and nobody waits for it
        return process.pid
    process.terminate()
    try:
        process.wait(TERMINATE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    other = _other_daemon(name, host, process.pid, timeout_s)
    if other is not None:
        return other
    if ready is None:
        raise KvpoolError(
            f"the daemon was not ready within {timeout_s:g} s and was stopped. Its log: {log_path}"
        )
    if ready:
        raise KvpoolError(ready.decode())
    raise KvpoolError(
        f"the daemon ended while it started. The end of its log ({log_path}):\n{_tail(log_path)}"
    )


def _other_daemon(name: str, host: int, ours: int, timeout_s: float) -> int | None:
    """The daemon that another `kvpool up` started meanwhile, once it is ready; None when there is none."""
    deadline = time.monotonic() + timeout_s
    lock = paths.daemon_lock_path(name, host)
    while (pid := holder(lock)) is not None and pid != ours and time.monotonic() < deadline:
        if (last_report(name, host) or {}).get("pid") == pid:
            return pid
        time.sleep(0.05)
    return None


def _read_line(fd: int, timeout_s: float) -> bytes | None:
    """What the daemon says at its start: ready, an error, or nothing (it ended); None when time is up."""
    deadline, said = time.monotonic() + timeout_s, b""
    while True:
        readable, _, _ = select.select([fd], [], [], max(0.0, deadline - time.monotonic()))
        if not readable:
            return None
        piece = os.read(fd, 65536)
        said += piece
        if not piece or said == b"ready\n":
            return said.strip()


def _tail(path: Path) -> str:
    return path.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace").strip()


def _print_up(
    spec: PoolSpec, host: int, pid: int, actions: list[Action], output: Output, api_url: str | None
) -> None:
    rows = [_up_row(spec, action) for action in actions]
    coherence = _coherence(spec.name, host)
    if output is Output.JSON:
        up = {"name": spec.name, "host": host, "pid": pid, "ready": True, "api": api_url, "tiers": rows}
        out.print_json(up | {"coherence": coherence})
        return
    for row in rows:
        row["capacity"] = human_bytes(row.pop("capacity_bytes"))
    out.print_table(rows, numbers=("capacity",))
    unverified = {
        "NoPeer": "; coherence not verified yet: no other host runs",
        "PeerMissing": "; coherence not verified yet with all hosts: some do not run",
    }.get(coherence, "")
    out.say(f'pool "{spec.name}" is ready: host {host}, daemon {pid}{unverified}')
    if api_url:
        out.say(f"status API: {api_url}")


def _coherence(name: str, host: int) -> str:
    """The reason in the verdict of the daemon's litmus test; empty when it has said none."""
    with contextlib.suppress(KeyError, TypeError):
        for condition in (last_report(name, host) or {})["conditions"]:
            if condition["type"] == "CoherenceVerified":
                return str(condition["reason"])
    return ""


def _up_row(spec: PoolSpec, action: Action) -> dict[str, Any]:
    done = {Format: "made", Keep: "kept", Await: "joined", Skip: "left out"}.get(type(action), "")
    path = "" if isinstance(action, Skip) else str(getattr(action, "path", ""))
    tier = spec.tier(action.tier)
    return {
        "tier": tier.name,
        "medium": tier.medium,
        "capacity_bytes": tier.capacity_bytes,
        "region": done,
        "path": path,
    }


@out.reports_errors
def down(
    name: target.NameArgument = None,
    file: target.FileOption = None,
    host: Annotated[
        int | None, typer.Option("--host", min=0, help="Stop this host only; else all on this machine.")
    ] = None,
    delete: Annotated[
        bool,
        typer.Option("--delete", help="Remove the regions with all blocks, whatever deletionPolicy says."),
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Delete even while engines use the pool.")] = False,
    kill: Annotated[bool, typer.Option("--kill", help="Kill a daemon that does not stop in time.")] = False,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for each daemon.")] = 30.0,
    output: OutputOption = Output.TABLE,
) -> None:
    """Stop the daemons of a pool on this machine. Engines go on without them.

    Blocks are kept for the next `kvpool up`, unless --delete or deletionPolicy: Delete says otherwise.
    """
    spec = target.pool(name, file)
    hosts = hosts_here(spec)
    if host is not None and host not in hosts:  # one may still run that the manifest has no more
        target.require_host(spec, host)
    if host is not None and delete:  # half of a pool cannot be deleted: shared regions belong to all hosts
        out.wrong_use("--delete removes the whole pool; leave --host out.")
    deleting = host is None and (delete or spec.deletion_policy == "Delete")
    if deleting:
        _refuse_while_used(spec, force=force)
    stopped = []
    for number in hosts if host is None else [host]:
        done = stop(paths.daemon_lock_path(spec.name, number), timeout, kill=kill)
        if done is not None:
            stopped.append({"host": number, "pid": done.pid, "killed": done.killed})
    api.stop_when_idle()
    removed = remove(region_paths(spec, hosts), real_regions().inspect) if deleting else []
    if deleting:
        shutil.rmtree(paths.pool_dir(spec.name), ignore_errors=True)
    _print_down(spec, stopped, removed, deleting, output)


def _refuse_while_used(spec: PoolSpec, *, force: bool) -> None:
    """Raises: RegionBusyError when a process is attached to a region that is to be removed."""
    users = users_of(spec)
    daemons = [user for user in users if user.role == "daemon"]
    if users and not force:
        listed = ", ".join(map(str, users))
        way_out = "Stop these processes first"
        if not daemons:
            way_out += ", or add --force: they go on, but nobody else finds what they store"
        raise RegionBusyError(
            f'pool "{spec.name}" is in use by {listed}. Nothing was stopped or removed. {way_out}.'
        )
    if daemons:
        listed = ", ".join(map(str, daemons))
        raise RegionBusyError(
            f'pool "{spec.name}" has regions that another pool serves: they are in use by {listed}. '
            "Nothing was stopped or removed, --force or not. Stop that pool first."
        )


def _print_down(
    spec: PoolSpec, stopped: list[dict[str, Any]], removed: list[Path], deleted: bool, output: Output
) -> None:
    kept = [] if deleted else [str(r.path) for r in regions_of(spec) if r.path.exists()]
    if output is Output.JSON:
        result = {"name": spec.name, "stopped": stopped, "removed": [str(p) for p in removed], "kept": kept}
        out.print_json(result)
        return
    for daemon_ in stopped:
        how = "killed" if daemon_["killed"] else "stopped"
        out.say(f"{how} daemon {daemon_['pid']} of host {daemon_['host']}")
    for path in removed:
        out.say(f"removed {path}")
    for path_ in kept:
        out.say(f"kept {path_} with its blocks")
    if not stopped and not removed:
        out.say(f'pool "{spec.name}" was not running')
