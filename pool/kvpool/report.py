"""What is known about a pool at one moment: counters, usage, participants, and what a check found."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any


def percent(hits: int, lookups: int) -> str:
    """The hit rate for people, in percent with one decimal, rounded down: 100.0 means every single one."""
    return f"{hits * 1000 // lookups / 10:.1f}" if lookups else "0.0"


def _add_maps(a: Mapping[str, int], b: Mapping[str, int]) -> dict[str, int]:
    return {k: a.get(k, 0) + b.get(k, 0) for k in sorted(a.keys() | b.keys())}


def _add_lists(a: list[int], b: list[int]) -> list[int]:
    if len(a) < len(b):
        a, b = b, a
    return [x + (b[i] if i < len(b) else 0) for i, x in enumerate(a)]


@dataclass(frozen=True, slots=True)
class Counters:
    """Totals since the region was formatted; they only grow. lookups == hits + sum(misses.values()).

    Latencies are histograms of calls: element i counts the calls that took [2**i, 2**(i+1)) nanoseconds.
    """

    lookups: int = 0
    hits: int = 0
    misses: dict[str, int] = field(default_factory=dict)
    bytes_loaded: int = 0
    bytes_stored: int = 0
    stored: int = 0
    present: int = 0
    declined: dict[str, int] = field(default_factory=dict)
    evictions: int = 0
    reaped: int = 0
    scrub_bad: int = 0
    load_latency: list[int] = field(default_factory=list)
    lookup_latency: list[int] = field(default_factory=list)
    store_latency: list[int] = field(default_factory=list)

    @property
    def hit_rate(self) -> float:
        """Share of the looked-up blocks that were served; 0.0 before the first lookup."""
        return self.hits / self.lookups if self.lookups else 0.0

    def __add__(self, other: Counters) -> Counters:
        sums: dict[str, object] = {}
        for f in fields(self):
            a, b = getattr(self, f.name), getattr(other, f.name)
            if isinstance(a, dict):
                sums[f.name] = _add_maps(a, b)
            elif isinstance(a, list):
                sums[f.name] = _add_lists(a, b)
            else:
                sums[f.name] = a + b
        return Counters(**sums)  # type: ignore[arg-type]


# Durations are counted by powers of two of nanoseconds; these are shown, from 1 us to 17 s.
FIRST_BUCKET, LAST_BUCKET = 9, 33


def in_seconds(calls: Sequence[int]) -> tuple[list[tuple[float, int]], float, int]:
    """A histogram of Counters as Prometheus wants it: (upper bound, calls up to it), sum in s, and all calls.

    The sum is made from the middles of the buckets.
    """
    bounds, seen, total_s = [], 0, 0.0
    for i in range(max(len(calls), LAST_BUCKET + 1)):
        count = calls[i] if i < len(calls) else 0
        seen += count
        total_s += count * 1.5 * 2.0**i / 1e9
        if FIRST_BUCKET <= i <= LAST_BUCKET:
            bounds.append((2.0 ** (i + 1) / 1e9, seen))
    return bounds, total_s, seen


@dataclass(frozen=True, slots=True)
class NamespaceUsage:
    """One namespace that a region knows, and what it holds of it."""

    digest: str  # hex
    description: dict[str, object]
    block_bytes: int
    blocks: int
    bytes: int


@dataclass(frozen=True, slots=True)
class NamespaceCounts:
    """What engines did in one namespace, as they counted it themselves; the numbers only grow.

    `saved_us`: microseconds of prefill that loads made needless, of `timed_hits` of the hits: of the others
    nobody has measured how long computing them takes.
    """

    hits: int = 0
    misses: dict[str, int] = field(default_factory=dict)
    stored: int = 0
    present: int = 0
    declined: dict[str, int] = field(default_factory=dict)
    bytes_loaded: int = 0
    bytes_stored: int = 0
    saved_us: int = 0
    timed_hits: int = 0

    @property
    def lookups(self) -> int:
        return self.hits + sum(self.misses.values())

    def __add__(self, other: NamespaceCounts) -> NamespaceCounts:
        return NamespaceCounts(
            hits=self.hits + other.hits,
            misses=_add_maps(self.misses, other.misses),
            stored=self.stored + other.stored,
            present=self.present + other.present,
            declined=_add_maps(self.declined, other.declined),
            bytes_loaded=self.bytes_loaded + other.bytes_loaded,
            bytes_stored=self.bytes_stored + other.bytes_stored,
            saved_us=self.saved_us + other.saved_us,
            timed_hits=self.timed_hits + other.timed_hits,
        )

    def counters(self) -> Counters:
        """The same as a pool's counters: what a namespace has none of is 0."""
        return Counters(
            lookups=self.lookups,
            hits=self.hits,
            misses=dict(self.misses),
            bytes_loaded=self.bytes_loaded,
            bytes_stored=self.bytes_stored,
            stored=self.stored,
            present=self.present,
            declined=dict(self.declined),
        )


