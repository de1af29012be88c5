// Walks over all slots of a shard: the base of reaping, adopting, counting, scrubbing and checking.
#pragma once
#include "attached.h"

namespace kvp {

// How far an extent's slots have to be looked at: all of them while it is being cut, none while it is unassigned (they are FREE by promise).
template <Memory M>
uint32_t slots_in_use(Attached<M>& a, const ShardMap& s, uint32_t extent, uint64_t* slot_bytes = nullptr) {
  const Offset at = s.extent_descriptor(extent);
  if (a.fresh(s.host())) {
    a.mem.invalidate(at, kLineBytes);
    a.mem.full_fence();
  }
  const SlotWord word{a.mem.load_word(at)};
  const uint64_t bytes = a.mem.load_word(at + offsetof(ExtentDescriptor, slot_bytes));
  const bool plausible = bytes >= kLineBytes && bytes <= s.superblock().extent_payload_bytes;
  if (slot_bytes != nullptr) *slot_bytes = word.state() == SlotState::Stable && plausible ? bytes : 0;
  if (word.state() == SlotState::Free) return 0;
  return word.state() == SlotState::Stable && plausible ? s.slot_count(bytes) : s.superblock().slots_per_extent;
}

// Calls f(SlotId) for every slot of the assigned extents; headers are invalidated first where that is needed, a line's worth of fences at a time.
template <Memory M, class F>
void for_each_slot(Attached<M>& a, const ShardMap& s, F f) {
  constexpr uint32_t kRound = 64;
  const bool fresh = a.fresh(s.host());
  for (uint32_t e = 0; e < s.superblock().extent_count; ++e) {
    const uint32_t n = slots_in_use(a, s, e);
    for (uint32_t i = 0; i < n; ++i) {
      if (fresh && i % kRound == 0) {
        a.mem.invalidate(s.slot_header(SlotId::make(e, i)), (n - i < kRound ? n - i : kRound) * kLineBytes);
        a.mem.full_fence();
      }
      f(SlotId::make(e, i));
    }
  }
}

}   // namespace kvp
