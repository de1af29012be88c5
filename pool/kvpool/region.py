"""A region: the formatted bytes of one tier, found, formatted and attached (DESIGN 4)."""

from __future__ import annotations

import functools
import json
import logging
import os
import socket
import stat
import time
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from kvpool import _native
from kvpool.buffers import Blocks, to_native
from kvpool.errors import FencedError, GeometryError, KvpoolError, RegionBusyError
from kvpool.geometry import BYTES_MAX, COUNT_MAX, extents_within, region_info
from kvpool.geometry import Coherence as Coherence
from kvpool.geometry import Geometry as Geometry
from kvpool.geometry import RegionInfo as RegionInfo
from kvpool.keys import KeyBatch, Namespace
from kvpool.medium import distance_note
from kvpool.outcomes import CODE_BY_REASON, REASON_BY_CODE, LoadResult, LookupResult, MissReason, StoreResult
from kvpool.paths import is_device_path
from kvpool.region_file import Progress, allocate, os_error, require_space
from kvpool.region_file import default_lock_path as default_lock_path
from kvpool.report import (
    AdoptReport,
    Counters,
    FsckReport,
    HeartbeatReport,
    HostUsage,
    NamespaceUsage,
    ParticipantInfo,
    PeerLitmus,
    PoisonReport,
    ReapReport,
    RepairReport,
    ResizeReport,
    ScrubReport,
    ShardOwner,
    SlotInfo,
    Usage,
)
from kvpool.text import flat

log = logging.getLogger("kvpool.region")

Role = Literal["engine", "daemon", "tool"]

_ROLES: dict[str, int] = {"engine": 1, "daemon": 2, "tool": 3}
_ROLE_NAMES = {v: k for k, v in _ROLES.items()}
_SLOT_STATES = ("free", "writing", "stored", "lent", "retired")
_HEARTBEAT_PATIENCE_S = 3.0  # three beats of the daemon
_FIRST_BUCKET_LOG2 = 8  # layout.h kLatencyFirstLog2
_WRONG_NAMESPACE = CODE_BY_REASON[MissReason.WRONG_NAMESPACE]
FORMAT_VERSION: int = _native.FORMAT_VERSION


def layout_table() -> str:
    """The persisted structures as this build writes them, as text."""
    return _native.layout_table()


