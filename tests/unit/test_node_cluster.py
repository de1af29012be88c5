"""The node's talk with the apiserver, with a stand-in for it: lists, watches that end or break, writes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kvpool_operator import kinds, listwatch
from kvpool_operator.client import ApiError, Expired
from kvpool_operator.kinds import Kind
from kvpool_operator.nodes.board import Board
from kvpool_operator.nodes.cluster import PUBLISH_S, PUBLISH_URGENT_S, Follower, Identity, Publisher

Object = dict[str, Any]
IDENTITY = Identity("ns", "p", "node-a", "pod")


def node_object(version: int, capacity: str = "1Gi", generation: int = 1, node: str = "node-a") -> Object:
    tier = {"name": "dram", "medium": "DRAM", "capacity": capacity}
    manifest = {
        "apiVersion": "kvpool.dev/v1alpha1",
        "kind": "KVPool",
        "metadata": {"name": "p"},
        "spec": {"tiers": [tier]},
    }
    return {
        "metadata": {"name": "p-0", "uid": "u", "generation": generation, "resourceVersion": str(version)},
        "spec": {"pool": "p", "nodeName": node, "host": 0, "state": "Active", "manifest": manifest},
    }


class Watch:
    """What a watch says, then how it ends."""

    def __init__(self, *lines: bytes, end: BaseException | None = None) -> None:
        self.lines, self.end = lines, end
        self.closed = False


class FakeCluster:
    """Answers from a script: each list and each watch takes the next one of its kind."""

    def __init__(self, lists: list[Any], watches: list[Any]) -> None:
        self.lists, self.watches = lists, watches
        self.asked: list[str] = []
        self.patches: list[Object] = []
        self.fails: BaseException | None = None

    async def read(self, path: str, query: dict[str, str]) -> Object:
        assert query["labelSelector"] == IDENTITY.selector
        self.asked.append("list")
        return await self._next(self.lists)

    async def lines(self, path: str, query: dict[str, str], silence_s: float) -> AsyncIterator[bytes]:
        self.asked.append(f"watch {query['resourceVersion']}")
        watch = await self._next(self.watches)
        try:
            yield b""
            for line in watch.lines:
                await asyncio.sleep(0)
                yield line
            if watch.end:
                raise watch.end
        finally:
            watch.closed = True

    async def apply(self, body: Object, kind: Kind, subresource: str, manager: str) -> None:
        if self.fails:
            raise self.fails
        assert (kind, subresource, manager) == (kinds.POOL_NODE, "status", "kvpool-node")
        self.patches.append(body["status"])

    async def _next(self, script: list[Any]) -> Any:
        if not script:
            await asyncio.sleep(3600)
        answer = script.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer


def listed(version: int, *nodes: Object) -> Object:
    return {"metadata": {"resourceVersion": str(version)}, "items": list(nodes)}


def event(kind: str, node: Object) -> bytes:
    return json.dumps({"type": kind, "object": node}).encode() + b"\n"


BOOKMARK = event("BOOKMARK", {"metadata": {"resourceVersion": "50"}})
GONE = event("ERROR", {"code": 410, "message": "too old"})


@pytest.fixture(autouse=True)
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPOOL_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "p").mkdir()
    monkeypatch.setattr(listwatch, "PAUSE_FIRST_S", 0.001)
    monkeypatch.setattr(listwatch, "PAUSE_MAX_S", 0.002)


def run(work: Callable[[], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        return await work()

    return asyncio.run(main())


def follow(api: FakeCluster, until: Callable[[Board], bool], begin: bool = False) -> tuple[Board, Follower]:
    board = Board()
    follower = Follower(api, IDENTITY, board)  # type: ignore[arg-type]

    async def main() -> None:
        if begin:
            follower.begin()
        task = asyncio.create_task(follower.run())
        for _ in range(2000):
            if until(board):
                break
            await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert until(board), api.asked

    asyncio.run(main())
    return board, follower


def capacity_of(board: Board) -> int:
    wanted, _ = board.wanted()
    return wanted.pool.tiers[0].capacity_bytes >> 30 if wanted else 0


def test_follower_goes_from_the_list_to_the_watch_and_on_from_where_it_ended() -> None:
    first = Watch(event("MODIFIED", node_object(41, "2Gi", 2)), BOOKMARK)
    second = Watch(event("MODIFIED", node_object(51, "3Gi", 3)))
    api = FakeCluster([listed(40, node_object(39))], [first, second])
    follow(api, lambda board: capacity_of(board) == 3)
    assert api.asked[:3] == ["list", "watch 40", "watch 50"]
    assert first.closed


@pytest.mark.parametrize(
    "broken",
    [
        Watch(GONE),
        Expired("GET", 410, "too old"),
        Watch(event("ERROR", {"code": 500, "message": "oops"})),
        ApiError("GET", 403, "forbidden"),
        Watch(b"not json"),
    ],
    ids=["gone", "http-410", "error", "forbidden", "garbage"],
)
def test_follower_after_a_watch_that_was_refused_lists_again(broken: Any) -> None:
    api = FakeCluster([listed(40, node_object(39)), listed(60, node_object(59, "2Gi", 2))], [broken])
    follow(api, lambda board: capacity_of(board) == 2)
    assert api.asked[:3] == ["list", "watch 40", "list"]


@pytest.mark.parametrize(
    "broken",
    [
        Watch(BOOKMARK, end=aiohttp.ClientPayloadError("cut")),
        Watch(BOOKMARK, end=asyncio.TimeoutError()),
        Watch(BOOKMARK, end=ConnectionResetError()),
    ],
    ids=["cut", "silent", "reset"],
)
def test_follower_after_a_watch_that_broke_off_goes_on_where_it_was(broken: Any) -> None:
    then = Watch(event("MODIFIED", node_object(59, "2Gi", 2)))
    api = FakeCluster([listed(40, node_object(39))], [broken, then])
    follow(api, lambda board: capacity_of(board) == 2)
    assert api.asked[:2] == ["list", "watch 40"]
    assert "list" not in api.asked[1:]


def test_follower_api_away_at_start_serves_what_was_kept_then_catches_up() -> None:
    follow(FakeCluster([listed(40, node_object(39))], []), lambda board: capacity_of(board) == 1)
    away = [ConnectionRefusedError()] * 5
    board, _ = follow(FakeCluster([*away], []), lambda board: capacity_of(board) == 1, begin=True)
    assert board.silent_s()[1] is None
    later = FakeCluster([*away, listed(60, node_object(59, "2Gi", 2))], [])
    follow(later, lambda board: capacity_of(board) == 2, begin=True)


def test_follower_object_deleted_or_of_another_node_is_no_assignment() -> None:
    deleted = Watch(event("DELETED", node_object(41)))
    board, follower = follow(
        FakeCluster([listed(40, node_object(39))], [deleted]),
        lambda board: deleted.closed and not capacity_of(board),
    )
    assert board.wanted() == (None, "")
    assert follower.found is None
    api = FakeCluster([listed(40, node_object(39, node="node-b"))], [])
    board, _ = follow(api, lambda _: "watch 40" in api.asked)
    assert board.wanted() == (None, "")


def test_follower_spec_that_cannot_be_read_keeps_the_one_before_and_says_why() -> None:
    wrong = event("MODIFIED", node_object(41, "1Quux", 2))
    board, _ = follow(
        FakeCluster([listed(40, node_object(39))], [Watch(wrong)]), lambda board: board.wanted()[1] != ""
    )
    assert capacity_of(board) == 1
    assert "capacity" in board.wanted()[1]


def test_selector_of_a_node_with_a_long_name_asks_for_the_whole_pool() -> None:
    assert IDENTITY.selector == "kvpool.dev/pool=p,kvpool.dev/node=node-a"
    assert Identity("ns", "p", "n" * 64, "pod").selector == "kvpool.dev/pool=p"


# --- writing ------------------------------------------------------------------------------------------------


class Written:
    def __init__(self, found: Object | None) -> None:
        self.api = FakeCluster([], [])
        self.now = 100.0
        self.follower = Follower(self.api, IDENTITY, Board())  # type: ignore[arg-type]
        self.follower.found = found
        self.status: Object = {"ready": True, "hits": 0}
        self.publisher = Publisher(
            self.api,  # type: ignore[arg-type]
            IDENTITY,
            self.follower,
            lambda before: dict(self.status),
            clock=lambda: self.now,
        )

    def step(self, seconds: float = 0.0, **status: Any) -> int:
        """Writes so far, after time has passed and the status has changed."""
        self.now += seconds
        self.status |= status
        run(self.publisher.step)
        return len(self.api.patches)


def test_publisher_writes_changes_only_and_numbers_not_too_often() -> None:
    w = Written(node_object(1))
    assert w.step() == 1
    assert w.step(100) == 1  # nothing changed
    assert w.step(hits=1) == 2
    assert w.step(PUBLISH_S / 2, hits=2) == 2
    assert w.step(PUBLISH_S / 2) == 3
    assert w.step(PUBLISH_URGENT_S, ready=False) == 4  # somebody waits for this
    assert w.api.patches[-1] == {"ready": False, "hits": 2}


def test_publisher_without_an_object_writes_nothing_and_a_new_one_gets_it_all() -> None:
    w = Written(None)
    assert w.step() == 0
    w.follower.found = node_object(1)
    assert w.step() == 1
    w.follower.found = node_object(2)
    w.follower.found["metadata"]["uid"] = "another"
    assert w.step() == 2


def test_publisher_failure_is_tried_again() -> None:
    w = Written(node_object(1))
    w.api.fails = ApiError("PATCH", 500, "no")
    with pytest.raises(ApiError):
        w.step()
    w.api.fails = None
    assert w.step(PUBLISH_S) == 1
