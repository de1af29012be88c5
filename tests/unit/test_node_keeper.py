"""The node's keeper over real regions, told by a board what a KVPoolNode would say."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from children import children, until
from kvpool import KeyBatch, Pool, _native, paths
from kvpool.region import Region
from kvpool_operator.nodes.assignment import Assignment
from kvpool_operator.nodes.board import Board, Truth
from kvpool_operator.nodes.keeper import Keeper
from strategies import buffers, contents, keys_of, namespace

UNIT = 4096
NS = namespace(UNIT)
KEYS = keys_of(NS, range(64))
MIB = 1 << 20


def tier(path: Path, capacity: str = "8Mi", **more: Any) -> dict[str, Any]:
    declared = {"name": path.name, "medium": "DRAM", "capacity": capacity, "minBlockSize": "4Ki"}
    return {**declared, "source": {"path": str(path)}, **more}


class Node:
    """A keeper in a thread, for one host of the pool `p`."""

    def __init__(self, host: int = 0) -> None:
        self.host = host
        self.board = Board()
        self.keeper = Keeper(self.board, "p")
        self.thread = threading.Thread(target=self.keeper.run)
        self.generation = 0
        self.thread.start()

    def assign(
        self, *tiers: dict[str, Any], state: str = "Active", adopt: Any = (), hosts: int = 1, **spec: Any
    ) -> None:
        self.generation += 1
        manifest = {
            "apiVersion": "kvpool.dev/v1alpha1",
            "kind": "KVPool",
            "metadata": {"name": "p"},
            "spec": {"hosts": hosts, "tiers": [*tiers], **spec},
        }
        node = {
            "metadata": {"name": f"p-{self.host}", "generation": self.generation},
            "spec": {
                "pool": "p",
                "host": self.host,
                "state": state,
                "adopt": adopt,
                "manifest": manifest,
            },
        }
        self.board.assign(Assignment.from_object(node, "p"))

    def truth(self) -> Truth:
        return self.board.truth()

    def wait(self, found: Callable[[Truth], Any]) -> Truth:
        """The truth once it is about the newest assignment and `found` is true of it."""
        until(lambda: self.truth().generation == self.generation and bool(found(self.truth())), timeout_s=30)
        return self.truth()

    def ready(self) -> Truth:
        return self.wait(lambda truth: truth.ready)

    def end(self) -> None:
        self.keeper.stop()
        self.thread.join(30)
        assert not self.thread.is_alive()


Start = Callable[..., Node]


@pytest.fixture
def place(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVPOOL_RUNTIME_DIR", str(folder / "runtime"))
    monkeypatch.delenv("KVPOOL_HOST", raising=False)
    return folder


@pytest.fixture
def start(place: Path) -> Iterator[Start]:
    nodes: list[Node] = []

    def make(host: int = 0) -> Node:
        nodes.append(Node(host))
        return nodes[-1]

    yield make
    for node in nodes:
        node.end()


def stored(pool: Pool, keys: KeyBatch = KEYS) -> int:
    return pool.store(keys, contents(keys)).stored_count


def served(pool: Pool, keys: KeyBatch = KEYS) -> int:
    return pool.load(keys, buffers(keys)).hit_count


def test_unassigned_then_assigned_then_changed_then_unassigned(start: Start, place: Path) -> None:
    node = start()
    until(lambda: "no KVPoolNode is assigned" in node.truth().message)
    node.assign(tier(place / "a"))
    node.ready()
    with Pool.open("p") as pool:
        assert stored(pool) == 64
        node.assign(tier(place / "a", "16Mi"), eviction={"highWatermark": 50, "lowWatermark": 40})
        node.wait(lambda truth: truth.report["tiers"][0]["capacity_bytes"] == 16 * MIB)
        assert served(pool) == 64
        node.assign(tier(place / "a", "16Mi"), tier(place / "b"))
        assert [t["name"] for t in node.ready().report["tiers"]] == ["a", "b"]
        node.assign(tier(place / "b"))
        assert [t["name"] for t in node.ready().report["tiers"]] == ["b"]
        assert not (place / "a").exists()
    node.board.assign(None)
    until(lambda: "no KVPoolNode is assigned" in node.truth().message)
    assert (place / "b").exists()


def test_change_that_cannot_be_had_is_said_and_the_pool_goes_on(start: Start, place: Path) -> None:
    node = start()
    node.assign(tier(place / "a"))
    node.ready()
    node.assign(tier(place / "a"), tier(place / "missing" / "b"))
    until(lambda: "does not exist" in node.truth().message)
    assert not node.truth().ready
    assert node.truth().generation == 1  # what is served
    with Pool.open("p") as pool:
        assert stored(pool) == 64
    node.assign(tier(place / "a"), tier(place / "missing" / "b", optional=True))
    truth = node.ready()
    assert list(truth.report["skipped_tiers"]) == ["b"]
    node.board.assign(None, unreadable="of another version")
    until(lambda: node.truth().message == "of another version")
    node.assign(tier(place / "a"))
    node.ready()


def test_tier_taken_out_while_no_daemon_ran_is_removed_at_start(start: Start, place: Path) -> None:
    first = start()
    first.assign(tier(place / "a"), tier(place / "b"))
    first.ready()
    first.end()
    second = start()
    second.assign(tier(place / "b"))
    second.ready()
    assert not (place / "a").exists()


def test_removing_leaves_nothing_but_what_another_living_node_uses(start: Start, place: Path) -> None:
    node = start()
    shared = tier(place / "shared", "16Mi", shared=True)
    node.assign(tier(place / "a"), shared, hosts=2)
    node.ready()
    with Region.attach(place / "shared", host=1, role="daemon") as other:
        beats = threading.Event()

        def beat() -> None:
            while not beats.wait(0.1):
                other.heartbeat()

        thread = threading.Thread(target=beat)
        thread.start()
        node.assign(tier(place / "a"), shared, hosts=2, state="Removing")
        node.wait(lambda truth: truth.removed)
        beats.set()
        thread.join()
    assert not (place / "a").exists()
    assert (place / "shared").exists()
    assert list(paths.pool_dir("p").iterdir()) == []
    node.assign(tier(place / "a"), shared, hosts=2, state="Removing")  # now it is the last one
    until(lambda: not (place / "shared").exists())
    node.assign(tier(place / "a"))
    node.ready()


def die_while_adopting(path: Path) -> None:
    with Region.attach(path, role="daemon") as region:
        _native.stop_at("adopt.freed", 1, signal.SIGKILL)
        region.adopt(1, 7)


def test_adoption_that_a_killed_daemon_began_is_completed(start: Start, place: Path) -> None:
    shared = tier(place / "shared", "16Mi", shared=True)
    node = start()
    node.assign(shared, hosts=2)
    node.ready()
    node.end()
    with Pool.open("p", host=1) as pool:
        assert stored(pool) == 64
    with children() as child:
        assert child(die_while_adopting, place / "shared").wait() == -signal.SIGKILL
    node = start()
    node.assign(shared, hosts=2, adopt=[{"shard": 1, "epoch": 7}])
    node.wait(lambda truth: truth.owners["shared"][1:] == [{"host": 0, "epoch": 7, "settled": True}])
    with Pool.open("p") as pool:
        assert served(pool) == 64
    node.assign(shared, hosts=2, adopt=[{"shard": 1, "epoch": 7}], state="Draining")
    truth = node.wait(lambda truth: truth.drained)
    assert truth.drained is not None
    assert truth.drained[:2] == ("False", "WaitingForAdoption")
    with Pool.open("p") as pool:
        assert stored(pool, keys_of(NS, range(100, 110))) == 0
    node.assign(shared, hosts=2, adopt=[{"shard": 1, "epoch": 7}])
    node.wait(lambda truth: truth.drained is None)
    with Pool.open("p") as pool:
        assert stored(pool, keys_of(NS, range(100, 110))) == 10