@functools.cache
def boot_id() -> bytes:
    """16 bytes that change with every boot of this machine."""
    try:
        return bytes.fromhex(Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", ""))
    except (OSError, ValueError):
        return bytes(16)


class Region:
    """One process's attachment to a region, as a participant of one host.

    Threads: all methods may be called from any thread; calls that copy or wait release the GIL. A child
             process after fork must attach for itself.
    """

    def __init__(self, native: _native.Region, path: str, host: int) -> None:
        self._native = native
        self.path = path
        self.host = host
        self.info = region_info(path, native.superblock())
        note = distance_note(self.info.medium.numa_node)
        if note:
            log.warning("far_medium region=%s note=%r", path, note)
        self._namespaces: dict[bytes, int] = {}
        self._finalizer = weakref.finalize(self, native.close)

    # -- making and finding ------------------------------------------------------------------------------

    @staticmethod
    def format(
        path: str | Path,
        geometry: Geometry,
        *,
        force: bool = False,
        preallocate: bool = True,
        progress: Progress | None = None,
    ) -> RegionInfo:
        """Makes an empty region. A file is created, or replaced with `force`; a device keeps its size.

        Raises: RegionBusyError when there is a region already (without `force`) or somebody uses it,
        GeometryError, MediumUnavailable. Nothing is changed then.
        `progress(done_bytes, total_bytes)` is called while memory is allocated.
        """
        path = os.fspath(path)
        arguments = geometry.arguments(path)
        plan = _native.plan(**arguments)  # sizes first: a wrong one must not leave a file behind
        zeroed = False
        if os.path.exists(path):
            mode = os.stat(path).st_mode
            if not stat.S_ISDIR(mode):
                # Asked by trying: only that tells a read-only filesystem from a missing permission.
                try:
                    os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))
                except OSError as e:
                    raise os_error(path, e, "be opened") from e
            if _native.looks_formatted(path) and not force:
                raise RegionBusyError(
                    f"region {path}: there is a kvpool region already. Nothing was changed. "
                    f"Erase it with 'kvpool format {path} --capacity SIZE --force'."
                )
            # A file at a device's place was handed out like a device: it is used as it is, and not replaced.
            if stat.S_ISREG(mode) and not is_device_path(Path(path)):
                size = os.path.getsize(path)
                if size and not force:
                    raise RegionBusyError(
                        f"region {path}: the file exists and is not a kvpool region ({size} bytes). "
                        "Nothing was changed. Choose another path, or overwrite it with "
                        f"'kvpool format {path} --capacity SIZE --force'."
                    )
                ensure_unused(path)
                require_space(path, geometry.capacity_bytes, preallocate, reuse=os.stat(path).st_blocks * 512)
                try:
                    os.unlink(path)
                except OSError as e:
                    raise os_error(path, e, "be replaced") from e
        if not os.path.exists(path):
            require_space(path, geometry.capacity_bytes, preallocate, reuse=0)
            filled = _filled(plan, geometry.capacity_bytes) if preallocate else []
            allocate(path, geometry.region_bytes, filled, progress)
            zeroed = True
        try:
            _native.format(
                path=path, lock_path=default_lock_path(path), force=force, zeroed=zeroed, **arguments
            )
            if geometry.region_bytes > geometry.capacity_bytes:
                _native.limit_region(path, geometry.capacity_bytes)
        except BaseException:
            if zeroed:
                os.unlink(path)
            raise
        return Region.inspect(path)

    @staticmethod
    def inspect(path: str | Path) -> RegionInfo:
        """What the superblock says. Changes nothing.

        Raises: SuperblockError, FormatVersionError, GeometryError, MediumUnavailable.
        """
        path = os.fspath(path)
        return region_info(path, _native.inspect(path))

    @classmethod
    def attach(
        cls,
        path: str | Path,
        *,
        host: int = 0,
        role: Role = "engine",
        node_name: str | None = None,
        lock_path: str | Path | None = None,
    ) -> Region:
        """Joins as a participant of `host`: cleans up after its processes that died; then all calls work.

        A shard that was last used in another boot of the machine is refused (FencedError); the daemon takes
        it over instead (PROTOCOL 5).

        Raises: MediumUnavailable, SuperblockError, FormatVersionError, GeometryError (no such host),
        RegionBusyError (all entries taken).
        """
        path = os.fspath(path)
        if role not in _ROLES:
            raise KvpoolError(
                f"region {path}: role {role!r} does not exist; expected one of {', '.join(_ROLES)}"
            )
        if not 0 <= host <= COUNT_MAX:
            raise GeometryError(
                f"region {path}: host {host} does not exist; hosts count from 0. "
                "Give the number of this machine's shard."
            )
        lock = os.fspath(lock_path) if lock_path is not None else default_lock_path(path)
        node = node_name or os.environ.get("KVPOOL_NODE_NAME") or socket.gethostname()
        take_over = role == "daemon"
        if take_over:
            _refuse_living_owner(path, host, lock, node)
        return cls(
            _native.Region(path, host, _ROLES[role], False, take_over, lock, node, boot_id()), path, host
        )

    @classmethod
    def open_read_only(cls, path: str | Path, *, lock_path: str | Path | None = None) -> Region:
        """Opens to look only: no participant entry is taken, nothing is written. For status, fsck, dump."""
        path = os.fspath(path)
        lock = os.fspath(lock_path) if lock_path is not None else default_lock_path(path)
        return cls(_native.Region(path, 0, _ROLES["tool"], True, False, lock, "", b""), path, 0)

    def close(self) -> None:
        """Leaves the region. Further calls raise RegionError."""
        self._finalizer()

    def __enter__(self) -> Region:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def participant(self) -> int:
        return self._native.participant

    @property
    def capacity_bytes(self) -> int:
        """The bytes of the whole region that may be used now, directory included."""
        return self._native.capacity_bytes()

    # -- blocks ------------------------------------------------------------------------------------------

    def lookup(self, keys: KeyBatch) -> LookupResult:
        """Which keys are stored, on any host. No side effects; counts nothing."""
        return LookupResult(self._native.lookup(keys.packed))

    def load(self, keys: KeyBatch, out: Blocks) -> LoadResult:
        """Copies the payloads of `keys` into `out`, each one verified by its checksum. See `Pool.load`."""
        size = keys.namespace.block_bytes
        b = to_native(out, len(keys), size, writable=True)
        return LoadResult(*self._native.load(keys.packed, b.base, b.stride, b.bytes, b.ids, b.pieces, size))

    def store(self, keys: KeyBatch, blocks: Blocks) -> StoreResult:
        """Stores the blocks that are not there yet. See `Pool.store`."""
        size = keys.namespace.block_bytes
        b = to_native(blocks, len(keys), size, writable=False)
        codes = b""
        for _ in range(2):
            code, index = self._namespace_index(keys.namespace)
            if code:
                return StoreResult(bytes([code]) * len(keys))
            codes = self._native.store(keys.packed, b.base, b.stride, b.bytes, b.ids, b.pieces, size, index)
            if _WRONG_NAMESPACE not in codes:
                break
            self._namespaces.pop(keys.namespace.digest, None)  # its row was damaged since: open another one
        return StoreResult(codes)

    def _namespace_index(self, namespace: Namespace) -> tuple[int, int]:
        index = self._namespaces.get(namespace.digest)
        if index is not None:
            return 0, index
        description = json.dumps(namespace.describe(), separators=(",", ":"))
        code, index = self._native.open_namespace(namespace.digest, namespace.block_bytes, description)
        if code == 0:
            # A row that was damaged may be another namespace's by now.
            others = {digest: row for digest, row in self._namespaces.items() if row != index}
            self._namespaces = {**others, namespace.digest: index}
        return code, index

    def record(self, lookups: int, hits: int, misses: dict[MissReason, int] | None = None) -> None:
        """Adds to this participant's counters what became of `lookups` keys: hits + the sum of the misses."""
        by_code = [(misses or {}).get(r, 0) if r is not None else 0 for r in REASON_BY_CODE]
        self._native.record(lookups, hits, by_code)

    # -- truth -------------------------------------------------------------------------------------------

    def counters(self) -> Counters:
        """Totals over all participants of all hosts since the region was formatted."""
        return _counters(self._native.counters(0, self.info.hosts))

    def counters_of(self, host: int) -> Counters:
        """Totals over all participants of one host."""
        return _counters(self._native.counters(host, host + 1))

    def usage(self) -> Usage:
        """How full the region is, by a walk over all slot headers: about 10 ns a slot."""
        hosts, namespaces = self._native.usage()
        rows = [
            HostUsage(
                host=h["host"],
                node_name=h["node_name"],
                state="ready" if h["state"] else "never attached",
                epoch=h["epoch"],
                incarnation=h["incarnation"],
                heartbeat=h["heartbeat"],
                capacity_bytes=h["capacity_bytes"],
                used_bytes=h["used_bytes"],
                blocks=h["blocks"],
                slots_total=h["slots"],
                slots_free=h["slots_free"],
                extents_total=h["extents"],
                extents_free=h["extents_free"],
                owner=h["owner"],
                slots_retired=h["slots_retired"],
            )
            for h in hosts
        ]
        return Usage(
            capacity_bytes=sum(h.capacity_bytes for h in rows),
            used_bytes=sum(h.used_bytes for h in rows),
            blocks=sum(h.blocks for h in rows),
            slots_total=sum(h.slots_total for h in rows),
            slots_free=sum(h.slots_free for h in rows),
            extents_total=sum(h.extents_total for h in rows),
            extents_free=sum(h.extents_free for h in rows),
            hosts=rows,
            namespaces=[
                NamespaceUsage(
                    n["digest"], _description(n["description"]), n["block_bytes"], n["blocks"], n["bytes"]
                )
                for n in namespaces
            ],
        )

    def namespaces(self) -> list[NamespaceUsage]:
        """The namespaces that the region knows, with what it holds of each. Walks over all slot headers."""
        return self.usage().namespaces

    def known_namespaces(self) -> dict[str, dict[str, object]]:
        """Digest (hex) and description of the namespaces that the region knows; no blocks are counted."""
        _, namespaces = self._native.usage(count_slots=False)
        return {n["digest"]: _description(n["description"]) for n in namespaces}

    def participants(self) -> list[ParticipantInfo]:
        """Processes that are attached, and dead ones that nobody reaped yet.

        Whether a process of another host lives is only known there.
        """
        return [
            ParticipantInfo(host, index, _ROLE_NAMES.get(role, str(role)), pid, generation, alive)
            for host, index, role, pid, generation, alive in self._native.participants()
        ]

    def dump(self) -> Iterator[SlotInfo]:
        """Every slot that is not free."""
        for host in range(self.info.hosts):
            start = 0
            while True:
                rows, start = self._native.slots(host, start, 4096)
                for h, extent, slot, state, *rest in rows:
                    yield SlotInfo(h, extent, slot, _SLOT_STATES[state], *rest)
                if start == 0:
                    break

    def check(self) -> FsckReport:
        """Checks the structure; changes nothing, and may run beside living participants."""
        problems, totals = self._native.check()
        return FsckReport(list(problems), dict(totals))

    @staticmethod
    def fsck(path: str | Path) -> FsckReport:
        """`check` of a region that is not attached."""
        with Region.open_read_only(path) as region:
            return region.check()

    # -- upkeep (the daemon's) ---------------------------------------------------------------------------

    def evict(self, used_fraction: float, blocks_max: int) -> int:
        """Evicts this host's oldest blocks until at most `used_fraction` (0..1) of its shard is used.

        Stops earlier when `blocks_max` are gone.
        """
        if not 0 <= used_fraction <= 1 or blocks_max < 0:
            raise KvpoolError(
                f"evict down to {used_fraction}, at most {blocks_max} blocks: "
                "expected a fraction 0 to 1, and 0 or more blocks"
            )
        return self._native.evict(used_fraction, min(blocks_max, BYTES_MAX))

    def resize(self, capacity_bytes: int, *, budget_s: float = 0.05) -> ResizeReport:
        """Goes towards another capacity, within `RegionInfo.smallest_bytes` and `capacity_bytes`.

        One call takes about `budget_s`; call again until the report says that it is done. Shrinking evicts
        what lies in the part that goes, and gives its memory back to the medium; growing takes memory first.
        Concerns this host's shard only. Others may use the region meanwhile.

        Raises: MediumUnavailable when there is no memory to grow, GeometryError.
        """
        return ResizeReport(*self._native.resize(capacity_bytes, int(budget_s * 1e9)))

    def give_up(self, ranges: Iterable[tuple[int, int]]) -> PoisonReport:
        """Memory that is known to be bad, as (first byte, length) of the region: nobody stores there again.

        Blocks that lie there are dropped. Harmless to repeat, and to be repeated: what is being filled is
        left, and so are extents that nobody uses yet.
        """
        ends = [value for pair in ranges for value in pair]
        if any(not 0 <= value <= BYTES_MAX for value in ends):
            raise KvpoolError(f"bad memory at {ends}: expected pairs of a first byte and a length, 0 or more")
        return PoisonReport(*self._native.give_up(ends))

    def told_bad(self) -> list[tuple[int, int]]:
        """Pages that the kernel has told this process are bad, and that cannot be read; each of them once."""
        return self._native.told_bad()

    def set_closed(self, closed: bool) -> None:
        """Whether processes of this host store nothing new: what they offer is declined as fenced."""
        self._native.set_closed(closed)

    def acknowledged_epoch(self, shard: int) -> int:
        """Up to which claims on `shard` this host has said that it stopped writing there."""
        return self._native.acknowledged_epoch(shard)

    def reap(self) -> ReapReport:
        """Cleans up after processes of this host that died without saying goodbye."""
        return ReapReport(*self._native.reap())

    def heartbeat(self) -> HeartbeatReport:
        """Says that this host lives.

        Also tells a new owner when this host lost its shard to it, and puts a shard that this host got in
        order (PROTOCOL 5, audit) once its old owner has said so.
        """
        self._native.heartbeat()
        lost, audited = self._native.acknowledge_lost(), self._native.audit_adopted()
        shards = range(self.info.hosts)
        return HeartbeatReport(
            owners=self.owners(),
            acknowledged=[shard for shard in shards if lost >> shard & 1],
            audited=[shard for shard in shards if audited >> shard & 1],
        )

    def heartbeat_of(self, host: int) -> int:
        """A number that grows as long as the daemon of `host` runs."""
        return self._native.host(host)[2]

    def owners(self) -> list[ShardOwner]:
        """Of each shard."""
        return [ShardOwner(*owner) for owner in self._native.owners()]

    def scrub(self, *, start: int = 0, limit: int | None = None, bytes_max: int | None = None) -> ScrubReport:
        """Verifies the payload of up to `limit` of this host's blocks and evicts those that are damaged.

        Stops as soon as `bytes_max` were read.
        """
        if start < 0 or (limit is not None and limit < 0) or (bytes_max is not None and bytes_max < 1):
            raise KvpoolError(
                f"scrub from slot {start}, at most {limit} blocks, {bytes_max} bytes: "
                "expected 0 or more, and at least 1 byte"
            )
        limits = [BYTES_MAX if value is None else value for value in (limit, bytes_max)]
        return ScrubReport(*self._native.scrub(start, *limits))

    def repair(self) -> RepairReport:
        """Puts in order what `check` finds in the shards that this host owns; reads all their blocks.

        No block that could be served is lost. Others may use the region meanwhile.
        """
        return RepairReport(*self._native.repair())

    def adopt(self, host: int, epoch: int) -> AdoptReport:
        """Takes over the shard of `host`, whose processes are gone (PROTOCOL 5).

        `epoch` comes from the one arbiter.

        Raises: FencedError when the epoch is not higher than every claim so far.
        """
        if not 0 <= host < self.info.hosts:
            raise GeometryError(
                f"region {self.path}: host {host} does not exist; "
                f"it was formatted for {self.info.hosts} host(s)"
            )
        if not 0 < epoch <= BYTES_MAX:
            raise FencedError(
                f"region {self.path}: epoch {epoch} cannot be; "
                "the arbiter gives numbers from 1, each higher than the last"
            )
        return AdoptReport(*self._native.adopt(host, epoch))

    # -- litmus (kvpool.litmus) --------------------------------------------------------------------------

    def litmus_begin(self) -> bool:
        """Takes this host's turn at the litmus test; False when another process of the host has it."""
        return self._native.litmus_begin()

    def litmus_end(self) -> None:
        """Gives the turn back, and tells other hosts that nobody answers here any more."""
        self._native.litmus_end()

    def litmus_serve(self, budget_s: float) -> bool:
        """Does what other hosts ask, for as long as they go on, at most `budget_s`. True: somebody asked."""
        return self._native.litmus_serve(int(budget_s * 1e9))

    def litmus_beats(self) -> list[int]:
        """A number of each host that changes as long as somebody answers there; 0 where nobody does."""
        return self._native.litmus_beats()

    def litmus_measure(self, peer: int, rounds: int) -> PeerLitmus:
        """Measures what this host sees of the stores of `peer`. Ends within seconds, whatever it does."""
        counts, trips = self._native.litmus_measure(peer, rounds)
        trips.sort()
        boots = [self._native.host(host)[3] for host in (peer, self.host)]
        return PeerLitmus(
            host=peer,
            same_machine=boots[0] == boots[1] != bytes(16),
            round_trip_us=trips[len(trips) // 2] / 1000 if trips else 0.0,
            round_trip_max_us=trips[-1] / 1000 if trips else 0.0,
            **counts,
        )


def ensure_unused(path: str | Path, *, lock_path: str | Path | None = None) -> None:
    """Raises: RegionBusyError while a process of this machine is attached; MediumUnavailable."""
    path = os.fspath(path)
    lock = default_lock_path(path) if lock_path is None else os.fspath(lock_path)
    try:
        _native.ensure_unused(path, lock)
    except RegionBusyError as busy:
        raise RegionBusyError(f"{str(busy).rstrip('.')}{_users(path, lock)}.") from None


def _users(path: str, lock: str) -> str:
    """The processes that are attached, for the end of a sentence; empty when the region cannot say them."""
    try:
        with Region.open_read_only(path, lock_path=lock) as region:
            users = [f"{user.role} process {user.pid}" for user in region.participants() if user.alive]
    except KvpoolError:
        return ""  # it is damaged; the locks are right all the same
    return f": {', '.join(users)}" if users else ""


def _refuse_living_owner(path: str, host: int, lock: str, node: str) -> None:
    """Two machines with one host number would both write its shard: the other's heartbeat gives it away."""
    with Region.open_read_only(path, lock_path=lock) as region:
        if host >= region.info.hosts:
            return  # attaching says what is wrong
        state, _, first, boot, other = region._native.host(host)
        if not state or boot in (boot_id(), bytes(16)):
            return
        deadline = time.monotonic() + _HEARTBEAT_PATIENCE_S
        while time.monotonic() < deadline:
            time.sleep(_HEARTBEAT_PATIENCE_S / 10)
            if region._native.host(host)[2] != first:
                raise RegionBusyError(
                    f"region {path}: node {other} is alive as host {host}, and this is node {node}. "
                    "Nothing was changed. Give each machine its own host number "
                    "(KVPOOL_HOST, or 'kvpool up --host')."
                )


def _filled(plan: dict[str, Any], capacity_bytes: int) -> list[tuple[int, int]]:
    """The ranges of a new region's file that hold memory: all but what it may grow to later."""
    if capacity_bytes >= plan["region_bytes"]:
        return [(0, plan["region_bytes"])]
    used = plan["extent_offset"] + extents_within(plan, capacity_bytes) * plan["extent_whole_bytes"]
    shards = [plan["shard_offset"] + host * plan["shard_bytes"] for host in range(plan["host_count"])]
    return [(0, plan["shard_offset"]), *((first, used) for first in shards)]


def _counters(c: list[int]) -> Counters:
    reasons = [(i, r) for i, r in enumerate(REASON_BY_CODE) if r is not None]
    return Counters(
        lookups=c[0],
        hits=c[1],
        bytes_loaded=c[2],
        bytes_stored=c[3],
        stored=c[4],
        present=c[5],
        evictions=c[6],
        reaped=c[7],
        scrub_bad=c[8],
        misses={r.value: c[16 + i] for i, r in reasons if c[16 + i]},
        declined={r.value: c[32 + i] for i, r in reasons if c[32 + i]},
        load_latency=[0] * _FIRST_BUCKET_LOG2 + c[48:72],
        lookup_latency=[0] * _FIRST_BUCKET_LOG2 + c[72:96],
        store_latency=[0] * _FIRST_BUCKET_LOG2 + c[96:112],
    )


def _description(text: str) -> dict[str, object]:
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError):
        parsed = None  # cut short to fit its row, or not ours
    return flat(parsed if isinstance(parsed, dict) else {"description": text})
