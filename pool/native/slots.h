// Slots of the home shard: finding a free one, evicting one, cutting extents for a slot size. Source: PROTOCOL 1.2, 3; DESIGN 4.5.
//
// Shared state is only in the medium. What a process keeps for itself (its cursor, its victim candidates, its list of extents) are hints that a
// compare-and-swap on the slot word checks. Not thread-safe: the caller holds a lock of the process.
#pragma once
#include <vector>

#include "attached.h"
#include "directory.h"
#include "error.h"
#include "extent.h"
#include "log.h"
#include "ownership.h"
#include "victim.h"

namespace kvp {

struct Claim {   // a slot that this process may fill
  SlotId slot;
  SlotWord word;   // WRITING, ours
};

// ---- steps that need no process-local state ----

// Ticks since any host last touched the slot. A stale or torn row can only make a worse choice (PROTOCOL 9.17).
template <Memory M>
uint16_t slot_age(Attached<M>& a, const ShardMap& s, SlotId slot, uint16_t now) {
  const uint64_t dense = s.dense(slot);
  uint16_t youngest = 0xffff;
  for (uint32_t h = 0; h < a.hosts(); ++h) {
    const ShardMap& reader = a.shard(HostIndex{h});
    if (HostIndex{h} != a.self && a.mem.load_word(reader.header()) == 0) continue;   // nobody was ever there
    const Offset at = reader.touch(s.host(), dense);
    if (a.fresh(HostIndex{h})) a.mem.invalidate(at, 2);   // no fence: an old tick does no harm
    const uint16_t tick = a.mem.load_half(at);
    if (tick == 0) continue;
    // A touch after the caller looked at the clock is not 2^16 ticks old. Of the 2^16, up to a turnover of the shard (2^13) counts as the future.
    auto age = static_cast<uint16_t>(now - tick);
    if (age >= 0xe000) age = 0;
    if (age < youngest) youngest = age;
  }
  return youngest;
}

template <Memory M>
uint16_t shard_tick(Attached<M>& a, const ShardMap& s) {
  return s.tick(a.mem.load_word(s.log_tail()));
}

template <Memory M>
void touch_slot(Attached<M>& a, const ShardMap& s, SlotId slot, uint16_t tick) {
  const Offset at = a.home().touch(s.host(), s.dense(slot));
  if (a.mem.load_half(at) == tick) return;   // a line that every reader writes would bounce between the cores
  a.mem.store_half(at, tick);
  a.mem.write_back(at, 2);
}

// PROTOCOL 3, steps 1 to 4. Afterwards the medium's word is not STABLE and the slot is ours. False: somebody was faster.
template <Memory M>
bool take_victim(Attached<M>& a, const ShardMap& s, SlotId slot, SlotWord stable, Claim& out) {
  M& m = a.mem;
  const Offset at = s.slot_header(slot);
  const SlotWord mine = a.writing(stable);
  if (!m.cas_word(at, stable.raw, mine.raw)) return false;   // evict.claim
  KVP_STEP("evict.claim");
  m.write_back(at, kLineBytes);   // evict.mark
  const Key key = a.load_header(s, slot).key();
  if (!m.without("evict.unpublish")) Directory<M>(a, s).unpublish(key, slot, stable.count());
  KVP_STEP("evict.before_fence");
  m.store_fence();   // evict.fence: only now may payload be overwritten
  a.count(kEvictions);
  out = {slot, mine};
  return true;
}

// A slot of ours that holds nothing becomes FREE. Its WRITING mark (or an older non-STABLE word) is in the medium already: FREE is a promise.
template <Memory M>
void release(Attached<M>& a, const ShardMap& s, const Claim& c) {
  a.mem.store_word(s.slot_header(c.slot), c.word.next(SlotState::Free, 0, 0).raw);
  KVP_STEP("release.free");
  a.mem.write_back(s.slot_header(c.slot), 8);
}

// A slot of ours whose payload the medium cannot keep: nobody stores there again. Here too some word that is not STABLE is in the medium already.
template <Memory M>
void retire_slot(Attached<M>& a, const ShardMap& s, const Claim& c) {
  a.mem.store_word(s.slot_header(c.slot), c.word.retire().raw);
  KVP_STEP("retire.slot");
  a.mem.write_back(s.slot_header(c.slot), 8);
}

template <Memory M>
bool evict_to_free(Attached<M>& a, const ShardMap& s, SlotId slot, SlotWord stable) {
  Claim c;
  if (!take_victim(a, s, slot, stable, c)) return false;
  release(a, s, c);   // no fence: who follows the record too early finds WRITING, which is gone as well
  log_append(a, s, LogHint::Evicted, slot);
  return true;
}

// A slot of this extent, cut as it was seen, is retired; a block in it is evicted first. Taken: somebody fills it, or is cutting the extent; try again.
enum class Retired { Now, WithItsBlock, Before, Taken };
template <Memory M>
Retired give_up_slot(Attached<M>& a, const ShardMap& s, SlotId slot, SlotWord cut) {
  const SlotWord word = a.word_of(s, slot);
  Claim c;
  const bool held = word.state() == SlotState::Stable;
  if (held) {
    if (!take_victim(a, s, slot, word, c)) return Retired::Taken;
  } else {
    if (word.state() != SlotState::Free) return word.retired() ? Retired::Before : Retired::Taken;
    c = {slot, a.writing(word)};
    if (!a.mem.cas_word(s.slot_header(slot), word.raw, c.word.raw)) return Retired::Taken;
    KVP_STEP("retire.claim");
  }
  const bool cut_anew = a.mem.load_word(s.extent_descriptor(slot.extent())) != cut.raw;   // with the slot ours it can't be any more
  if (cut_anew)
    release(a, s, c);
  else
    retire_slot(a, s, c);
  if (held) log_append(a, s, LogHint::Evicted, slot);
  return cut_anew ? Retired::Taken : held ? Retired::WithItsBlock : Retired::Now;
}

// ---- the allocator of one process ----

template <Memory M>
class Slots {
 public:
  explicit Slots(Attached<M>& a)
      : a_(a), m_(a.mem), s_(a.home()), random_(0x9e3779b97f4a7c15ULL * (a.participant + 1) + a.generation), extents_(a.extents(a.self)) {}

