// Region: puts in order what a damaged medium or dead processes left in the shards that this host owns. May run beside living participants: every
// change is a compare-and-swap on the word that was looked at, or a step of recovery.h.
//
// No right block is given up: what could be served before can be served afterwards. Nothing is guessed but what a checksum confirms.
#include <algorithm>

#include "error.h"
#include "region.h"
#include "region_file.h"

namespace kvp {

// Plain numbers, because the medium may fail below the code that counts (Memory::guarded).
struct Region::Tally {
  uint64_t checked = 0, dropped = 0, slots_freed = 0, republished = 0, entries = 0, extents = 0, rows_restored = 0, rows_freed = 0, records = 0;
  uint64_t tails = 0, claims = 0, claim_lines = 0, extents_left = 0, claims_left = 0, retired = 0, slots_back = 0, extents_unread = 0;
  uint64_t claim_owner = 0, claim_epoch = 0;
};

namespace {

constexpr uint32_t kSizesMax = 8;   // slot sizes of one extent: one, unless it was damaged

// A row in which one bit is wrong becomes right again. The word (bytes 0..7) is outside its checksum.
bool correct_one_bit(NamespaceRow& row) {
  const uint64_t now = Namespaces<CpuMemory>::checksum(row);
  if (__builtin_popcountll(now ^ row.checksum) == 1) {
    row.checksum = now;
    return true;
  }
  auto* bytes = reinterpret_cast<uint8_t*>(&row);
  for (uint32_t i = offsetof(NamespaceRow, digest); i < sizeof row; ++i)
    for (uint32_t bit = 0; bit < 8; ++bit) {
      bytes[i] = static_cast<uint8_t>(bytes[i] ^ 1u << bit);
      if (Namespaces<CpuMemory>::checksum(row) == row.checksum) return true;
      bytes[i] = static_cast<uint8_t>(bytes[i] ^ 1u << bit);
    }
  return false;
}

}   // namespace

bool Region::others_alive() {
  for (uint32_t p = 0; p < superblock_.participant_count; ++p)
    if (p != attached_->participant && participant_alive(to_int(attached_->self), p)) return true;
  return false;
}

// This host's claim on its own shard says that it has not taken it over: an adoption that was cut short, or a flipped bit. It is done (again), with a
// higher epoch of ours: nobody else is asked for it. Not while others of this host may be in the middle of a store.
void Region::repair_claim(Tally& t) {
  const ShardMap& s = attached_->home();
  const Ownership o = ownership_of(*attached_, s);
  if (o.settled) return;
  if (o.owner != attached_->self || o.epoch == ~uint64_t{0} || others_alive()) {
    ++t.claims_left;
    t.claim_owner = to_int(o.owner), t.claim_epoch = o.epoch;
    return;
  }
  adopt(*attached_, s, o.epoch + 1);
  ++t.claims;
}

// What this host claims, and that it never claimed something: both copies are equal again. Another process may be in the middle of a claim; what it has
// written meanwhile stays.
void Region::repair_claim_lines(Tally& t) {
  CpuMemory& m = attached_->mem;
  for (uint32_t on = 0; on < attached_->hosts(); ++on) {
    const Offset at = attached_->home().claim(HostIndex{on});
    const ClaimLine line = load_claim(*attached_, at);
    if (!claim_damaged(line, at)) continue;
    const uint64_t epoch = claimed_epoch(line, at);
    const uint64_t settled = claim_settled(line, epoch) ? epoch : line.settled_epoch;
    const auto put = [&](uint64_t offset, uint64_t there, uint64_t right) { return there == right || m.cas_word(at + offset, there, right); };
    if (put(offsetof(ClaimLine, epoch_checksum), line.epoch_checksum, claim_checksum(at, epoch)) &&
        put(offsetof(ClaimLine, epoch), line.epoch, epoch) && put(offsetof(ClaimLine, epoch_copy), line.epoch_copy, epoch) &&
        put(offsetof(ClaimLine, settled_epoch), line.settled_epoch, settled) && put(offsetof(ClaimLine, settled_copy), line.settled_copy, settled))
      ++t.claim_lines;
    m.write_back(at, kLineBytes);
  }
  m.store_fence();
}

// What is wrong with a row: true when it was put right, and how. Nobody waits for a dead writer, nor for the repair of a damaged row.
Region::Judged Region::judge_namespace(const ShardMap& s, uint32_t i) {
  CpuMemory& m = attached_->mem;
  const Offset at = s.namespace_row(i);
  NamespaceRow row;
  const bool stable = transfer_->namespaces().read(s, i, row);
  const SlotWord word{row.word};
  if (stable || m.load_word(at) != row.word || (word.state() == SlotState::Writing && writer_alive(to_int(attached_->self), word)))
    return Judged::Right;
  NamespaceRow right = row;
  const bool whole = Namespaces<CpuMemory>::checksum(row) == row.checksum;
  const bool empty = std::all_of(std::begin(row.digest), std::end(row.digest), [](uint8_t byte) { return byte == 0; });
  const bool usable = !empty && (whole || (word.state() != SlotState::Free && correct_one_bit(right))) && plausible_slot_bytes(right.slot_bytes) &&
                      right.block_bytes <= right.slot_bytes;
  if (word.state() == SlotState::Free && !usable) return Judged::Right;
  // It is ours before it changes: somebody else may be judging it too.
  const SlotWord mine = attached_->writing(word);
  if (!m.cas_word(at, word.raw, mine.raw)) return Judged::Right;
  KVP_STEP("namespace.judged");
  m.write_back(at, kLineBytes);
  m.store_fence();
  if (usable)
    for (uint32_t k = 1; k < sizeof row / 8; ++k) {
      uint64_t value = 0, there = 0;
      std::memcpy(&value, reinterpret_cast<const uint8_t*>(&right) + k * 8ULL, 8);
      std::memcpy(&there, reinterpret_cast<const uint8_t*>(&row) + k * 8ULL, 8);
      if (value != there) m.store_word(at + k * 8ULL, value);
    }
  m.store_word(at, mine.next(usable ? SlotState::Stable : SlotState::Free, attached_->participant, attached_->generation).raw);
  m.write_back(at, sizeof row);
  return usable ? Judged::Restored : Judged::Freed;
}

// Rows [from, to) of a shard that this host owns. What was put right.
uint32_t Region::judge_namespaces(const ShardMap& s, uint32_t from, uint32_t to, uint64_t* restored) {
  uint32_t judged = 0;
  for (uint32_t i = from; i < to; ++i) {
    const Judged j = judge_namespace(s, i);
    if (j == Judged::Right) continue;
    ++judged;
    if (j == Judged::Restored && restored != nullptr) ++*restored;
  }
  if (judged == 0) return 0;
  attached_->mem.store_fence();
  transfer_->namespaces().forget(s.host());
  return judged;
}

void Region::repair_namespaces(const ShardMap& s, Tally& t) {
  uint64_t restored = 0;
  const uint32_t judged = judge_namespaces(s, 0, superblock_.namespace_count, &restored);
  t.rows_restored += restored, t.rows_freed += judged - restored;
}

bool Region::readable_slot(const ShardMap& s, SlotId slot, uint64_t slot_bytes) {
  const Offset at = s.payload(slot, slot_bytes);
  attached_->mem.invalidate_all(at, slot_bytes);
  return fault_guarded([&] {
    attached_->mem.full_fence();
    attached_->mem.checksum(at, slot_bytes);
  });
}

void Region::repair_extent(const ShardMap& s, uint32_t e, Tally& t) {
  CpuMemory& m = attached_->mem;
  const uint32_t writers = to_int(attached_->self);
  if (attached_->avoids(s.host(), e)) {
    ++t.extents_unread;
    return;
  }
  const Cut found = load_cut(*attached_, s, e);
  const SlotWord cut = found.word;
  if (cut.state() == SlotState::Writing && writer_alive(writers, cut)) return;   // its cutter takes care of its slots
  for (uint32_t i = 0; i < superblock_.slots_per_extent; ++i) {
    const SlotId slot = SlotId::make(e, i);
    const Offset header_at = s.slot_header(slot);
    const Header header = attached_->load_header(s, slot);
    const SlotWord seen = header.word();
    if (seen.state() == SlotState::Free) continue;
    if (seen.state() == SlotState::Stable) {
      ++t.checked;
      bool sound = false;
      const bool readable = fault_guarded([&] { sound = transfer_->namespaces().sound(s, slot, header) != 0; });
      if (!readable && retire_block(s, slot, header.h.namespace_index))
        ++t.retired;
      else if (!sound && attached_->word_of(s, slot) == seen && evict_to_free(*attached_, s, slot, seen))
        ++t.dropped;
      continue;
    }
    if (seen.retired()) {   // memory that can be read again was replaced, or written to as a whole
      const bool lies_there = found.serves() != 0 && i < s.slot_count(found.serves());
      if (lies_there && !readable_slot(s, slot, found.serves())) continue;
      if (m.cas_word(header_at, seen.raw, seen.next(SlotState::Free, 0, 0).raw)) ++t.slots_back;
      m.write_back(header_at, 8);
      continue;
    }
    if (seen.state() == SlotState::Writing && writer_alive(writers, seen)) continue;
    m.write_back(header_at, kLineBytes);
    m.store_fence();   // only then FREE: else the medium may still say STABLE
    if (!m.cas_word(header_at, seen.raw, seen.next(SlotState::Free, 0, 0).raw)) continue;
    m.write_back(header_at, 8);
    ++t.slots_freed;
  }
  repair_descriptor(s, e, t);
}

// What the blocks that are in it need; nothing, if there are none. Reads headers only.
void Region::repair_descriptor(const ShardMap& s, uint32_t e, Tally& t) {
  CpuMemory& m = attached_->mem;
  const Offset at = s.extent_descriptor(e);
  const uint32_t writers = to_int(attached_->self);
  if (attached_->avoids(s.host(), e)) return;
  const Cut cut = load_cut(*attached_, s, e);
  if (cut.word.state() == SlotState::Writing && writer_alive(writers, cut.word)) return;
  uint64_t sizes[kSizesMax] = {};
  uint32_t size_count = 0, last_used = 0;
  bool unknown = false;   // somebody is writing there, or there is a block that nobody can judge
  for (uint32_t i = 0; i < superblock_.slots_per_extent; ++i) {
    const SlotId slot = SlotId::make(e, i);
    const Header header = attached_->load_header(s, slot);
    if (const uint64_t bytes = transfer_->namespaces().fits(s, slot, header); bytes != 0) {
      last_used = i;
      if (std::find(sizes, sizes + size_count, bytes) == sizes + size_count && size_count < kSizesMax) sizes[size_count++] = bytes;
    } else if (header.word().state() == SlotState::Stable || (header.word().state() == SlotState::Writing && writer_alive(writers, header.word()))) {
      unknown = true;
    }
  }
  const bool fits = size_count == 0 || std::find(sizes, sizes + size_count, cut.slot_bytes) != sizes + size_count;
  const bool right = cut.right && (cut.unassigned() ? size_count == 0 : cut.serves() != 0 && plausible_slot_bytes(cut.slot_bytes) && fits);
  if (right && (size_count == 0 || last_used < s.slot_count(cut.slot_bytes))) return;
  if (size_count == 0 && unknown) {   // nothing says what it serves
    ++t.extents_left;
    return;
  }
  const SlotWord mine = attached_->writing(cut.word);
  if (!m.cas_word(at, cut.word.raw, mine.raw)) return;   // somebody has just cut it
  m.write_back(at, 8);
  m.store_fence();
  // The smallest size, if two have got into it: then every block's slot is one that is looked at.
  const uint64_t bytes = size_count == 0 ? 0 : *std::min_element(sizes, sizes + size_count);
  store_cut(*attached_, s, e, bytes);
  m.store_word(at, (bytes == 0 ? mine.next(SlotState::Free, 0, 0) : mine.next(SlotState::Stable, attached_->participant, attached_->generation)).raw);
  m.write_back(at, kLineBytes);
  m.store_fence();
  ++t.extents;
}

void Region::repair_buckets(const ShardMap& s, Tally& t) {
  CpuMemory& m = attached_->mem;
  Directory<CpuMemory> directory(*attached_, s);
  for (uint64_t b = 0; b < superblock_.bucket_count; ++b)
    for (uint32_t i = 0; i < kEntriesPerBucket; ++i) {
      const Offset at = s.bucket(b) + i * 8ULL;
      const Entry entry{m.load_word(at)};
      if (entry.empty() || entry.is_ghost()) continue;
      bool wrong = wrong_entry(s, b, entry) != nullptr;
      if (!wrong && directory.alive(entry)) {   // a second one of its kind, in this bucket or the other one
        const Key key = attached_->load_header(s, entry.slot()).key();
        for (uint32_t which = 0; which < 2 && !wrong; ++which)
          for (uint32_t k = 0; k < kEntriesPerBucket && !wrong; ++k) {
            const Offset other = directory.bucket(key, which) + k * 8ULL;
            wrong = other < at && m.load_word(other) == entry.raw;
          }
      }
      if (!wrong || !m.cas_word(at, entry.raw, 0)) continue;
      m.write_back(at, 8);
      ++t.entries;
    }
  m.store_fence();
}

void Region::repair_log(const ShardMap& s, Tally& t) {
  CpuMemory& m = attached_->mem;
  const uint64_t ring = superblock_.log_record_count;
  LogFit fit = fit_log(s);
  if (fit.best != fit.tail) {
    if (m.cas_word(s.log_tail(), fit.tail, fit.best)) ++t.tails;
    fit = fit_log(s);
  }
  if (fit.best != fit.tail || fit.misfits > ring / 2) {   // nothing can be told from what is left: as after an adoption, others rescan
    log_take_over(*attached_, s);
    ++t.tails;
    return;
  }
  for (uint64_t i = 0; i < ring; ++i) {
    const uint64_t tail = m.load_word(s.log_tail());
    const LogRecord seen{m.load_word(s.log_record(i))};
    if (log_lap_fits(tail, 0, i, seen.lap()) || m.load_word(s.log_tail()) != tail) continue;
    const uint64_t lap = log_lap(tail, i);
    const LogRecord right = lap == 0 ? LogRecord{} : LogRecord::make(lap, LogHint::Rescan, SlotId{});
    if (m.cas_word(s.log_record(i), seen.raw, right.raw)) ++t.records;
  }
}

void Region::repair_shard(const ShardMap& s, Tally& t) {
  if (fenced(*attached_, s)) return;
  repair_namespaces(s, t);
  for (uint32_t e = 0; e < superblock_.extent_count; ++e) repair_extent(s, e, t);
  repair_buckets(s, t);
  // Last, when wrong entries no longer take the room. That of a living writer may be on its way; a second one does no harm.
  for_each_slot(*attached_, s, [&](SlotId slot) {
    const Header header = attached_->load_header(s, slot);
    if (header.word().state() == SlotState::Stable && header.right && attached_->word_of(s, slot) == header.word() &&
        republish(*attached_, s, slot, header))
      ++t.republished;
  });
  repair_log(s, t);
  write_back_directory(*attached_, s);
  attached_->mem.store_fence();
  log_append(*attached_, s, LogHint::Rescan, SlotId{});
}

// What an audit leaves to the owner's own processes: lines that a late owner's cache has set back, beside slots and log.
void Region::repair_directory(const ShardMap& s) {
  Tally t;
  for (uint32_t e = 0; e < superblock_.extent_count; ++e) repair_descriptor(s, e, t);
  repair_buckets(s, t);
}

uint32_t Region::judge_descriptor(const ShardMap& s, uint32_t extent) {
  if (load_cut(*attached_, s, extent).right) return 0;
  Tally t;
  repair_descriptor(s, extent, t);
  return static_cast<uint32_t>(t.extents);
}

Repair Region::repair() {
  const Use use = ensure_writer();
  Recovered reaped;
  const uint32_t dead = reap_dead(reaped);
  std::lock_guard<std::mutex> lock(maintenance_);
  log_laps_.resize(superblock_.log_record_count);
  Repair r;
  Tally t;
  const uint32_t copies = copies_right_ < 2 ? rewrite_superblocks(path_, superblock_) : 0;
  if (copies != 0) copies_right_ = 2;
  const bool ok = guarded([&] {
    t.checked = t.extents_left = t.claims_left = t.extents_unread = 0;
    repair_claim_lines(t);
    repair_claim(t);
    follow_owners();
    for (uint32_t h = 0; h < attached_->hosts(); ++h)
      if (HostIndex{h} == attached_->self || attached_->owns(HostIndex{h})) repair_shard(attached_->shard(HostIndex{h}), t);
  });
  const auto done = [&](uint64_t count, const char* what) {
    if (count != 0) r.done.push_back(std::to_string(count) + " " + what);
  };
  done(copies, "copy of the superblock written anew from the right one");
  done(t.claim_lines, "claim lines with a wrong copy put right");
  done(t.claims, "adoption that was cut short, done again");
  done(dead, "dead processes cleaned up after");
  done(reaped.freed + t.slots_freed, "slots freed that nobody was writing any more");
  done(t.rows_restored, "namespaces restored");
  done(t.rows_freed, "damaged namespaces removed; their blocks are misses");
  done(t.dropped, "damaged blocks dropped; they are misses");
  done(t.retired, "blocks in memory that cannot be read dropped; their slots are not used any more");
  done(t.slots_back, "retired slots whose memory can be read again, in use again");
  done(t.extents, "extent descriptors put right");
  done(t.entries, "wrong or double bucket entries removed");
  done(reaped.republished + t.republished, "blocks that nobody could find, entered again");
  done(t.tails, "change log tail put right");
  done(t.records, "damaged change log records replaced");
  if (!ok) r.left.emplace_back("the medium failed while it was repaired (poisoned memory, or the file was truncated); replace it");
  if (t.extents_unread != 0)
    r.left.push_back(std::to_string(t.extents_unread) +
                     " extents have slot headers that cannot be read (poisoned memory); nobody uses them. Replace the medium");
  if (t.extents_left != 0)
    r.left.push_back(std::to_string(t.extents_left) +
                     " extents have a damaged descriptor while a process writes there; repair again when it is done");
  if (t.claims_left != 0)
    r.left.push_back("shard " + std::to_string(to_int(attached_->self)) + " is claimed by host " + std::to_string(t.claim_owner) + " with epoch " +
                     std::to_string(t.claim_epoch) +
                     " and not taken over; stop this host's engines and repair again, or adopt it with a higher epoch");
  r.blocks_checked = t.checked, r.blocks_dropped = t.dropped;
  return r;
}

}   // namespace kvp
