"""The status API under load: many pools and nodes, requests at a fixed rate, event streams, a slow reader.

    python tests/bench/status_api.py [--pools 1000] [--nodes 5000] [--rate 200] [--seconds 20] [--streams 500]

The server has one core. Exits with 1 when a bound of BOUNDS is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

BOUNDS = {"p99_ms": 50.0, "with_streams_p99_ms": 50.0, "rss_mib": 300.0, "errors": 0, "streams_behind": 0}
UPDATE_S = 1.0


# --- the server ---------------------------------------------------------------------------------------------


def serve(port: int, pools: int, nodes: int) -> None:
    """A source of so many pools, whose every pool changes each second, behind the real server."""
    from api.statuses import StillSource, counters, pool
    from kvpool.api import model, server
    from kvpool.api.guard import Limit
    from kvpool.api.pace import Pace
    from kvpool.api.service import Service

    each = nodes // pools
    source = StillSource(*[_at(pool(f"pool-{i:04}", f"team-{i % 20}", nodes=each)) for i in range(pools)])

    async def run() -> None:
        turn = 0
        while True:
            began = time.monotonic()
            turn += 1
            pace = Pace()
            for key in list(source.board.known()):
                before = source.board.get(key)
                assert before is not None
                lookups = 100 + 10 * turn
                shown = before.pool.model_copy(
                    update={
                        "lookups": lookups,
                        "hits": lookups - 20,
                        "hit_rate": model.percent(lookups - 20, lookups),
                    }
                )
                counted = counters(lookups, lookups - 20)
                source.board.put(_at(replace(before, pool=shown, counters=counted, series={"node": counted})))
                await pace.turn()
            await asyncio.sleep(max(0.0, UPDATE_S - (time.monotonic() - began)))

    source.run = run  # type: ignore[method-assign]
    service = Service(source, limit=Limit(per_second=1e9, burst=10**9))
    server.serve(service, server.listening("127.0.0.1", port))


def _at(status: Any) -> Any:
    return replace(status, observed_at=time.time())


# --- the clients --------------------------------------------------------------------------------------------


@dataclass
class Seen:
    """What the clients measured."""

    latencies_s: list[float] = field(default_factory=list)
    errors: int = 0
    events: list[int] = field(default_factory=list)  # a stream
    opening_s: float = 0.0  # of all streams, one after the other


async def _connect(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)


async def _get(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, path: str) -> tuple[int, int]:
    """Status and length of an answer, over a connection that is kept."""
    writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    length = int(head.partition("content-length: ")[2].partition("\r\n")[0])
    await reader.readexactly(length)
    return int(head[9:12]), length


async def _asker(port: int, path: str, every_s: float, offset_s: float, until: float, seen: Seen) -> None:
    """Asks at fixed times. A late answer counts from the time at which it should have been asked for."""
    reader, writer = await _connect(port)
    due = time.monotonic() + offset_s
    while due < until:
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        code, _ = await _get(reader, writer, path)
        seen.latencies_s.append(time.monotonic() - due)
        seen.errors += code != 200
        due += every_s
    writer.close()


async def _opened(port: int, pool: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """An event stream whose first event has come."""
    reader, writer = await _connect(port)
    writer.write(f"GET {pool}/events HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    await reader.readuntil(b"event: status")
    return reader, writer


async def _listener(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, until: float, seen: Seen, *, slow: bool
) -> None:
    count = 0
    while time.monotonic() < until:
        if slow:
            await asyncio.sleep(0.5)  # takes nothing
            continue
        try:
            line = await asyncio.wait_for(reader.readline(), max(0.01, until - time.monotonic()))
        except asyncio.TimeoutError:
            break
        count += line.startswith(b"event: status")
    if not slow:
        seen.events.append(count)
    writer.close()


async def measure(port: int, given: argparse.Namespace, path: str, streams: int) -> Seen:
    seen = Seen()
    pools = [f"/v1/pools/team-{i % 20}/pool-{i % given.pools:04}" for i in range(streams)]
    slow = ["/v1/pools/team-0/pool-0000"] * (5 if streams else 0)
    began = time.monotonic()
    opened = [await _opened(port, pool) for pool in [*pools, *slow]]
    seen.opening_s = time.monotonic() - began
    until = time.monotonic() + given.seconds
    connections = 20
    listeners = [
        _listener(reader, writer, until, seen, slow=i >= streams) for i, (reader, writer) in enumerate(opened)
    ]
    askers = [
        _asker(port, path, connections / given.rate, i / given.rate, until, seen) for i in range(connections)
    ]
    await asyncio.gather(*listeners, *askers)
    return seen


def _rss_mib(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pools", type=int, default=1000)
    parser.add_argument("--nodes", type=int, default=5000)
    parser.add_argument("--rate", type=float, default=200.0)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve(given.serve, given.pools, given.nodes)
        return 0
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    cores = sorted(os.sched_getaffinity(0))
    command = [
        sys.executable,
        __file__,
        "--serve",
        str(port),
        "--pools",
        str(given.pools),
        "--nodes",
        str(given.nodes),
    ]
    process = subprocess.Popen(command, preexec_fn=lambda: os.sched_setaffinity(0, cores[:1]))
    os.sched_setaffinity(0, cores[1:] or cores)
    try:
        result = asyncio.run(_all(port, given, process.pid))
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(20)
    print(json.dumps(result, indent=2))
    missed = [name for name, bound in BOUNDS.items() if result[name] > bound]
    if missed:
        print(f"missed: {', '.join(missed)} (bounds {BOUNDS})")
    return 1 if missed else 0


async def _all(port: int, given: argparse.Namespace, pid: int) -> dict[str, Any]:
    for _ in range(600):
        try:
            await _get(*await _connect(port), "/readyz")
            break
        except (OSError, asyncio.IncompleteReadError):
            await asyncio.sleep(0.1)
    _, size = await _get(*await _connect(port), "/v1/pools")
    before = _cpu_s(pid)
    await asyncio.sleep(5)
    idle = (_cpu_s(pid) - before) / 5  # the source of this benchmark itself
    before = _cpu_s(pid)
    plain = await measure(port, given, "/v1/pools", 0)
    plain_cpu = (_cpu_s(pid) - before) / given.seconds
    rss = _rss_mib(pid)
    before = _cpu_s(pid)
    busy = await measure(port, given, "/v1/pools", given.streams)
    busy_cpu = (_cpu_s(pid) - before) / given.seconds
    least = int(given.seconds / UPDATE_S * 0.8)
    return {
        "pools": given.pools,
        "nodes": given.nodes,
        "rate": given.rate,
        "answer_bytes": size,
        "cpu_share_source_alone": round(idle, 3),
        "cpu_share": round(plain_cpu, 3),
        "cpu_share_with_streams": round(busy_cpu, 3),
        **_times(plain, ""),
        "rss_mib": round(rss, 1),
        "errors": plain.errors + busy.errors,
        "streams": given.streams,
        "opening_streams_s": round(busy.opening_s, 2),
        **_times(busy, "with_streams_"),
        "rss_with_streams_mib": round(_rss_mib(pid), 1),
        "events_per_stream_min": min(busy.events, default=0),
        "streams_behind": sum(count < least for count in busy.events),
    }


def _times(seen: Seen, prefix: str) -> dict[str, float]:
    ordered = sorted(seen.latencies_s)
    at = {f"{prefix}p50_ms": 0.5, f"{prefix}p99_ms": 0.99, f"{prefix}max_ms": 1.0}
    return {
        name: round(1000 * ordered[min(len(ordered) - 1, int(q * len(ordered)))], 2) for name, q in at.items()
    }


if __name__ == "__main__":
    sys.exit(main())