  // A slot for a block of slot_bytes. NoSpace only when every slot that could go is being written by somebody else.
  Outcome claim(uint64_t slot_bytes, Claim& out) {
    if (fenced(a_, s_) && !m_.without("claim.fenced")) return Outcome::Fenced;   // before each claim (PROTOCOL 5)
    follow_limit();
    SlotClass& c = class_of(slot_bytes);
    // An attempt fails when others take what we look at, or cut extents anew: after a few, let them go on first.
    constexpr uint32_t kAttempts = 64, kAttemptsInARow = 4;
    for (uint32_t i = 0; i < kAttempts; ++i) {
      if (i >= kAttemptsInARow) m_.yield();
      if (claim_free(c, out)) return Outcome::Ok;
      if (assign_extent(c)) continue;
      if (refresh(c)) continue;
      if (c.extents.empty()) {
        recut_for(c, 0);
        continue;
      }
      if (c.evictions_until_rebalance == 0) {
        c.evictions_until_rebalance = rebalance_period(c);
        if (recut_for(c, c.victim_age)) continue;
      }
      if (evict_inline(c, out)) return Outcome::Ok;
      if (i == kAttempts / 2) recut_for(c, 0);   // perhaps stopped processes hold all that we have
    }
    return Outcome::NoSpace;
  }

  // Takes an extent out of use: its blocks are evicted, `empty` is called while nobody can write into it, then it is unassigned. False: somebody is
  // writing there, or cutting it; try again. Like recut, but for nobody.
  template <class F>
  bool retire(uint32_t e, F empty) {
    const Offset at = s_.extent_descriptor(e);
    const Cut cut = load_cut(a_, s_, e);
    const SlotWord before = cut.word;
    if (before.state() != SlotState::Stable && before.state() != SlotState::Free) return false;
    const SlotWord mine = a_.writing(before);
    if (!m_.cas_word(at, before.raw, mine.raw)) return false;
    KVP_STEP("extent.retire.claim");
    m_.write_back(at, 8);
    const uint32_t slots = cut.unassigned() ? 0 : s_.superblock().slots_per_extent;   // those of a FREE one are FREE by promise
    uint32_t settled = 0, taken = 0;
    bool keeps = false;   // retired slots; they mean something only as long as the extent is cut as it is
    const auto retired = [&](uint32_t i) {
      const bool is = a_.word_of(s_, SlotId::make(e, i)).retired();
      keeps = keeps || is;
      return is;
    };
    while (settled < slots && (wait_for_writer(SlotId::make(e, settled)) || retired(settled))) ++settled;
    // Each of them fences: its mark is in the medium.
    while (settled == slots && taken < slots && (take_for_recut(SlotId::make(e, taken)) || retired(taken))) ++taken;
    const bool done = taken == slots;
    if (done) empty();
    for (uint32_t i = 0; i < taken; ++i) {
      const SlotId slot = SlotId::make(e, i);
      if (const SlotWord word = a_.word_of(s_, slot); !word.retired()) release(a_, s_, {slot, word});
    }
    m_.store_fence();
    if (done && !keeps) store_cut(a_, s_, e, 0);
    m_.store_word(at, (done && !keeps) || cut.unassigned() ? mine.next(SlotState::Free, 0, 0).raw
                                                           : mine.next(SlotState::Stable, a_.participant, a_.generation).raw);
    KVP_STEP("extent.retired");
    m_.write_back(at, kLineBytes);
    m_.store_fence();
    if (done && slots != 0) log_append(a_, s_, LogHint::Rescan, SlotId{});
    return done;
  }

