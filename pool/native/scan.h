// Walks over all slots of a shard: the base of reaping, adopting, counting, scrubbing and checking.
#pragma once
#include "extent.h"

namespace kvp {

// How far an extent's slots have to be looked at: all of them while it is being cut or its descriptor is damaged, none while it is unassigned (they are
// FREE by promise) or cannot be read.
template <Memory M>
uint32_t slots_in_use(Attached<M>& a, const ShardMap& s, uint32_t extent, uint64_t* slot_bytes = nullptr) {
  const Offset at = s.extent_descriptor(extent);
  if (a.avoids(s.host(), extent)) {
    if (slot_bytes != nullptr) *slot_bytes = 0;
    return 0;
  }
  if (a.fresh(s.host())) {
    a.mem.invalidate(at, kLineBytes);
    a.mem.full_fence();
  }
  const Cut cut = load_cut(a, s, extent);
  if (slot_bytes != nullptr) *slot_bytes = cut.serves();
  if (cut.unassigned()) return 0;
  return cut.serves() != 0 ? s.slot_count(cut.slot_bytes) : s.superblock().slots_per_extent;
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
