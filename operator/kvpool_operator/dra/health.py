"""The stream by which the kubelet learns whether devices are well."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

from kvpool.cxl import Backend, ComposeError, Memory
from kvpool_operator.dra.allocation import MEMORY_PREFIX
from kvpool_operator.dra.slices import DEVICE
from kvpool_operator.dra.wire import HEALTH, message

PERIOD_S = 10.0  # the kubelet takes a device that it heard nothing of for 30 s for unknown
HEALTHY, UNHEALTHY = 1, 2


def answer(memories: list[Memory], at_s: float) -> Any:
    """One answer of the stream: every memory of this node. Pure."""
    made = message(HEALTH, "NodeWatchResourcesResponse")()
    for memory in memories:
        device = made.devices.add(
            health=HEALTHY if memory.healthy else UNHEALTHY, last_updated_time=int(at_s)
        )
        device.device.pool_name = f"{MEMORY_PREFIX}{memory.serial}"
        device.device.device_name = DEVICE
    return made


async def watch(backend: Backend, period_s: float = PERIOD_S) -> AsyncIterator[Any]:
    """Answers without end. A backend that cannot look has nothing to say: the kubelet then knows nothing."""
    while True:
        try:
            memories = await asyncio.to_thread(backend.memories)
        except (ComposeError, OSError):
            memories = []
        yield answer(memories, time.time())
        await asyncio.sleep(period_s)