 private:
  struct Extent {
    uint32_t index;
    SlotWord word;   // of its descriptor when we last looked
  };
  struct SlotClass {
    uint64_t slot_bytes = 0;
    uint32_t slot_count = 0;   // an extent
    std::vector<Extent> extents;
    uint32_t cursor_extent = 0;   // place in `extents`
    uint32_t cursor_slot = 0;
    uint32_t scan_budget = kScanLong;
    SampledLru victims;
    uint32_t victim_age = 0;   // of the last victims, a moving average
    uint32_t evictions_until_rebalance = kScanLong;
  };
  // Between the watermarks 5 to 10 % of the slots are free: 64 headers in a row miss all of them in 4 % of the scans at most.
  static constexpr uint32_t kScanLong = 64, kScanShort = 8;

  SlotClass& class_of(uint64_t slot_bytes) {
    for (SlotClass& c : classes_)
      if (c.slot_bytes == slot_bytes) return c;
    SlotClass& c = classes_.emplace_back();
    c.slot_bytes = slot_bytes;
    c.slot_count = s_.slot_count(slot_bytes);
    KVP_CHECK(c.slot_count != 0);
    refresh(c);
    if (!c.extents.empty()) c.cursor_extent = next_random(static_cast<uint32_t>(c.extents.size()));
    c.cursor_slot = next_random(c.slot_count);   // two processes should not walk side by side
    return c;
  }

  uint32_t next_random(uint32_t below) {
    random_ ^= random_ << 13, random_ ^= random_ >> 7, random_ ^= random_ << 17;
    return static_cast<uint32_t>((random_ >> 32) * below >> 32);
  }

  // Extents that may not be used any more are no place for a cursor.
  void follow_limit() {
    const uint32_t extents = a_.extents(s_.host());
    if (extents == extents_ && a_.avoided() == avoided_) return;
    extents_ = extents, avoided_ = a_.avoided();
    for (SlotClass& c : classes_) refresh(c);
  }

  // Reads the descriptors; true if the class has other extents than before.
  bool refresh(SlotClass& c) {
    scratch_.clear();
    for (uint32_t e = 0; e < extents_; ++e) {
      const Cut cut = load_cut(a_, s_, e);
      if (cut.serves() == c.slot_bytes && !a_.avoids(s_.host(), e)) scratch_.push_back({e, cut.word});
    }
    bool changed = scratch_.size() != c.extents.size();
    for (size_t i = 0; !changed && i < scratch_.size(); ++i)
      changed = scratch_[i].index != c.extents[i].index || scratch_[i].word != c.extents[i].word;
    if (!changed) return false;
    for (const Extent& e : scratch_) m_.write_back(s_.extent_descriptor(e.index), kLineBytes);   // also for who cut it and is not done yet
    c.extents.swap(scratch_);
    c.victims.clear();
    c.scan_budget = kScanLong;
    if (c.cursor_extent >= c.extents.size()) c.cursor_extent = 0;
    return true;
  }

  // The extent may have been cut anew between the look at its descriptor and the claim. With the slot ours it can't be any more.
  bool still_cut_for(const Extent& e, const Claim& claim) {
    if (m_.load_word(s_.extent_descriptor(e.index)) == e.word.raw || m_.without("claim.still_cut")) return true;
    release(a_, s_, claim);
    return false;
  }

  bool claim_if_free(const Extent& e, uint32_t slot_index, Claim& out) {
    const SlotId slot = SlotId::make(e.index, slot_index);
    const SlotWord word = a_.word_of(s_, slot);   // store.find_free
    if (word.state() != SlotState::Free) return false;
    const SlotWord mine = a_.writing(word);
    if (!m_.cas_word(s_.slot_header(slot), word.raw, mine.raw)) return false;   // store.claim: no write-back, no fence (FREE is a promise)
    KVP_STEP("store.claim");
    out = {slot, mine};
    return still_cut_for(e, out);
  }

