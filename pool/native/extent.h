// What an extent is cut into: its descriptor, read and written. Source: DESIGN 4.5, PROTOCOL 0.
//
// A descriptor has a checksum over its sizes, seeded with its place. All zero is an extent that nobody has cut yet. One that is FREE and says a size,
// or serves a size that its checksum does not vouch for, is damaged: its slots are looked at, all of them, and nobody stores there.
#pragma once
#include "attached.h"

namespace kvp {

struct Cut {
  SlotWord word;
  uint64_t slot_bytes = 0, slot_count = 0;   // as they stand there
  bool right = false;                        // the sizes are what was written
  bool unassigned() const { return right && word.state() == SlotState::Free; }
  uint64_t serves() const { return right && word.state() == SlotState::Stable ? slot_bytes : 0; }
};

inline uint64_t cut_checksum(Offset at, uint64_t slot_bytes, uint64_t slot_count) {
  if (slot_bytes == 0 && slot_count == 0) return 0;
  const uint64_t sizes[2] = {slot_bytes, slot_count};
  return line_checksum(sizes, sizeof sizes, at);
}

template <Memory M>
Cut load_cut(Attached<M>& a, const ShardMap& s, uint32_t extent) {
  const Offset at = s.extent_descriptor(extent);
  const Line line = a.mem.load_line(at);
  ExtentDescriptor d;
  std::memcpy(&d, &line, sizeof d);
  Cut c{{d.word}, d.slot_bytes, d.slot_count, false};
  const bool plausible = d.slot_bytes >= kLineBytes && d.slot_bytes <= s.superblock().extent_payload_bytes;
  const bool sizes =
      c.word.state() == SlotState::Free ? d.slot_bytes == 0 && d.slot_count == 0 : plausible && d.slot_count == s.slot_count(d.slot_bytes);
  c.right = sizes && d.checksum == cut_checksum(at, d.slot_bytes, d.slot_count);
  return c;
}

// The sizes only; the word comes after them. 0: it serves nobody.
template <Memory M>
void store_cut(Attached<M>& a, const ShardMap& s, uint32_t extent, uint64_t slot_bytes) {
  const Offset at = s.extent_descriptor(extent);
  const uint64_t slot_count = slot_bytes == 0 ? 0 : s.slot_count(slot_bytes);
  a.mem.store_word(at + offsetof(ExtentDescriptor, slot_bytes), slot_bytes);
  a.mem.store_word(at + offsetof(ExtentDescriptor, slot_count), slot_count);
  a.mem.store_word(at + offsetof(ExtentDescriptor, checksum), cut_checksum(at, slot_bytes, slot_count));
}

}   // namespace kvp
