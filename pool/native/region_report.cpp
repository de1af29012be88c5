// Region: what is in it and who uses it. Nothing here writes to the medium.
#include <algorithm>
#include <cstring>
#include <map>

#include "error.h"
#include "region.h"

namespace kvp {
namespace {

std::string hex(const uint8_t* bytes, uint32_t n) {
  static const char digits[] = "0123456789abcdef";
  std::string out;
  for (uint32_t i = 0; i < n; ++i) out += digits[bytes[i] >> 4], out += digits[bytes[i] & 15];
  return out;
}

}   // namespace

std::vector<uint64_t> Region::counters(uint32_t from, uint32_t to) {
  const Use use = ensure_open();
  std::vector<uint64_t> sums(kCounters);
  const bool ok = fault_guarded([&] {
    CpuMemory& m = attached_->mem;
    for (uint32_t h = from; h < to && h < attached_->hosts(); ++h) {
      const ShardMap& s = attached_->shard(HostIndex{h});
      const bool fresh = attached_->fresh(HostIndex{h});
      for (uint32_t p = 0; p < superblock_.participant_count; ++p) {
        if (fresh) {
          m.invalidate(s.participant(p), sizeof(Participant));
          m.full_fence();
        }
        if (m.load_word(s.participant(p)) == 0) continue;   // never used
        for (uint32_t c = 0; c < kCounters; ++c) sums[c] += m.load_word(s.counter(p, c));
      }
    }
  });
  if (!ok) medium_failed();
  return sums;
}

std::vector<ParticipantView> Region::participants() {
  const Use use = ensure_open();
  std::vector<ParticipantView> all;
  const bool ok = fault_guarded([&] {
    for (uint32_t h = 0; h < attached_->hosts(); ++h) {
      const ShardMap& s = attached_->shard(HostIndex{h});
      for (uint32_t p = 0; p < superblock_.participant_count; ++p) {
        if (attached_->fresh(HostIndex{h})) {
          attached_->mem.invalidate(s.participant(p), kLineBytes);
          attached_->mem.full_fence();
        }
        const uint64_t word = attached_->mem.load_word(s.participant(p));
        if (static_cast<uint32_t>(word) != static_cast<uint32_t>(ParticipantState::Live)) continue;
        const uint64_t who = attached_->mem.load_word(s.participant(p) + 8);
        const bool me = !read_only_ && HostIndex{h} == attached_->self && p == attached_->participant;
        all.push_back(
            {h, p, static_cast<uint32_t>(who), static_cast<uint32_t>(who >> 32), static_cast<uint32_t>(word >> 32), me || participant_alive(h, p)});
      }
    }
  });
  if (!ok) medium_failed();
  return all;
}

std::vector<ShardUsage> Region::usage(std::vector<NamespaceUsage>& namespaces, bool count_slots) {
  const Use use = ensure_open();
  std::vector<ShardUsage> shards;
  std::map<std::string, NamespaceUsage> by_digest;
  HostView v;   // these own memory, and the guarded code may be left in the middle
  ShardUsage u;
  std::vector<uint64_t> blocks_of;
  const bool ok = guarded([&] {
    shards.clear(), by_digest.clear();
    CpuMemory& m = attached_->mem;
    for (uint32_t h = 0; h < attached_->hosts(); ++h) {
      const ShardMap& s = attached_->shard(HostIndex{h});
      v = view_host(h);
      u = {};
      u.host = h;
      u.state = v.state, u.incarnation = v.incarnation, u.heartbeat = v.heartbeat, u.node_name = v.node_name;
      const Ownership o = ownership_of(*attached_, s);
      u.owner = to_int(o.owner), u.epoch = o.epoch;
      follow_limit(HostIndex{h});
      u.extents = attached_->extents(HostIndex{h});
      u.capacity_bytes = u.extents * superblock_.extent_payload_bytes;
      blocks_of.assign(superblock_.namespace_count, 0);
      for (uint32_t e = 0; count_slots && e < superblock_.extent_count; ++e) {
        uint64_t slot_bytes = 0;
        const uint32_t n = slots_in_use(*attached_, s, e, &slot_bytes);
        if (n == 0) {
          if (e < u.extents && !attached_->avoids(HostIndex{h}, e)) ++u.extents_free;
          continue;
        }
        if (slot_bytes == 0) slot_bytes = superblock_.slot_bytes_min;   // being cut: nothing but claims in it
        for (uint32_t i = 0; i < n; ++i) {
          const Offset at = s.slot_header(SlotId::make(e, i));
          if (attached_->fresh(HostIndex{h})) m.invalidate(at, kLineBytes);
          const SlotWord word{m.load_word(at)};
          ++u.slots;
          if (word.state() == SlotState::Free) {
            ++u.slots_free;
            continue;
          }
          if (word.retired()) {
            ++u.slots_retired;
            continue;
          }
          u.used_bytes += slot_bytes;
          if (word.state() != SlotState::Stable) {
            ++u.slots_writing;
            continue;
          }
          ++u.blocks;
          const auto index = static_cast<uint16_t>(m.load_word(at + 40) >> 32);
          if (index < blocks_of.size()) ++blocks_of[index];
        }
      }
      for (uint32_t i = 0; i < superblock_.namespace_count; ++i) {
        NamespaceRow row;
        if (SlotWord{m.load_word(s.namespace_row(i))}.state() != SlotState::Stable || !transfer_->namespaces().read(s, i, row)) continue;
        NamespaceUsage& u_ns = by_digest[hex(row.digest, kKeyBytes)];
        u_ns.digest = hex(row.digest, kKeyBytes);
        u_ns.description.assign(row.description, std::min<size_t>(row.description_bytes, sizeof row.description));
        u_ns.block_bytes = row.block_bytes;
        u_ns.blocks += blocks_of[i];
        u_ns.bytes += blocks_of[i] * row.block_bytes;
      }
      shards.push_back(u);
    }
  });
  if (!ok) medium_failed();
  for (auto& [digest, usage_of] : by_digest) namespaces.push_back(usage_of);
  return shards;
}

std::vector<SlotView> Region::slots(uint32_t host, uint64_t from, uint64_t limit, uint64_t& next) {
  const Use use = ensure_open();
  std::vector<SlotView> out;
  if (host >= attached_->hosts()) return out;
  const ShardMap& s = attached_->shard(HostIndex{host});
  uint64_t dense = from;
  const bool ok = guarded([&] {
    out.clear(), dense = from;
    const uint16_t now = shard_tick(*attached_, s);
    for (; dense < s.slots() && out.size() < limit; ++dense) {
      const SlotId slot = s.slot_at(dense);
      const uint32_t in_use = slots_in_use(*attached_, s, slot.extent());
      if (slot.slot() >= in_use) {   // skip the rest of the extent
        dense = uint64_t{slot.extent() + 1} * superblock_.slots_per_extent - 1;
        continue;
      }
      if (attached_->fresh(HostIndex{host})) {
        attached_->mem.invalidate(s.slot_header(slot), kLineBytes);
        attached_->mem.full_fence();
      }
      const Header header = attached_->load_header(s, slot);
      const SlotWord word = header.word();
      if (word.state() == SlotState::Free) continue;
      out.push_back({host, slot.extent(), slot.slot(), word.retired() ? SlotView::kRetired : static_cast<uint32_t>(word.state()), word.participant(),
                     word.generation(), header.h.length_bytes, header.h.namespace_index, header.h.flags, slot_age(*attached_, s, slot, now),
                     word.count(), header.right, hex(header.h.key, 6)});
    }
  });
  if (!ok) medium_failed();
  next = dense >= s.slots() ? 0 : dense;
  return out;
}

}   // namespace kvp
