// Blocks in and out of a region: lookup, load, store. The steps carry the names that PROTOCOL 1 and 2 give them.
//
// With the payload checksum checked, header and payload are one round and no re-read is needed for safety (PROTOCOL 2, last paragraph);
// the slot word is read again only to name the reason of a miss.
#pragma once
#include <memory>
#include <vector>

#include "replica.h"
#include "slots.h"

namespace kvp {

// n blocks in the caller's memory, each of `pieces` pieces. With `ids`: piece j of block i lies at base[j] + ids[i] * stride[j] (pages of an
// engine). Without: base and bytes have n * pieces elements.
struct Buffers {
  const uint64_t* base;
  const uint64_t* stride;
  const uint64_t* bytes;
  const int64_t* ids;
  uint32_t pieces;

  void block(uint64_t i, Piece* out) const {
    for (uint32_t j = 0; j < pieces; ++j) {
      const uint64_t k = ids != nullptr ? j : i * pieces + j;
      const uint64_t address = base[k] + (ids != nullptr ? static_cast<uint64_t>(ids[i]) * stride[j] : 0);
      out[j] = {reinterpret_cast<uint8_t*>(address), bytes[k]};
    }
  }
};

struct Found {
  HostIndex shard{};
  SlotId slot;
  SlotHeader header;
};

// What a namespace row says about slots. Rows are immutable, so a right one is remembered for ever; a stale one (the shard was formatted or
// adopted anew) can only lead to a wrong address, and there the payload checksum fails.
template <Memory M>
class Namespaces {
 public:
  explicit Namespaces(Attached<M>& a) : a_(a), slot_bytes_(uint64_t{a.hosts()} * a.sb.namespace_count) {}

  // 0: unknown. Any thread.
  uint64_t slot_bytes(const ShardMap& s, uint16_t index) {
    if (index >= s.superblock().namespace_count) return 0;
    std::atomic<uint64_t>& known = slot_bytes_[to_int(s.host()) * s.superblock().namespace_count + index];
    uint64_t bytes = known.load(std::memory_order_relaxed);
    if (bytes != 0) return bytes;
    NamespaceRow row;
    if (!read(s, index, row)) return 0;
    known.store(row.slot_bytes, std::memory_order_relaxed);
    return row.slot_bytes;
  }
  // The slot size of a block that may be served, by its header alone; 0: there is none.
  uint64_t fits(const ShardMap& s, SlotId slot, const Header& header) {
    if (header.word().state() != SlotState::Stable || !header.right) return 0;
    const uint64_t bytes = slot_bytes(s, header.h.namespace_index);
    return bytes != 0 && header.h.length_bytes <= bytes && slot.slot() < s.slot_count(bytes) ? bytes : 0;
  }
  // Its payload as well, which is read.
  uint64_t sound(const ShardMap& s, SlotId slot, const Header& header) {
    const uint64_t bytes = fits(s, slot, header);
    return bytes != 0 && a_.mem.checksum(s.payload(slot, bytes), header.h.length_bytes) == header.h.payload_checksum ? bytes : 0;
  }
  void forget(HostIndex shard) {
    for (uint32_t i = 0; i < a_.sb.namespace_count; ++i) slot_bytes_[to_int(shard) * a_.sb.namespace_count + i].store(0, std::memory_order_relaxed);
  }

  bool read(const ShardMap& s, uint32_t index, NamespaceRow& row) {
    const Offset at = s.namespace_row(index);
    if (a_.fresh(s.host())) {
      a_.mem.invalidate(at, sizeof row);
      a_.mem.full_fence();
    }
    for (uint32_t i = 0; i < sizeof row / kLineBytes; ++i) {
      const Line line = a_.mem.load_line(at + i * kLineBytes);
      std::memcpy(reinterpret_cast<uint8_t*>(&row) + i * kLineBytes, &line, sizeof line);
    }
    return SlotWord{row.word}.state() == SlotState::Stable && checksum(row) == row.checksum && row.slot_bytes >= kLineBytes &&
           row.slot_bytes <= s.superblock().extent_payload_bytes && row.block_bytes <= row.slot_bytes;
  }

