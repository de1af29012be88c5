"""Generated requests from the API's own description: no 5xx, and every answer is as described."""

from __future__ import annotations

import asyncio
import os

import pytest
import schemathesis
from hypothesis import HealthCheck, settings

from api.statuses import NOW, Clock, StillSource, pool
from kvpool.api import model
from kvpool.api.app import create_app
from kvpool.api.guard import Limit
from kvpool.api.history import MemoryHistory, Row
from kvpool.api.service import Service
from kvpool.api.status import Key
from kvpool.report import NamespaceCounts, NamespaceReport

EXAMPLES = int(os.environ.get("KVPOOL_API_EXAMPLES", "8"))


def _app() -> object:
    """An API with pools that are usual, empty, damaged and of a cluster; one is the description's example."""
    history = MemoryHistory()
    asyncio.run(history.append([(Key("local", "prefix-pool"), Row(NOW - 20, lookups=3, hits=1))]))
    empty = model.Pool(namespace="local", name="empty", problems=["damaged"])
    done = NamespaceCounts(hits=7, misses={"evicted": 2}, saved_us=5_000_000, timed_hits=5)
    counted = NamespaceReport("ab" * 20, {"model": "m", "block_tokens": 16}, 4096, done, keyed=True)
    engine = model.EngineMisses(
        engine="h0/4711",
        live=False,
        namespaces=["ab" * 6],
        lookups=9,
        hits=7,
        hit_rate=77.8,
        misses=done.misses,
    )
    source = StillSource(
        pool("prefix-pool", "local"),
        pool("empty", "local", lookups=0, hits=0, nodes=0, pool=empty),
        pool("cluster", "team", namespaces=None, engines=()),
        pool("counted", "team", reports={"ab" * 20: counted}, engines=[engine]),
    )
    unlimited = Limit(per_second=1e9, burst=10**9)
    return create_app(Service(source, history=history, clock=Clock(), limit=unlimited))


# The streams have no end: they are tested in test_events.
schema = schemathesis.openapi.from_asgi("/v1/openapi.json", _app()).exclude(path_regex="/events$")


@pytest.mark.filterwarnings("ignore")  # of the generator itself
@schema.parametrize()
@settings(max_examples=EXAMPLES, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_generated_requests_get_what_is_described(case: schemathesis.Case) -> None:
    # A token of a list is opaque: what is generated for it is refused with 400, as documented.
    refused = [schemathesis.checks.positive_data_acceptance] if "continue" in (case.query or {}) else []
    case.call_and_validate(headers={"Host": "localhost"}, excluded_checks=refused)