@dataclass(frozen=True, slots=True)
class NamespaceReport:
    """One namespace as engines described it, and what they did in it. The digest is empty for none known."""

    digest: str  # hex
    description: dict[str, object]
    block_bytes: int
    counts: NamespaceCounts = field(default_factory=NamespaceCounts)
    keyed: bool = False  # a tenant's: whose is in the digest only

    def __add__(self, other: NamespaceReport) -> NamespaceReport:
        """The same namespace, of other engines."""
        description = self.description or other.description
        return replace(self, description=description, counts=self.counts + other.counts)

    @property
    def saved_tokens(self) -> int | None:
        """Prompt tokens that were loaded; None when nothing says how many a block has."""
        tokens = tokens_of_block(self.description)
        return int(self.counts.hits * tokens) if tokens else None

    @property
    def saved_ms(self) -> int | None:
        """Milliseconds of prefill that hits have saved; None as long as nothing was measured."""
        return self.counts.saved_us // 1000 // ranks_of(self.description) if self.counts.timed_hits else None


def tokens_of_block(description: Mapping[str, object]) -> float:
    """Tokens that one block of one rank stands for; 0 when its namespace does not say.

    A token is there when all ranks of an engine have their part of it.
    """
    return _positive(description.get("block_tokens"), 0) / ranks_of(description)


def ranks_of(description: Mapping[str, object]) -> int:
    """The ranks that an engine of a namespace has."""
    return _positive(description.get("tp_size"), 1) * _positive(description.get("pp_size"), 1)


def _positive(value: object, otherwise: int) -> int:
    if isinstance(value, str) and value.isdecimal() and len(value) < 10:  # as custom resources have it
        value = int(value)
    return value if isinstance(value, int) and 0 < value < 1 << 32 else otherwise


@dataclass(frozen=True, slots=True)
class PrefillCurve:
    """How long an engine computes: `a_us` a token, and `b_ns` more for each token that stands before it.

    `trusted` is False as long as too little was measured.
    """

    a_us: float = 0.0
    b_ns: float = 0.0
    samples: int = 0
    trusted: bool = False


@dataclass(frozen=True, slots=True)
class EngineReport:
    """One process of an engine, and what it did in each namespace (by digest) since it opened the pool."""

    name: str
    host: int
    pid: int
    pod: str
    engine: str  # equal in all processes of one engine; empty when it did not say
    started_at: float
    ended_at: float | None  # None: it lives
    tiers: list[str]
    namespaces: dict[str, NamespaceCounts]
    curve: PrefillCurve = field(default_factory=PrefillCurve)
    more_pids: list[int] = field(default_factory=list)  # of the engine's other processes
    nth: int = 1  # of those that would be called the same, the one that lives first

    @property
    def pids(self) -> list[int]:
        return [self.pid, *self.more_pids]

    @property
    def shown(self) -> str:
        """What people call it: a process id is unique on its host, or in its pod, as long as it lives."""
        called = f"{self.pod or f'h{self.host}'}/{self.pid}"
        return called if self.nth == 1 else f"{called}#{self.nth}"

    @property
    def total(self) -> NamespaceCounts:
        return sum(self.namespaces.values(), NamespaceCounts())


