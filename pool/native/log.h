// The change log of a shard: a ring of 8-byte records that say where to look, never what to believe. Source: PROTOCOL 7.
//
// Appended by processes of the owner host, followed by all others.
#pragma once
#include "attached.h"
#include "error.h"

namespace kvp {

// The tail that most records of a ring agree to: those before it are of its lap, those behind it of the lap before. `lap(i)` is that of record i,
// `fits` how many agree; 0: there is no telling. Single damaged records do not matter, whatever lap they say.
template <class Lap>
uint64_t log_best_tail(uint64_t ring, Lap lap, uint64_t& fits) {
  uint64_t most = 0, lead = 0, best = 0;   // the lap of most records, if there is one, by Boyer and Moore's vote
  for (uint64_t i = 0; i < ring; ++i) {
    const uint64_t seen = lap(i);
    if (lead == 0) most = seen;
    lead += seen == most ? 1 : -1ULL;
  }
  fits = 0;
  for (const uint64_t candidate : {most, most + 1, lap(0), lap(ring - 1) + 1}) {   // the newest lap
    const uint64_t newest = candidate & LogRecord::kLapMask, older = (newest - 1) & LogRecord::kLapMask;
    if (newest == 0) continue;
    uint64_t n = 0;
    for (uint64_t i = 0; i < ring; ++i) n += lap(i) == older;
    for (uint64_t i = 0; i < ring; ++i) {
      if (n > fits) fits = n, best = (newest - 1) * ring + i;
      n += (lap(i) == newest ? 1 : 0) - (lap(i) == older ? 1ULL : 0);
    }
  }
  return best;
}

// The tail is only a hint: when it was damaged, put it where the ring's records say.
template <Memory M>
void log_repair_tail(Attached<M>& a, const ShardMap& s) {
  const uint64_t tail = a.mem.load_word(s.log_tail());
  uint64_t fits = 0;
  const uint64_t best = log_best_tail(
      s.superblock().log_record_count, [&](uint64_t i) { return LogRecord{a.mem.load_word(s.log_record(i))}.lap(); }, fits);
  if (fits != 0) a.mem.cas_word(s.log_tail(), tail, best);
}

// After the change itself is fenced. No number is taken before the record is written, so an appender that dies leaves no hole.
template <Memory M>
void log_append(Attached<M>& a, const ShardMap& s, LogHint hint, SlotId slot) {
  M& m = a.mem;
  const uint64_t ring = s.superblock().log_record_count;
  // Only a damaged ring or tail makes this fail for long. A lost record makes a follower's replica stale, which is harmless: the load checks.
  constexpr uint32_t kTriesBeforeRepair = 1000, kTriesForced = 16, kTries = kTriesBeforeRepair + 100 + kTriesForced;
  for (uint32_t i = 0; i < kTries; ++i) {
    if (i == kTriesBeforeRepair) log_repair_tail(a, s);
    const uint64_t tail = m.load_word(s.log_tail());   // append.tail
    const Offset at = s.log_record(tail);
    const LogRecord seen{m.load_word(at)};   // append.look
    const uint64_t lap = (tail / ring + 1) & LogRecord::kLapMask;
    if (seen.lap() == lap) {                      // somebody wrote it and has not moved the tail yet
      m.cas_word(s.log_tail(), tail, tail + 1);   // append.help
      continue;
    }
    // The tail moved under us; or the record itself is damaged, and is overwritten when nothing else helps.
    if (seen.lap() != ((lap - 1) & LogRecord::kLapMask) && i < kTries - kTriesForced) continue;
    if (!m.cas_word(at, seen.raw, LogRecord::make(lap, hint, slot).raw)) continue;
    KVP_STEP("append.record");
    m.write_back(at, 8);
    m.cas_word(s.log_tail(), tail, tail + 1);   // may fail: then somebody helped
    KVP_STEP("append.tail");
    m.write_back(s.log_tail(), 8);
    m.store_fence();
    return;
  }
}

// A follower's place in one shard's log.
struct LogPosition {
  uint64_t next = 0;
  bool rescan = true;   // the first look, and after having lost the thread
  uint64_t odd = 0;     // the record that stood at `next` when all headers were walked last, if it was no record for this place
};

// What does the next record say? The caller has made its line fresh. A lap before this one: nothing new. Any lap but these two: we were overtaken, or the
// log was set back (a late owner's cache came over it). After a rescan such a record means the same only until it, or the tail, changes.
enum class LogNews { Nothing, Record, Lost };
template <Memory M>
LogNews log_news(Attached<M>& a, const ShardMap& s, const LogPosition& position, LogRecord record) {
  const uint64_t lap = (position.next / s.superblock().log_record_count + 1) & LogRecord::kLapMask;
  if (record.lap() == lap) return LogNews::Record;
  if (record.lap() == ((lap - 1) & LogRecord::kLapMask)) return LogNews::Nothing;
  if (record.raw != position.odd) return LogNews::Lost;
  if (a.fresh(s.host())) {
    a.mem.invalidate(s.log_tail(), 8);
    a.mem.full_fence();
  }
  return a.mem.load_word(s.log_tail()) == position.next ? LogNews::Nothing : LogNews::Lost;
}
template <Memory M>
bool log_has_news(Attached<M>& a, const ShardMap& s, const LogPosition& position) {
  return log_news(a, s, position, LogRecord{a.mem.load_word(s.log_record(position.next))}) != LogNews::Nothing;
}

// Calls look(slot) for every slot that changed since the last call, at most `limit` of them; the callee loads the header (fresh) and believes it.
// Returns false when the caller must rescan all headers: start_rescan first, then look at every slot.
template <Memory M, class Look>
bool log_follow(Attached<M>& a, const ShardMap& s, LogPosition& position, uint32_t limit, Look look) {
  M& m = a.mem;
  const bool fresh = a.fresh(s.host());
  constexpr uint32_t kRound = 32;
  for (uint32_t done = 0; done < limit;) {
    // All records of a round first, then all headers: the misses overlap. The headers come after the records (PROTOCOL 7, Follow).
    if (fresh) {
      m.invalidate(s.log_record(position.next), 8);
      m.full_fence();
    }
    SlotId slots[kRound];
    uint32_t n = 0;
    while (n < kRound && done + n < limit) {
      const Offset at = s.log_record(position.next);
      if (n != 0 && fresh && at % kLineBytes == 0) break;   // the next line was not invalidated in this round
      const LogRecord record{m.load_word(at)};              // follow.record
      const LogNews news = log_news(a, s, position, record);
      if (news == LogNews::Lost && !m.without("follow.lost")) return position.rescan = true, false;
      if (news != LogNews::Record) break;
      if (record.hint() == LogHint::Rescan && !m.without("follow.rescan")) return position.rescan = true, false;
      ++position.next;
      if (s.contains(record.slot())) slots[n++] = record.slot();
    }
    if (n == 0) return true;
    if (fresh) {
      for (uint32_t i = 0; i < n; ++i) m.invalidate(s.slot_header(slots[i]), kLineBytes);
      m.full_fence();
    }
    for (uint32_t i = 0; i < n; ++i) look(slots[i]);
    done += n;
  }
  return true;
}

// The position is read before the headers: what is appended meanwhile is followed later.
template <Memory M>
void start_rescan(Attached<M>& a, const ShardMap& s, LogPosition& position) {
  M& m = a.mem;
  if (a.fresh(s.host())) {
    m.invalidate(s.log_tail(), 8);
    m.full_fence();
  }
  position.next = m.load_word(s.log_tail());                 // rescan.tail
  position.odd = m.load_word(s.log_record(position.next));   // perhaps stale: then it is odd once more
  position.rescan = false;
}

// Adopter, auditor: a lap beyond all that can have been written, so that no follower believes a record of the old owner. Lines are already fresh.
// Beside living appenders (an audit at home): what they wrote meanwhile is overwritten, but all that it says is in the headers that followers walk now.
template <Memory M>
void log_take_over(Attached<M>& a, const ShardMap& s) {
  M& m = a.mem;
  constexpr uint64_t kLapsAhead = 2;   // whoever appends at this moment is not that far
  const uint64_t ring = s.superblock().log_record_count;
  uint64_t lap = m.load_word(s.log_tail()) / ring + 1;
  for (uint64_t i = 0; i < ring; ++i) {
    const uint64_t seen = LogRecord{m.load_word(s.log_record(i))}.lap();
    if (seen > lap) lap = seen;
  }
  lap = (lap + kLapsAhead) & LogRecord::kLapMask;
  for (uint64_t i = 0; i < ring; ++i) m.store_word(s.log_record(i), LogRecord::make(lap, LogHint::Rescan, SlotId{}).raw);
  KVP_STEP("adopt.log.refill");
  m.write_back(s.log_record(0), ring * 8);
  m.store_word(s.log_tail(), lap * ring);   // first position of the lap after it; whoever sees it before the ring walks once more
  m.write_back(s.log_tail(), 8);
  m.store_fence();   // also behind all that the caller has written back: appends come after it
}

}   // namespace kvp
