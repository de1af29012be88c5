// Region: blocks in and out.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>

#include "error.h"
#include "region.h"

namespace kvp {
namespace {

uint64_t now_ns() {
  return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count());
}

uint32_t latency_bucket(uint64_t ns, uint32_t buckets) {
  const uint32_t log2 = ns == 0 ? 0 : 63 - static_cast<uint32_t>(__builtin_clzll(ns));
  const uint32_t i = log2 < kLatencyFirstLog2 ? 0 : log2 - kLatencyFirstLog2;
  return i < buckets ? i : buckets - 1;
}

}   // namespace

void Region::refresh() {
  std::lock_guard<std::mutex> lock(lookup_);
  // A medium that fails now fails in the probe too, and there it is a reason.
  if (!guarded([&] { transfer_->refresh(); })) transfer_->walk_again();
}

void Region::lookup_group(const Key* keys, uint32_t n, Outcome* outcomes, Found* found) {
  std::lock_guard<std::mutex> lock(lookup_);
  if (fault_guarded([&] { transfer_->lookup_group(keys, n, outcomes, found); })) return;
  // A line that one of them needs cannot be read. The others do not need it.
  for (uint32_t i = 0; i < n; ++i)
    if (!fault_guarded([&] { transfer_->lookup_group(keys + i, 1, outcomes + i, found == nullptr ? nullptr : found + i); }))
      outcomes[i] = Outcome::TierError;
}

void Region::lookup(const Key* keys, uint64_t n, uint8_t* codes) {
  const Use use = ensure_open();
  const FaultHandlerChecked handler;
  const uint64_t start = now_ns();
  refresh();
  for (uint64_t i = 0; i < n; i += kGroup) {
    const auto group = static_cast<uint32_t>(std::min<uint64_t>(kGroup, n - i));
    Outcome outcomes[kGroup];
    lookup_group(keys + i, group, outcomes, nullptr);
    for (uint32_t k = 0; k < group; ++k) codes[i + k] = static_cast<uint8_t>(outcomes[k]);
  }
  if (!read_only_ && n != 0) fault_guarded([&] { attached_->count(kLookupLatency + latency_bucket(now_ns() - start, kLatencyBuckets)); });
}

// A damaged block of a shard that this host writes goes at once, so that the next store stores it anew: else it would be "present" to stores and a miss
// to loads until the scrubber came by. Dropped is the very word that was found; a block that was overwritten meanwhile has another one. Another
// host's processes may not write there: for them the block stays a miss until its owner reads or scrubs it.
void Region::drop_damaged(const Found& found) {
  const ShardMap& s = attached_->shard(found.shard);
  bool ours = false;
  const bool readable = fault_guarded([&] {
    ours = attached_->owns(found.shard) && !fenced(*attached_, s);
    // The load went by what it got: somebody may have written to the caller's buffer, or an old row of the namespace was remembered. A block of a
    // newer build (another codec, a flag, a length of its own) is none of ours to judge.
    if (!ours || found.header.codec != 0 || found.header.flags != 0) return;
    const bool sound = transfer_->namespaces().sound(s, found.slot, {found.header, true}) != 0;   // what is found has a right header
    if (!sound && evict_to_free(*attached_, s, found.slot, SlotWord{found.header.word})) attached_->count(kScrubBad);
  });
  if (!readable && ours) retire_block(s, found.slot, found.header.namespace_index);
}