def engine_from(said: Mapping[str, Any]) -> EngineReport:
    """What `asdict` made of a report of this version."""
    return EngineReport(
        **{
            **said,
            "namespaces": {
                digest: NamespaceCounts(**counts) for digest, counts in said["namespaces"].items()
            },
            "curve": PrefillCurve(**said["curve"]),
        }
    )


@dataclass(frozen=True, slots=True)
class EngineReports:
    """What is known of a pool's engines: those that live and those that ended lately, and the sums of all."""

    engines: list[EngineReport] = field(default_factory=list)
    namespaces: dict[str, NamespaceReport] = field(default_factory=dict)  # by digest, all engines since ever
    skipped: dict[str, str] = field(default_factory=dict)  # file -> why it was not read
    left_out: int = 0  # processes of engines that are counted, and not in `engines`: they are too many

    @property
    def total(self) -> NamespaceCounts:
        return sum((n.counts for n in self.namespaces.values()), NamespaceCounts())

    def __add__(self, other: EngineReports) -> EngineReports:
        """Of two hosts."""
        namespaces = dict(self.namespaces)
        for digest, more in other.namespaces.items():
            before = namespaces.get(digest)
            namespaces[digest] = more if before is None else before + more
        return EngineReports(
            self.engines + other.engines,
            namespaces,
            self.skipped | other.skipped,
            self.left_out + other.left_out,
        )

    def grouped(self) -> EngineReports:
        """The same with one entry an engine: its processes are added, under the name of the first.

        Names are unique: a process that opens the pool again, after it had closed it, is another entry.
        """
        found: dict[object, EngineReport] = {}
        for report in sorted(self.engines, key=lambda e: (e.started_at, e.name)):
            key = (report.host, report.engine) if report.engine else report.name
            before = found.get(key)
            found[key] = report if before is None else _joined(before, report)
        return replace(self, engines=_numbered(found.values()))


def _numbered(reports: Iterable[EngineReport]) -> list[EngineReport]:
    """Those of one name numbered, so that a name says which: first who lives, then the newest."""
    taken: dict[str, int] = {}
    numbers: dict[str, int] = {}
    reports = list(reports)
    for report in sorted(reports, key=lambda e: (e.ended_at is not None, -e.started_at, e.name)):
        numbers[report.name] = taken[report.shown] = taken.get(report.shown, 0) + 1
    return [replace(report, nth=numbers[report.name]) for report in reports]


def _joined(a: EngineReport, b: EngineReport) -> EngineReport:
    counts = dict(a.namespaces)
    for digest, more in b.namespaces.items():
        counts[digest] = counts.get(digest, NamespaceCounts()) + more
    ended = None if a.ended_at is None or b.ended_at is None else max(a.ended_at, b.ended_at)
    tiers = [*a.tiers, *(tier for tier in b.tiers if tier not in a.tiers)]
    curve = a.curve if a.curve.trusted or not b.curve.trusted else b.curve
    pids = a.more_pids + [pid for pid in b.pids if pid not in a.pids]
    return replace(a, namespaces=counts, ended_at=ended, tiers=tiers, curve=curve, more_pids=pids)


@dataclass(frozen=True, slots=True)
class HostUsage:
    """One host's shard."""

    host: int
    node_name: str
    state: str
    epoch: int
    incarnation: int
    heartbeat: int
    capacity_bytes: int
    used_bytes: int
    blocks: int
    slots_total: int
    slots_free: int
    extents_total: int
    extents_free: int
    owner: int  # the host that owns the shard: its own, until another one adopts it
    slots_retired: int = 0  # in memory that is bad: nobody stores there any more


@dataclass(frozen=True, slots=True)
class Usage:
    """How full a region is. `used_bytes` counts the slots that hold a block, padding included."""

    capacity_bytes: int
    used_bytes: int
    blocks: int
    slots_total: int
    slots_free: int
    extents_total: int
    extents_free: int
    hosts: list[HostUsage]
    namespaces: list[NamespaceUsage]