  bool claim_free(SlotClass& c, Claim& out) {
    if (c.extents.empty()) return false;
    for (uint32_t i = 0; i < c.scan_budget; ++i) {
      const Extent e = c.extents[c.cursor_extent];
      const uint32_t slot = c.cursor_slot;
      if (++c.cursor_slot >= c.slot_count) {
        c.cursor_slot = 0;
        c.cursor_extent = (c.cursor_extent + 1) % static_cast<uint32_t>(c.extents.size());
      }
      if (claim_if_free(e, slot, out)) {
        c.scan_budget = kScanLong;
        return true;
      }
    }
    c.scan_budget = kScanShort;
    return false;
  }

  bool assign_extent(SlotClass& c) {
    for (uint32_t e = 0; e < extents_; ++e) {
      const Cut cut = load_cut(a_, s_, e);
      if (!cut.unassigned() || a_.avoids(s_.host(), e)) continue;
      const SlotWord mine = a_.writing(cut.word);
      if (!m_.cas_word(s_.extent_descriptor(e), cut.word.raw, mine.raw)) continue;
      KVP_STEP("extent.claim");
      publish_extent(c, e, mine);
      return true;
    }
    return false;
  }

  void publish_extent(SlotClass& c, uint32_t e, SlotWord mine) {
    const Offset at = s_.extent_descriptor(e);
    store_cut(a_, s_, e, c.slot_bytes);
    const SlotWord stable = a_.stable(mine);
    m_.store_word(at, stable.raw);
    KVP_STEP("extent.assigned");
    refresh(c);   // writes it back; the fence of a block's payload comes before anybody is told of the block
    for (uint32_t i = 0; i < c.extents.size(); ++i)
      if (c.extents[i].index == e) c.cursor_extent = i, c.cursor_slot = 0;
  }

  bool evict_inline(SlotClass& c, Claim& out) {
    const uint16_t now = shard_tick(a_, s_);
    SlotId picked[SampledLru::kSamples];
    for (SlotId& slot : picked) {
      slot = SlotId::make(c.extents[next_random(static_cast<uint32_t>(c.extents.size()))].index, next_random(c.slot_count));
      m_.prefetch(s_.slot_header(slot));
      m_.prefetch(s_.touch(s_.host(), s_.dense(slot)));
    }
    for (const SlotId slot : picked) {
      const SlotWord word = a_.word_of(s_, slot);   // evict.look
      const Extent* e = extent_of(c, slot);
      if (word.state() == SlotState::Free && claim_if_free(*e, slot.slot(), out)) return true;
      if (word.state() == SlotState::Stable) c.victims.offer({slot, word, slot_age(a_, s_, slot, now)});
    }
    Candidate victim;
    while (c.victims.take(victim)) {
      const Extent* e = extent_of(c, victim.slot);
      if (e == nullptr || a_.word_of(s_, victim.slot) != victim.word) continue;
      if (slot_age(a_, s_, victim.slot, now) < victim.age / 2) continue;   // it was read since we sampled it
      if (!take_victim(a_, s_, victim.slot, victim.word, out)) continue;
      if (!still_cut_for(*e, out)) return false;
      c.victim_age = (c.victim_age * 7 + victim.age) / 8;
      if (c.evictions_until_rebalance != 0) --c.evictions_until_rebalance;
      return true;
    }
    return false;
  }

  const Extent* extent_of(const SlotClass& c, SlotId slot) const {
    for (const Extent& e : c.extents)
      if (e.index == slot.extent()) return &e;
    return nullptr;
  }

  // Space follows demand: look at other slot sizes only now and then, a cut empties a whole extent.
  uint32_t rebalance_period(const SlotClass& c) const { return c.slot_count < kScanLong ? kScanLong : c.slot_count; }

