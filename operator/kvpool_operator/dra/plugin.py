"""The plugin's two sockets: the kubelet finds it by the one, and has claims prepared by the other.

Their names carry the pod's uid, so that a new instance registers beside the old one during a rolling update.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc

from kvpool_operator.client import UNREACHABLE, ApiError, Cluster
from kvpool_operator.dra import health, notices
from kvpool_operator.dra.allocation import UID, ClaimRef
from kvpool_operator.dra.cdi import device_name
from kvpool_operator.dra.metrics import Metrics
from kvpool_operator.dra.parameters import Refused
from kvpool_operator.dra.prepare import Preparer
from kvpool_operator.dra.wire import DRA, HEALTH, REGISTRATION, SUPPORTED, handler, message
from kvpool_operator.names import DRIVER

log = logging.getLogger("kvpool.dra")

STOP_S = 10.0  # calls that run are ended in order


class Plugin:
    """Serves the kubelet until `stop`.

    Threads: one event loop.
    """

    def __init__(
        self,
        preparer: Preparer,
        cluster: Cluster,
        kubelet: Path,
        instance: str,
        metrics: Metrics,
        driver: str = DRIVER,
    ) -> None:
        self._preparer, self._cluster, self._driver = preparer, cluster, driver
        self._metrics = metrics
        self.folder = kubelet / "plugins" / driver
        self._registry = kubelet / "plugins_registry"
        self.endpoint = self.folder / f"dra-{instance}.sock"
        self.registration = self._registry / f"{driver}-{instance}-reg.sock"
        self.registered = asyncio.Event()
        self.problem = ""  # why the kubelet would not have it
        self._servers: list[Any] = []
        self._telling: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """The service first, and only then the socket by which the kubelet finds it."""
        for folder in (self.folder, self._registry):
            folder.mkdir(parents=True, exist_ok=True)
        for stale in [*self._registry.glob(f"{self._driver}-*-reg.sock"), *self.folder.glob("dra-*.sock")]:
            if not _answers(stale):
                stale.unlink(missing_ok=True)
        self._servers.append(
            await _serve(
                self.endpoint,
                handler(
                    DRA,
                    {"NodePrepareResources": self._prepare, "NodeUnprepareResources": self._unprepare},
                ),
                handler(HEALTH, {"NodeWatchResources": self._watch}),
            )
        )
        self._servers.append(
            await _serve(
                self.registration,
                handler(REGISTRATION, {"GetInfo": self._info, "NotifyRegistrationStatus": self._registered}),
            )
        )
        log.info("serving endpoint=%s", self.endpoint)

    async def stop(self) -> None:
        """Leave the kubelet first, then end what runs."""
        self.registration.unlink(missing_ok=True)
        for server in reversed(self._servers):
            await server.stop(STOP_S)
        if self._telling:
            await asyncio.wait(self._telling, timeout=STOP_S)
        self.endpoint.unlink(missing_ok=True)

    # --- registration ---------------------------------------------------------------------------------------

    async def _info(self, _request: Any, _context: Any) -> Any:
        return message(REGISTRATION, "PluginInfo")(
            type="DRAPlugin",
            name=self._driver,
            endpoint=str(self.endpoint),
            supported_versions=list(SUPPORTED),
        )

    async def _registered(self, request: Any, _context: Any) -> Any:
        if request.plugin_registered:
            self.problem = ""
            self.registered.set()
            log.info("registered driver=%s", self._driver)
        else:
            self.problem = request.error or "the kubelet gave no reason"
            log.error("registration_refused error=%r", self.problem)
        return message(REGISTRATION, "RegistrationStatusResponse")()

    # --- claims ---------------------------------------------------------------------------------------------

    async def _prepare(self, request: Any, _context: Any) -> Any:
        """Every claim gets an answer of its own; one that is refused keeps no other from being prepared."""
        made = message(DRA, "NodePrepareResourcesResponse")()
        refs = [_ref(claim) for claim in request.claims]
        answers = await asyncio.gather(*(self._prepared(ref) for ref in refs))
        for ref, answer in zip(refs, answers, strict=True):
            made.claims[ref.uid].CopyFrom(answer)
        return made

    async def _prepared(self, ref: ClaimRef) -> Any:
        answer = message(DRA, "NodePrepareResourceResponse")()
        problem, ended = "", "done"
        began = time.monotonic()
        try:
            _check(ref)
            results = await self._preparer.prepare(ref)
        except Refused as refused:
            ended, problem = "refused", str(refused)
        except (*UNREACHABLE, ApiError) as error:
            ended = "failed"
            said = str(error) or type(error).__name__
            problem = f"{ref.where}: it could not be prepared now, and is tried again: {said}"
        self._metrics.prepares.labels(ended).inc()
        self._metrics.duration.observe(time.monotonic() - began)
        if problem:
            log.warning("refused claim=%s/%s uid=%s error=%r", ref.namespace, ref.name, ref.uid, problem)
            answer.error = problem
        else:
            for index, result in enumerate(results):
                answer.devices.add(
                    # An alternative that was taken is named with its request: cxl/new-2.
                    request_names=[result.request],
                    pool_name=result.pool,
                    device_name=result.device,
                    # Several memories are one region: a container is given it once.
                    cdi_device_ids=[device_name(ref.uid)] if index == 0 else [],
                )
        self._tell(ref, problem)
        return answer

    async def _unprepare(self, request: Any, _context: Any) -> Any:
        made = message(DRA, "NodeUnprepareResourcesResponse")()
        for claim in request.claims:
            ref = _ref(claim)
            answer = made.claims[ref.uid]
            answer.SetInParent()  # a claim without an entry would count as not answered
            try:
                _check(ref)
                await self._preparer.unprepare(ref)
                self._metrics.unprepares.labels("done").inc()
            except (Refused, OSError, ValueError) as error:
                self._metrics.unprepares.labels("failed").inc()
                answer.error = f"{ref.where}: {error}"
                log.warning("not_unprepared claim=%s/%s error=%r", ref.namespace, ref.name, str(error))
        return made

    async def _watch(self, _request: Any, _context: Any) -> AsyncIterator[Any]:
        async for answer in health.watch(self._preparer.backend):
            yield answer

    def _tell(self, ref: ClaimRef, problem: str) -> None:
        """On the claim, while the kubelet goes on."""
        task = asyncio.ensure_future(notices.tell(self._cluster, ref, self._preparer.settings.node, problem))
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)


def _ref(claim: Any) -> ClaimRef:
    return ClaimRef(claim.namespace, claim.name, claim.uid)


def _check(ref: ClaimRef) -> None:
    """A claim's uid becomes part of file names."""
    if not UID.fullmatch(ref.uid):
        raise Refused(f"{ref.where}: {ref.uid!r} is no uid of a claim.")


async def _serve(path: Path, *handlers: Any) -> Any:
    path.unlink(missing_ok=True)
    server = grpc.aio.server()
    server.add_generic_rpc_handlers(handlers)
    server.add_insecure_port(f"unix:{path}")
    await server.start()
    return server


def _answers(path: Path) -> bool:
    """Whether somebody listens at a socket; a plugin that was killed leaves the file."""
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as tried:
        try:
            tried.connect(str(path))
        except OSError:
            return False
        return True
