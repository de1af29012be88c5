"""An open pool follows the manifest of the pool that runs: tiers come, go and are made anew under it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from children import until
from kvpool import KeyBatch, Pool, paths
from kvpool.provision import provision
from kvpool.region import Region
from kvpool.spec import PoolSpec
from strategies import buffers, contents, keys_of, namespace

NS = namespace(4096)


def declare(folder: Path, *names: str, hosts: int = 1) -> PoolSpec:
    """Provision a pool with tiers of these names, in this order."""
    tiers: list[dict[str, Any]] = [
        {
            "name": name,
            "medium": "DRAM",
            "capacity": "8Mi",
            "minBlockSize": "4Ki",
            "shared": hosts > 1,
            "source": {"path": str(folder / name)},
        }
        for name in names
    ]
    spec = PoolSpec.from_object(
        {
            "apiVersion": "kvpool.dev/v1alpha1",
            "kind": "KVPool",
            "metadata": {"name": "p"},
            "spec": {"hosts": hosts, "tiers": tiers},
        }
    )
    provision(spec, 0, timeout_s=0, progress=lambda *_: None, waiting=lambda _: None)
    return spec


@pytest.fixture
def place(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVPOOL_RUNTIME_DIR", str(folder / "runtime"))
    monkeypatch.delenv("KVPOOL_HOST", raising=False)
    return folder


def look(pool: Pool) -> list[str]:
    """The tiers after a look at the manifest."""
    assert pool._opened is not None
    pool._opened._due = 0.0
    pool.lookup(keys_of(NS, [0]))
    return [tier.name for tier in pool.tiers]


def stored(pool: Pool, keys: KeyBatch) -> int:
    return pool.store(keys, contents(keys)).stored_count


def users(path: Path) -> int:
    with Region.open_read_only(path) as region:
        return len(region.participants())


def test_tiers_come_and_go_and_those_that_stay_keep_their_region(place: Path) -> None:
    declare(place, "a")
    keys = keys_of(NS, range(8))
    with Pool.open("p") as pool:
        assert stored(pool, keys) == 8
        (first,) = pool.tiers
        declare(place, "a", "b")
        assert look(pool) == ["a", "b"]
        assert pool.tiers[0] is first
        assert stored(pool, keys) == 8  # into the new one
        del first
        declare(place, "b")
        assert look(pool) == ["b"]
        assert users(place / "a") == 0  # it was left
        assert pool.load(keys, buffers(keys)).hit_count == 8


def test_a_region_that_was_made_anew_is_attached_anew(place: Path) -> None:
    declare(place, "a")
    with Pool.open("p") as pool:
        (place / "a").unlink()
        assert look(pool) == ["a"]  # the manifest says nothing new
        declare(place, "a")
        assert look(pool) == ["a"]
        keys = keys_of(NS, range(4))
        assert stored(pool, keys) == 4
        with Pool.open("p") as other:
            assert other.load(keys, buffers(keys)).hit_count == 4


def test_a_manifest_that_cannot_be_followed_changes_nothing(place: Path) -> None:
    declare(place, "a")
    with Pool.open("p") as pool:
        text = paths.manifest_path("p").read_text()
        paths.manifest_path("p").write_text(text + "nonsense: true\n")
        assert look(pool) == ["a"]
        (tier,) = pool.tiers
        declare(place, "a", "b")
        (place / "b").unlink()
        assert look(pool) == ["a"]
        declare(place, "a", "b")
        assert look(pool) == ["a", "b"]
        assert pool.tiers[0] is tier
        paths.manifest_path("p").unlink()  # the pool is down
        assert look(pool) == ["a", "b"]


def test_the_host_number_is_followed_unless_it_was_given(place: Path) -> None:
    declare(place, "a", hosts=2)
    with Pool.open("p") as pool, Pool.open("p", host=0) as fixed:
        paths.host_path("p").write_text("1\n")
        look(pool), look(fixed)
        assert [pool.tiers[0].region.host, fixed.tiers[0].region.host] == [1, 0]  # type: ignore[attr-defined]


def test_calls_that_run_meanwhile_end_as_they_began(place: Path) -> None:
    declare(place, "a", "b")
    keys = keys_of(NS, range(16))
    with Pool.open("p") as pool:
        stored(pool, keys)
        ending, failures = threading.Event(), []

        def use() -> None:
            while not ending.is_set():
                try:
                    assert pool.load(keys, buffers(keys)).hit_count == 16
                except BaseException as error:
                    failures.append(error)

        threads = [threading.Thread(target=use) for _ in range(3)]
        for thread in threads:
            thread.start()
        for names in (["b"], ["a", "b"], ["b"], ["a", "b"]):
            declare(place, *names)
            until(lambda names=names: look(pool) == names)  # another thread may be looking just now
        ending.set()
        for thread in threads:
            thread.join()
        assert failures == []
