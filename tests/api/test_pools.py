"""What GET below /v1/pools answers."""

from __future__ import annotations

import base64
from dataclasses import replace

import pytest

from api.conftest import Ask
from api.statuses import NOW, Clock, StillSource, pool
from kvpool.api import model
from kvpool.api.problem import MEDIA_TYPE
from kvpool.api.status import Key


def test_list_pools_sorted_with_age_and_crd_names(serve: Ask, clock: Clock) -> None:
    client = serve(StillSource(pool("b"), pool("a"), pool("a", "other")))
    clock.now += 7.0
    answer = client.get("/v1/pools").json()
    assert [(p["namespace"], p["name"]) for p in answer["items"]] == [
        ("other", "a"),
        ("team", "a"),
        ("team", "b"),
    ]
    assert answer["total"] == 3
    assert answer["next"] is None
    first = answer["items"][0]
    assert (first["age_s"], first["stale"], first["hitRate"]) == (7.0, False, 80.0)
    assert first["nodes"] == {"desired": 2, "ready": 2, "outOfDate": 0}
    assert first["tiers"][0]["capacityBytes"] == 1 << 30


def test_list_pools_pages_visit_each_once_though_pools_come_and_go(serve: Ask) -> None:
    source = StillSource(*[pool(f"p{i:02}") for i in range(7)])
    client = serve(source)
    seen, start = [], None
    while True:
        page = client.get("/v1/pools", params={"limit": 3} | ({"continue": start} if start else {})).json()
        seen += [p["name"] for p in page["items"]]
        start = page["next"]
        if start is None:
            break
        source.board.remove(Key("team", "p00"))  # before the page: shifts nothing
    assert seen == [f"p{i:02}" for i in range(7)]


def test_list_pools_one_namespace_only(serve: Ask) -> None:
    client = serve(StillSource(pool("a"), pool("a", "other")))
    answer = client.get("/v1/pools", params={"namespace": "other"}).json()
    assert [(p["namespace"], p["name"]) for p in answer["items"]] == [("other", "a")]


@pytest.mark.parametrize("token", ["x", "!!!", base64.urlsafe_b64encode(b'{"a": 1}').decode(), "WzFd", "W10"])
def test_continue_no_token_is_problem_400(serve: Ask, token: str) -> None:
    answer = serve(StillSource(pool())).get("/v1/pools", params={"continue": token})
    assert (answer.status_code, answer.headers["content-type"]) == (400, MEDIA_TYPE)
    assert "`next`" in answer.json()["detail"]


def test_unknown_pool_is_problem_404_that_says_where_to_look(serve: Ask) -> None:
    answer = serve(StillSource()).get("/v1/pools/team/nope")
    assert (answer.status_code, answer.headers["content-type"]) == (404, MEDIA_TYPE)
    assert answer.json() == {
        "type": "about:blank",
        "title": "Not Found",
        "status": 404,
        "detail": 'no pool "nope" in namespace "team", or none that you may see; GET /v1/pools lists them',
        "instance": "/v1/pools/team/nope",
    }


def test_wrong_parameters_are_problems_that_do_not_repeat_the_value(serve: Ask) -> None:
    client = serve(StillSource(pool()))
    for path in ("/v1/pools?limit=0", "/v1/pools/Team/p", "/v1/pools/team/p/history?window=hunter2"):
        answer = client.get(path)
        assert (answer.status_code, answer.headers["content-type"]) == (422, MEDIA_TYPE)
        assert "hunter2" not in answer.json()["detail"]
    assert client.get("/nothing").headers["content-type"] == MEDIA_TYPE
    assert client.post("/v1/pools").status_code == 405


@pytest.mark.parametrize(
    "path", ["", "/team/p", "/team/p/nodes", "/team/p/tiers", "/team/p/misses", "/team/p/explain"]
)
def test_etag_same_content_is_304_and_any_change_is_not(serve: Ask, clock: Clock, path: str) -> None:
    source = StillSource(pool())
    client = serve(source)
    first = client.get("/v1/pools" + path)
    tag = {"If-None-Match": first.headers["etag"]}
    clock.now += 5
    source.board.put(pool(observed_at=NOW + 5))  # the same, only younger
    again = client.get("/v1/pools" + path, headers=tag)
    assert (again.status_code, again.content) == (304, b"")
    source.board.put(pool(lookups=101))
    assert client.get("/v1/pools" + path, headers=tag).status_code == 200