  // The row of a namespace in the home shard, made if it is not there. Owner host only. `writers` knows who is in the middle of a row; rows that
  // nobody will finish, and damaged ones, are left to the caller (`left_behind`): they are judged, and then there is room.
  template <class Writers>
  Outcome find_or_add(const uint8_t* digest, uint64_t block_bytes, const char* description, uint32_t description_bytes, uint16_t& index,
                      Writers&& writers) {
    const ShardMap& s = a_.home();
    NamespaceRow row;
    for (bool again = true; again;) {
      bool being_written = false;
      for (uint32_t i = 0; i < s.superblock().namespace_count; ++i) {
        const SlotWord word{a_.mem.load_word(s.namespace_row(i))};
        if (word.state() == SlotState::Writing) (writers.alive(word) ? being_written : writers.left_behind) = true;
        if (word.state() != SlotState::Stable) continue;
        if (!read(s, i, row)) {
          writers.left_behind = writers.left_behind || a_.mem.load_word(s.namespace_row(i)) == word.raw;
        } else if (std::memcmp(row.digest, digest, kKeyBytes) == 0) {
          index = static_cast<uint16_t>(i);
          a_.mem.write_back(s.namespace_row(i), sizeof row);   // vouched for, as a block that is found present: its writer may not be done yet
          return row.block_bytes == block_bytes ? Outcome::Ok : Outcome::WrongNamespace;
        }
      }
      if (being_written) {   // it may be ours-to-be; for ever only if its writer is stopped
        a_.mem.yield();
        if (writers.patient()) continue;
      }
      again = false;
      for (uint32_t i = 0; i < s.superblock().namespace_count; ++i) {
        const Offset at = s.namespace_row(i);
        const SlotWord word{a_.mem.load_word(at)};
        if (word.state() != SlotState::Free) continue;
        const SlotWord mine = a_.writing(word);
        again = !a_.mem.cas_word(at, word.raw, mine.raw);
        if (again) break;   // a race: perhaps for the same namespace, so look again
        KVP_STEP("namespace.claim");
        std::memset(&row, 0, sizeof row);
        row.word = mine.next(SlotState::Stable, a_.participant, a_.generation).raw;
        std::memcpy(row.digest, digest, kKeyBytes);
        row.block_bytes = block_bytes;
        row.slot_bytes = slot_bytes_for(s, block_bytes);
        row.description_bytes = static_cast<uint16_t>(description_bytes < sizeof row.description ? description_bytes : sizeof row.description);
        std::memcpy(row.description, description, row.description_bytes);
        row.checksum = checksum(row);
        for (uint32_t k = sizeof row / 8; k-- > 0;) {   // the word last
          uint64_t value;
          std::memcpy(&value, reinterpret_cast<uint8_t*>(&row) + k * 8ULL, 8);
          a_.mem.store_word(at + k * 8ULL, value);
        }
        KVP_STEP("namespace.stable");
        a_.mem.write_back(at, sizeof row);   // no fence: that of a block's payload comes before anybody is told of the block
        index = static_cast<uint16_t>(i);
        return Outcome::Ok;
      }
    }
    return Outcome::NamespacesFull;
  }
  // For those who cannot tell who lives: everybody does, for so many looks.
  struct EverybodyWrites {
    uint32_t looks = 1000;
    bool left_behind = false;
    bool alive(SlotWord) const { return true; }
    bool patient() { return looks != 0 && --looks != 0; }
  };
  Outcome find_or_add(const uint8_t* digest, uint64_t block_bytes, const char* description, uint32_t description_bytes, uint16_t& index) {
    return find_or_add(digest, block_bytes, description, description_bytes, index, EverybodyWrites{});
  }

  static uint64_t slot_bytes_for(const ShardMap& s, uint64_t block_bytes) {
    const uint64_t lines = (block_bytes + kLineBytes - 1) / kLineBytes * kLineBytes;
    return lines < s.superblock().slot_bytes_min ? s.superblock().slot_bytes_min : lines;
  }
  static uint64_t checksum(const NamespaceRow& row) {
    NamespaceRow copy = row;
    copy.word = 0, copy.checksum = 0;
    return line_checksum(&copy, sizeof copy, 0);
  }

