"""Where a pool's files lie."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvpool import paths
from kvpool.errors import KvpoolError, MediumUnavailable
from kvpool.spec import PoolSpec


def spec_of(*tiers: dict[str, object], hosts: int = 2) -> PoolSpec:
    return PoolSpec.from_object(
        {
            "apiVersion": "kvpool.dev/v1alpha1",
            "kind": "KVPool",
            "metadata": {"name": "p"},
            "spec": {"hosts": hosts, "tiers": list(tiers)},
        }
    )


DRAM: dict[str, object] = {"name": "dram", "medium": "DRAM", "capacity": "1Gi"}
SHARED: dict[str, object] = {
    "name": "cxl",
    "medium": "CXL",
    "capacity": "1Gi",
    "shared": True,
    "source": {"path": "/mnt/pool"},
}


def test_runtime_dir_follows_environment_then_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPOOL_RUNTIME_DIR", "/a/b")
    assert paths.runtime_dir() == Path("/a/b")
    monkeypatch.delenv("KVPOOL_RUNTIME_DIR")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert paths.runtime_dir() == Path("/run/kvpool")
    monkeypatch.setattr(os, "geteuid", lambda: 7)
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    assert paths.runtime_dir() == Path("/run/user/7/kvpool")
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert paths.runtime_dir() == Path("/tmp/kvpool-7")


@pytest.mark.parametrize("name", ["", "..", "a/b", "/etc", "A", "a" * 70 + "/"])
def test_pool_dir_name_that_leaves_the_runtime_dir_is_refused(name: str) -> None:
    with pytest.raises(KvpoolError, match="not the name of a pool"):
        paths.pool_dir(name)


@pytest.mark.parametrize(
    ("tier", "host", "expected"),
    [
        (DRAM, 0, "/dev/shm/kvpool.p.dram"),
        (DRAM, 1, "/dev/shm/kvpool.p.dram.h1"),
        (DRAM | {"hugePages": True}, 0, "/dev/hugepages/kvpool.p.dram"),
        (DRAM | {"source": {"path": "/mnt/x"}}, 1, "/mnt/x.h1"),
        (DRAM | {"shared": True}, 1, "/dev/shm/kvpool.p.dram"),
        (SHARED, 1, "/mnt/pool"),
        (SHARED | {"shared": False}, 1, "/mnt/pool.h1"),
        (SHARED | {"shared": False, "source": {"path": "/dev/dax0.0"}}, 1, "/dev/dax0.0"),
    ],
)
def test_region_path(tier: dict[str, object], host: int, expected: str) -> None:
    spec = spec_of(tier, SHARED | {"name": "other", "source": {"path": "/mnt/other"}})
    assert paths.region_path(spec, spec.tiers[0], host) == Path(expected)


def test_region_path_tier_without_a_path_is_unavailable() -> None:
    spec = spec_of({"name": "gpu", "medium": "GPU", "capacity": "1Gi"}, SHARED)
    with pytest.raises(MediumUnavailable, match="not in this version"):
        paths.region_path(spec, spec.tiers[0], 0)


def test_pool_names_lists_folders_with_a_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPOOL_RUNTIME_DIR", str(tmp_path))
    assert paths.pool_names() == []
    for name in ("b", "a", "empty"):
        paths.ensure_pool_dir(name)
    for name in ("b", "a"):
        paths.manifest_path(name).write_text("")
    assert paths.pool_names() == ["a", "b"]


def test_ensure_pool_dir_unusable_directory_names_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KVPOOL_RUNTIME_DIR", str(tmp_path / "file"))
    with pytest.raises(MediumUnavailable, match="KVPOOL_RUNTIME_DIR"):
        paths.ensure_pool_dir("p")


def test_default_host_environment_must_be_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVPOOL_HOST", raising=False)
    assert paths.default_host() == 0
    monkeypatch.setenv("KVPOOL_HOST", "3")
    assert paths.default_host() == 3
    monkeypatch.setenv("KVPOOL_HOST", "node-b")
    with pytest.raises(KvpoolError, match="KVPOOL_HOST"):
        paths.default_host()


def test_default_host_is_what_the_daemon_wrote_down_unless_the_environment_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVPOOL_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("KVPOOL_HOST", raising=False)
    assert paths.default_host("p") == 0
    paths.ensure_pool_dir("p")
    paths.host_path("p").write_text("3\n")
    assert paths.default_host("p") == 3
    assert paths.default_host() == 0
    monkeypatch.setenv("KVPOOL_HOST", "2")
    assert paths.default_host("p") == 2
    monkeypatch.delenv("KVPOOL_HOST")
    paths.host_path("p").write_text("three")
    with pytest.raises(KvpoolError, match="p/host: "):
        paths.default_host("p")
