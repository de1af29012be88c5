// A replica of the other hosts' directories in this process's own memory, kept by following their change logs. Source: DESIGN 4.4, PROTOCOL 7.
//
// With it a lookup costs the same with two hosts and with sixty-four: one probe here instead of two lines of every shard. It is a hint and nothing
// more: a stale entry is found out when the slot's header is loaded. A shard whose log has overtaken us is probed directly until its headers have been
// walked again, a few thousand at each refresh, so that no lookup ever waits for a walk.
//
// Threads: one at a time; the caller holds a lock. Every access to the medium comes before the change of the table that it causes, so a medium
// that fails in between leaves the table whole.
#pragma once
#include <cstdlib>
#include <memory>
#include <vector>

#include "log.h"
#include "scan.h"

namespace kvp {

// How much of the other hosts' news one refresh takes in; the rest is taken in by the next ones.
struct ReplicaPace {
  uint64_t headers = 4096;   // walked, of all hosts together: about 50 us
  uint32_t records = 4096;   // followed, a host
};

template <Memory M>
class Replica {
 public:
  explicit Replica(Attached<M>& a, ReplicaPace pace = {}) : a_(a), pace_(pace), followed_(a.hosts()), table_(kFirstSize) {}

  // Follows every other host's log, or goes on with the walk over its headers.
  void refresh() {
    look_ahead();
    uint64_t left = pace_.headers;
    for (uint32_t i = 0, first = turn_; i < a_.hosts(); ++i) {
      const uint32_t h = (first + i) % a_.hosts();
      if (HostIndex{h} == a_.self) continue;
      const ShardMap& s = a_.shard(HostIndex{h});
      Followed& f = followed_[h];
      if (f.fingerprints == nullptr) {
        if (a_.mem.load_word(s.header()) == 0) continue;   // nobody was ever there
        f.fingerprints.reset(static_cast<uint32_t*>(std::calloc(s.slots(), sizeof(uint32_t))));
        KVP_CHECK(f.fingerprints != nullptr);
        f.held.resize(s.superblock().extent_count);
      } else if (covers(HostIndex{h}) && !log_has_news(a_, s, f.position)) {
        continue;
      }
      if (f.position.rescan) {
        start_rescan(a_, s, f.position);
        f.walked = 0;
      }
      if (f.walked < s.slots()) {
        walk(s, f, left);
        if (left == 0) turn_ = h;   // its walk goes on first next time
      }
      if (f.walked < s.slots()) continue;
      uint32_t followed = 0;   // also what changed during the walk
      log_follow(a_, s, f.position, pace_.records, [&](SlotId slot) { ++followed, look(s, f, slot); });
      f.behind = followed >= pace_.records;
    }
  }

  // The medium failed while we followed: what we were to look at is lost.
  void walk_again() {
    for (Followed& f : followed_) f.position.rescan = f.position.rescan || f.fingerprints != nullptr;
  }

  // May this shard be left out of direct probing?
  bool covers(HostIndex h) const {
    const Followed& f = followed_[to_int(h)];
    return f.fingerprints == nullptr || (f.walked == a_.shard(h).slots() && !f.position.rescan && !f.behind);
  }

  // Calls found(host, slot) for every slot that may hold the key; true if a block that looked like it was evicted.
  template <class F>
  bool probe(const Key& key, F found) const {
    const uint32_t fp = fingerprint(key);
    bool ghost = false;
    for (uint64_t i = place(fp);; i = next(i)) {
      const uint64_t e = table_[i];
      if (e == 0) return ghost;
      if (!same(e, fp)) continue;
      if (static_cast<uint32_t>(e) == kGhost)
        ghost = true;
      else
        found(host_of(e), SlotId{static_cast<uint32_t>(e)});
    }
  }
  [[gnu::always_inline]] void prefetch(const Key& key) const { __builtin_prefetch(&table_[place(fingerprint(key))]); }

 private:
  static constexpr uint64_t kFirstSize = 1024;     // a power of two
  static constexpr uint64_t kWalkDescriptor = 8;   // an extent's descriptor costs a fence and a miss, as much as so many headers in a row
  static constexpr uint32_t kGhost = 0xffffffff;

  struct Free {
    void operator()(uint32_t* p) const { std::free(p); }
  };
  struct Followed {
    LogPosition position;
    uint64_t walked = 0;                              // headers walked so far
    bool behind = false;                              // more records than one refresh follows
    std::unique_ptr<uint32_t[], Free> fingerprints;   // of the block in each slot, 0 = none; untouched pages cost nothing
    std::vector<uint32_t> held;                       // fingerprints that are not 0, an extent
  };

  // Entry: fingerprint 26 | host 6 | slot id 32; 0 = empty. 26 bits: with 10^6 blocks one probe in sixty loads a header in vain.
  static uint32_t fingerprint(const Key& key) {
    const auto f = static_cast<uint32_t>(key.words[3] & 0x3ffffff);
    return f == 0 ? 1 : f;
  }
  static uint64_t entry(uint32_t fp, HostIndex h, SlotId slot) { return uint64_t{fp} << 38 | uint64_t{to_int(h)} << 32 | slot.raw; }
  static bool same(uint64_t e, uint32_t fp) { return e >> 38 == fp; }
  static HostIndex host_of(uint64_t e) { return HostIndex{static_cast<uint32_t>(e >> 32 & 63)}; }
  uint64_t place(uint32_t fp) const { return uint64_t{fp} * 0x9e3779b97f4a7c15ULL >> 20 & (table_.size() - 1); }
  uint64_t next(uint64_t i) const { return (i + 1) & (table_.size() - 1); }