 private:
  Attached<M>& a_;
  std::vector<std::atomic<uint64_t>> slot_bytes_;
};

inline constexpr uint32_t kGroup = 64;   // keys whose cache misses overlap; enough to hide the latency, small enough for the stack

template <Memory M>
class Transfer {
 public:
  explicit Transfer(Attached<M>& a, ReplicaPace pace = {}) : a_(a), m_(a.mem), namespaces_(a), slots_(a) {
    if (a.hosts() > 1) replica_ = std::make_unique<Replica<M>>(a, pace);
  }

  Namespaces<M>& namespaces() { return namespaces_; }
  Slots<M>& slots() { return slots_; }

  // Once before the groups of a call: what other hosts stored before now is found.
  void refresh() {
    if (replica_ != nullptr) replica_->refresh();
  }

  void walk_again() {
    if (replica_ != nullptr) replica_->walk_again();
  }

  // Are this host's blocks known without a look at its directory? (Not while its log is ahead of us.)
  bool follows(HostIndex shard) const { return replica_ != nullptr && replica_->covers(shard); }

  // codes[i]: Ok, Evicted, FailedChecksum (of a header) or NeverStored. At most kGroup keys; `found` may be null. No side effects.
  void lookup_group(const Key* keys, uint32_t n, Outcome* codes, Found* found) {
    KVP_CHECK(n <= kGroup);
    for (uint32_t i = 0; i < n; ++i) codes[i] = Outcome::NeverStored;
    uint32_t missing = n;
    probe_shard(a_.home(), keys, n, codes, found, missing);   // own shard first: no invalidates
    if (missing != 0 && replica_ != nullptr) probe_replica(keys, n, codes, found, missing);
    for (uint32_t h = 0; h < a_.hosts() && missing != 0; ++h)
      if (HostIndex{h} != a_.self && !replica_->covers(HostIndex{h})) probe_shard(a_.shard(HostIndex{h}), keys, n, codes, found, missing);
  }

  // Blocks that lookup_group has found (codes[i] is Ok) are copied out and verified; codes[i] says what became of each. Block i goes to block first + i
  // of `to`; `pieces` is room for those of one block. While a block is copied, the next one's payload leaves the cache: when its turn comes there is
  // nothing to wait for. A medium that fails below a block makes that block a miss, and no other.
  template <class TickOf>
  void load_group(const Found* found, uint32_t n, const Buffers& to, uint64_t first, uint64_t block_bytes, Piece* pieces, Outcome* codes,
                  TickOf ticks) {
    HostIndex ticking{kMaxHosts};
    uint16_t tick = 0;
    bool dropped = false;   // is the next payload out of the cache already?
    for (uint32_t i = 0; i < n; ++i) {
      if (codes[i] != Outcome::Ok) continue;
      const Found& f = found[i];
      uint32_t next = i + 1;
      while (next < n && codes[next] != Outcome::Ok) ++next;
      to.block(first + i, pieces);
      const auto load = [&](bool ahead) {
        return m_.guarded([&] {
          if (f.shard != ticking) tick = ticks(f.shard), ticking = f.shard;
          codes[i] = load_block(f, pieces, to.pieces, block_bytes, tick, dropped, ahead ? payload_of(found[next], block_bytes) : 0);
        });
      };
      bool ahead = next < n && a_.fresh(found[next].shard);
      if (!load(ahead)) {
        // Perhaps only what the next block needs cannot be read; it will find out by itself.
        const bool again = ahead;
        ahead = false;
        if (!again || !load(false)) codes[i] = Outcome::TierError;
      }
      dropped = ahead && codes[i] != Outcome::WrongNamespace;   // of which nothing is copied
    }
  }

