"""Every reason of `kvpool.outcomes` is reached by a test, or known to be given by nobody yet."""

from __future__ import annotations

import ast
import signal
from pathlib import Path

from children import children
from kvpool import _native
from kvpool.outcomes import MissReason
from kvpool.region import Region
from regions import NS, make
from strategies import buffers, contents, keys_of, wrong_hits

ROOT = Path(__file__).resolve().parents[2]
# The test that asserts that the real thing gives this reason.
REACHED = {
    MissReason.NEVER_STORED: "unit/test_pool.py::test_other_namespace_of_a_known_model_is_wrong_namespace",
    MissReason.EVICTED: "unit/test_region.py::"
    "test_damaged_payload_is_failed_checksum_once_then_evicted_and_the_next_store_stores_it_anew",
    MissReason.WRONG_NAMESPACE: "unit/test_pool.py::test_other_namespace_of_a_known_model_is_wrong_namespace",
    MissReason.BELOW_MINIMUM: "unit/test_connector_session.py::"
    "test_match_below_the_minimum_is_declined_and_counted",
    MissReason.FAILED_CHECKSUM: "unit/test_region.py::"
    "test_damaged_payload_of_another_host_stays_a_miss_until_its_owner_reads_it",
    MissReason.CHANGED_WHILE_READING: "unit/test_miss_reasons.py::"
    "test_block_replaced_under_its_reader_is_changed_while_reading",
    MissReason.TIER_ERROR: "unit/test_region_refusals.py::"
    "test_medium_that_fails_after_a_refused_attach_is_still_only_a_miss",
    MissReason.NO_SPACE: "unit/test_miss_reasons.py::"
    "test_store_beside_a_stopped_writer_that_holds_the_only_slot_is_no_space",
    MissReason.NAMESPACES_FULL: "crash/test_races.py::"
    "test_namespaces_beyond_the_rows_are_declined_with_their_reason",
    MissReason.FENCED: "crash/test_races.py::test_nobody_writes_to_a_shard_before_its_adoption_is_done",
}
# Part of the format, for quotas and the break-even gate, which are not there yet. Whoever gives one of them
# moves it up and writes its test.
GIVEN_BY_NOBODY = {MissReason.QUOTA, MissReason.DECLINED_BY_COST}
MAY_NAME_THEM = {"outcomes.py", "explain.py", "layout.h"}


def asserted(test: str, reason: MissReason) -> bool:
    """Whether the function exists and an assert in it names the reason."""
    file, name = test.split("::")
    for node in ast.walk(ast.parse((ROOT / "tests" / file).read_text())):
        if isinstance(node, ast.FunctionDef) and node.name == name:
            asserts = (inner for inner in ast.walk(node) if isinstance(inner, ast.Assert))
            return any(f"MissReason.{reason.name}" in ast.unparse(a.test) for a in asserts)
    return False


def test_every_reason_has_a_test_that_reaches_it() -> None:
    assert REACHED.keys() | GIVEN_BY_NOBODY == set(MissReason)
    assert not REACHED.keys() & GIVEN_BY_NOBODY
    missing = [reason.name for reason, test in REACHED.items() if not asserted(test, reason)]
    assert missing == []


def test_asserted_wants_the_test_and_the_reason() -> None:
    test = REACHED[MissReason.NO_SPACE]
    assert asserted(test, MissReason.NO_SPACE)
    assert not asserted(test, MissReason.QUOTA)
    assert not asserted(test + "_gone", MissReason.NO_SPACE)


def test_reasons_without_a_test_are_given_by_no_code() -> None:
    for reason in GIVEN_BY_NOBODY:
        names = (f"MissReason.{reason.name}", "Outcome::" + reason.name.title().replace("_", ""))
        sources = [
            p
            for top in ("pool", "connector")
            for end in ("py", "h", "cpp")
            for p in (ROOT / top).rglob(f"*.{end}")
        ]
        given = [
            p.name
            for p in sources
            if p.name not in MAY_NAME_THEM and any(name in p.read_text() for name in names)
        ]
        assert given == [], f"{reason.name} is given now: write its test"


def test_block_replaced_under_its_reader_is_changed_while_reading(folder: Path) -> None:
    """The reader has seen the block's header, then sleeps; meanwhile its only slot is filled anew."""
    path = make(folder / "region", slots=1, slots_per_extent=1)
    first, second = keys_of(NS, [1]), keys_of(NS, [2])

    def read_slowly() -> list[MissReason | None]:
        with Region.attach(path) as region:
            _native.stop_at("load.before_copy", 1, signal.SIGSTOP)
            out = buffers(first)
            result = region.load(first, out)
            assert not wrong_hits(first, result.codes, out)
            return list(result.reasons)

    with Region.attach(path) as region, children() as start:
        region.store(first, contents(first))
        reader = start(read_slowly)
        assert reader.wait_stopped()
        assert region.store(second, contents(second)).stored_count == 1
        reader.signal(signal.SIGCONT)
        assert reader.result() == [MissReason.CHANGED_WHILE_READING]
        assert region.load(second, buffers(second)).hit_count == 1, "and nobody dropped the new block"
        assert region.counters().scrub_bad == 0


def test_store_beside_a_stopped_writer_that_holds_the_only_slot_is_no_space(folder: Path) -> None:
    path = make(folder / "region", slots=1, slots_per_extent=1)
    first, second = keys_of(NS, [1]), keys_of(NS, [2])

    def store_slowly() -> int:
        with Region.attach(path) as region:
            _native.stop_at("store.claim", 1, signal.SIGSTOP)
            return region.store(first, contents(first)).stored_count

    with Region.attach(path) as region, children() as start:
        writer = start(store_slowly)
        assert writer.wait_stopped()
        assert list(region.store(second, contents(second)).reasons) == [MissReason.NO_SPACE]
        writer.signal(signal.SIGCONT)
        assert writer.result() == 1
        assert region.store(second, contents(second)).stored_count == 1, "a full region evicts"