uint64_t Region::load(const Key* keys, uint64_t n, const Buffers& to, uint64_t block_bytes, uint8_t* codes) {
  const Use use = ensure_writer();
  const FaultHandlerChecked handler;
  const uint64_t start = now_ns();
  uint64_t bytes = 0;
  std::vector<Piece> pieces(to.pieces);
  std::vector<Found> found(kGroup);
  refresh();
  for (uint64_t i = 0; i < n; i += kGroup) {
    const auto group = static_cast<uint32_t>(std::min<uint64_t>(kGroup, n - i));
    Outcome outcomes[kGroup];
    bool was_found[kGroup];
    lookup_group(keys + i, group, outcomes, found.data());
    for (uint32_t k = 0; k < group; ++k) was_found[k] = outcomes[k] == Outcome::Ok;
    transfer_->load_group(found.data(), group, to, i, block_bytes, pieces.data(), outcomes,
                          [&](HostIndex shard) { return transfer_->tick_of(shard); });
    for (uint32_t k = 0; k < group; ++k) {
      if (outcomes[k] == Outcome::Ok) bytes += block_bytes;
      if (was_found[k] && (outcomes[k] == Outcome::FailedChecksum || outcomes[k] == Outcome::WrongNamespace || outcomes[k] == Outcome::TierError))
        drop_damaged(found[k]);
      codes[i + k] = static_cast<uint8_t>(outcomes[k]);
    }
  }
  if (n != 0)
    fault_guarded([&] {
      attached_->count(kBytesLoaded, bytes);
      attached_->count(kLoadLatency + latency_bucket(now_ns() - start, kLatencyBuckets));
    });
  return bytes;
}

// One block that is not there yet. Where the medium fails below its payload, another slot is taken.
Outcome Region::store_block(const Key& key, const Piece* pieces, uint32_t piece_count, uint64_t block_bytes, uint16_t namespace_index,
                            uint64_t slot_bytes) {
  constexpr uint32_t kSlots = 8;
  for (uint32_t i = 0; i < kSlots; ++i) {
    Outcome one = Outcome::TierError;
    Claim claim{};
    {
      std::lock_guard<std::mutex> lock(allocator_);
      // The same key twice in one batch, or stored by somebody since the look at the group.
      if (!guarded([&] { one = transfer_->begin_store(key, slot_bytes, claim); })) return Outcome::TierError;
    }
    if (one != Outcome::Ok) return one;
    if (fault_guarded([&] { one = transfer_->complete_store(claim, key, pieces, piece_count, block_bytes, namespace_index, slot_bytes); }))
      return one;
    const bool learnt = avoid_unreadable();
    if (!leave_slot(claim, slot_bytes) && !learnt) return Outcome::TierError;
  }
  return Outcome::TierError;
}

void Region::store(const Key* keys, uint64_t n, const Buffers& from, uint64_t block_bytes, uint16_t namespace_index, uint8_t* codes) {
  const Use use = ensure_writer();
  const FaultHandlerChecked handler;
  const uint64_t start = now_ns();
  const uint64_t slot_bytes = Namespaces<CpuMemory>::slot_bytes_for(attached_->home(), block_bytes);
  std::vector<Piece> pieces(from.pieces);
  std::vector<Found> found(kGroup);
  // A row that was damaged or given to another namespace since it was opened: nobody could load what is stored under it. The caller opens another one.
  // Whoever judges a row changes its word, so that the row need not be read as a whole each time.
  bool known = true;
  fault_guarded([&] {
    const uint64_t opened = namespace_index < superblock_.namespace_count ? opened_rows_[namespace_index].load(std::memory_order_relaxed) : 0;
    known = opened != 0 && attached_->mem.load_word(attached_->home().namespace_row(namespace_index)) == opened;
  });
  if (!known) {
    std::fill_n(codes, n, static_cast<uint8_t>(Outcome::WrongNamespace));
    return;
  }
  refresh();
  bool open = true;
  fault_guarded([&] {
    follow_limit(attached_->self);
    open = !closed();
  });
  uint64_t by_code[kOutcomes] = {};
  for (uint64_t i = 0; i < n; i += kGroup) {
    const auto group = static_cast<uint32_t>(std::min<uint64_t>(kGroup, n - i));
    Outcome outcomes[kGroup];
    lookup_group(keys + i, group, outcomes, found.data());
    for (uint32_t k = 0; k < group; ++k) {
      Outcome one = Outcome::TierError;
      if (outcomes[k] == Outcome::Ok) {
        one = Outcome::Present;
        fault_guarded([&] { transfer_->vouch(keys[i + k], found[k]); });
      } else if (!open) {
        one = Outcome::Fenced;
      } else {   // also where a lookup failed: of a block that cannot be read another copy may be stored
        from.block(i + k, pieces.data());
        one = store_block(keys[i + k], pieces.data(), from.pieces, block_bytes, namespace_index, slot_bytes);
      }
      codes[i + k] = static_cast<uint8_t>(one);
      ++by_code[codes[i + k]];
    }
  }
  if (n != 0)
    fault_guarded([&] {
      attached_->count(kStored, by_code[0]);
      attached_->count(kPresent, by_code[1]);
      attached_->count(kBytesStored, by_code[0] * block_bytes);
      for (uint32_t c = 2; c < kOutcomes; ++c) attached_->count(kDeclined + c, by_code[c]);
      attached_->count(kStoreLatency + latency_bucket(now_ns() - start, kStoreLatencyBuckets));
    });
}