  // Where a found block's payload lies. 0: a newer build may have written it.
  Offset payload_of(const Found& f, uint64_t block_bytes) {
    const ShardMap& s = a_.shard(f.shard);
    const uint64_t slot_bytes = namespaces_.slot_bytes(s, f.header.namespace_index);
    const bool known = slot_bytes != 0 && f.header.codec == 0 && f.header.flags == 0 && f.header.length_bytes == block_bytes &&
                       f.slot.slot() < s.slot_count(slot_bytes);
    return known ? s.payload(f.slot, slot_bytes) : 0;
  }

  // Copies a found block out and verifies it. `pieces` add up to block_bytes. `dropped`: its payload was `ahead` of the block before.
  Outcome load_block(const Found& f, const Piece* pieces, uint32_t piece_count, uint64_t block_bytes, uint16_t tick, bool dropped = false,
                     Offset ahead = 0) {
    const ShardMap& s = a_.shard(f.shard);
    const Offset payload = payload_of(f, block_bytes);
    if (payload == 0) return Outcome::WrongNamespace;
    if (a_.fresh(f.shard)) {
      if (!dropped) m_.invalidate(payload, block_bytes);   // load.payload.inv, after the load of the header
      m_.full_fence();
    }
    KVP_STEP("load.before_copy");
    const uint64_t checksum = m_.copy_out(pieces, piece_count, payload, ahead, ahead == 0 ? 0 : block_bytes);   // load.payload
    if (checksum == f.header.payload_checksum || m_.without("load.verify")) {   // load.verify: content is right whoever wrote it
      touch_slot(a_, s, f.slot, tick);
      return Outcome::Ok;
    }
    if (a_.fresh(f.shard)) {
      m_.full_fence();
      m_.invalidate(s.slot_header(f.slot), kLineBytes);   // load.header2.inv
      m_.full_fence();
    }
    namespaces_.forget(f.shard);
    const bool changed = a_.word_of(s, f.slot).raw != f.header.word;   // load.recheck: only to name the reason
    return changed ? Outcome::ChangedWhileReading : Outcome::FailedChecksum;
  }

  uint16_t tick_of(HostIndex shard) {
    if (a_.fresh(shard)) m_.invalidate(a_.shard(shard).log_tail(), 8);   // no fence: a tick that is one load old does no harm
    return shard_tick(a_, a_.shard(shard));
  }

  // Is the key in the home shard already? Vouches for it: what a dying process may have left in the cache is written back (PROTOCOL 9.13).
  bool present_at_home(const Key& key, Claim& where) {
    Outcome code;
    Found f;
    uint32_t missing = 1;
    code = Outcome::NeverStored;
    probe_shard(a_.home(), &key, 1, &code, &f, missing);
    if (missing != 0) return false;
    vouch(key, f);
    where = {f.slot, {f.header.word}};
    return true;
  }
  void vouch(const Key& key, const Found& f) {
    if (f.shard != a_.self || m_.coherent() || m_.without("store.vouch")) return;
    Directory<M> directory(a_, a_.home());
    m_.write_back(a_.home().slot_header(f.slot), kLineBytes);
    m_.write_back(directory.bucket(key, 0), kLineBytes);
    m_.write_back(directory.bucket(key, 1), kLineBytes);
    m_.store_fence();
  }

  // PROTOCOL 1, steps 1 and 2. Ok: the slot is ours, `complete` is next. Present: `claim` says where. One thread of the process at a time.
  Outcome begin_store(const Key& key, uint64_t slot_bytes, Claim& claim) {
    return present_at_home(key, claim) ? Outcome::Present : slots_.claim(slot_bytes, claim);
  }
  // PROTOCOL 1, steps 3 to 6.
  Outcome complete_store(const Claim& claim, const Key& key, const Piece* pieces, uint32_t piece_count, uint64_t block_bytes,
                         uint16_t namespace_index, uint64_t slot_bytes) {
    const SlotWord stable = fill(claim, key, pieces, piece_count, block_bytes, namespace_index, slot_bytes);
    return publish(claim, stable, key) ? Outcome::Ok : Outcome::NoSpace;
  }

