// The bucket index of a shard: probe, publish, unpublish. Source: PROTOCOL 0, 1.5, 2.1-2.2, 3.3.
//
// A key has two candidate buckets of eight entries. An entry is dead as soon as the count of its slot differs from its own, so a left-over
// entry misleads nobody and anybody on the owner host may replace it.
#pragma once
#include "attached.h"

namespace kvp {

inline constexpr uint32_t kCandidates = 2 * kEntriesPerBucket;

struct Probe {
  SlotId slots[kCandidates];
  uint16_t counts[kCandidates];
  uint32_t n = 0;
  bool ghost = false;        // a block with this tag was evicted here
  bool unreadable = false;   // a block with this tag lies where this process cannot look
};

template <Memory M>
class Directory {
 public:
  Directory(Attached<M>& a, const ShardMap& s) : a_(a), m_(a.mem), s_(s) {}

  Offset bucket(const Key& key, uint32_t which) const { return s_.bucket(key.bucket(which, s_.superblock().bucket_count)); }

  [[gnu::always_inline]] void prefetch(const Key& key) const {
    m_.prefetch(bucket(key, 0));
    m_.prefetch(bucket(key, 1));
  }
  void invalidate(const Key& key) const {
    m_.invalidate(bucket(key, 0), kLineBytes);
    m_.invalidate(bucket(key, 1), kLineBytes);
  }

  // Slots that may hold the key; the header decides.
  void probe(const Key& key, Probe& out) const {
    out.n = 0;
    out.ghost = out.unreadable = false;
    const uint16_t tag = key.tag();
    for (uint32_t which = 0; which < 2; ++which) {
      const Offset at = bucket(key, which);
      if (which == 1 && at == bucket(key, 0)) break;
      const Line line = m_.load_line(at);   // load.bucket
      for (const uint64_t raw : line.words) {
        const Entry entry{raw};
        if (entry.tag() != tag) continue;
        if (entry.is_ghost())
          out.ghost = true;
        else if (s_.contains(entry.slot()) && a_.avoids(s_.host(), entry.slot().extent()))
          out.unreadable = true;
        else if (s_.contains(entry.slot()))
          out.slots[out.n] = entry.slot(), out.counts[out.n++] = entry.count_low();
      }
    }
  }

  // Owner host only. False: all candidate entries are alive, one of their blocks has to go first (`full` holds their slots).
  bool publish(const Key& key, SlotId slot, uint64_t count, Probe& full) {
    const Entry want = Entry::make(key.tag(), count, slot);
    for (;;) {
      Offset place = 0;
      Entry there{};
      uint32_t best_room = 0;
      Offset dead_place = 0;
      Entry dead{};
      full.n = 0;
      for (uint32_t which = 0; which < 2; ++which) {
        const Offset at = bucket(key, which);
        if (which == 1 && at == bucket(key, 0)) break;
        uint32_t room = 0;
        Offset free_place = 0;
        Entry free_entry{};
        for (uint32_t i = 0; i < kEntriesPerBucket; ++i) {
          const Offset entry_at = at + i * 8ULL;
          const Entry entry{m_.load_word(entry_at)};   // publish.look
          if (entry == want && !m_.without("publish.already")) return true;
          if (entry.empty() || entry.is_ghost()) {
            if (room++ == 0 || entry.empty()) free_place = entry_at, free_entry = entry;   // keep ghosts as long as there is room
          } else if (!alive(entry)) {
            dead_place = entry_at, dead = entry;
          } else {
            full.slots[full.n] = entry.slot();
            full.counts[full.n++] = entry.count_low();
          }
        }
        if (room > best_room) best_room = room, place = free_place, there = free_entry;
      }
      if (best_room == 0) place = dead_place, there = dead;
      if (place == 0) return false;
      if (!m_.cas_word(place, there.raw, want.raw)) continue;   // two processes took one entry: look again
      KVP_STEP("publish.cas");
      m_.write_back(place, 8);
      return true;
    }
  }

  // Owner host only. Hygiene: the entry is dead already. The ghost lets a reader say "evicted".
  void unpublish(const Key& key, SlotId slot, uint64_t count) {
    const Entry gone = Entry::make(key.tag(), count, slot);
    for (uint32_t which = 0; which < 2; ++which) {
      const Offset at = bucket(key, which);
      for (uint32_t i = 0; i < kEntriesPerBucket; ++i)
        if (m_.load_word(at + i * 8ULL) == gone.raw && m_.cas_word(at + i * 8ULL, gone.raw, Entry::ghost(key.tag()).raw)) {
          KVP_STEP("evict.unpublish");
          m_.write_back(at, kLineBytes);
        }
    }
  }

  bool has_entry(const Key& key, SlotId slot, uint64_t count) const {
    const Entry want = Entry::make(key.tag(), count, slot);
    for (uint32_t which = 0; which < 2; ++which)
      for (uint32_t i = 0; i < kEntriesPerBucket; ++i)
        if (m_.load_word(bucket(key, which) + i * 8) == want.raw) return true;
    return false;
  }

  bool alive(Entry entry) const {
    if (entry.empty() || entry.is_ghost() || !s_.contains(entry.slot()) || a_.avoids(s_.host(), entry.slot().extent())) return false;
    const SlotWord word{m_.load_word(s_.slot_header(entry.slot()))};   // publish.is_entry_dead
    return (word.count() & 0xffff) == entry.count_low() && !m_.without("publish.alive");
  }

 private:
  Attached<M>& a_;
  M& m_;
  const ShardMap& s_;
};

}   // namespace kvp
