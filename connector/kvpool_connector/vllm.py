"""`KVPoolConnector`: vLLM's callbacks in, session calls out. vLLM 0.29 to 0.33.

    --kv-transfer-config '{
        "kv_connector": "KVPoolConnector", "kv_connector_module_path": "kvpool_connector.vllm",
        "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"pool": "NAME or manifest", "host": 0}}'

vLLM makes one object in the scheduler's process and one in each rank's worker. Each worker derives the
namespace of its blocks from the cache that it really has, and the scheduler's object gets them all through
the handshake that vLLM offers for this: it never guesses what a rank stores.

Signatures take more arguments than they use, because they differ between versions.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from kvpool import Namespace, Pool

from . import identity, pages
from .guard import GuardedPool, logger
from .plan import StepPlan
from .prefill import HostStopwatch, NoStopwatch, Stopwatch
from .session import SchedulerSession, WorkerSession
from .settings import Settings, SettingsError
from .stopwatch import DeviceStopwatch
from .tally import Tally

try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
except ImportError:  # older versions do not tell sources apart
    CacheHitSource = None


@dataclass
class KVPoolMetadata(KVConnectorMetadata):
    """What the scheduler tells every rank for one step."""

    plan: StepPlan = field(default_factory=StepPlan)


@dataclass
class KVPoolHandshake(KVConnectorHandshakeMetadata):
    """What a rank tells the scheduler once."""

    namespace: Namespace


class BlockHashes(Sequence[bytes]):
    """A request's hashes, one a block, as they are now: of several finer ones, the last covers the block.

    Holds the request and not its list, which an engine may replace when the request gets more input.
    """

    def __init__(self, request: Any, per_block: int) -> None:
        self._request = request
        self._per_block = per_block

    def __len__(self) -> int:
        return len(self._request.block_hashes) // self._per_block

    def __getitem__(self, index: Any) -> Any:
        hashes, per_block = self._request.block_hashes, self._per_block
        if per_block == 1:
            return hashes[index]
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return hashes[index * per_block + per_block - 1]


class KVPoolConnector(KVConnectorBase_V1, SupportsHMA):
    """Reuses KV blocks through a kvpool pool.

    Promises: the engine gets a block as it was stored, or recomputes it. A failing pool costs hits only.
    Raises:   at start only: SettingsError for an engine or settings that cannot work, KvpoolError for a pool
              that cannot be opened.
    """

    if CacheHitSource is not None:
        _cache_hit_source = CacheHitSource.HOST

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self._config = vllm_config
        self._settings = Settings.parse(transfer.kv_connector_extra_config)
        self._consumes, self._produces = transfer.is_kv_consumer, transfer.is_kv_producer
        identity.refuse_unsupported(vllm_config, kv_cache_config, loads=self._consumes)
        self._block_tokens, self._hashed_tokens = identity.block_tokens(vllm_config, kv_cache_config)
        self._block_count = int(kv_cache_config.num_blocks)
        self._layout_name = str(getattr(kv_cache_config, "kv_cache_layout", None) or "engine")
        self._scheme = identity.hash_scheme(
            vllm_config, self._hashed_tokens, environment=os.environ, fixed_seed=_fixed_seed()
        )
        self._in_background = _loads_in_background(self._settings, vllm_config)
        engine = str(getattr(transfer, "engine_id", None) or "")  # the same in all processes of an engine
        self._pool = GuardedPool(Pool.open(self._settings.pool, host=self._settings.host, engine=engine))
        self._tally = Tally()
        self._scheduler: SchedulerSession | None = None
        self._worker: WorkerSession | None = None
        self._namespace: Namespace | None = None

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # a block that is not stored is a miss later

    # ---- scheduler ----

    def set_xfer_handshake_metadata(self, metadata: Any) -> None:
        told = [metadata[rank] for rank in sorted(metadata)]
        namespaces = [rank.namespace for rank in told if isinstance(rank, KVPoolHandshake)]
        expected = int(self._config.parallel_config.tensor_parallel_size)
        if len(namespaces) != expected:
            raise SettingsError(
                f"kvpool: {len(namespaces)} of {expected} ranks told what they store. With MultiConnector, "
                "list KVPoolConnector first: only one connector's ranks can tell their scheduler something."
            )
        self._scheduler = SchedulerSession(
            self._pool,
            namespaces,
            block_tokens=self._block_tokens,
            min_tokens=self._settings.min_tokens,
            loads=self._consumes,
            stores=self._produces and self._settings.store != "none",
            store_generated=self._settings.store == "all",
            in_background=self._in_background,
            tally=self._tally,
        )
        for namespace in namespaces:
            logger.info("kvpool_ready pool=%s namespace=%s", self._settings.pool, namespace.describe())

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Any) -> None:
        self.set_xfer_handshake_metadata({tp_rank: told for (_pp_rank, tp_rank), told in metadata.items()})

    def on_new_request(self, request: Any) -> None:
        if self._scheduler is not None:
            self._scheduler.open_request(
                request.request_id,
                BlockHashes(request, self._block_tokens // self._hashed_tokens),
                request.num_prompt_tokens,
            )

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int, *_: Any) -> tuple[int, bool]:
        if self._scheduler is None or getattr(request, "skip_reading_prefix_cache", False):
            return 0, False
        tokens = self._scheduler.match(request.request_id, num_computed_tokens, request.num_tokens)
        return tokens, self._in_background and tokens > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int, *_: Any) -> None:
        if self._scheduler is not None:
            table = blocks.get_block_ids()[0] if num_external_tokens else ()
            self._scheduler.admit(request.request_id, table, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVPoolMetadata:
        session = self._scheduler
        if session is None:
            return KVPoolMetadata()
        steps = scheduler_output.num_scheduled_tokens
        for new in scheduler_output.scheduled_new_reqs:
            session.scheduled(
                new.req_id,
                new.block_ids[0],
                replace=True,
                computed_tokens=new.num_computed_tokens,
                step_tokens=steps[new.req_id],
            )
        known = scheduler_output.scheduled_cached_reqs
        for request_id, block_ids, computed in zip(
            known.req_ids, known.new_block_ids, known.num_computed_tokens, strict=True
        ):
            session.scheduled(
                request_id,
                block_ids[0] if block_ids else (),
                replace=request_id in known.resumed_req_ids,
                computed_tokens=computed,
                step_tokens=steps[request_id],
            )
        return KVPoolMetadata(session.take_plan())

    def update_connector_output(self, connector_output: Any) -> None:
        if self._scheduler is not None:
            self._scheduler.loads_failed(getattr(connector_output, "invalid_block_ids", None) or ())

    def request_finished_all_groups(self, request: Any, block_ids: Any, *_: Any) -> tuple[bool, None]:
        if self._scheduler is not None:
            self._scheduler.close_request(request.request_id)
        return False, None  # everything is copied before a step ends

    def request_finished(self, request: Any, block_ids: Any, *_: Any) -> tuple[bool, None]:
        return self.request_finished_all_groups(request, block_ids)

    def reset_cache(self, *_: Any) -> bool:
        """Engines ask for this when their weights changed: the fingerprint no longer holds."""
        if self._scheduler is not None:
            logger.warning(
                "kvpool_off: the engine's caches were reset, so its weights may have changed since they were "
                "fingerprinted. Nothing is loaded or stored until the engine is restarted."
            )
            self._scheduler.stop()
        return True

    # ---- worker ----

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        layers = pages.describe(kv_caches, self._block_count)
        cache = pages.open_cache(layers, always_stage=self._settings.staging == "always")
        if self._settings.prefault:
            pages.prefault(layers)
        self._namespace = identity.namespace(
            self._config,
            self._settings,
            identity.CacheLayout(
                self._layout_name,
                [layer.inside for layer in layers],
                cache.block_bytes,
                _attention(self._config, layers),
            ),
            tp_rank=_tp_rank(),
            block=self._block_tokens,
            scheme=self._scheme,
            weights=identity.weights(self._config, self._settings),
            version=vllm.__version__,
        )
        self._worker = WorkerSession(
            self._pool,
            self._namespace,
            cache,
            agree=_agree,
            tally=self._tally,
            stopwatch=_stopwatch(layers[0].tensor.device.type),
        )
        self._pool.attempt(self._pool.pool.record_use, self._namespace)

    def get_handshake_metadata(self) -> KVPoolHandshake | None:
        return None if self._namespace is None else KVPoolHandshake(self._namespace)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """The first thing of a step in every version; loads come before the forward pass or behind it."""
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None:
            self._worker.begin_step()

    def start_load_kv(self, forward_context: Any, **_: Any) -> None:
        if self._worker is not None:
            self._worker.start_loads(self._plan())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: what a step needs is loaded before it."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **_: Any) -> None:
        """Nothing yet: a block is stored whole, when all its layers are there."""

    def wait_for_save(self) -> None:
        if self._worker is not None:
            self._worker.store(self._plan())

    def get_finished(self, finished_req_ids: Iterable[str]) -> tuple[set[str] | None, set[str] | None]:
        return None, (self._worker.take_loaded() or None) if self._worker is not None else None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.take_failed() if self._worker is not None else set()

    def _plan(self) -> StepPlan:
        metadata = self._get_connector_metadata()
        return metadata.plan if isinstance(metadata, KVPoolMetadata) else StepPlan()

    # ---- both ----

    def get_kv_connector_stats(self) -> Any:
        data = self._tally.take()
        return None if data is None else self.build_kv_connector_stats(data)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Any:
        from .metrics import KVPoolStats

        return KVPoolStats(data)

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> Any:
        from .metrics import KVPoolPromMetrics

        return KVPoolPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()
        self._pool.close()


def _stopwatch(device: str) -> Stopwatch:
    if device == "cpu":
        return HostStopwatch()
    return DeviceStopwatch() if device == "cuda" else NoStopwatch()


def _fixed_seed() -> str | None:
    """The seed that this version's cryptographic block hashes start from; None where it is random."""
    from vllm.v1.core import kv_cache_utils

    seed = getattr(kv_cache_utils, "DEFAULT_NONE_HASH_SEED", None)
    return None if seed is None else str(seed)


