"""The pool over its tiers: order, reasons, counting, and what it says when it cannot be opened."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpool.errors import BufferShapeError, KvpoolError, ManifestError, MediumUnavailable, RegionError
from kvpool.keys import KeyBatch
from kvpool.outcomes import MissReason
from kvpool.pool import Pool
from kvpool.region import Region
from kvpool.spec import PoolSpec
from kvpool.tiers.mapped import MappedTier
from strategies import buffers, contents, keys_of, namespace, small_geometry, wrong_hits

UNIT = 1024
NS = namespace(UNIT)


def region(folder: Path, name: str, slots: int = 16, hosts: int = 1, host: int = 0) -> Region:
    path = folder / name
    if not path.exists():
        Region.format(
            path, small_geometry(slots, hosts=hosts, block_bytes=UNIT, slots_per_extent=4, namespaces=4)
        )
    return Region.attach(path, host=host)


@pytest.fixture
def two_tiers(folder: Path) -> Iterator[Pool]:
    upper = MappedTier("dram", "DRAM", False, region(folder, "dram", slots=4))
    lower = MappedTier("cxl", "CXL", True, region(folder, "cxl", slots=16))
    with Pool([upper, lower], "test") as pool:
        yield pool


@pytest.fixture
def one_tier(folder: Path) -> Iterator[Pool]:
    with Pool([MappedTier("dram", "DRAM", False, region(folder, "dram"))], "test") as pool:
        yield pool


def load(pool: Pool, keys: KeyBatch, **more: bool) -> list[MissReason | None]:
    out = buffers(keys)
    result = pool.load(keys, out, **more)
    assert not wrong_hits(keys, result.codes, out)
    return list(result.reasons)


def test_block_evicted_above_is_served_below(two_tiers: Pool) -> None:
    for i in range(12):
        keys = keys_of(NS, [i])
        assert two_tiers.store(keys, contents(keys)).stored_count == 1
    assert two_tiers.tiers[0].lookup(keys_of(NS, range(12))).hit_count == 4
    keys = keys_of(NS, range(12))
    assert two_tiers.lookup(keys).hit_count == 12
    assert load(two_tiers, keys) == [None] * 12
    counters = two_tiers.counters()
    assert (counters.lookups, counters.hits, counters.misses) == (12, 12, {})
    assert [t.counters().hits for t in two_tiers.tiers] == [4, 8]


def test_pages_and_pieces_go_through_all_tiers(two_tiers: Pool) -> None:
    keys = keys_of(NS, range(8))
    assert two_tiers.store(keys, [[b[:100], b[100:]] for b in contents(keys)]).stored_count == 8
    out = buffers(keys)
    result = two_tiers.load(keys, [[memoryview(b)[:1000], memoryview(b)[1000:]] for b in out])
    assert result.hit_count == 8
    assert not wrong_hits(keys, result.codes, out)


def test_misses_have_reasons_and_are_counted_once(one_tier: Pool) -> None:
    stored = keys_of(NS, range(30))
    for i in range(30):
        one_tier.store(stored[i : i + 1], contents(stored[i : i + 1]))
    reasons = load(one_tier, stored)
    assert reasons.count(None) == 16
    assert MissReason.EVICTED in reasons
    assert load(one_tier, keys_of(NS, range(100, 120))).count(MissReason.NEVER_STORED) >= 15
    one_tier.record_misses(MissReason.BELOW_MINIMUM, 3)
    one_tier.record_misses(MissReason.BELOW_MINIMUM, 0)
    counters = one_tier.counters()
    assert counters.lookups == 30 + 20 + 3
    assert counters.hits == 16
    assert counters.lookups == counters.hits + sum(counters.misses.values())
    assert counters.misses["below-minimum"] == 3


def test_lookup_and_load_count_only_when_asked(one_tier: Pool) -> None:
    keys = keys_of(NS, range(4))
    one_tier.store(keys, contents(keys))
    one_tier.lookup(keys)
    load(one_tier, keys, count=False)
    assert one_tier.counters().lookups == 0
    one_tier.lookup(keys, count=True)
    load(one_tier, keys)
    counters = one_tier.counters()
    assert (counters.lookups, counters.hits) == (8, 8)


def test_other_namespace_of_a_known_model_is_wrong_namespace(one_tier: Pool) -> None:
    keys = keys_of(NS, range(2))
    one_tier.store(keys, contents(keys))
    other_weights = keys_of(namespace(UNIT, weights="0" * 64), range(2))
    assert load(one_tier, other_weights) == [MissReason.WRONG_NAMESPACE] * 2
    assert list(one_tier.lookup(other_weights).reasons) == [MissReason.WRONG_NAMESPACE] * 2
    stranger = keys_of(namespace(UNIT, "another model"), range(2))
    assert load(one_tier, stranger) == [MissReason.NEVER_STORED] * 2


def test_store_says_stored_when_any_tier_took_it(two_tiers: Pool) -> None:
    keys = keys_of(NS, range(3))
    two_tiers.tiers[0].store(keys[:1], contents(keys[:1]))
    result = two_tiers.store(keys, contents(keys))
    assert result.stored_count == 3
    assert two_tiers.store(keys, contents(keys)).present_count == 3


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ([bytearray(UNIT)], "1 buffers for 2 keys"),
        ([bytearray(UNIT), bytearray(1)], "block 1 has 1 bytes"),
        ([bytearray(UNIT), bytes(UNIT)], "read-only"),
    ],
)
def test_buffers_that_do_not_fit_are_refused_before_any_tier_is_asked(
    two_tiers: Pool, out: list[bytes], message: str
) -> None:
    keys = keys_of(NS, [0, 1])
    two_tiers.store(keys, contents(keys))
    with pytest.raises(BufferShapeError, match=message):
        two_tiers.load(keys, out)
    assert bytes(out[0]) == bytes(UNIT)
    assert two_tiers.counters().lookups == 0
    if message != "read-only":
        with pytest.raises(BufferShapeError, match=message):
            two_tiers.store(keys_of(NS, [5, 6]), out)
        assert two_tiers.lookup(keys_of(NS, [5, 6])).hit_count == 0


def test_batches_of_nothing_are_no_error(two_tiers: Pool) -> None:
    nothing = keys_of(NS, [])
    assert len(two_tiers.lookup(nothing, count=True)) == len(two_tiers.store(nothing, [])) == 0
    assert load(two_tiers, nothing) == []
    assert two_tiers.counters().lookups == 0


def test_closed_pool_raises_and_closing_twice_is_fine(folder: Path) -> None:
    pool = Pool([MappedTier("dram", "DRAM", False, region(folder, "dram"))], "test")
    pool.close()
    pool.close()
    with pytest.raises(RegionError, match=r"it was closed. Attach again"):
        pool.lookup(keys_of(NS, [1]))


def test_pool_without_tiers_is_refused() -> None:
    with pytest.raises(
        KvpoolError, match="no tier can be opened here; it needs at least one DRAM or CXL tier"
    ):
        Pool([], "empty")


def manifest(folder: Path, optional: str = "false") -> Path:
    path = folder / "pool.yaml"
    cxl = f"source: {{path: {folder}/cxl}}, optional: {optional}"
    path.write_text(
        textwrap.dedent(f"""\
            apiVersion: kvpool.dev/v1alpha1
            kind: KVPool
            metadata: {{name: test}}
            spec:
              hosts: 1
              tiers:
              - {{name: dram, medium: DRAM, capacity: 1Mi, source: {{path: {folder}/dram}}}}
              - {{name: cxl, medium: CXL, capacity: 1Mi, shared: true, {cxl}}}
            """)
    )
    return path


def test_open_by_manifest_attaches_its_tiers_in_order(folder: Path) -> None:
    region(folder, "dram").close()
    region(folder, "cxl", hosts=1).close()
    with Pool.open(manifest(folder)) as pool:
        assert [t.name for t in pool.tiers] == ["dram", "cxl"]
        keys = keys_of(NS, [1])
        pool.store(keys, contents(keys))
    with Pool.open(PoolSpec.from_file(manifest(folder))) as pool:
        assert load(pool, keys_of(NS, [1])) == [None]


def test_open_with_a_tier_missing_is_refused_unless_it_is_optional(folder: Path) -> None:
    region(folder, "dram").close()
    with pytest.raises(MediumUnavailable, match="cxl: cannot be opened: No such file"):
        Pool.open(manifest(folder))
    with region(folder, "dram") as alone:  # what had been opened before was closed again
        assert len(alone.participants()) == 1
    with Pool.open(manifest(folder, optional="true")) as pool:
        assert [t.name for t in pool.tiers] == ["dram"]


def test_open_as_a_host_that_does_not_exist_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    region(folder, "dram").close()
    with pytest.raises(
        KvpoolError, match=r"host 1 does not exist; the manifest has spec.hosts: 1. Set KVPOOL_HOST to 0\.\.0"
    ):
        Pool.open(manifest(folder), host=1)
    monkeypatch.setenv("KVPOOL_HOST", "7")
    with pytest.raises(KvpoolError, match="host 7 does not exist"):
        Pool.open(manifest(folder))


def test_open_a_name_that_does_not_run_says_what_does(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPOOL_RUNTIME_DIR", str(folder / "run"))
    with pytest.raises(
        MediumUnavailable,
        match=r"pool nobody: no pool of this name on this machine .there are: none.. Start it with",
    ):
        Pool.open("nobody")
    (folder / "bad.yaml").write_text("kind: Nothing\n")
    with pytest.raises(ManifestError):
        Pool.open(folder / "bad.yaml")
