// Where everything lies in a region: from what the manifest asks for to a superblock, and from a superblock to offsets.
//
// Pure: no memory of a region is touched here.
#pragma once
#include <cstdint>

#include "layout.h"

namespace kvp {

struct GeometryRequest {
  uint64_t region_bytes = 0;
  uint32_t hosts = 1;
  uint64_t slot_bytes_min = 16384;   // blocks smaller than this waste the rest; 1 header line a slot of this size is set aside
  uint64_t extent_bytes = 0;         // payload of an extent; 0 = a 64th of the shard
  uint32_t participants = 64;        // a host
  uint32_t namespaces = 256;         // a shard
  uint64_t align_bytes = 4096;
  Coherence coherence = Coherence::Hardware;
};

// Throws Error{Geometry}: the message says which number does not fit and what would.
Superblock plan_region(const GeometryRequest& request);

// How many extents of a shard lie within its share of so many bytes of the region.
uint32_t extents_within(const Superblock& superblock, uint64_t region_bytes);

// Throws Error{Superblock} if the numbers of a superblock with a right checksum contradict each other (a damaged or hostile file).
void check_consistent(const Superblock& superblock);

enum class HostIndex : uint32_t {};
constexpr uint32_t to_int(HostIndex h) { return static_cast<uint32_t>(h); }

// Addresses in one shard. `dense` = extent * slots_per_extent + slot: the slot's place in touch rows and scans.
class ShardMap {
 public:
  ShardMap() = default;
  ShardMap(const Superblock& sb, HostIndex host) : sb_(&sb), base_(sb.shard_offset + uint64_t{to_int(host)} * sb.shard_bytes), host_(host) {}

  HostIndex host() const { return host_; }
  Offset base() const { return base_; }
  Offset end() const { return base_ + sb_->shard_bytes; }
  Offset header() const { return base_; }
  Offset claim(HostIndex on) const { return base_ + sb_->claims_offset + to_int(on) * kLineBytes; }
  Offset acknowledgement(HostIndex on) const { return base_ + sb_->acknowledgements_offset + to_int(on) * kLineBytes; }
  Offset litmus_say_line() const { return base_ + sb_->grants_offset + to_int(host_) * kLineBytes; }
  Offset litmus_test_line() const { return base_ + sb_->returns_offset + to_int(host_) * kLineBytes; }
  Offset participant(uint32_t index) const { return base_ + sb_->participants_offset + index * sizeof(Participant); }
  Offset counter(uint32_t index, uint32_t counter) const { return participant(index) + offsetof(Participant, counters) + counter * 8ULL; }
  Offset touch(HostIndex on, uint64_t dense) const {
    return base_ + sb_->touch_offset + to_int(on) * sb_->touch_row_bytes + dense * sizeof(uint16_t);
  }
  Offset namespace_row(uint32_t index) const { return base_ + sb_->namespaces_offset + index * sizeof(NamespaceRow); }
  Offset extent_descriptor(uint32_t extent) const { return base_ + sb_->extent_descriptors_offset + extent * kLineBytes; }
  Offset bucket(uint64_t index) const { return base_ + sb_->buckets_offset + index * kLineBytes; }
  Offset log_tail() const { return base_ + sb_->log_tail_offset; }
  Offset log_record(uint64_t position) const { return base_ + sb_->log_ring_offset + (position & (sb_->log_record_count - 1)) * 8; }
  Offset log_ring_end() const { return base_ + sb_->log_ring_offset + sb_->log_record_count * 8; }
  Offset extent(uint32_t extent) const { return base_ + sb_->extents_offset + extent * sb_->extent_bytes; }
  Offset slot_header(SlotId slot) const { return extent(slot.extent()) + slot.slot() * kLineBytes; }
  Offset payload(SlotId slot, uint64_t slot_bytes) const { return extent(slot.extent()) + sb_->extent_payload_offset + slot.slot() * slot_bytes; }

  uint64_t dense(SlotId slot) const { return uint64_t{slot.extent()} * sb_->slots_per_extent + slot.slot(); }
  SlotId slot_at(uint64_t dense) const {
    return SlotId::make(static_cast<uint32_t>(dense / sb_->slots_per_extent), static_cast<uint32_t>(dense % sb_->slots_per_extent));
  }
  uint64_t slots() const { return uint64_t{sb_->extent_count} * sb_->slots_per_extent; }
  bool contains(SlotId slot) const { return slot.extent() < sb_->extent_count && slot.slot() < sb_->slots_per_extent; }
  // Slots of an extent that is cut into pieces of slot_bytes.
  uint32_t slot_count(uint64_t slot_bytes) const {
    const uint64_t n = sb_->extent_payload_bytes / slot_bytes;
    return static_cast<uint32_t>(n < sb_->slots_per_extent ? n : sb_->slots_per_extent);
  }
  // The slot's clock: log positions, scaled so that one turnover of the shard (a store and an eviction a slot) is at most 2^13 ticks
  // and a 16-bit tick wraps only after eight turnovers.
  uint16_t tick(uint64_t log_position) const {
    uint32_t shift = 0;
    while ((slots() * 2) >> shift > 8192) ++shift;
    const auto t = static_cast<uint16_t>(log_position >> shift);
    return t == 0 ? uint16_t{1} : t;   // 0 means never
  }
  const Superblock& superblock() const { return *sb_; }

 private:
  const Superblock* sb_ = nullptr;
  Offset base_ = 0;
  HostIndex host_{};
};

}   // namespace kvp
