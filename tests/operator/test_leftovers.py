"""What the DRA driver has on record of claims that are gone: one bad record is in no other's way."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

pytest.importorskip("grpc", reason="no grpcio in this environment: pip install 'kvpool[operator]'")

from kvpool.cxl import Wanted
from kvpool.cxl.file import FileBackend
from kvpool_operator.client import ApiError
from kvpool_operator.dra.allocation import ClaimRef, Result
from kvpool_operator.dra.cdi import Folder, Given
from kvpool_operator.dra.checkpoint import Checkpoint, Record
from kvpool_operator.dra.leftovers import Leftovers
from kvpool_operator.dra.prepare import Preparer, Settings

BAD, GOOD = "11111111-1111-4111-8111-111111111111", "22222222-2222-4222-8222-222222222222"
MIB = 1 << 20


@dataclass
class NoClaims:
    """A cluster in which every claim is gone; asking for `broken` fails."""

    broken: Exception | None = None

    async def get(self, _kind: Any, _namespace: str, name: str) -> None:
        if self.broken is not None and name == "bad":
            raise self.broken

    async def list(self, *_: Any) -> list[Any]:
        return []


@dataclass
class Place:
    checkpoint: Checkpoint
    backend: FileBackend
    cdi: Folder
    cluster: NoClaims

    @property
    def leftovers(self) -> Leftovers:
        settings = Settings("node", "ops")
        return Leftovers(Preparer(self.cluster, self.backend, self.checkpoint, self.cdi, settings))  # type: ignore[arg-type]

    def record(self, uid: str) -> Path:
        return self.checkpoint._path(uid)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """Two claims that were released, each with a region that goes with it."""
    (tmp_path / "cxl").mkdir()
    backend = FileBackend.with_memories(tmp_path / "cxl", 2, 64 * MIB)
    made = Place(Checkpoint(tmp_path), backend, Folder(tmp_path / "cdi"), NoClaims())
    for uid, name, serial in ((BAD, "bad", "0x1"), (GOOD, "good", "0x2")):
        backend.compose(Wanted(UUID(uid), (serial,), MIB))
        result = Result("region", f"memory/{serial}", "memory")
        made.checkpoint.write(Record(ClaimRef("team", name, uid), "released", (result,), uid, "Delete"))
    return made


async def until_released(leftovers: Leftovers, gone: Callable[[], bool]) -> None:
    task = asyncio.ensure_future(leftovers.run())
    try:
        for _ in range(500):
            if gone() or task.done():
                break
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        assert not task.done(), task
    finally:
        task.cancel()


def damaged(**changes: Any) -> Callable[[str], str]:
    return lambda text: json.dumps({**json.loads(text), **changes})


REF = {"namespace": "team", "name": "bad", "uid": BAD}
RESULT = {"request": "region", "pool": "memory/0x1", "device": "memory"}
DAMAGE = {
    "half of it": lambda text: text[:40],
    "deep": lambda _: "[" * 100_000,
    "binary": lambda _: "\0",
    "a list": lambda _: "[]",
    "no version": damaged(version=True),
    "a newer version": damaged(version=2),
    "another claim's": damaged(ref={**REF, "uid": GOOD}),
    "no namespace": damaged(ref={**REF, "namespace": None}),
    "a path for a name": damaged(ref={**REF, "name": "../x"}),
    "a field too many": damaged(ref={**REF, "more": "x"}),
    "no ref": damaged(ref=[]),
    "an unknown state": damaged(state="lost"),
    "a state that is no text": damaged(state=["released"]),
    "an unknown policy": damaged(policy="Delete!"),
    "a region that is no text": damaged(region=5),
    "a region that is no UUID": damaged(region="1111111!-1111-4111-8111-111111111111"),
    "no results": damaged(results=[]),
    "results that are none": damaged(results=5),
    "a result that is none": damaged(results=["x"]),
    "a device that is no text": damaged(results=[{**RESULT, "device": 1}]),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_damaged_record_is_skipped_by_itself(
    place: Place, damage: Callable[[str], str], caplog: pytest.LogCaptureFixture
) -> None:
    path = place.record(BAD)
    path.write_text(damage(path.read_text()))
    assert place.checkpoint.read(BAD) is None
    asyncio.run(until_released(place.leftovers, lambda: not place.record(GOOD).exists()))
    assert place.checkpoint.uids() == {BAD}
    assert [str(region.uuid) for region in place.backend.regions()] == [BAD], "nobody knows whose it is"
    told = [line for line in caplog.messages if line.startswith("checkpoint_unreadable")]
    assert len(told) == 1, "it is said once"
    assert BAD in told[0]


@pytest.mark.parametrize(
    "error", [ApiError("get", 500, "no"), OSError("no"), ZeroDivisionError("no")], ids=repr
)
def test_record_whose_claim_cannot_be_looked_at_is_in_no_others_way(place: Place, error: Exception) -> None:
    place.cluster.broken = error
    leftovers = place.leftovers

    async def twice() -> None:
        await until_released(leftovers, lambda: not place.record(GOOD).exists())
        assert place.checkpoint.uids() == {BAD}
        place.cluster.broken = None
        await until_released(leftovers, lambda: not place.record(BAD).exists())

    asyncio.run(twice())
    assert place.checkpoint.uids() == set()
    assert place.backend.regions() == []


def test_unprepare_of_a_damaged_record_removes_what_there_is(place: Place) -> None:
    place.cdi.write(BAD, Given())
    place.record(BAD).write_text("[")
    preparer = place.leftovers._preparer
    asyncio.run(preparer.unprepare(ClaimRef("team", "bad", BAD)))
    assert place.checkpoint.uids() == {GOOD}
    assert place.cdi.uids() == set()


def test_files_of_others_among_cdi_files_stay(place: Place, tmp_path: Path) -> None:
    place.cdi.write(BAD, Given())
    other = place.cdi.file(BAD).with_name("dra.kvpool.dev-claim_notes.json")
    other.write_text("{}")
    place.checkpoint.remove(BAD)
    asyncio.run(place.leftovers.tidy())
    assert other.exists()
    assert not place.cdi.file(BAD).exists()
    for uid in ("../../etc/passwd", "", "x" * 36):
        with pytest.raises(ValueError, match="no uid"):
            place.cdi.file(uid)
        with pytest.raises(ValueError, match="no uid"):
            place.cdi.write(uid, Given())
    assert sorted(path.name for path in (tmp_path / "cdi").iterdir()) == [other.name]
