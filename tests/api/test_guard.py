"""Access, limits and headers around every request."""

from __future__ import annotations

import logging
import re
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import uvicorn
from prometheus_client.parser import text_string_to_metric_families

from api.conftest import Ask
from api.statuses import Clock, StillSource, pool
from kvpool.api import server
from kvpool.api.access import Caller, TokenAccess, bearer
from kvpool.api.guard import LOOPBACK_NAMES, Limit, RateLimiter, host_name
from kvpool.api.problem import ApiError
from kvpool.api.service import Service
from kvpool.errors import KvpoolError
from kvpool.report import Counters

TOKEN = "correct-horse-battery"


def test_headers_on_every_answer_and_no_cors(serve: Ask) -> None:
    client = serve(StillSource(pool()))
    for path in ("/v1/pools", "/nothing", "/healthz"):
        answer = client.get(path, headers={"Origin": "https://elsewhere.example"})
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert not [name for name in answer.headers if name.startswith("access-control")]


def test_other_host_name_on_loopback_is_refused(serve: Ask) -> None:
    client = serve(StillSource(pool()), hosts=LOOPBACK_NAMES)
    assert client.get("/v1/pools").status_code == 200
    for name in ("rebound.example", "rebound.example:9470", ""):
        assert client.get("/v1/pools", headers={"Host": name}).status_code == 421
    assert [host_name(h) for h in ("LocalHost:1", "[::1]:9470", "127.0.0.1")] == [
        "localhost",
        "[::1]",
        "127.0.0.1",
    ]


def test_too_many_requests_are_429_and_others_go_on(serve: Ask) -> None:
    client = serve(StillSource(pool()), limit=Limit(per_second=0.001, burst=3))
    answers = [client.get("/v1/pools").status_code for _ in range(5)]
    assert answers == [200, 200, 200, 429, 429]
    refused = client.get("/v1/pools")
    assert int(refused.headers["retry-after"]) >= 1
    assert client.get("/healthz").status_code == 200


def test_rate_limiter_refills_and_forgets_old_addresses() -> None:
    clock = Clock()
    limiter = RateLimiter(Limit(per_second=2, burst=1), clock)
    assert limiter.wait_s("a") == 0
    assert limiter.wait_s("a") == pytest.approx(0.5)
    assert limiter.wait_s("b") == 0
    clock.now += 0.5
    assert limiter.wait_s("a") == 0
    for i in range(20_000):
        limiter.wait_s(str(i))
    assert len(limiter._buckets) <= 10_001


