"""What an engine needs of the pool, in its words and without its code: requests, block hashes, block ids.

`SchedulerSession` decides what to load and what to store; `WorkerSession`, one in each rank, does it. Between
them travels a `StepPlan`, and the ids of the blocks that failed travel back.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import ParamSpec, Protocol

from kvpool import KeyBatch, LookupResult, MissReason, Namespace, Pool

from .guard import GuardedPool, logger
from .plan import HASH_BYTES, StepPlan, Transfer, Work
from .prefill import Curve, HostStopwatch, NoStopwatch, Savings, Stopwatch
from .tally import Tally

# A waiting request is asked for at every scheduling attempt, up to thousands of times. Blocks may come and go
# in the meantime, and both errors are harmless: a hit that is gone fails its load, a new block is found a
# moment later.
LOOKUP_TTL_S = 0.1
_P = ParamSpec("_P")
CURVE_EVERY = 16  # steps between two reports of how long this engine computes


class PagedCache(Protocol):
    """Moves whole blocks between the pool and an engine's cache (`pages` has those for paged tensors).

    Result:  one outcome code a block (bytes): 0 hit or stored, 1 present, above 1 a reason.
    Threads: a load may run beside a store, for other block ids.
    Raises:  whatever the pool raises; the cache then holds garbage in the blocks of a load.
    """

    @property
    def block_bytes(self) -> int: ...

    def load(self, pool: Pool, keys: KeyBatch, block_ids: Sequence[int]) -> bytes: ...

    def store(self, pool: Pool, keys: KeyBatch, block_ids: Sequence[int]) -> bytes: ...


@dataclass(slots=True)
class _Lookup:
    first: int  # index of the first block that was asked for
    end: int
    hit_count: int  # usable blocks, in every rank
    results: list[LookupResult]  # one a rank; none when the pool failed
    expires: float


@dataclass(slots=True)
class _Request:
    hashes: Sequence[bytes]
    prompt_blocks: int
    block_ids: list[int] = field(default_factory=list)
    lookup: _Lookup | None = None
    counted: bool = False
    store_from: int = 0  # the first block that is not planned for storing yet
    own_from: int = 0  # the first block that this engine computes itself
    trusted_end: int | None = None  # a block that failed to load is not asked for again
    external: range = range(0)  # the blocks that were last loaded for this request itself
    spoiled: bool = False  # computed on a block that failed in another request


class SchedulerSession:
    """Plans loads and stores.

    Threads: one.  Raises: nothing; a pool that fails has no blocks.
    Source:  a block has the same index in a request's hashes and in its block table.
    """

    def __init__(
        self,
        pool: GuardedPool,
        namespaces: Sequence[Namespace],
        *,
        block_tokens: int,
        min_tokens: int = 0,
        loads: bool = True,
        stores: bool = True,
        store_generated: bool = False,
        in_background: bool = False,
        tally: Tally | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool = pool
        self._namespaces = list(namespaces)
        self._block_tokens = block_tokens
        self._min_blocks = -(-min_tokens // block_tokens)
        self._loads = loads
        self._stores = stores
        self._store_generated = store_generated
        self._in_background = in_background
        self.tally = tally or Tally()
        self._clock = clock
        self._requests: dict[str, _Request] = {}
        self._plan = StepPlan()
        self._epoch = 0

    @property
    def request_count(self) -> int:
        """Requests that are being followed; 0 when the engine is idle."""
        return len(self._requests)

    def open_request(self, request_id: str, hashes: Sequence[bytes], prompt_tokens: int) -> None:
        """Follow a request. `hashes` is kept, and read again as it grows."""
        if request_id not in self._requests:
            self._requests[request_id] = _Request(hashes, prompt_tokens // self._block_tokens)

    def stop(self) -> None:
        """From now on there is nothing to load and nothing to store."""
        self._loads = self._stores = False

    def close_request(self, request_id: str) -> None:
        self._requests.pop(request_id, None)

    def match(self, request_id: str, computed_tokens: int, total_tokens: int) -> int:
        """How many tokens after the first `computed_tokens` the pool can give. Free of side effects."""
        request = self._requests.get(request_id)
        if request is None or not self._loads or computed_tokens % self._block_tokens:
            return 0
        first = computed_tokens // self._block_tokens
        # The engine has to compute at least one token itself, to have something to sample from.
        end = min((total_tokens - 1) // self._block_tokens, len(request.hashes))
        if request.trusted_end is not None:
            end = min(end, request.trusted_end)
        if end <= first:
            request.lookup = None
            return 0
        known = request.lookup
        now = self._clock()
        if known is None or (known.first, known.end) != (first, end) or now >= known.expires:
            known = request.lookup = self._look_up(request, first, end)
        if known.hit_count < max(1, self._min_blocks):
            return 0
        return known.hit_count * self._block_tokens

    def _look_up(self, request: _Request, first: int, end: int) -> _Lookup:
        hashes = b"".join(request.hashes[first:end])
        started = time.perf_counter()
        hit_count = end - first
        results: list[LookupResult] = []
        for namespace in self._namespaces:
            keys = self._pool.attempt(KeyBatch.from_hashes, namespace, hashes)
            result = None if keys is None else self._pool.lookup(keys)
            if keys is None or result is None:
                hit_count, results = 0, []
                break
            results.append(result)
            hit_count = min(hit_count, result.prefix_count)
        self.tally.took("lookup_seconds", time.perf_counter() - started)
        return _Lookup(first, end, hit_count if results else 0, results, self._clock() + LOOKUP_TTL_S)

    def admit(self, request_id: str, block_ids: Sequence[int], external_tokens: int) -> None:
        """The engine gave the request its blocks, and takes `external_tokens` from the pool (0: none).

        `block_ids` is the whole table, from the request's first block on.
        """
        request = self._requests.get(request_id)
        if request is None:
            return
        lookup, request.lookup = request.lookup, None
        if lookup is not None and not request.counted:
            request.counted = True
            self._count_misses(lookup, taken=external_tokens > 0)
        count = external_tokens // self._block_tokens
        if not count:
            return
        request.block_ids = list(block_ids)
        if lookup is None or count > lookup.hit_count:
            # Not what was offered, so which blocks are meant is a guess: all of them fail, and are computed.
            logger.error("kvpool_plan_mismatch request=%s external_tokens=%d", request_id, external_tokens)
            self._plan.loads.append(Transfer(request_id, b"", list(block_ids), self._in_background))
            return
        span = slice(lookup.first, lookup.first + count)
        request.own_from = request.store_from = span.stop
        request.external = range(span.start, span.stop)
        self._plan.loads.append(
            Transfer(
                request_id,
                b"".join(request.hashes[span]),
                request.block_ids[span],
                self._in_background,
                lookup.first * self._block_tokens,
            )
        )

    def _count_misses(self, lookup: _Lookup, *, taken: bool) -> None:
        """Count what the pool did not have, for each rank. What it had is counted by the loads."""
        asked = lookup.end - lookup.first
        self.tally.count("requested_blocks", asked * len(self._namespaces))
        if not lookup.results:
            for namespace in self._namespaces:
                self._record(namespace, MissReason.TIER_ERROR, asked)
            return
        usable = lookup.hit_count
        declined = 0 < usable < self._min_blocks
        for namespace, result in zip(self._namespaces, lookup.results, strict=True):
            counts: dict[MissReason, int] = {}
            # Blocks behind the first gap share its reason: hashes are chained, they are of no use without it.
            behind = MissReason.NEVER_STORED
            for reason in result.reasons[usable:]:
                behind = reason or behind
                counts[behind] = counts.get(behind, 0) + 1
            if declined and not taken:
                counts[MissReason.BELOW_MINIMUM] = counts.get(MissReason.BELOW_MINIMUM, 0) + usable
            for reason, count in counts.items():
                self._record(namespace, reason, count)

    def _record(self, namespace: Namespace, reason: MissReason, count: int) -> None:
        self._pool.record_misses(reason, count, namespace)
        self.tally.count_reason("missed_blocks", reason.value, count)

    def scheduled(
        self,
        request_id: str,
        new_block_ids: Sequence[int],
        *,
        replace: bool,
        computed_tokens: int,
        step_tokens: int,
    ) -> None:
        """The request runs in this step: `step_tokens` after `computed_tokens`. Plans what becomes full.

        `replace`: the ids are a new table and not an addition to the old one (first time, or resumed).
        """
        if self._loads:
            self._plan.work.add(computed_tokens, step_tokens)
        request = self._requests.get(request_id)
        if request is None:
            return
        if replace:
            request.block_ids = list(new_block_ids)
            # What is computed already came from the engine's own cache, and was stored when it was computed,
            # or from the pool. After a preemption the engine may have lost some of it: that is computed and
            # stored again.
            request.own_from = request.store_from = computed_tokens // self._block_tokens
        else:
            request.block_ids.extend(new_block_ids)
        if not self._stores or request.spoiled:
            return
        end = min(
            (computed_tokens + step_tokens) // self._block_tokens, len(request.hashes), len(request.block_ids)
        )
        if not self._store_generated:
            end = min(end, request.prompt_blocks)
        if end > request.store_from:
            span = slice(request.store_from, end)
            self._plan.stores.append(
                Transfer(request_id, b"".join(request.hashes[span]), request.block_ids[span])
            )
            request.store_from = end

    def take_plan(self) -> StepPlan:
        """The plan of the step that starts now; the next one begins empty."""
        plan, self._plan = self._plan, StepPlan()
        plan.epoch = self._epoch
        return plan

    def loads_failed(self, block_ids: Iterable[int]) -> None:
        """Some rank could not load these blocks. The engine computes them again, and all behind them."""
        failed = set(block_ids)
        if not failed:
            return
        # Workers drop the stores of the epoch in which a load failed: what was computed on top is wrong.
        self._epoch += 1
        for request in self._requests.values():
            hit = next((i for i, block_id in enumerate(request.block_ids) if block_id in failed), None)
            if hit is not None:
                request.trusted_end = hit if request.trusted_end is None else min(hit, request.trusted_end)
                request.own_from = min(request.own_from, hit)
                # Shared through the engine's own cache. The engine lets only the other request compute it
                # again, and nothing here says that it has done so before this one runs on.
                request.spoiled = request.spoiled or hit not in request.external
            request.store_from = min(request.store_from, request.own_from)


class WorkerSession:
    """Moves blocks between the pool and one rank's cache.

    Threads: one engine thread; loads in the background have a thread of their own.
    Raises:  nothing; what cannot be loaded is a failed block, what cannot be stored is not stored.
    """

    def __init__(
        self,
        pool: GuardedPool,
        namespace: Namespace,
        cache: PagedCache,
        *,
        agree: Callable[[bool], bool] = bool,
        tally: Tally | None = None,
        stopwatch: Stopwatch | None = None,
    ) -> None:
        """`agree` is called by all ranks in the same steps, and is True in all when it got True in any."""
        self._pool = pool
        self._namespace = namespace
        self._cache = cache
        self._agree = agree
        self.tally = tally or Tally()
        self._stopwatch = stopwatch or HostStopwatch()
        self._curve = Curve()
        self._saved = Savings()
        self._failed: set[int] = set()
        self._wrong_until_epoch = -1
        self._lock = threading.Lock()
        self._done: dict[str, set[int]] = {}
        self._closing = False
        self._jobs: queue.SimpleQueue[Transfer | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def begin_step(self) -> None:
        """Before anything of a step."""
        self._timed(self._stopwatch.start)

    def start_loads(self, plan: StepPlan) -> None:
        """Load what this step needs, and hand the rest to the background. Engines that have nothing to load
        for this step may call it behind the forward pass."""
        self._timed(self._stopwatch.pause)
        try:
            self._start_loads(plan)
        finally:
            self._timed(self._stopwatch.resume)

    def _start_loads(self, plan: StepPlan) -> None:
        needed = [transfer for transfer in plan.loads if not transfer.in_background]
        if needed:
            failed: set[int] = set()
            for transfer in needed:
                failed |= self._load(transfer)
            self._failed |= failed
            # Attention mixes what all ranks hold: a gap in one spoils what every rank computes in this step.
            if self._agree(bool(failed)):
                self._wrong_until_epoch = plan.epoch
        for transfer in plan.loads:
            if transfer.in_background:
                self._start_thread()
                self._jobs.put(transfer)

    def store(self, plan: StepPlan) -> None:
        """After the forward pass: store the blocks that it filled."""
        self._timed(self._stopwatch.stop, plan.work)
        self._timed(self._measure)
        if plan.epoch <= self._wrong_until_epoch:
            return
        for transfer in plan.stores:
            self._store(transfer)

    def take_loaded(self) -> set[str]:
        """Requests whose background load is over. Blocks that failed are in `take_failed` from now on."""
        with self._lock:
            done, self._done = self._done, {}
        for failed in done.values():
            self._failed |= failed
        return set(done)

    def take_failed(self) -> set[int]:
        failed, self._failed = self._failed, set()
        return failed

    def close(self) -> None:
        """Wait for the load that is running; those that have not started are dropped."""
        self._closing = True
        thread, self._thread = self._thread, None
        if thread is not None:
            self._jobs.put(None)
            thread.join()

    def _load(self, transfer: Transfer) -> set[int]:
        """Load; the ids of the blocks that hold garbage now."""
        started = time.perf_counter()
        codes = self._pool.attempt(self._load_blocks, transfer)
        self.tally.took("load_seconds", time.perf_counter() - started)
        if codes is None:
            failed = set(transfer.block_ids)
            self.tally.count_reason("missed_blocks", MissReason.TIER_ERROR.value, len(failed))
        else:
            failed = {block_id for block_id, code in zip(transfer.block_ids, codes, strict=True) if code}
            for reason in LookupResult(codes).reasons if failed else ():
                if reason is not None:
                    self.tally.count_reason("missed_blocks", reason.value, 1)
            self._count_saved(transfer, codes)
        hits = len(transfer.block_ids) - len(failed)
        self.tally.count("hit_blocks", hits)
        self.tally.count("failed_blocks", len(failed))
        self.tally.count("loaded_bytes", hits * self._cache.block_bytes)
        return failed

    def _count_saved(self, transfer: Transfer, codes: bytes) -> None:
        """The engine goes on behind the first block that failed; what came before it is not computed."""
        blocks = LookupResult(codes).prefix_count
        if blocks:
            with self._lock:
                self._saved.add(transfer.context_tokens, blocks * self._namespace.block_tokens, blocks)

    def _timed(self, call: Callable[_P, object], *args: _P.args, **kwargs: _P.kwargs) -> None:
        """Measuring must not cost the engine a step: once it fails, it ends."""
        try:
            call(*args, **kwargs)
        except Exception as error:
            self._stopwatch = NoStopwatch()
            logger.warning("kvpool_not_timed error=%r: hits are counted, and seconds saved are not", error)

    def _measure(self) -> None:
        """Learn from the passes that are over, and tell what hits have saved as soon as that is known."""
        over = self._stopwatch.take()
        for work, seconds in over:
            self._curve.add(work, seconds)
        if over and (self._curve.samples < CURVE_EVERY or self._curve.samples % CURVE_EVERY == 0):
            self._pool.attempt(self._pool.pool.record_curve, self._curve.report())
        if not self._saved.blocks:
            return
        with self._lock:
            saved = self._saved
            saving_s = self._curve.seconds(Work(saved.tokens, saved.pairs))
            if saving_s is None:
                return
            self._saved = Savings()
        self._pool.attempt(self._pool.pool.record_saved, self._namespace, saving_s, saved.blocks)

    def _load_blocks(self, transfer: Transfer) -> bytes | None:
        if len(transfer.hashes) != HASH_BYTES * len(transfer.block_ids):
            return None  # see SchedulerSession.admit
        keys = KeyBatch.from_hashes(self._namespace, transfer.hashes)
        return self._cache.load(self._pool.pool, keys, transfer.block_ids)

    def _store(self, transfer: Transfer) -> None:
        started = time.perf_counter()
        codes = self._pool.attempt(self._store_blocks, transfer)
        self.tally.took("store_seconds", time.perf_counter() - started)
        if codes is None:
            self.tally.count_reason("declined_blocks", MissReason.TIER_ERROR.value, len(transfer.block_ids))
            return
        stored, present = codes.count(0), codes.count(1)
        self.tally.count("stored_blocks", stored)
        self.tally.count("present_blocks", present)
        self.tally.count("stored_bytes", stored * self._cache.block_bytes)
        if stored + present < len(codes):
            for reason in LookupResult(codes).reasons:
                if reason is not None:
                    self.tally.count_reason("declined_blocks", reason.value, 1)

    def _store_blocks(self, transfer: Transfer) -> bytes:
        keys = KeyBatch.from_hashes(self._namespace, transfer.hashes)
        return self._cache.store(self._pool.pool, keys, transfer.block_ids)

    def _start_thread(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kvpool-load", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while (transfer := self._jobs.get()) is not None:
            if self._closing:
                continue
            failed = self._load(transfer)
            with self._lock:
                self._done[transfer.request_id] = failed