def _loads_in_background(settings: Settings, config: Any) -> bool:
    """Whether loads run beside the steps.

    With asynchronous scheduling the next step is under way before a failed load of this one is known, and its
    token would be delivered. A load in the background is over before its request runs, so nothing is built on
    it.
    """
    ahead = bool(getattr(config.scheduler_config, "async_scheduling", False))
    if ahead and settings.load == "sync":
        raise SettingsError(
            "kvpool: load=sync with asynchronous scheduling could deliver tokens computed from a block that "
            "failed to load. Set load to async (or leave it out), or give the engine --no-async-scheduling."
        )
    return settings.load == "async" or ahead


def _tp_rank() -> int:
    from vllm.distributed import get_tensor_model_parallel_rank

    return int(get_tensor_model_parallel_rank())


def _agree(mine: bool) -> bool:
    """True in all ranks when it is in any."""
    from vllm.distributed import get_tp_group

    group = get_tp_group()
    if group.world_size == 1:
        return mine
    votes = torch.tensor([int(mine)], dtype=torch.int32)
    torch.distributed.all_reduce(votes, op=torch.distributed.ReduceOp.MAX, group=group.cpu_group)
    return bool(votes.item())


def _attention(config: Any, layers: Sequence[pages.Layer]) -> str:
    """The attention backend, and on a CPU its instruction set: both decide how a page is packed."""
    modules = getattr(config.compilation_config, "static_forward_context", {})
    names = set()
    for layer in layers:
        module = modules.get(layer.name)
        backend = getattr(module, "attn_backend", None)
        names.add(backend.get_name() if backend is not None else type(module).__name__)
    parts = sorted(names)
    if layers[0].tensor.device.type == "cpu":
        parts.append(torch.backends.cpu.get_cpu_capability())
        amx = getattr(torch.cpu, "_is_amx_tile_supported", None)
        parts.append("amx" if amx is not None and amx() else "no-amx")
    return "/".join(parts)