  // PROTOCOL 1, steps 3 and 4: fill a claimed slot. Returns the STABLE word.
  SlotWord fill(const Claim& claim, const Key& key, const Piece* pieces, uint32_t piece_count, uint64_t block_bytes, uint16_t namespace_index,
                uint64_t slot_bytes) {
    const ShardMap& s = a_.home();
    const Offset at = s.slot_header(claim.slot);
    SlotHeader h;
    std::memset(&h, 0, sizeof h);
    h.payload_checksum = m_.stream_copy(s.payload(claim.slot, slot_bytes), pieces, piece_count);   // store.payload
    KVP_STEP("store.payload");
    m_.store_fence();   // store.payload.fence: the header must not overtake the payload
    KVP_STEP("store.payload.fence");
    const SlotWord stable = a_.stable(claim.word);
    h.word = stable.raw;
    std::memcpy(h.key, &key, kKeyBytes);
    h.length_bytes = static_cast<uint32_t>(block_bytes);
    h.namespace_index = namespace_index;
    h.header_checksum = line_checksum(&h, kHeaderChecksumCovers, at);
    Line line;
    std::memcpy(&line, &h, sizeof h);
    for (uint32_t i = 1; i < 8; ++i) m_.store_word(at + i * 8ULL, line.words[i]);   // store.header.body
    KVP_STEP("store.header.body");
    m_.store_word(at, line.words[0]);   // store.header.word, last
    KVP_STEP("store.header.word");
    m_.write_back(at, kLineBytes);   // no fence: an entry whose header is not there yet is just dead
    touch_slot(a_, s, claim.slot, shard_tick(a_, s));
    return stable;
  }

  // PROTOCOL 1, steps 5 and 6. False: no place could be made in either bucket; the slot was given back.
  bool publish(const Claim& claim, SlotWord stable, const Key& key) {
    const ShardMap& s = a_.home();
    Directory<M> directory(a_, s);
    constexpr uint32_t kAttempts = 64;
    for (uint32_t i = 0; i < kAttempts; ++i) {
      Probe full;
      if (directory.publish(key, claim.slot, stable.count(), full)) {
        KVP_STEP("store.published");
        m_.store_fence();   // store.publish.fence: only now may "stored" be told to others
        log_append(a_, s, LogHint::Stored, claim.slot);
        return true;
      }
      evict_one_of(full);   // both buckets full of living entries (PROTOCOL 9.16)
    }
    const SlotWord now = a_.word_of(s, claim.slot);
    if (now == stable) evict_to_free(a_, s, claim.slot, stable);
    return false;
  }

 private:
  // One probe of our own memory for all other hosts, then the headers that it names.
  void probe_replica(const Key* keys, uint32_t n, Outcome* codes, Found* found, uint32_t& missing) {
    struct Place {
      HostIndex host;
      SlotId slot;
    };
    constexpr uint32_t kPlaces = 4;   // blocks with one fingerprint: the same block on several hosts, seldom another one
    Place places[kGroup][kPlaces];
    uint32_t counts[kGroup];
    bool any_fresh = false;
    for (uint32_t i = 0; i < n; ++i)
      if (codes[i] != Outcome::Ok) replica_->prefetch(keys[i]);
    for (uint32_t i = 0; i < n; ++i) {
      counts[i] = 0;
      if (codes[i] == Outcome::Ok) continue;
      const bool ghost = replica_->probe(keys[i], [&](HostIndex h, SlotId slot) {
        if (a_.avoids(h, slot.extent())) codes[i] = Outcome::TierError;
        if (counts[i] == kPlaces || a_.avoids(h, slot.extent())) return;
        places[i][counts[i]++] = {h, slot};
        const Offset at = a_.shard(h).slot_header(slot);
        if (a_.fresh(h))
          m_.invalidate(at, kLineBytes), any_fresh = true;   // load.header.inv
        else
          m_.prefetch(at);
      });
      if (ghost && codes[i] == Outcome::NeverStored) codes[i] = Outcome::Evicted;
    }
    if (any_fresh) m_.full_fence();   // load.header.fence
    for (uint32_t i = 0; i < n; ++i)
      for (uint32_t k = 0; k < counts[i]; ++k) {
        const ShardMap& s = a_.shard(places[i][k].host);
        const Header header = a_.load_header(s, places[i][k].slot);   // load.header
        if (header.word().state() != SlotState::Stable && !m_.without("load.state")) continue;
        if (!header.right && !m_.without("load.header_checksum")) continue;
        if (header.key() != keys[i] && !m_.without("load.key")) continue;
        codes[i] = Outcome::Ok;
        if (found != nullptr) found[i] = {s.host(), places[i][k].slot, header.h};
        --missing;
        break;
      }
  }

