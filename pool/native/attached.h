// Attached: one process's place in a region. Which host it is on, which participant it is, which shards its host owns.
//
// Everything in directory.h to adopt.h works on an Attached<M>, for any Memory M.
#pragma once
#include <atomic>
#include <cstring>
#include <vector>

#include "digest.h"
#include "geometry.h"
#include "memory.h"

namespace kvp {

struct Key {
  uint64_t words[4];
  // A key is a SHA-256, so any bits of it are as good as a hash: tag and both bucket numbers come from different words.
  uint16_t tag() const {
    const auto t = static_cast<uint16_t>(words[0] >> 48);
    return t == 0 ? uint16_t{1} : t;
  }
  uint64_t bucket(uint32_t which, uint64_t bucket_count) const {
    return static_cast<uint64_t>(static_cast<unsigned __int128>(words[1 + which]) * bucket_count >> 64);
  }
  bool operator==(const Key&) const = default;
};
static_assert(sizeof(Key) == kKeyBytes);

inline Key key_at(const uint8_t* packed, uint64_t index) {
  Key key;
  std::memcpy(&key, packed + index * kKeyBytes, kKeyBytes);
  return key;
}

struct Header {   // a slot header as it was loaded, and whether its checksum was right
  SlotHeader h;
  bool right;
  SlotWord word() const { return {h.word}; }
  Key key() const {
    Key k;
    std::memcpy(&k, h.key, kKeyBytes);
    return k;
  }
};

inline constexpr uint64_t kHeaderChecksumCovers = offsetof(SlotHeader, header_checksum);

template <Memory M>
class Attached {
 public:
  Attached(M memory, const Superblock& superblock, HostIndex host) : mem(memory), sb(superblock), self(host) {
    for (uint32_t h = 0; h < sb.host_count; ++h) shards_[h] = ShardMap(sb, HostIndex{h}), extents_[h] = sb.extent_count;
    avoided_ = std::vector<std::atomic<bool>>(uint64_t{sb.host_count} * sb.extent_count);
    owned_[to_int(self)] = true;
  }
  Attached(const Attached&) = delete;   // the ShardMaps point into this object
  Attached& operator=(const Attached&) = delete;

  const ShardMap& shard(HostIndex h) const { return shards_[to_int(h)]; }
  const ShardMap& home() const { return shards_[to_int(self)]; }
  uint32_t hosts() const { return sb.host_count; }

  // Does this process's host write the owner's lines of this shard?
  bool owns(HostIndex shard) const { return owned_[to_int(shard)].load(std::memory_order_relaxed); }
  void set_owned(HostIndex shard, bool owned) { owned_[to_int(shard)].store(owned, std::memory_order_relaxed); }
  // How many extents of this shard may hold blocks: all of them, until its host's daemon says less (region_limit.cpp).
  uint32_t extents(HostIndex shard) const { return extents_[to_int(shard)].load(std::memory_order_relaxed); }
  void set_extents(HostIndex shard, uint32_t extents) { extents_[to_int(shard)].store(extents, std::memory_order_relaxed); }
  // Slot headers of this extent cannot be read: this process walks past it, and stores elsewhere.
  bool avoids(HostIndex shard, uint32_t extent) const {
    return avoided_[uint64_t{to_int(shard)} * sb.extent_count + extent].load(std::memory_order_relaxed);
  }
  // False: it is avoided already.
  bool avoid(HostIndex shard, uint32_t extent) {
    if (avoided_[uint64_t{to_int(shard)} * sb.extent_count + extent].exchange(true, std::memory_order_relaxed)) return false;
    avoided_count_.fetch_add(1, std::memory_order_relaxed);
    return true;
  }
  uint32_t avoided() const { return avoided_count_.load(std::memory_order_relaxed); }
  // Where what can hold blocks ends. Behind it there may be holes, which a flush would fill with memory.
  Offset end_of_extents(const ShardMap& s) const { return extents(s.host()) == sb.extent_count ? s.end() : s.extent(extents(s.host())); }

  // Must lines of this shard be invalidated before they are read? (PROTOCOL 2, last paragraph)
  bool fresh(HostIndex shard) const { return !mem.coherent() && !owns(shard); }

  SlotWord word_of(const ShardMap& s, SlotId slot) { return {mem.load_word(s.slot_header(slot))}; }
  Header load_header(const ShardMap& s, SlotId slot) {
    const Offset at = s.slot_header(slot);
    Header header;
    const Line line = mem.load_line(at);
    std::memcpy(&header.h, &line, sizeof line);
    header.right = line_checksum(&header.h, kHeaderChecksumCovers, at) == header.h.header_checksum;
    return header;
  }
  SlotWord writing(SlotWord from) { return next(from, SlotState::Writing); }
  SlotWord stable(SlotWord from) { return next(from, SlotState::Stable); }
  void count(uint32_t counter, uint64_t by = 1) {
    if (by != 0) mem.add_word(home().counter(participant, counter), by);
  }

  M mem;
  const Superblock sb;
  const HostIndex self;
  uint32_t participant = 0;
  uint32_t generation = 0;
  bool reaped_own = false;   // what earlier generations of our own participant entry left behind has been seen to

 private:
  SlotWord next(SlotWord from, SlotState state) {
    if (mem.without(state == SlotState::Writing ? "bump.writing" : "bump.stable"))
      return SlotWord::make(state, from.count(), participant, generation);
    return from.next(state, participant, generation);
  }

  ShardMap shards_[kMaxHosts];
  std::atomic<bool> owned_[kMaxHosts] = {};
  std::atomic<uint32_t> extents_[kMaxHosts] = {};
  std::vector<std::atomic<bool>> avoided_;
  std::atomic<uint32_t> avoided_count_ = 0;
};

}   // namespace kvp
