"""The source of this machine's pools: a real region, seen through the API and through `kvpool status`."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("kvpool._native", reason="the compiled part of kvpool is not built")

from api.conftest import Ask
from kvpool import KeyBatch, Namespace, Pool
from kvpool.api.local import LocalSource
from kvpool.api.saved import saved
from kvpool.cli import app
from kvpool.provision import provision
from kvpool.report import NamespaceUsage
from kvpool.spec import PoolSpec

MANIFEST = """
apiVersion: kvpool.dev/v1alpha1
kind: KVPool
metadata: {name: here}
spec:
  tiers:
  - {name: dram, medium: DRAM, capacity: 8Mi, source: {path: MEDIA/dram}}
"""


@pytest.fixture
def spec(folder: Path, monkeypatch: pytest.MonkeyPatch) -> PoolSpec:
    monkeypatch.setenv("KVPOOL_RUNTIME_DIR", str(folder / "run"))
    monkeypatch.delenv("KVPOOL_HOST", raising=False)
    made = PoolSpec.from_text(MANIFEST.replace("MEDIA", str(folder)))
    provision(made, 0, timeout_s=5, progress=lambda *_: None, waiting=lambda _: None)
    return made


def use(tokens: int = 16) -> None:
    """Ten blocks stored, five of them loaded twice, five others asked in vain."""
    space = Namespace(
        model="m",
        weights="w",
        dtype="float16",
        kv_layout="flat",
        block_tokens=tokens,
        block_bytes=4096,
        hash_scheme="sha256",
    )
    keys = [KeyBatch.from_hashes(space, [bytes([i, j]) * 16 for j in range(5)]) for i in range(3)]
    out = [bytearray(4096) for _ in range(5)]
    with Pool.open("here") as opened:
        opened.store(keys[0], [bytes(4096)] * 5)
        opened.store(keys[1], [bytes(4096)] * 5)
        for batch in (keys[0], keys[0], keys[2]):
            opened.load(batch, out)


def test_api_and_status_command_agree(spec: PoolSpec, serve: Ask) -> None:
    use()
    source = LocalSource()
    assert not source.readiness().ready
    asyncio.run(source.step())
    assert source.readiness().ready
    client = serve(source)  # type: ignore[arg-type]
    seen = client.get("/v1/pools/local/here").json()
    told = json.loads(CliRunner().invoke(app, ["status", "here", "-o", "json"]).stdout)["pools"][0]
    assert (seen["lookups"], seen["hits"], seen["hitRate"]) == (15, 10, 66.7)
    assert (seen["lookups"], seen["hits"], seen["misses"]) == (told["lookups"], told["hits"], told["misses"])
    assert (seen["blocks"], seen["usedBytes"]) == (told["tiers"][0]["blocks"], told["tiers"][0]["used_bytes"])
    assert seen["saved"] == {"tokens": 160, "exact": True, "prefillSeconds": None}
    ready = seen["conditions"][0]
    assert (ready["type"], ready["status"], ready["reason"]) == ("Ready", "False", "Stopped")
    spaces = client.get("/v1/pools/local/here/namespaces").json()["items"]
    assert [(s["model"], s["blockTokens"], s["blocks"]) for s in spaces] == [("m", 16, 10)]


def test_pool_that_is_gone_leaves_and_broken_manifest_is_shown(spec: PoolSpec, folder: Path) -> None:
    source = LocalSource()
    asyncio.run(source.step())
    assert [key.name for key in source.board.known()] == ["here"]
    (folder / "run" / "here" / "pool.yaml").write_text("kind: nonsense\n")
    asyncio.run(source.step())
    status = source.board.get(source.board.known()[0])
    assert status is not None
    assert status.pool.conditions[0].reason == "CannotBeSeen"
    (folder / "run" / "here" / "pool.yaml").unlink()
    asyncio.run(source.step())
    assert not source.board.known()


def test_look_that_fails_keeps_the_last_and_readiness_says_why(spec: PoolSpec) -> None:
    def broken() -> list[str]:
        raise OSError("no such device")

    source = LocalSource()
    asyncio.run(source.step())
    source._names = broken
    asyncio.run(source.step())
    assert len(source.board) == 1
    assert "no such device" in source.readiness().message


def test_saved_tokens_of_parallel_ranks_count_once_and_mixtures_say_so() -> None:
    def usage(blocks: int, **fields: object) -> NamespaceUsage:
        return NamespaceUsage("d", fields, 4096, blocks, 4096 * blocks)

    whole = saved(100, [usage(5, block_tokens=32, tp_size=2), usage(5, block_tokens=32, tp_size=2)])
    assert whole is not None
    assert (whole.tokens, whole.exact) == (1600, True)
    mixed = saved(100, [usage(30, block_tokens=16), usage(10, block_tokens=32)])
    assert mixed is not None
    assert (mixed.tokens, mixed.exact) == (2000, False)
    assert saved(100, [usage(5)]) is None
    empty = saved(100, [usage(0, block_tokens=16)])
    assert empty is not None
    assert empty.tokens == 1600