  // In rounds: invalidate all, fence once, then load, so that the misses overlap.
  void probe_shard(const ShardMap& s, const Key* keys, uint32_t n, Outcome* codes, Found* found, uint32_t& missing) {
    Directory<M> directory(a_, s);
    const bool fresh = a_.fresh(s.host());
    for (uint32_t i = 0; i < n; ++i) {
      if (codes[i] == Outcome::Ok) continue;
      if (fresh)
        directory.invalidate(keys[i]);   // load.bucket.inv
      else
        directory.prefetch(keys[i]);
    }
    if (fresh) {
      m_.full_fence();   // load.bucket.fence
      for (uint32_t i = 0; i < n; ++i)
        if (codes[i] != Outcome::Ok) directory.prefetch(keys[i]);
    }
    Probe probes[kGroup];
    bool any = false;
    for (uint32_t i = 0; i < n; ++i) {
      probes[i].n = 0;
      if (codes[i] == Outcome::Ok) continue;
      directory.probe(keys[i], probes[i]);
      if (probes[i].ghost && codes[i] == Outcome::NeverStored) codes[i] = Outcome::Evicted;
      if (probes[i].unreadable) codes[i] = Outcome::TierError;
      for (uint32_t k = 0; k < probes[i].n; ++k) {
        any = true;
        if (fresh)
          m_.invalidate(s.slot_header(probes[i].slots[k]), kLineBytes);   // load.header.inv
        else
          m_.prefetch(s.slot_header(probes[i].slots[k]));
      }
    }
    if (!any) return;
    if (fresh) m_.full_fence();   // load.header.fence
    for (uint32_t i = 0; i < n; ++i)
      for (uint32_t k = 0; k < probes[i].n; ++k) {
        const Header header = a_.load_header(s, probes[i].slots[k]);   // load.header
        if (header.word().state() != SlotState::Stable && !m_.without("load.state")) continue;
        if ((header.word().count() & 0xffff) != probes[i].counts[k] && !m_.without("load.count")) continue;
        if (!header.right)   // torn by a writer, or damaged?
          codes[i] = a_.word_of(s, probes[i].slots[k]) == header.word() ? Outcome::FailedChecksum : Outcome::ChangedWhileReading;
        if (!header.right && !m_.without("load.header_checksum")) continue;
        if (header.key() != keys[i] && !m_.without("load.key")) continue;
        codes[i] = Outcome::Ok;
        if (found != nullptr) found[i] = {s.host(), probes[i].slots[k], header.h};
        --missing;
        break;
      }
  }

  void evict_one_of(const Probe& full) {
    const ShardMap& s = a_.home();
    const uint16_t now = shard_tick(a_, s);
    uint32_t oldest = kCandidates;
    uint16_t oldest_age = 0;
    SlotWord word{};
    for (uint32_t i = 0; i < full.n; ++i) {
      const SlotWord w = a_.word_of(s, full.slots[i]);
      if (w.state() != SlotState::Stable) continue;
      const uint16_t age = slot_age(a_, s, full.slots[i], now);
      if (oldest == kCandidates || age > oldest_age) oldest = i, oldest_age = age, word = w;
    }
    if (oldest != kCandidates) evict_to_free(a_, s, full.slots[oldest], word);
  }

  Attached<M>& a_;
  M& m_;
  Namespaces<M> namespaces_;
  Slots<M> slots_;
  std::unique_ptr<Replica<M>> replica_;   // of the other hosts' directories; none with one host
};

}   // namespace kvp
