"""Places of the protocol that the simulator does not miss when they are left out, and why.

`NEEDLESS` may go, or stays for a reason outside of safety. `UNSEEN` is needed by argument, or was noticed only by a search that is
too long for every run: each is a missing scenario. Both lists may only shrink: a place that is noticed after all fails the test.
"""

from __future__ import annotations

COVERED = "the write-back of the whole directory in the end, and its fence, cover it"
HINT = "only a hint: who follows it loads the header again"
ONE_REAPER = "one reaper a dead process, by its lock: nobody else writes that word"

NEEDLESS = {
    "attached.h next bump.stable": "one bump of the count a cycle is enough; see PAIRS",
    "attached.h next bump.writing": "one bump of the count a cycle is enough; see PAIRS",
    "directory.h publish publish.already": "two equal entries mislead nobody; they take room",
    "directory.h unpublish write_back": "hygiene: the entry is dead when the slot's count has moved on",
    "slots.h take_victim evict.unpublish": "hygiene: the entry is dead when the slot's count has moved on",
    "log.h log_append cas->store #1": "the tail is a hint; who finds it behind helps it on",
    "log.h log_news full_fence": "a stale tail only puts off the next walk over the headers",
    "log.h log_news full_fence->store_fence": "a stale tail only puts off the next walk over the headers",
    "log.h log_news invalidate": "a stale tail only puts off the next walk over the headers",
    "log.h log_take_over store_fence #1": "a ring that comes after its tail looks odd, and is walked past",
    "log.h log_take_over store_fence #2": "the fence of the adopter's settled line, or of the next append, comes after it",
    "recovery.h adopt full_fence #1": "the fences in the end order the claim; a late owner that sees it later is audited",
    "recovery.h adopt full_fence->store_fence #1": "as the one before",
    "recovery.h adopt write_back #2": COVERED,
    "recovery.h adopt write_back #3": "only processes of this host read the settled epoch, in this cache",
    "recovery.h adopt store_fence #1": "the fences of the log's take-over come after it",
    "recovery.h adopt store_fence #2": "the fence of the settled line comes after it",
    "recovery.h audit audit.sound": "nothing is stored into an adopted shard, so a late owner's block is whole; damage is not",
    "recovery.h reap cas->store #1": ONE_REAPER,
    "recovery.h reap cas->store #2": ONE_REAPER,
    "recovery.h reap write_back #2": COVERED,
    "recovery.h reap write_back #3": COVERED,
    "recovery.h settle_extent cas->store": ONE_REAPER,
    "recovery.h settle_extent write_back": COVERED,
    "recovery.h write_back_directory write_back #1": "what is reaped is written back one by one as well",
    "replica.h look follow.header_checksum": HINT,
    "replica.h look follow.state": HINT,
    "slots.h evict_to_free store_fence": "who follows the record too early finds WRITING instead of FREE: gone as well",
    "slots.h release write_back": "FREE is a promise: another word that is not STABLE is in the medium already",
    "slots.h slot_age invalidate": "ages only make a worse choice (PROTOCOL 9.17)",
    "slots.h touch_slot write_back": "ages only make a worse choice (PROTOCOL 9.17)",
    "transfer.h load_block full_fence #2": "the payload's checksum has decided; what follows only names the reason",
    "transfer.h load_block full_fence->store_fence #2": "as the one before",
    "transfer.h probe_replica load.header_checksum": "the payload's checksum is in the header, and decides",
    "transfer.h probe_replica load.state": "the payload's checksum is in the header, and decides",
    "transfer.h probe_shard load.count": "the key and the payload's checksum decide",
    "transfer.h probe_shard load.header_checksum": "the payload's checksum is in the header, and decides",
    "transfer.h probe_shard load.state": "the payload's checksum is in the header, and decides",
}

UNSEEN = {
    "directory.h invalidate invalidate #2": "needs a stale second bucket: one key in eight has one of its own",
    "directory.h unpublish cas->store": "noticed by seed 991 of `log` in an earlier form of it",
    "log.h log_take_over write_back #2": "noticed by seed 153 of `back` in an earlier form of it",
    "log.h start_rescan full_fence->store_fence": "a load that runs ahead of its invalidate, in the first look only",
    "ownership.h acknowledge full_fence": "needs a dirty line of the late owner: a compare-and-swap that fails, and nothing after it",
    "ownership.h acknowledge full_fence->store_fence": "as the one before",
    "ownership.h acknowledge store_fence": "the acknowledgement only comes late",
    "ownership.h fenced fence.settled": "noticed by `--explore back --preemptions 1 --events 1`, run 9039",
    "recovery.h adopt store_fence #3": "noticed by seed 358 of `back` in an earlier form of it",
    "recovery.h audit cas->store": "needs a writer of the owner's host that evicts the slot that is being judged",
    "recovery.h audit store_fence": "the fences of the log's take-over come after it; the two were not left out together",
    "recovery.h reap store_fence #1": "noticed by `--explore reap --preemptions 2 --events 0`, run 144,874: a minute and more",
    "recovery.h reap write_back #1": "as the one before",
    "recovery.h reap store_fence #2": "needs a follower that walks between the record and what it speaks of",
    "recovery.h write_back_directory write_back #2": "needs a bucket line that only the dead one had written",
    "slots.h publish_extent store_fence": "needs a host that dies between two processes' first stores",
    "slots.h publish_extent write_back": "as the one before",
    "slots.h refresh write_back": "as the one before",
    "slots.h recut cas->store": "needs two processes that cut one extent at once",
    "slots.h recut store_fence #1": "the fences of the eviction before it cover most of it",
    "slots.h recut store_fence #3": "as the one before",
    "slots.h recut write_back #1": "as the one before",
    "transfer.h find_or_add store_fence": "needs a host that dies between two processes' first stores",
    "transfer.h find_or_add write_back #1": "as the one before",
    "transfer.h vouch write_back #2": "needs two bucket lines; the small shards here have one",
    "transfer.h vouch write_back #3": "as the one before",
}

SURVIVES = {**NEEDLESS, **UNSEEN}

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
        ["--scenario", "evict", "--seeds", "1:1000"],
        "transfer.h load_block load.verify",
        "transfer.h load_block invalidate #1",
    ),
]