def test_etag_news_grew_too_old_is_a_change(serve: Ask, clock: Clock) -> None:
    client = serve(StillSource(pool()))
    tag = {"If-None-Match": client.get("/v1/pools").headers["etag"]}
    clock.now += 61
    answer = client.get("/v1/pools", headers=tag)
    assert answer.status_code == 200
    assert answer.json()["items"][0]["stale"] is True


def test_nodes_have_their_own_age_and_pages(serve: Ask, clock: Clock) -> None:
    client = serve(StillSource(pool(nodes=5)))
    page = client.get("/v1/pools/team/p/nodes", params={"limit": 4}).json()
    assert [node["age_s"] for node in page["items"]] == [0.0, 1.0, 2.0, 3.0]
    rest = client.get("/v1/pools/team/p/nodes", params={"continue": page["next"]}).json()
    assert [node["name"] for node in rest["items"]] == ["p-4"]


def test_explain_names_reason_difference_and_what_to_do(serve: Ask) -> None:
    client = serve(StillSource(pool(hits=10)))
    answer = client.get("/v1/pools/team/p/explain").json()
    assert answer["misses"][0]["reason"] == "evicted"
    assert answer["misses"][0]["share"] == 0.9
    assert "raise the capacity" in answer["misses"][0]["advice"]
    assert answer["namespaces"][0]["differences"][0]["field"] == "dtype"
    one = client.get("/v1/pools/team/p/explain", params={"engine": "cdcd"}).json()
    assert [d["namespace"] for d in one["namespaces"]] == ["cd" * 6]
    unknown = client.get("/v1/pools/team/p/explain", params={"engine": "0123"})
    assert unknown.status_code == 404
    assert "abab" in unknown.json()["detail"]


def test_namespaces_source_that_cannot_know_says_so(serve: Ask) -> None:
    client = serve(StillSource(pool(), pool("q", namespaces=None)))
    known = client.get("/v1/pools/team/p/namespaces").json()
    assert (known["known"], known["items"][0]["blockTokens"]) == (True, 16)
    unknown = client.get("/v1/pools/team/q/namespaces").json()
    assert (unknown["known"], unknown["items"]) == (False, [])


def test_misses_by_reason_and_engine(serve: Ask) -> None:
    answer = serve(StillSource(pool())).get("/v1/pools/team/p/misses").json()
    assert [(m["reason"], m["count"]) for m in answer["misses"]] == [("evicted", 20)]
    (engine,) = answer["engines"]
    assert answer["enginesTotal"] == 1
    assert (engine["engine"], engine["node"], engine["tiers"]) == ("h0/4711", "worker-0", ["dram"])
    assert (engine["misses"], engine["lookups"], engine["hitRate"]) == (None, None, None)


def test_hits_above_lookups_never_more_than_all(serve: Ask) -> None:
    assert model.percent(120, 100) == 100.0
    assert model.percent(-5, 100) == 0.0
    assert model.percent(0, 0) is None


def test_openapi_every_field_of_status_models_is_described() -> None:
    from kvpool.api.app import create_app
    from kvpool.api.service import Service

    document = create_app(Service(StillSource())).openapi()
    assert "HTTPValidationError" not in str(document)
    for path, operations in document["paths"].items():
        for operation in operations.values():
            assert operation["summary"], path
            assert "429" in operation["responses"] or path in ("/healthz", "/readyz")
    for name in ("Pool", "Tier", "Node", "HistoryPoint"):
        for field, schema in document["components"]["schemas"][name]["properties"].items():
            if field.endswith(("Bytes", "Seconds", "_s", "Rate")):
                assert "description" in schema, f"{name}.{field}"


def test_readyz_source_behind_is_503_with_reason(serve: Ask) -> None:
    source = StillSource()
    client = serve(source)
    assert client.get("/readyz").status_code == 200
    source.ready = replace(source.ready, ready=False, message="the watch is dead")
    answer = client.get("/readyz")
    assert (answer.status_code, answer.json()["message"]) == (503, "the watch is dead")
    assert client.get("/healthz").status_code == 200
