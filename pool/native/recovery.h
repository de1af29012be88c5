// After a death: reaping what a dead process left (PROTOCOL 4) and adopting a shard whose host is gone or came back (PROTOCOL 5).
#pragma once
#include "scan.h"
#include "slots.h"
#include "transfer.h"

namespace kvp {

struct Recovered {
  uint64_t kept = 0;
  uint64_t freed = 0;
  uint64_t republished = 0;
};

// Inserts the entry of a STABLE slot if it is missing. True: inserted. A block for which there is no room is evicted.
template <Memory M>
bool republish(Attached<M>& a, const ShardMap& s, SlotId slot, const Header& header) {
  Directory<M> directory(a, s);
  const Key key = header.key();
  if (directory.has_entry(key, slot, header.word().count())) return false;
  Probe full;
  if (directory.publish(key, slot, header.word().count(), full)) return true;
  evict_to_free(a, s, slot, header.word());
  return false;
}

// An extent whose cutter died: it serves its old size if blocks are left in it, else nobody. Its slots have been settled before.
template <Memory M>
void settle_extent(Attached<M>& a, const ShardMap& s, uint32_t extent, SlotWord word) {
  const Offset at = s.extent_descriptor(extent);
  bool empty = true;
  for (uint32_t i = 0; empty && i < s.superblock().slots_per_extent; ++i) empty = a.word_of(s, SlotId::make(extent, i)).state() == SlotState::Free;
  if (empty) store_cut(a, s, extent, 0);
  const SlotWord settled = empty ? word.next(SlotState::Free, 0, 0) : word.next(SlotState::Stable, a.participant, a.generation);
  a.mem.cas_word(at, word.raw, settled.raw);
  if (empty) a.mem.write_back(s.extent(extent), s.superblock().slots_per_extent * kLineBytes);   // nobody looks there from now on
}

// Namespace rows and extents of an adopted shard that somebody was in the middle of writing: nobody is any more.
template <Memory M>
void settle_rows(Attached<M>& a, const ShardMap& s) {
  for (uint32_t i = 0; i < s.superblock().namespace_count; ++i) {
    const SlotWord word{a.mem.load_word(s.namespace_row(i))};
    if (word.state() != SlotState::Stable && word.state() != SlotState::Free)
      a.mem.store_word(s.namespace_row(i), word.next(SlotState::Free, 0, 0).raw);
  }
  for (uint32_t e = 0; e < s.superblock().extent_count; ++e) {
    const SlotWord word{a.mem.load_word(s.extent_descriptor(e))};
    if (!a.avoids(s.host(), e) && (word.state() == SlotState::Writing || word.state() == SlotState::Lent)) settle_extent(a, s, e, word);
  }
}

// Whatever the dead one had in the caches of this host: other hosts must see it too.
template <Memory M>
void write_back_directory(Attached<M>& a, const ShardMap& s) {
  if (a.mem.coherent()) return;
  const Superblock& sb = s.superblock();
  for (uint32_t e = 0; e < sb.extent_count; ++e)
    if (const uint32_t n = slots_in_use(a, s, e); n != 0) a.mem.write_back(s.extent(e), n * kLineBytes);
  a.mem.write_back(s.namespace_row(0), s.log_ring_end() - s.namespace_row(0));   // namespaces, descriptors, buckets, tail, ring
}

// Any process of the owner host, after the *unclean* death of a process that used this participant entry. The caller holds the entry's lock: so
// all its generations but `living` (the caller's own, or kNobody) are dead for good before the first slot word is loaded (PROTOCOL 4.1), and
// nobody else reaps them.
inline constexpr uint32_t kNobody = 0xffffffff;
template <Memory M>
Recovered reap(Attached<M>& a, const ShardMap& s, uint32_t participant, uint32_t living) {
  M& m = a.mem;
  Recovered r;
  const auto its = [&](SlotWord w) {
    return w.participant() == participant && (w.generation() != living || m.without("reap.generation")) &&
           (!w.retired() || m.without("reap.retired"));
  };
  // The entry of a finished block lies in one of two lines far away. They are asked for a few slots ahead: a million blocks are a million misses.
  struct Finished {
    SlotId slot;
    SlotWord word;
  };
  constexpr uint32_t kAhead = 16;
  Finished waiting[kAhead];
  uint64_t seen = 0;
  const auto ensure_published = [&](const Finished& f) {
    const Header header = a.load_header(s, f.slot);
    if (header.word() == f.word && header.right && !m.without("reap.republish") && republish(a, s, f.slot, header)) ++r.republished;
  };
  for_each_slot(a, s, [&](SlotId slot) {
    const SlotWord word = a.word_of(s, slot);   // reap.look
    if (!its(word)) return;
    const Offset at = s.slot_header(slot);
    if (word.state() == SlotState::Writing) {
      m.write_back(at, kLineBytes);
      m.store_fence();   // only then FREE: else the medium may still say STABLE
      KVP_STEP("reap.before_free");
      if (!m.without("reap.free") && m.cas_word(at, word.raw, word.next(SlotState::Free, 0, 0).raw)) ++r.freed;
    } else if (word.state() == SlotState::Stable) {
      Directory<M>(a, s).prefetch(a.load_header(s, slot).key());
      if (seen >= kAhead) ensure_published(waiting[seen % kAhead]);
      waiting[seen++ % kAhead] = {slot, word};
    }
  });
  for (uint64_t i = seen > kAhead ? seen - kAhead : 0; i < seen; ++i) ensure_published(waiting[i % kAhead]);
  for (uint32_t e = 0; e < s.superblock().extent_count; ++e) {
    const SlotWord word{m.load_word(s.extent_descriptor(e))};
    if (word.state() == SlotState::Writing && its(word) && !a.avoids(s.host(), e)) settle_extent(a, s, e, word);
  }
  for (uint32_t i = 0; i < s.superblock().namespace_count; ++i) {
    const SlotWord word{m.load_word(s.namespace_row(i))};
    if (word.state() == SlotState::Writing && its(word)) m.cas_word(s.namespace_row(i), word.raw, word.next(SlotState::Free, 0, 0).raw);
  }
  KVP_STEP("reap.before_write_back");
  write_back_directory(a, s);
  m.store_fence();
  log_append(a, s, LogHint::Rescan, SlotId{});
  a.count(kReaped, r.freed);
  return r;
}

// PROTOCOL 5. The arbiter's epoch is higher than every claim so far (checked by the caller).
template <Memory M>
Recovered adopt(Attached<M>& a, const ShardMap& s, uint64_t epoch) {
  M& m = a.mem;
  Recovered r;
  const Offset claim = a.home().claim(s.host());
  store_claim(a, claim, epoch);   // adopt.claim, in the claimer's own shard
  m.write_back(claim, kLineBytes);
  KVP_STEP("adopt.claimed");
  m.invalidate_all(s.namespace_row(0), a.end_of_extents(s) - s.namespace_row(0));   // adopt.inv: all lines that change hands, payload too
  m.full_fence();
  a.set_owned(s.host(), true);
  for_each_slot(a, s, [&](SlotId slot) {
    const Header header = a.load_header(s, slot);
    const SlotWord word = header.word();
    if (word.state() == SlotState::Stable && (header.right || m.without("adopt.header_checksum"))) {
      ++r.kept;
      return;
    }
    if (word.state() == SlotState::Free || m.without("adopt.free")) return;
    if (word.retired() && !m.without("adopt.retired")) return;
    m.store_word(s.slot_header(slot), word.next(SlotState::Free, 0, 0).raw);
    ++r.freed;
  });
  KVP_STEP("adopt.freed");
  settle_rows(a, s);
  for_each_slot(a, s, [&](SlotId slot) {
    const Header header = a.load_header(s, slot);
    if (header.word().state() == SlotState::Stable && !m.without("adopt.republish") && republish(a, s, slot, header)) ++r.republished;
  });
  write_back_directory(a, s);
  if (!m.without("adopt.log")) log_take_over(a, s);   // ends with a fence for all of it
  store_settled(a, claim, epoch);                     // adopt.settled: only now may our writers start
  m.write_back(claim, kLineBytes);                    // for the reports of other hosts
  KVP_STEP("adopt.done");
  return r;
}

// PROTOCOL 5, audit: on a shard that this host owns by adoption, after the old owner has acknowledged (or was switched off). Medium and our cache may
// differ for good until this has been done. Judges the medium, verifies payloads too, and finds again what a late write of the old owner hid.
//
// A shard may be large: a call reads so many bytes of payload, and the next one goes on where it stopped. Nothing late comes any more by then, and what
// our own host does in between is in its cache. True: the shard is through.
struct AuditProgress {
  bool begun = false;
  uint64_t next = 0;   // slot, as in ShardMap::dense
  Recovered done;
};
template <Memory M>
bool audit(Attached<M>& a, Namespaces<M>& namespaces, const ShardMap& s, AuditProgress& p, uint64_t bytes_max) {
  M& m = a.mem;
  const bool at_home = s.host() == a.self;
  const auto from_medium = [&](Offset at, uint64_t bytes) {   // audit.inv: judge the medium and not our cache
    m.invalidate(at, bytes);
    m.full_fence();
  };
  if (!p.begun) {
    from_medium(s.namespace_row(0), s.extent(0) - s.namespace_row(0));
    for (uint32_t e = 0; e < a.extents(s.host()); ++e)
      if (!a.avoids(s.host(), e)) from_medium(s.extent(e), s.superblock().extent_payload_offset);
    namespaces.forget(s.host());
    if (!at_home) settle_rows(a, s);   // what the old owner began
    p.begun = true;
  }
  uint64_t bytes_read = 0;
  uint32_t extent = ~0U, in_use = 0;
  for (; p.next < s.slots() && bytes_read < bytes_max; ++p.next) {
    const SlotId slot = s.slot_at(p.next);
    if (slot.extent() != extent) in_use = slots_in_use(a, s, extent = slot.extent());
    if (slot.slot() >= in_use) {   // FREE by promise, to the extent's end
      p.next += s.superblock().slots_per_extent - slot.slot() - 1;
      continue;
    }
    const Header header = a.load_header(s, slot);
    const SlotWord word = header.word();
    if (word.state() == SlotState::Free || (word.retired() && !m.without("audit.retired"))) continue;
    if (word.state() == SlotState::Writing && at_home) continue;   // by a living process of ours; a dead one's is the reaper's
    bool sound = false;
    m.guarded([&] {   // what cannot be read is not sound
      if (const uint64_t slot_bytes = namespaces.fits(s, slot, header); slot_bytes != 0) {
        bytes_read += header.h.length_bytes;
        from_medium(s.payload(slot, slot_bytes), header.h.length_bytes);
        sound = word.state() == SlotState::Stable && namespaces.sound(s, slot, header) != 0;
      }
    });
    if (word.state() != SlotState::Stable) {   // by the late owner, so nobody else changes it
      m.store_word(s.slot_header(slot), word.next(SlotState::Free, 0, 0).raw);
      ++p.done.freed;
    } else if (!sound && !m.without("audit.sound")) {
      p.done.freed += evict_to_free(a, s, slot, word);   // unless somebody of our host was faster
    } else {
      ++p.done.kept;
      if (!m.without("audit.republish") && republish(a, s, slot, header)) ++p.done.republished;
    }
  }
  if (p.next < s.slots()) return false;
  write_back_directory(a, s);
  log_take_over(a, s);   // a late write may have set tail and ring back
  return true;
}
template <Memory M>
Recovered audit(Attached<M>& a, Namespaces<M>& namespaces, const ShardMap& s) {
  AuditProgress p;
  audit(a, namespaces, s, p, ~uint64_t{0});
  return p.done;
}

}   // namespace kvp