@dataclass(frozen=True, slots=True)
class ParticipantInfo:
    """A process that is or was attached to a region."""

    host: int
    index: int
    role: str
    pid: int
    generation: int
    alive: bool


@dataclass(frozen=True, slots=True)
class ReapReport:
    """What was cleaned up after processes that died without saying goodbye."""

    dead: int
    freed: int
    republished: int


@dataclass(frozen=True, slots=True)
class ResizeReport:
    """How far a change of a region's capacity has come; `capacity_bytes` is what may be used by now."""

    capacity_bytes: int
    extents: int  # of this host's shard, that may hold blocks
    retired: int  # extents that were emptied by this step
    done: bool


@dataclass(frozen=True, slots=True)
class PoisonReport:
    """What was given up of memory that is known to be bad, in the shards of this host."""

    slots: int  # retired by this call
    blocks: int  # that were in them, and are misses
    retired_before: int
    left: int  # being filled just now, or in an extent that nobody uses yet
    extents: int  # whose slot headers cannot be read: nobody uses them
    directory_bytes: int  # that nothing can take the place of

    @property
    def slots_retired(self) -> int:
        return self.slots + self.retired_before


@dataclass(frozen=True, slots=True)
class AdoptReport:
    """What became of the slots of a shard that changed its owner."""

    kept: int
    freed: int
    republished: int


@dataclass(frozen=True, slots=True)
class ShardOwner:
    """Who owns a shard. `settled` is False while the owner is still taking it over."""

    host: int
    epoch: int
    settled: bool


@dataclass(frozen=True, slots=True)
class HeartbeatReport:
    """What a heartbeat found: whose each shard is, and what was done about those that changed hands."""

    owners: list[ShardOwner]
    acknowledged: list[int]  # shards that this host lost and has told the new owner that it stopped
    audited: list[int]  # shards that this host got and has put in order after their old owner stopped


@dataclass(frozen=True, slots=True)
class ScrubReport:
    """What a scrub pass found; `next_slot` is where the next pass goes on (0 after the last slot).

    `failed` of the bad ones could not be read at all: the medium failed.
    """

    checked: int
    bad: int
    next_slot: int
    bytes: int = 0  # read
    failed: int = 0


@dataclass(frozen=True, slots=True)
class RepairReport:
    """What `fsck --repair` did, and what it had to leave, in sentences."""

    done: list[str]
    left: list[str]
    blocks_checked: int
    blocks_dropped: int


@dataclass(frozen=True, slots=True)
class PeerLitmus:
    """What one host measured of another one's stores. Counts are of tries, and of those that went wrong.

    `end`: "measured"; "silent" (no answer in time), "deaf" (it lives, and does not see what it is asked),
    "busy" (others asked it all the time).
    """

    host: int
    end: str
    plain: int = 0  # stores that were left in the writer's cache
    plain_stale: int = 0  # ... and not seen by a reader that had the line cached
    plain_unseen: int = 0  # ... and not even after an invalidate
    flushed: int = 0  # stores that were written back
    cached_stale: int = 0  # ... and not seen by a reader that had the line cached: a stale read
    flushed_lost: int = 0  # ... and not even after an invalidate
    ordered: int = 0  # looks at a flag, then at what was stored before it
    reordered: int = 0  # ... that was not there
    abandoned: int = 0
    round_trip_us: float = 0.0  # median
    round_trip_max_us: float = 0.0
    same_machine: bool = False

    @property
    def measured(self) -> bool:
        return self.end == "measured"


@dataclass(frozen=True, slots=True)
class FsckReport:
    """What a check of a region's structure found. `problems` is empty for a clean region."""

    problems: list[str]
    totals: dict[str, int]

    @property
    def ok(self) -> bool:
        return not self.problems


@dataclass(frozen=True, slots=True)
class SlotInfo:
    """One slot that is not free, as `kvpool dump` shows it. `key` is the first 12 hex digits only."""

    host: int
    extent: int
    slot: int
    state: str
    count: int
    participant: int
    generation: int
    key: str
    length_bytes: int
    namespace_index: int
    flags: int
    header_ok: bool
    age: int
