"""The source of this machine's pools: a real region, seen through the API and through `kvpool status`."""

from __future__ import annotations

import asyncio
import json
import os
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
from kvpool.report import NamespaceCounts, NamespaceReport, NamespaceUsage
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
    assert (seen["saved"]["tokens"], seen["saved"]["exact"]) == (160, True)
    assert (seen["saved"]["prefillSeconds"], seen["saved"]["prefillCoverage"]) == (None, None)
    assert "different lengths" in seen["saved"]["prefillNote"]
    ready = seen["conditions"][0]
    assert (ready["type"], ready["status"], ready["reason"]) == ("Ready", "False", "Stopped")
    spaces = client.get("/v1/pools/local/here/namespaces").json()["items"]
    assert [(s["model"], s["blockTokens"], s["blocks"]) for s in spaces] == [("m", 16, 10)]
    assert [(s["lookups"], s["hits"], s["hitRate"], s["savedTokens"]) for s in spaces] == [
        (15, 10, 66.7, 160)
    ]
    assert [(s["misses"], s["tenant"]) for s in spaces] == [({"never-stored": 5}, False)]
    (engine,) = client.get("/v1/pools/local/here/misses").json()["engines"]
    assert (engine["engine"], engine["live"], engine["hitRate"]) == (f"h0/{os.getpid()}", False, 66.7)
    assert (engine["lookups"], engine["misses"]) == (15, {"never-stored": 5})
    assert engine["namespaces"] == [spaces[0]["digest"]]
    assert [tier["hitRate"] for tier in seen["tiers"]] == [66.7]


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


def test_saved_tokens_are_exact_when_engines_of_several_block_sizes_report() -> None:
    def report(hits: int, saved_us: int = 0, timed: int = 0, **fields: object) -> NamespaceReport:
        counts = NamespaceCounts(hits=hits, saved_us=saved_us, timed_hits=timed)
        return NamespaceReport("d", fields, 4096, counts)

    stored = [
        NamespaceUsage("a", {"block_tokens": 16}, 4096, 30, 0),
        NamespaceUsage("b", {"block_tokens": 32}, 4096, 10, 0),
    ]
    reports = {"a": report(60, block_tokens=16), "b": report(40, 4_000_000, 20, block_tokens=32, tp_size=2)}
    all_told = saved(100, stored, reports)
    assert all_told is not None
    assert (all_told.tokens, all_told.exact) == (60 * 16 + 40 * 16, True)
    # Both ranks have counted the same two seconds; of the other hits nobody knows.
    assert (all_told.prefill_seconds, all_told.prefill_coverage) == (2.0, 20.0)
    # Ten hits more, of an engine that reports nothing: 20 tokens each on average.
    more = saved(110, stored, reports)
    assert more is not None
    assert (more.tokens, more.exact) == (all_told.tokens + 200, False)
    # As custom resources have it: text.
    text = saved(10, [], {"a": report(10, block_tokens="16", tp_size="1")})
    assert text is not None
    assert (text.tokens, text.exact) == (160, True)