def test_token_right_one_only(serve: Ask, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    client = serve(StillSource(pool()), access=TokenAccess(TOKEN), open_metrics=False)
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {TOKEN}"}):
        for path in ("/v1/pools", "/v1/pools/team/p/events", "/metrics"):
            answer = client.get(path, headers=headers)
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"].startswith("Bearer")
            assert "wrong" not in answer.text
    right = {"Authorization": f"Bearer {TOKEN}"}
    assert client.get("/v1/pools", headers=right).status_code == 200
    assert client.get("/metrics", headers=right).status_code == 200
    assert client.get("/healthz").status_code == 200
    assert TOKEN not in caplog.text


class OneNamespace:
    """Lets the caller read one namespace."""

    async def who(self, authorization: str | None) -> Caller:
        return Caller(bearer(authorization))

    async def may_read(self, caller: Caller, namespace: str | None) -> bool:
        return namespace == caller.name


def test_caller_sees_only_namespaces_that_they_may_read(serve: Ask) -> None:
    source = StillSource(pool("a", "mine"), pool("b", "theirs"))
    client = serve(source, access=OneNamespace(), open_metrics=False)
    me = {"Authorization": "Bearer mine"}
    answer = client.get("/v1/pools", headers=me).json()
    assert ([p["name"] for p in answer["items"]], answer["total"]) == (["a"], 1)
    for path in ("", "/nodes", "/misses", "/history", "/events"):
        hidden = client.get(f"/v1/pools/theirs/b{path}", headers=me)
        missing = client.get(f"/v1/pools/theirs/never{path}", headers=me)
        assert hidden.status_code == missing.status_code == 404
        assert hidden.json()["detail"].replace('"b"', '"never"') == missing.json()["detail"]
    assert client.get("/metrics", headers=me).status_code == 404


def test_same_etag_is_not_shared_between_callers(serve: Ask) -> None:
    client = serve(StillSource(pool("a", "mine"), pool("b", "theirs")), access=OneNamespace())
    mine = client.get("/v1/pools", headers={"Authorization": "Bearer mine"})
    theirs = {"Authorization": "Bearer theirs", "If-None-Match": mine.headers["etag"]}
    assert client.get("/v1/pools", headers=theirs).status_code == 200
    assert "authorization" in mine.headers["vary"]


def test_listening_elsewhere_needs_a_token() -> None:
    assert server.access_for("127.0.0.1", None) is not None
    with pytest.raises(KvpoolError, match="KVPOOL_API_TOKEN"):
        server.access_for("0.0.0.0", None)
    with pytest.raises(KvpoolError, match="16 characters"):
        server.access_for("0.0.0.0", "short")
    assert isinstance(server.access_for("0.0.0.0", TOKEN), TokenAccess)
    with pytest.raises(ApiError):
        bearer("Bearer ")


def test_metrics_are_valid_and_labels_bounded(serve: Ask) -> None:
    strange = Counters(
        lookups=10, hits=5, misses={"evicted": 3, "no\nsuch": 2}, load_latency=[0] * 12 + [4, 1]
    )
    shown = pool().pool.model_copy(update={"misses": strange.misses})
    client = serve(StillSource(pool(counters=strange, pool=shown), pool("q", namespaces=None)))
    client.get("/v1/pools/team/never-heard-of")
    families = {f.name: f for f in text_string_to_metric_families(client.get("/metrics").text)}
    reasons = {
        s.labels["reason"]: s.value for s in families["kvpool_pool_misses"].samples if s.labels["pool"] == "p"
    }
    assert reasons == {"evicted": 3, "other": 2}
    load = [s for s in families["kvpool_pool_load_duration_seconds"].samples if s.name.endswith("_bucket")]
    assert [s.value for s in load] == sorted(s.value for s in load)
    assert load[-1].value == 5
    routes = {s.labels["route"] for s in families["kvpool_api_requests"].samples}
    assert "/v1/pools/{namespace}/{name}" in routes
    assert not [route for route in routes if "never" in route]
    for family in families.values():
        assert family.documentation, family.name


def test_every_metric_of_the_api_is_documented_and_no_other(serve: Ask) -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "observability.md").read_text()
    documented = set(re.findall(r"`(kvpool_(?:pool|api)_[a-z_]+)`", text))
    answer = serve(StillSource(pool())).get("/metrics").text
    served = set(re.findall(r"^# TYPE (kvpool_[a-z_]+) ", answer, re.MULTILINE))
    assert {name for name in served if not name.endswith("_created")} == documented


def test_only_trusted_proxies_say_who_asks() -> None:
    assert server.proxies_for([]) == ""
    assert server.proxies_for(["10.0.0.0/8", "::1"]) == "10.0.0.0/8,::1"
    for wrong in ("everybody", "10.0.0.0/99", ""):
        with pytest.raises(KvpoolError, match=r"no address. Write one like 10\.0\.0\.7"):
            server.proxies_for([wrong])


def _statuses(service: Service, proxies: str, forwarded: list[str]) -> list[int]:
    """The answers to one request for each text in X-Forwarded-For, from the real server."""
    listener = server.listening("127.0.0.1", 0)
    config = server.config_of(service, proxies)
    running = uvicorn.Server(config)
    thread = threading.Thread(target=running.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        return [_status(server.url_of(listener) + "/v1/pools", text) for text in forwarded]
    finally:
        running.should_exit = True
        thread.join(20)
        listener.close()


def _status(url: str, forwarded: str) -> int:
    request = urllib.request.Request(url, headers={"X-Forwarded-For": forwarded})
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as refused:
        return refused.code


@pytest.mark.parametrize(("proxies", "last"), [("", 429), ("10.0.0.0/8", 429), ("127.0.0.0/8", 200)])
def test_limit_counts_the_address_that_a_trusted_proxy_says(proxies: str, last: int) -> None:
    service = Service(StillSource(pool()), limit=Limit(per_second=0.001, burst=1))
    assert _statuses(service, proxies, ["192.0.2.1", "192.0.2.2"]) == [200, last]
