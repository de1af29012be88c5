"""The life of a shared CXL memory: composed, used from both guests, killed, rebooted, grown, damaged.

The tests build on each other, in this order.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from typing import Any

import pytest

from guest.machine import Guest
from guest.shared import OTHER, POOL, REGION, REGION_SIZE, SERIAL, Shared, refused

BLOCKS = 128  # of each guest
INTERLEAVED = "22222222-2222-4333-8444-555555555555"
FLIPS = 400


@pytest.fixture(autouse=True)
def _stop_at_the_first_failure(request: pytest.FixtureRequest, shared: Shared) -> None:
    if request.session.testsfailed:
        pytest.skip("a test before it failed, and they build on each other")


def test_both_guests_boot_and_see_the_memory_by_its_serial(shared: Shared) -> None:
    shared.both(Guest.start)
    shared.both(Guest.wait)
    shared.counted["boots"] += 2
    for listed in shared.both(lambda guest: guest.must("kvpool", "cxl", "list", "-o", "json").json()):
        found = [(m["serial"], m["size_bytes"], m["healthy"]) for m in listed["memories"]]
        assert found == [(SERIAL, 512 << 20, True), (OTHER, 512 << 20, True)]
        assert listed["regions"] == []
    shared.tell(boot_s=[round(guest.boot_s, 1) for guest in (shared.a, shared.b)])


def test_composing_is_taken_back_at_each_step_that_fails(shared: Shared) -> None:
    failed = shared.a.call("fail_at_each_step", uuid=REGION, memories=[SERIAL], size_bytes=256 << 20)
    assert failed[0].startswith("create_pmem_region")
    assert failed[-1] == "create-namespace"
    shared.tell(steps_that_failed=failed)


def test_composing_that_dies_at_each_step_is_completed_by_the_next(shared: Shared) -> None:
    died = shared.b.call("die_at_each_step", uuid=REGION, memories=[SERIAL], size_bytes=256 << 20)
    assert died >= 11
    shared.tell(steps_that_died=died)


def test_interleaved_region_has_the_same_bytes_on_both_guests(shared: Shared) -> None:
    a, b = shared.a, shared.b
    ways = ["kvpool", "cxl", "compose", "--uuid", INTERLEAVED, "--size", "512Mi", "-o", "json"]
    right = [*ways, "--memory", SERIAL, "--memory", OTHER]
    for done in shared.both(lambda guest: guest.must(*right)):
        assert done.json()["memories"] == [SERIAL, OTHER]
        assert done.json()["device"]["size_bytes"] == 510 << 20
    a.call("write_device", path="/dev/dax0.0", seed="interleaved")
    assert b.call("device_has", path="/dev/dax0.0", seed="interleaved")
    assert "exists with another geometry" in refused(b.run(*ways, "--memory", OTHER, "--memory", SERIAL))
    _forget_region(b)
    for wrong in (["--memory", OTHER, "--memory", SERIAL], [*right[-4:], "--granularity", "512"]):
        assert b.run(*ways, *wrong).code == 1
    b.must(*right)
    assert b.call("device_has", path="/dev/dax0.0", seed="interleaved")
    shared.both(lambda guest: guest.must("kvpool", "cxl", "destroy", INTERLEAVED))


def test_both_guests_compose_at_once_with_empty_labels(shared: Shared) -> None:
    begin = time.monotonic()
    first, second = shared.both(shared.compose)
    shared.tell(compose_s=round(time.monotonic() - begin, 2), region=first)
    assert first == second
    assert first["uuid"] == REGION
    assert first["device"]["size_bytes"] == 254 << 20
    assert first["device"]["align_bytes"] == 2 << 20
    assert shared.compose(shared.a) == first


def test_composing_what_cannot_be_is_refused(shared: Shared) -> None:
    assert "there is no memory 0xc9 here" in shared.compose_refused(shared.a, "--memory", "0xc9")
    assert "exists with another geometry" in shared.compose_refused(shared.a, "--granularity", "1024")
    assert "exists with another geometry" in shared.compose_refused(shared.a, size="512Mi")
    assert "at most 512Mi" in shared.compose_refused(shared.a, size="1Gi")


def test_both_daemons_start_at_once_and_the_litmus_holds(shared: Shared) -> None:
    begin = time.monotonic()
    shared.both(shared.up)
    shared.tell(up_s=round(time.monotonic() - begin, 1))
    for guest in (shared.a, shared.b):
        verdict = _until_verified(guest)
        shared.tell(**{f"litmus_of_{guest.name}": verdict})
        assert verdict["status"] == "True", verdict


def test_blocks_stored_on_one_guest_are_hits_on_the_other(shared: Shared) -> None:
    for stores, loads in ((shared.a, shared.b), (shared.b, shared.a)):
        assert shared.store(stores, f"of {stores.name}", BLOCKS) == {"stored": BLOCKS}
        assert shared.load(loads, f"of {stores.name}", BLOCKS) == {"hit": BLOCKS, "wrong": 0}
        assert shared.load(loads, f"of {stores.name}", 16, first=BLOCKS)["miss never-stored"] == 16


def test_region_in_use_is_neither_removed_nor_resized(shared: Shared) -> None:
    assert "is mapped by process" in refused(shared.a.run("kvpool", "cxl", "destroy", REGION))
    assert "is mapped by process" in refused(
        shared.a.run("kvpool", "cxl", "destroy", REGION, "--with-blocks")
    )
    assert "is mapped by process" in refused(
        shared.a.run("kvpool", "cxl", "resize", REGION, "--size", "512Mi")
    )


def test_guest_killed_in_mid_store_leaves_nothing_wrong_and_is_warm_after_its_reboot(shared: Shared) -> None:
    a, b = shared.a, shared.b
    a.call("store_on_and_on", pool=POOL, seed="cut")
    _until(lambda: a.call("stored_so_far") >= 64)
    acknowledged = a.call("stored_so_far")
    a.kill()
    shared.counted["stored"] += acknowledged
    assert shared.load(b, "cut", acknowledged) == {"hit": acknowledged, "wrong": 0}
    shared.load(b, "cut", 256, first=acknowledged)  # whatever came after, also the one that was cut
    assert shared.load(b, "of a", BLOCKS)["hit"] == BLOCKS
    assert shared.store(b, "meanwhile", 16) == {"stored": 16}
    _boot(shared, a)
    shared.compose(a)
    shared.up(a)
    for seed, count in (("of a", BLOCKS), ("of b", BLOCKS), ("cut", acknowledged), ("meanwhile", 16)):
        assert shared.load(a, seed, count) == {"hit": count, "wrong": 0}
    assert shared.store(a, "after the reboot", 16) == {"stored": 16}
    assert shared.load(b, "after the reboot", 16)["hit"] == 16
    shared.tell(acknowledged_before_the_kill=acknowledged, reboot_s=round(a.boot_s, 1))


def test_flipped_bits_are_misses_and_never_wrong(shared: Shared) -> None:
    for number in range(0, BLOCKS, 8):
        begin = hashlib.shake_128(f"of b {number}".encode()).digest(64)
        assert shared.flip(begin, at=number % 64)
    found = shared.load(shared.a, "of b", BLOCKS)
    assert found["hit"] == BLOCKS - BLOCKS // 8
    assert sum(count for reason, count in found.items() if reason.startswith("miss")) == BLOCKS // 8
    shared.tell(bits_flipped=BLOCKS // 8, found_after_the_flips=found)


def test_tier_grows_while_both_guests_use_it(shared: Shared) -> None:
    for guest in (shared.a, shared.b):
        shared.up(guest, capacity="96Mi")
    assert _capacity(shared.a) == _capacity(shared.b) == 96 << 20
    assert shared.load(shared.b, "of a", BLOCKS) == {"hit": BLOCKS, "wrong": 0}
    assert shared.store(shared.a, "more", BLOCKS) == {"stored": BLOCKS}
    assert shared.load(shared.b, "more", BLOCKS) == {"hit": BLOCKS, "wrong": 0}


def test_region_with_blocks_is_not_destroyed_unless_told_twice(shared: Shared) -> None:
    shared.both(shared.down)
    message = refused(shared.b.run("kvpool", "cxl", "destroy", REGION))
    assert "holds a kvpool region" in message
    shared.b.must("kvpool", "cxl", "destroy", REGION, "--with-blocks")
    assert shared.b.must("kvpool", "cxl", "list", "-o", "json").json()["regions"] == []
    shared.compose(shared.b)  # its bytes are still there


def test_region_grows_and_its_blocks_stay(shared: Shared) -> None:
    for guest in (shared.a, shared.b):
        resized = guest.must("kvpool", "cxl", "resize", REGION, "--size", "512Mi", "-o", "json").json()
        assert resized["device"]["size_bytes"] == 510 << 20
    shared.both(lambda guest: shared.up(guest, capacity="192Mi"))
    assert shared.load(shared.b, "of a", BLOCKS) == {"hit": BLOCKS, "wrong": 0}
    assert shared.load(shared.a, "more", BLOCKS) == {"hit": BLOCKS, "wrong": 0}
    shared.down(shared.b)
    for size, device_bytes in ((REGION_SIZE, 254 << 20), ("512Mi", 510 << 20)):  # the pool fits into the less
        resized = shared.b.must("kvpool", "cxl", "resize", REGION, "--size", size, "-o", "json").json()
        assert resized["device"]["size_bytes"] == device_bytes


def test_region_made_again_with_another_geometry_is_refused(shared: Shared) -> None:
    b = shared.b
    _forget_region(b)
    for more, size in ((["--granularity", "512"], "512Mi"), ([], REGION_SIZE)):
        message = shared.compose_refused(b, *more, size=size)
        assert "was made with another geometry: 1 way(s) of granularity 256, 512Mi" in message
        assert b.must("kvpool", "cxl", "list", "-o", "json").json()["regions"] == []
    shared.tell(other_geometry_says=message.strip())
    assert shared.compose(b, size="512Mi")["device"]["size_bytes"] == 510 << 20


def test_missing_namespace_is_made_again_over_living_memory(shared: Shared) -> None:
    b = shared.b
    b.must("ndctl", "destroy-namespace", "-f", "namespace0.0")
    (region,) = b.must("kvpool", "cxl", "list", "-o", "json").json()["regions"]
    assert region["device"] is None
    shared.compose(b, size="512Mi")
    shared.up(b, capacity="192Mi")
    assert shared.load(b, "of a", BLOCKS) == {"hit": BLOCKS, "wrong": 0}
    assert shared.load(shared.a, "of a", BLOCKS) == {"hit": BLOCKS, "wrong": 0}


def test_guest_that_lost_its_labels_joins_again_beside_a_living_peer(shared: Shared) -> None:
    b = shared.b
    b.kill()
    for labels in b.labels:
        labels.unlink()
    _boot(shared, b)
    shared.compose(b, size="512Mi")
    shared.up(b, capacity="192Mi")
    assert shared.load(b, "of a", BLOCKS) == {"hit": BLOCKS, "wrong": 0}
    assert shared.store(b, "new labels", 16) == {"stored": 16}
    assert shared.load(shared.a, "new labels", 16) == {"hit": 16, "wrong": 0}


def test_doubled_namespace_is_refused_with_both_names(shared: Shared) -> None:
    b = shared.b
    shared.down(b)
    b.must("ndctl", "destroy-namespace", "-f", "namespace0.0")
    for _ in range(2):
        b.must("ndctl", "create-namespace", "-r", "region0", "-m", "devdax", "-M", "mem", "-s", "128M")
    message = shared.compose_refused(b, size="512Mi")
    assert "it has 2 namespaces" in message
    assert "namespace0.0" in message
    assert "namespace0.1" in message
    shared.tell(doubled_namespace_says=message.strip())
    for name in ("namespace0.0", "namespace0.1"):
        b.must("ndctl", "destroy-namespace", "-f", name)
    shared.compose(b, size="512Mi")
    shared.up(b, capacity="192Mi")
    # The second namespace's info block lies in the middle of the pool: at most the blocks there are lost.
    assert shared.load(b, "of a", BLOCKS)["hit"] >= BLOCKS - 2
    assert shared.load(shared.a, "more", BLOCKS)["hit"] >= BLOCKS - 2


def test_bits_flipped_anywhere_are_never_served_and_can_be_repaired(shared: Shared) -> None:
    seeds = ("of a", "of b", "cut", "more", "meanwhile", "new labels")
    shared.flip_anywhere(FLIPS, 48 << 20, seed=7)
    for guest in (shared.a, shared.b):
        for seed in seeds:
            shared.load(guest, seed, 64)  # none of them may be wrong
    for guest in (shared.a, shared.b):
        guest.run("kvpool", "fsck", POOL, "--repair")
    assert shared.store(shared.a, "after the repair", 32).get("stored") == 32
    assert shared.load(shared.b, "after the repair", 32)["hit"] == 32
    shared.tell(bits_flipped_anywhere=FLIPS)


def _boot(shared: Shared, guest: Guest) -> None:
    guest.reboot()
    shared.counted["boots"] += 1


def _forget_region(guest: Guest) -> None:
    """What a reboot does: the kernel's region goes, its namespace's label stays."""
    guest.must("cxl", "disable-region", "region0")
    guest.must("cxl", "destroy-region", "region0")
    assert guest.must("kvpool", "cxl", "list", "-o", "json").json()["regions"] == []


def _status(guest: Guest) -> dict[str, Any]:
    (pool,) = guest.must("kvpool", "status", POOL, "-o", "json").json()["pools"]
    return dict(pool)


def _until_verified(guest: Guest) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def known() -> bool:
        for condition in _status(guest)["conditions"]:
            if condition["type"] == "CoherenceVerified":
                found.update(condition)
        return found.get("status", "Unknown") != "Unknown"

    _until(known)
    return found


def _capacity(guest: Guest) -> int:
    (tier,) = _status(guest)["tiers"]
    return int(tier["capacity_bytes"])


def _until(happened: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.3)