def test_engines_that_differ_are_told_apart_with_what_to_do(spec: PoolSpec, serve: Ask) -> None:
    """The second one has stored nothing: only its own report says what it is set to."""
    use()
    reader = Namespace("m", "w", "float16", "flat", 32, 4096, "sha256")
    with Pool.open("here") as opened:
        keys = KeyBatch.from_hashes(reader, [bytes([9, j]) * 16 for j in range(5)])
        opened.load(keys, [bytearray(4096) for _ in range(5)])
        source = LocalSource()
        asyncio.run(source.step())
        client = serve(source)  # type: ignore[arg-type]
        engines = client.get("/v1/pools/local/here/misses").json()["engines"]
        assert [(e["live"], e["hits"], e["lookups"]) for e in engines] == [(True, 0, 5), (False, 10, 15)]
        by_name = client.get("/v1/pools/local/here/explain", params={"engine": engines[0]["engine"]}).json()
        assert (by_name["ownCounters"], by_name["lookups"], by_name["hitRate"]) == (True, 5, 0.0)
        assert by_name["misses"][0]["reason"] == "wrong-namespace"
        (difference,) = by_name["namespaces"][0]["differences"]
        assert (difference["field"], difference["here"], difference["there"]) == ("block_tokens", "32", "16")
        assert "--block-size" in by_name["advice"]
        digest = reader.digest.hex()[:12]
        by_digest = client.get("/v1/pools/local/here/explain", params={"engine": digest}).json()
        assert (by_digest["lookups"], by_digest["namespaces"]) == (5, by_name["namespaces"])
    told = CliRunner().invoke(app, ["explain", "here", "--engine", digest])
    assert "block_tokens" in told.stdout
    assert "0.0% of 5 looked-up blocks" in told.stdout
    unknown = CliRunner().invoke(app, ["explain", "here", "--engine", "nobody"])
    assert (unknown.exit_code, digest in unknown.output) == (1, True)
    short = CliRunner().invoke(app, ["explain", "here", "--engine", digest[:3]])
    assert (short.exit_code, "give four or more digits" in short.output) == (1, True)
    shown = CliRunner().invoke(app, ["status", "here"]).stdout
    assert "66.7%" in shown  # of the engine
    assert "saved: 160 tokens" in shown


HOSTILE = "\udcff\x1b]0;evil\x07\x1b[2J\nproblem: fake \u202e"


def test_texts_of_others_break_no_answer_and_reach_no_terminal(
    spec: PoolSpec, serve: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of engines, in their reports and in regions: halves of pairs, control characters, nesting."""
    monkeypatch.setenv("KVPOOL_POD_NAME", HOSTILE)
    common = {"weights": "w", "dtype": "f", "kv_layout": "l", "block_bytes": 4096, "hash_scheme": "s"}
    spaces = [
        Namespace(model=f"m{HOSTILE}", block_tokens=16, extra={HOSTILE: HOSTILE}, **common),  # type: ignore[arg-type]
        Namespace(model=f"m{HOSTILE}", block_tokens=32, **common),  # type: ignore[arg-type]
        Namespace(model="n", block_tokens=16, extra={"x": [[[HOSTILE]]]}, **common),  # type: ignore[arg-type, dict-item]
    ]
    with Pool.open("here", engine=HOSTILE) as opened:
        for space in spaces[:1] + spaces[2:]:
            opened.store(KeyBatch.from_hashes(space, [bytes(32)]), [bytes(4096)])
        loaded = opened.load(KeyBatch.from_hashes(spaces[1], [bytes(32)]), [bytearray(4096)])
        assert str(loaded.reasons[0]) == "wrong-namespace"

        source = LocalSource()
        asyncio.run(source.step())
        client = serve(source)  # type: ignore[arg-type]
        for below in ("", "/nodes", "/namespaces", "/misses", "/explain", "/tiers"):
            answer = client.get(f"/v1/pools/local/here{below}")
            assert answer.status_code in (200, 404 if below == "/tiers" else 200), (below, answer.text)
        assert client.get("/metrics").status_code == 200
        models = {n["model"] for n in client.get("/v1/pools/local/here/namespaces").json()["items"]}
        assert f"m?{HOSTILE[1:]}" in models

        for command in ("status", "explain"):
            told = CliRunner().invoke(app, [command, "here"])
            assert told.exit_code == 0, told.output
            assert "\\x1b]0;evil\\x07\\x1b[2J\\nproblem: fake" in told.stdout
            assert not {"\x1b", "\x07", "\u202e"} & set(told.stdout)
            assert not [line for line in told.stdout.splitlines() if line.startswith("problem: fake")]
            as_json = CliRunner().invoke(app, [command, "here", "-o", "json"])
            assert (as_json.exit_code, "\x1b" in as_json.stdout) == (0, False)
        assert CliRunner().invoke(app, ["top", "--rounds", "1"]).exit_code == 0
