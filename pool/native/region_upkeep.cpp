// Region: what the daemon does for its host's shards.
#include <fcntl.h>

#include <algorithm>

#include "error.h"
#include "region.h"
#include "region_file.h"

namespace kvp {

uint64_t Region::evict(double used_fraction, uint64_t blocks_max) {
  const Use use = ensure_writer();
  std::lock_guard<std::mutex> lock(maintenance_);
  uint64_t evicted = 0;
  std::vector<uint64_t> bytes_by_age(1u << 12);   // ages in steps of 16 ticks
  const bool ok = guarded([&] {
    std::fill(bytes_by_age.begin(), bytes_by_age.end(), 0);
    const ShardMap& s = attached_->home();
    if (fenced(*attached_, s)) return;
    follow_limit(s.host());
    const uint32_t extents = attached_->extents(s.host());   // the others are emptied by resize
    const uint16_t now = shard_tick(*attached_, s);
    uint64_t used = 0, retired = 0;
    const auto each_stable = [&](auto f) {
      for (uint32_t e = 0; e < extents; ++e) {
        uint64_t slot_bytes = 0;
        const uint32_t n = slots_in_use(*attached_, s, e, &slot_bytes);
        if (slot_bytes == 0) continue;
        for (uint32_t i = 0; i < n; ++i) {
          const SlotId slot = SlotId::make(e, i);
          const SlotWord word = attached_->word_of(s, slot);
          if (word.retired()) retired += slot_bytes;
          if (word.state() == SlotState::Stable && !f(slot, word, slot_bytes)) return;
        }
      }
    };
    each_stable([&](SlotId slot, SlotWord, uint64_t slot_bytes) {
      used += slot_bytes;
      bytes_by_age[slot_age(*attached_, s, slot, now) >> 4] += slot_bytes;
      return true;
    });
    // Of what blocks can fill: the rest at the end of each extent, too small for another block, must not keep the shard below its watermark.
    uint64_t usable = 0;
    for (uint32_t e = 0; e < extents; ++e) {
      uint64_t slot_bytes = 0;
      const uint32_t n = slots_in_use(*attached_, s, e, &slot_bytes);
      usable += slot_bytes != 0 ? n * slot_bytes : superblock_.slots_per_extent * superblock_.slot_bytes_min;
    }
    usable -= std::min(usable, retired);
    const auto target = static_cast<uint64_t>(static_cast<double>(usable) * used_fraction);
    if (used <= target || blocks_max == 0) return;
    uint64_t to_free = used - target, above = 0;
    uint32_t threshold = static_cast<uint32_t>(bytes_by_age.size());
    while (threshold > 0 && above < to_free) above += bytes_by_age[--threshold];
    each_stable([&](SlotId slot, SlotWord word, uint64_t slot_bytes) {
      if (slot_age(*attached_, s, slot, now) >> 4 < threshold) return true;
      if (evict_to_free(*attached_, s, slot, word)) {
        ++evicted;
        to_free = to_free > slot_bytes ? to_free - slot_bytes : 0;
      }
      return to_free != 0 && evicted < blocks_max;
    });
  });
  if (!ok) medium_failed();
  return evicted;
}

void Region::heartbeat() {
  const Use use = ensure_writer();
  const Offset at = attached_->home().header() + offsetof(ShardHeader, heartbeat);
  const bool ok = fault_guarded([&] {
    attached_->mem.add_word(at, 1);
    attached_->mem.write_back(at, 8);
    attached_->mem.store_fence();
  });
  if (!ok) medium_failed();
}

Scrubbed Region::scrub(uint64_t from, uint64_t limit, uint64_t bytes_max) {
  const Use use = ensure_writer();
  std::lock_guard<std::mutex> lock(maintenance_);
  Scrubbed r;
  if (!fault_guarded([&] {
        follow_owners();
        scrub_rows(r, bytes_max);
      }))
    medium_failed();
  // Positions count through the shards of all hosts, our own first; those of others are stepped over.
  const uint64_t slots = attached_->home().slots();
  uint64_t at = from;
  for (; at < slots * attached_->hosts() && r.checked < limit && r.bytes < bytes_max; ++at) {
    const ShardMap& s = attached_->shard(HostIndex{static_cast<uint32_t>((to_int(attached_->self) + at / slots) % attached_->hosts())});
    if (at == from || at % slots == 0) {
      bool ours = false;
      if (!fault_guarded([&] { ours = attached_->owns(s.host()) && !fenced(*attached_, s); })) medium_failed();
      if (!ours) {
        at += slots - at % slots - 1;
        continue;
      }
    }
    at += scrub_slot(s, s.slot_at(at % slots), r);
  }
  r.next = at >= slots * attached_->hosts() ? 0 : at;
  return r;
}

// A few rows of the home shard each time, so that a damaged one costs its blocks only for a while, and gives its room to another namespace.
void Region::scrub_rows(Scrubbed& r, uint64_t bytes_max) {
  constexpr uint64_t kShare = 16;   // of what is read
  const ShardMap& s = attached_->home();
  if (fenced(*attached_, s)) return;
  const uint64_t most = std::max<uint64_t>(1, bytes_max / kShare / sizeof(NamespaceRow));
  if (next_row_ >= superblock_.namespace_count) next_row_ = 0;
  const auto to = static_cast<uint32_t>(std::min<uint64_t>(superblock_.namespace_count, next_row_ + most));
  for (uint32_t i = next_row_; i < to; ++i)
    if (attached_->mem.load_word(s.namespace_row(i)) != 0) r.bytes += sizeof(NamespaceRow);
  judge_namespaces(s, next_row_, to);
  next_row_ = to;
}

// Returns how many slots after it need no look.
uint64_t Region::scrub_slot(const ShardMap& s, SlotId slot, Scrubbed& r) {
  bool bad = false, stable = false;
  SlotWord word{};
  uint32_t in_use = 0;
  uint16_t index = 0;
  bool retired = false;
  const bool ok = fault_guarded([&] {
    if (slot.slot() == 0) judge_descriptor(s, slot.extent());
    in_use = slots_in_use(*attached_, s, slot.extent());
    if (slot.slot() >= in_use) return;
    r.bytes += kLineBytes;
    const Header header = attached_->load_header(s, slot);
    word = header.word();
    if (word.state() != SlotState::Stable) return;
    stable = true;
    if (header.right) r.bytes += std::min<uint64_t>(header.h.length_bytes, superblock_.extent_payload_bytes);
    index = header.h.namespace_index;
    bad = transfer_->namespaces().sound(s, slot, header) == 0;
  });
  if (ok && slot.slot() >= in_use) return superblock_.slots_per_extent - slot.slot() - 1;
  if (!ok) {
    ++r.failed;
    if (avoid_unreadable()) return superblock_.slots_per_extent - slot.slot() - 1;
    bad = stable = true;
    retired = retire_block(s, slot, index);
    if (retired) ++r.bad;
  }
  if (!stable) return 0;
  ++r.checked;
  if (bad && !retired)   // only if it is still the same block: it may have been evicted and filled anew while we read it
    fault_guarded([&] {
      if (!fenced(*attached_, s) && evict_to_free(*attached_, s, slot, word)) {
        ++r.bad;
        attached_->count(kScrubBad);
      }
    });
  return 0;
}

Recovered Region::adopt_shard(uint32_t host, uint64_t epoch) {
  const Use use = ensure_writer();
  std::lock_guard<std::mutex> lock(maintenance_);
  if (host >= attached_->hosts())
    throw Error(ErrorKind::Geometry,
                "region " + path_ + ": there is no shard " + std::to_string(host) + " to adopt; it has " + std::to_string(attached_->hosts()) + ".");
  Recovered r;
  const ShardMap& s = attached_->shard(HostIndex{host});
  Ownership o{};
  // One process of a host at a time: the lock goes with it, and the next one may begin again what it left unfinished.
  struct flock turn = adoption_lock(F_WRLCK, to_int(attached_->self));
  if (::fcntl(lock_fd_, F_OFD_SETLK, &turn) != 0)
    throw Error(ErrorKind::Busy, "region " + path_ + ": another process of this host is taking a shard over. Wait until it is done.");
  struct Turn {
    int fd;
    struct flock lock;
    ~Turn() { ::fcntl(fd, F_OFD_SETLK, &lock); }
  } done{lock_fd_, adoption_lock(F_UNLCK, to_int(attached_->self))};
  bool unfinished = false;
  if (!fault_guarded([&] {
        o = ownership_of(*attached_, s);
        const uint64_t settled = attached_->mem.load_word(attached_->home().claim(s.host()) + offsetof(ClaimLine, settled_epoch));
        unfinished = epoch == o.epoch && o.owner == attached_->self && settled != epoch;
      }))
    medium_failed();
  if (epoch <= o.epoch && !unfinished)
    throw Error(ErrorKind::Fenced, "region " + path_ + ": shard " + std::to_string(host) + " is already claimed with epoch " +
                                       std::to_string(o.epoch) + " by host " + std::to_string(to_int(o.owner)) + "; epoch " + std::to_string(epoch) +
                                       " is not higher. The arbiter must give a higher one.");
  protect(HostIndex{host}, true);
  const bool ok = guarded([&] {
    follow_limit(HostIndex{host});
    r = adopt(*attached_, s, epoch);
  });
  if (!ok) medium_failed();
  return r;
}

uint64_t Region::own_claim(const ShardMap& s) {
  const Offset at = attached_->home().claim(s.host());
  return claimed_epoch(load_claim(*attached_, at), at);
}

// Another process of this host may have adopted a shard, or another host one of ours.
void Region::follow_owners() {
  for (uint32_t h = 0; h < attached_->hosts(); ++h) {
    const bool had = attached_->owns(HostIndex{h});
    const bool has = !fenced(*attached_, attached_->shard(HostIndex{h}));
    if (HostIndex{h} != attached_->self && had != has) protect(HostIndex{h}, has);
  }
}

std::vector<Owner> Region::owners() {
  const Use use = ensure_open();
  std::vector<Owner> all(attached_->hosts());
  const bool ok = fault_guarded([&] {
    for (uint32_t h = 0; h < attached_->hosts(); ++h) {
      const ShardMap& s = attached_->shard(HostIndex{h});
      const Ownership o = ownership_of(*attached_, s);
      all[h] = {to_int(o.owner), o.epoch, o.settled};
    }
  });
  if (!ok) medium_failed();
  return all;
}

// Any host that owned the shard before may be the late one; the last of them acknowledges our epoch.
bool Region::acknowledged(const ShardMap& s, uint64_t epoch) {
  CpuMemory& m = attached_->mem;
  for (uint32_t before = 0; before < attached_->hosts(); ++before) {
    if (HostIndex{before} == attached_->self) continue;
    const Offset at = attached_->shard(HostIndex{before}).acknowledgement(s.host());
    if (attached_->fresh(HostIndex{before})) {
      m.invalidate(at, kLineBytes);
      m.full_fence();
    }
    if (m.load_word(at) >= epoch) return true;
  }
  return false;
}

uint64_t Region::audit_adopted() {
  const Use use = ensure_writer();
  std::lock_guard<std::mutex> lock(maintenance_);
  // Of payload, a call: some 50 ms, so that the heartbeat in which it happens is not late.
  constexpr uint64_t kBytesACall = 128ULL << 20;
  uint64_t audited = 0;
  const bool ok = guarded([&] {
    follow_owners();
    for (uint32_t h = 0; h < attached_->hosts(); ++h) {
      const ShardMap& s = attached_->shard(HostIndex{h});
      const uint64_t epoch = own_claim(s);
      Audit& one = audits_[h];
      if (!attached_->owns(HostIndex{h}) || audited_epoch_[h] >= epoch || fenced(*attached_, s)) continue;
      if (one.epoch != epoch) {
        if (!acknowledged(s, epoch)) continue;
        KVP_STEP("audit.begin");
        one = {epoch, {}};
        audit(*attached_, transfer_->namespaces(), s, one.progress, 0);   // only makes the directory fresh
        judge_namespaces(s, 0, superblock_.namespace_count);
      }
      if (!audit(*attached_, transfer_->namespaces(), s, one.progress, kBytesACall)) continue;
      repair_directory(s);
      audited_epoch_[h] = epoch;
      KVP_STEP("audit.done");
      audited |= 1ULL << h;
    }
  });
  if (!ok) medium_failed();
  return audited;
}

uint64_t Region::acknowledge_lost() {
  const Use use = ensure_writer();
  std::lock_guard<std::mutex> lock(maintenance_);
  uint64_t acknowledged = 0;
  const bool ok = guarded([&] {
    for (uint32_t h = 0; h < attached_->hosts(); ++h) {
      const ShardMap& s = attached_->shard(HostIndex{h});
      const Ownership o = ownership_of(*attached_, s);
      const bool once_ours = HostIndex{h} == attached_->self || own_claim(s) != 0;
      if (!once_ours || o.owner == attached_->self || attached_->mem.load_word(attached_->home().acknowledgement(HostIndex{h})) >= o.epoch) continue;
      // Our other processes see the claim before their next claim of a slot; those in the middle of a store must end first.
      bool writing = false;
      for_each_slot(*attached_, s, [&](SlotId slot) {
        const SlotWord w = attached_->word_of(s, slot);
        writing = writing || (w.state() == SlotState::Writing && writer_alive(to_int(attached_->self), w));
      });
      if (writing) continue;
      if (HostIndex{h} != attached_->self && attached_->owns(HostIndex{h})) protect(HostIndex{h}, false);
      attached_->set_owned(HostIndex{h}, false);
      KVP_STEP("acknowledge.before_flush");
      acknowledge(*attached_, s, o.epoch);
      KVP_STEP("acknowledge.done");
      acknowledged |= 1ULL << h;
    }
    follow_owners();
  });
  if (!ok) medium_failed();
  return acknowledged;
}

}   // namespace kvp