  // Takes the coldest extent of the other slot sizes, if its blocks are more than twice as old as `victim_age`, and cuts it for this one.
  bool recut_for(SlotClass& c, uint32_t victim_age) {
    constexpr uint32_t kLooks = 8, kSamplesEach = 8, kMargin = 16;
    const uint16_t now = shard_tick(a_, s_);
    struct Look {
      uint32_t extent, age;
    };
    Look looks[kLooks];
    uint32_t looked = 0;
    const uint32_t extents = extents_;
    const uint32_t start = next_random(extents);
    for (uint32_t i = 0; i < extents && looked < kLooks; ++i) {
      const uint32_t e = (start + i) % extents;
      const Cut cut = load_cut(a_, s_, e);
      const uint64_t slot_bytes = cut.serves();
      if (cut.word.state() != SlotState::Stable || slot_bytes == c.slot_bytes || a_.avoids(s_.host(), e)) continue;
      uint32_t age = 0xffff;   // of a damaged descriptor: nobody can use the extent as it is
      if (slot_bytes != 0) {
        age = 0;
        for (uint32_t k = 0; k < kSamplesEach; ++k) {
          const SlotId slot = SlotId::make(e, next_random(s_.slot_count(slot_bytes)));
          age += a_.word_of(s_, slot).state() == SlotState::Stable ? slot_age(a_, s_, slot, now) : 0xffffu;   // a free slot is as cold as can be
        }
        age /= kSamplesEach;
      }
      looks[looked++] = {e, age};
    }
    // The coldest first. One in which a stopped process holds a slot cannot be had; that must not keep us from the others.
    for (; looked != 0; --looked) {
      uint32_t best = 0;
      for (uint32_t i = 1; i < looked; ++i)
        if (looks[i].age > looks[best].age) best = i;
      if (victim_age != 0 && looks[best].age != 0xffff && looks[best].age <= 2 * victim_age + kMargin) return false;
      if (recut(c, looks[best].extent)) return true;
      looks[best] = looks[looked - 1];
    }
    return false;
  }

  // All slots of the extent become WRITING by us (as PROTOCOL 6.1 does for a loan), then it serves another size. Gives up, and puts everything
  // back, when a slot is being written by somebody else for longer than we want to wait. Needs no fences of its own: each eviction has one, and
  // who still reads the old cut in the medium looks at slots that hold nothing.
  bool recut(SlotClass& c, uint32_t e) {
    const Offset at = s_.extent_descriptor(e);
    const SlotWord before{m_.load_word(at)};
    const SlotWord mine = a_.writing(before);
    if (before.state() != SlotState::Stable || !m_.cas_word(at, before.raw, mine.raw)) return false;
    KVP_STEP("extent.recut.claim");
    const uint32_t slots = s_.superblock().slots_per_extent;
    // Nobody starts to fill a slot here any more, so those that are being filled become fewer. Nothing is evicted before it is clear that they end.
    uint32_t settled = 0;
    while (settled < slots && (wait_for_writer(SlotId::make(e, settled)) || m_.without("recut.wait"))) ++settled;
    uint32_t taken = 0;   // the slots before it are ours; a slot that another thread of this process is filling is not
    while (settled == slots && taken < slots && take_for_recut(SlotId::make(e, taken))) ++taken;
    for (uint32_t i = 0; i < taken; ++i) {
      const SlotId slot = SlotId::make(e, i);
      release(a_, s_, {slot, a_.word_of(s_, slot)});
    }
    if (taken < slots) {
      m_.store_word(at, mine.next(SlotState::Stable, a_.participant, a_.generation).raw);
      m_.write_back(at, 8);
      return false;
    }
    publish_extent(c, e, mine);
    log_append(a_, s_, LogHint::Rescan, SlotId{});
    return true;
  }

  static constexpr uint32_t kPatience = 1000, kLooksInARow = 100;   // looks at a slot that is being filled: some microseconds
  bool wait_for_writer(SlotId slot) {
    for (uint32_t i = 0; i < kPatience; ++i) {
      const SlotWord word = a_.word_of(s_, slot);
      if (word.state() != SlotState::Writing) return true;
      if (word.retired()) return false;   // for ever
      if (i % kLooksInARow == kLooksInARow - 1) m_.yield();
    }
    return false;
  }
  bool take_for_recut(SlotId slot) {
    for (uint32_t i = 0; i < kPatience; ++i) {
      const SlotWord word = a_.word_of(s_, slot);
      Claim claim;
      if (word.state() == SlotState::Stable && take_victim(a_, s_, slot, word, claim)) return true;
      if (word.state() == SlotState::Free && m_.cas_word(s_.slot_header(slot), word.raw, a_.writing(word).raw)) return true;
      if (word.retired()) return false;   // for ever
      if (i % kLooksInARow == kLooksInARow - 1) m_.yield();
    }
    return false;
  }

  Attached<M>& a_;
  M& m_;
  const ShardMap& s_;
  uint64_t random_;
  std::vector<SlotClass> classes_;
  std::vector<Extent> scratch_;
  uint32_t extents_;   // that may be used, as we last saw it
  uint32_t avoided_ = 0;
};

}   // namespace kvp