uint8_t Region::open_namespace(const uint8_t* digest, uint64_t block_bytes, const std::string& description, uint16_t& index) {
  const Use use = ensure_writer();
  const uint64_t slot_bytes = Namespaces<CpuMemory>::slot_bytes_for(attached_->home(), block_bytes);
  if (slot_bytes > superblock_.extent_payload_bytes)
    throw Error(ErrorKind::Namespace, "region " + path_ + ": a block of " + std::to_string(block_bytes) + " bytes is larger than an extent (" +
                                          std::to_string(superblock_.extent_payload_bytes) +
                                          " bytes). Give the tier an extentSize that holds several blocks, or more capacity.");
  // A living process writes a row in microseconds. One that is stopped in the middle is not waited for any longer than this, once.
  constexpr uint64_t kPatienceNs = 50'000'000;
  struct Writers {
    Region& region;
    uint64_t until = 0;
    bool left_behind = false;
    bool alive(SlotWord word) { return region.writer_alive(to_int(region.attached_->self), word); }
    bool patient() {
      const uint64_t now = now_ns();
      if (until == 0) until = now + kPatienceNs;
      std::this_thread::sleep_for(std::chrono::microseconds(20));
      return now < until;
    }
  } writers{*this};
  Outcome outcome = Outcome::TierError;
  std::lock_guard<std::mutex> lock(allocator_);
  const auto find_or_add = [&] {
    outcome = transfer_->namespaces().find_or_add(digest, block_bytes, description.data(), static_cast<uint32_t>(description.size()), index, writers);
  };
  fault_guarded([&] {
    if (closed() || fenced(*attached_, attached_->home())) {
      outcome = Outcome::Fenced;
      return;
    }
    find_or_add();
    if (writers.left_behind) {   // a row that nobody finishes, or a damaged one: it is judged now, and may be the one that we want
      judge_namespaces(attached_->home(), 0, superblock_.namespace_count);
      find_or_add();
    }
    NamespaceRow row;
    if (outcome == Outcome::Ok && transfer_->namespaces().read(attached_->home(), index, row) && std::memcmp(row.digest, digest, kKeyBytes) == 0)
      opened_rows_[index].store(row.word, std::memory_order_relaxed);
  });
  return static_cast<uint8_t>(outcome);
}

void Region::record(uint64_t lookups, uint64_t hits, const std::vector<uint64_t>& misses) {
  if (read_only_) return;
  const Use use = ensure_open();
  fault_guarded([&] {
    attached_->count(kLookups, lookups);
    attached_->count(kHits, hits);
    for (uint32_t i = 0; i < misses.size() && i < kOutcomes; ++i) attached_->count(kMisses + i, misses[i]);
  });
}

}   // namespace kvp