  // The lines that say whether there is anything to do, of all hosts in one round: their misses overlap, and nearly always there is nothing.
  void look_ahead() {
    bool any_fresh = false;
    const auto each = [&](auto f) {
      for (uint32_t h = 0; h < a_.hosts(); ++h) {
        const ShardMap& s = a_.shard(HostIndex{h});
        if (HostIndex{h} != a_.self) f(HostIndex{h}, followed_[h].fingerprints == nullptr ? s.header() : s.log_record(followed_[h].position.next));
      }
    };
    each([&](HostIndex h, Offset at) {
      if (a_.fresh(h)) a_.mem.invalidate(at, 8), any_fresh = true;
    });
    if (any_fresh) a_.mem.full_fence();
    each([&](HostIndex, Offset at) { a_.mem.prefetch(at); });
  }

  // The header was invalidated by the caller where that is needed.
  void look(const ShardMap& s, Followed& f, SlotId slot) {
    if (a_.avoids(s.host(), slot.extent())) return remember(s, f, slot, 0);
    const Header header = a_.load_header(s, slot);   // follow.header
    remember(
        s, f, slot,
        (header.word().state() == SlotState::Stable || a_.mem.without("follow.state")) && (header.right || a_.mem.without("follow.header_checksum"))
            ? fingerprint(header.key())
            : 0);
  }
  void remember(const ShardMap& s, Followed& f, SlotId slot, uint32_t now) {
    uint32_t& before = f.fingerprints[s.dense(slot)];
    if (now == before) return;
    uint32_t& held = f.held[slot.extent()];
    if (before != 0) --held, erase(before, s.host(), slot);
    before = now;
    if (now != 0) ++held, insert(now, s.host(), slot);
  }

  // Headers that no extent's cut uses are not touched: they hold nothing, and a sparse medium has no memory behind them.
  void walk(const ShardMap& s, Followed& f, uint64_t& left) {
    const uint32_t per_extent = s.superblock().slots_per_extent;
    while (left != 0 && f.walked < s.slots()) {
      const SlotId first = s.slot_at(f.walked);
      const uint32_t in_use = slots_in_use(a_, s, first.extent());
      left = left > kWalkDescriptor ? left - kWalkDescriptor : 1;
      const bool used = first.slot() < in_use;
      if (!used && f.held[first.extent()] == 0) {
        f.walked += per_extent - first.slot();
        continue;
      }
      const uint32_t room = (used ? in_use : per_extent) - first.slot();
      const auto n = static_cast<uint32_t>(left < room ? left : room);
      if (used && a_.fresh(s.host())) {
        a_.mem.invalidate(s.slot_header(first), n * kLineBytes);
        a_.mem.full_fence();
      }
      for (uint32_t i = 0; i < n; ++i) {
        const SlotId slot = SlotId::make(first.extent(), first.slot() + i);
        if (used)
          look(s, f, slot);
        else   // of an earlier cut
          remember(s, f, slot, 0);
      }
      f.walked += n;
      left -= n;
    }
  }

  void insert(uint32_t fp, HostIndex h, SlotId slot) {
    if ((used_ + 1) * 10 > table_.size() * 6) rebuild();
    put(fp, h, slot);
  }
  void put(uint32_t fp, HostIndex h, SlotId slot) {
    uint64_t i = place(fp);
    while (table_[i] != 0 && static_cast<uint32_t>(table_[i]) != kGhost) i = next(i);
    used_ += table_[i] == 0;
    table_[i] = entry(fp, h, slot);
  }
  void erase(uint32_t fp, HostIndex h, SlotId slot) {
    const uint64_t gone = entry(fp, h, slot);
    for (uint64_t i = place(fp); table_[i] != 0; i = next(i))
      if (table_[i] == gone) {
        table_[i] |= kGhost;   // keeps the fingerprint, so that a reader can say "evicted"
        return;
      }
  }
  // Drops the ghosts, and grows when the living need it.
  void rebuild() {
    uint64_t living = 1;
    for (const uint64_t e : table_) living += e != 0 && static_cast<uint32_t>(e) != kGhost;
    uint64_t size = kFirstSize;
    while (size * 3 < living * 10) size *= 2;   // a third full afterwards at most
    std::vector<uint64_t> old(size);
    old.swap(table_);
    used_ = 0;
    for (const uint64_t e : old)
      if (e != 0 && static_cast<uint32_t>(e) != kGhost) put(static_cast<uint32_t>(e >> 38), host_of(e), SlotId{static_cast<uint32_t>(e)});
  }

  Attached<M>& a_;
  const ReplicaPace pace_;
  std::vector<Followed> followed_;
  uint32_t turn_ = 0;   // the host whose walk is next
  std::vector<uint64_t> table_;
  uint64_t used_ = 0;
};

}   // namespace kvp
