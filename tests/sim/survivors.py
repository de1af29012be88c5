"""Places of the protocol that the simulator does not miss when they are left out: the reason why nobody needs them, or what they are for.

The list may only shrink: a place that is noticed after all fails the test, and so does one that is not noticed and not here.
"""

from __future__ import annotations

HINT = "only a hint: who follows it loads the header again"
ONE_REAPER = "one reaper a dead process, by its lock: nobody else writes that word"
OLDER_TAIL = "an older tail is as good: what came since is followed after the walk, or walked once more"
OLD_CUT = "an older descriptor in the medium says that free slots lie there, and so they do: each of their headers is written back"
VERIFIED = "the payload's checksum is in the header, and decides"

NEEDLESS = {
    "attached.h next bump.stable": "one bump of the count a cycle is enough; see PAIRS",
    "attached.h next bump.writing": "one bump of the count a cycle is enough; see PAIRS",
    "directory.h publish publish.already": "two equal entries mislead nobody; they take room",
    "log.h log_append cas->store #1": "the tail is a hint; who finds it behind helps it on",
    "log.h log_repair_tail cas->store": "the tail is a hint; who finds it behind helps it on",
    "log.h start_rescan full_fence": OLDER_TAIL,
    "log.h start_rescan full_fence->store_fence": OLDER_TAIL,
    "recovery.h reap cas->store #1": ONE_REAPER,
    "recovery.h reap cas->store #2": ONE_REAPER,
    "recovery.h settle_extent cas->store": ONE_REAPER,
    "replica.h look follow.header_checksum": HINT,
    "replica.h look follow.state": HINT,
    "slots.h recut recut.wait": "taking the slots waits as well; waiting before it spares blocks that would be evicted in vain",
    "slots.h retire store_fence #2": OLD_CUT,
    "slots.h retire write_back #1": OLD_CUT,
    "slots.h retire write_back #2": OLD_CUT,
    "slots.h slot_age invalidate": "ages only make a worse choice (PROTOCOL 9.17)",
    "slots.h take_victim evict.unpublish": "the entry is dead when the slot's count has moved on; the ghost names the reason of a miss",
    "slots.h touch_slot write_back": "ages only make a worse choice (PROTOCOL 9.17)",
    "transfer.h load_block full_fence #2": "the payload's checksum has decided; what follows only names the reason",
    "transfer.h load_block full_fence->store_fence #2": "as the one before",
    "transfer.h probe_replica load.state": VERIFIED,
    "transfer.h probe_shard load.count": "the key and the payload's checksum decide",
    "transfer.h probe_shard load.header_checksum": VERIFIED,
    "transfer.h probe_shard load.state": VERIFIED,
}

# Lines of the protocol's source with an access that no scenario comes to, by what stands there.
UNVISITED = {
    "scan.h: a.mem.invalidate(s.slot_header(SlotId::make(e, i)), (n - i < kRound ? n - i : kRound) * kLineBytes);": "reports on the shards of other hosts",
    "scan.h: a.mem.full_fence();": "as the one before",
    "transfer.h: if (a_.fresh(shard)) m_.invalidate(a_.shard(shard).log_tail(), 8);": "the age that a load writes down",
}

# Two places that stand in for each other: either may go, not both. With the arguments under which it is noticed.
PAIRS = [
    (
        ["--scenario", "evict", "--seeds", "1:1000"],
        "attached.h next bump.stable",
        "attached.h next bump.writing",
    ),
    (
        ["--scenario", "evict", "--seeds", "1:1000"],
        "transfer.h probe_replica load.state",
        "transfer.h probe_replica load.header_checksum",
    ),
    (
        ["--scenario", "probe", "--seeds", "1:1000"],
        "transfer.h probe_shard load.state",
        "transfer.h probe_shard load.count",
    ),
    (
        ["--scenario", "evict", "--seeds", "1:1000"],
        "transfer.h load_block load.verify",
        "transfer.h load_block invalidate #1",
    ),
]
