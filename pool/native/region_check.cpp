// Region: is its structure sound? Reads only, and may run beside living participants: what looks wrong is looked at twice.
#include <chrono>
#include <cstring>
#include <string>
#include <thread>

#include "error.h"
#include "region.h"

namespace kvp {
namespace {

constexpr size_t kProblemsMax = 100;

std::string numbered(const std::string& what, uint64_t number) { return what + " " + std::to_string(number); }

}   // namespace

bool Region::plausible_slot_bytes(uint64_t bytes) const {
  return bytes >= superblock_.slot_bytes_min && bytes <= superblock_.extent_payload_bytes && bytes % kLineBytes == 0;
}

// An entry that readers take for a block's, and that is none: 0 = it is right, or dead, or changing.
const char* Region::wrong_entry(const ShardMap& s, uint64_t bucket, Entry entry) {
  if (entry.empty() || entry.is_ghost()) return nullptr;
  if (!s.contains(entry.slot())) return "an entry names a slot that does not exist";
  Directory<CpuMemory> directory(*attached_, s);
  if (!directory.alive(entry)) return nullptr;
  const Header header = attached_->load_header(s, entry.slot());
  if (header.word().state() != SlotState::Stable) {
    // The count of a slot changes with its state, so an entry of this count can only be right while the slot is STABLE.
    return directory.alive(entry) && attached_->word_of(s, entry.slot()) == header.word() ? "an entry names a slot that holds no block" : nullptr;
  }
  const Key key = header.key();
  const bool here = directory.bucket(key, 0) == s.bucket(bucket) || directory.bucket(key, 1) == s.bucket(bucket);
  if (!header.right || attached_->word_of(s, entry.slot()) != header.word() || (here && key.tag() == entry.tag())) return nullptr;
  return "an entry names the slot of another block";
}

// The lap that record i of the ring has when the tail is `tail`: those before it have its lap, those behind it the one before.
uint64_t Region::log_lap(uint64_t tail, uint64_t i) const {
  const uint64_t ring = superblock_.log_record_count;
  return (tail / ring + (i < tail % ring ? 1 : 0)) & LogRecord::kLapMask;
}

// Records behind the tail that their appenders have not told it yet are one lap ahead. `before`: so many records before the tail may have been
// loaded before they were appended.
bool Region::log_lap_fits(uint64_t tail, uint64_t before, uint64_t i, uint64_t lap) const {
  const uint64_t ahead = (lap - log_lap(tail, i)) & LogRecord::kLapMask, mask = superblock_.log_record_count - 1;
  if (ahead == 1) return ((i - tail) & mask) < superblock_.participant_count;
  return ahead == 0 || (ahead == LogRecord::kLapMask && ((tail - 1 - i) & mask) < before);
}

// Which tail the records of the ring fit: those before it are of its lap, those behind it of the lap before.
Region::LogFit Region::fit_log(const ShardMap& s) {
  CpuMemory& m = attached_->mem;
  const uint64_t ring = superblock_.log_record_count;
  std::vector<uint64_t>& laps = log_laps_;
  const uint64_t before = m.load_word(s.log_tail());
  for (uint64_t i = 0; i < ring; ++i) laps[i] = LogRecord{m.load_word(s.log_record(i))}.lap();
  const uint64_t tail = m.load_word(s.log_tail());
  LogFit fit{tail, tail, 0};
  if (tail < before || tail - before >= ring / 2) return fit;
  uint64_t fits = 0;
  for (uint64_t i = 0; i < ring; ++i) {
    fits += laps[i] == log_lap(tail, i);
    fit.misfits += !log_lap_fits(tail, tail - before, i, laps[i]);
  }
  uint64_t best_fits = 0;
  const uint64_t best = log_best_tail(
      ring, [&](uint64_t i) { return laps[i]; }, best_fits);
  if (best_fits > fits + (tail - before) + superblock_.participant_count) fit.best = best;   // another one has to be much better
  return fit;
}

void Region::check_extent(const ShardMap& s, uint32_t e, uint32_t owner, Check& c, const Problem& problem) {
  CpuMemory& m = attached_->mem;
  const Offset at = s.extent_descriptor(e);
  // Made only when it is told: a string may not live across an access that may fail.
  const auto extent = [&] { return numbered("shard", to_int(s.host())) + ", " + numbered("extent", e); };
  if (attached_->avoids(s.host(), e)) {
    problem(extent() + ": its slot headers cannot be read (poisoned memory); nobody uses it, and its blocks are misses");
    return;
  }
  uint64_t slot_bytes = 0;
  const uint32_t n = slots_in_use(*attached_, s, e, &slot_bytes);
  const Cut found = load_cut(*attached_, s, e);
  const SlotWord cut = found.word;
  const uint64_t cut_bytes = found.slot_bytes;
  const auto unchanged = [&] { return m.load_word(at) == cut.raw; };
  if (n == 0) ++c.unassigned;
  if (cut.state() == SlotState::Writing && !writer_alive(owner, cut) && unchanged())
    problem(extent() + ": being cut by a process that is gone; it waits for the reaper");
  if (cut.state() == SlotState::Lent) problem(extent() + ": marked as lent, which no build of this format does");
  const bool serves = cut.state() == SlotState::Stable;
  if ((serves || cut.state() == SlotState::Free) && (!found.right || (serves && !plausible_slot_bytes(cut_bytes))) && unchanged() &&
      !load_cut(*attached_, s, e).right)
    problem(extent() + ": its descriptor is damaged (slots of " + std::to_string(cut_bytes) + " bytes)");
  Directory<CpuMemory> directory(*attached_, s);
  uint64_t blocks = 0, fitting = 0, stray = 0;
  for (uint32_t i = 0; i < superblock_.slots_per_extent; ++i) {
    const SlotId slot = SlotId::make(e, i);
    if (attached_->fresh(s.host())) {
      m.invalidate(s.slot_header(slot), kLineBytes);
      m.full_fence();
    }
    if (i >= n) {   // FREE by promise
      const SlotWord word = attached_->word_of(s, slot);
      if (word.state() != SlotState::Free && !(word.state() == SlotState::Writing && writer_alive(owner, word)) &&
          attached_->word_of(s, slot) == word)
        ++stray;
      continue;
    }
    const Header header = attached_->load_header(s, slot);
    const SlotWord word = header.word();
    const auto name = [&] { return extent() + ", " + numbered("slot", i); };
    ++c.slots;
    switch (word.state()) {
      case SlotState::Free: ++c.free; break;
      case SlotState::Lent:
        ++c.lent;
        problem(name() + ": marked as lent, which no build of this format does");
        break;
      case SlotState::Writing: {
        if (word.retired()) {
          ++c.retired;
          break;
        }
        ++c.writing;
        if (!writer_alive(owner, word) && attached_->word_of(s, slot) == word)
          problem(name() + ": being written by a process that is gone; it waits for the reaper");
        break;
      }
      case SlotState::Stable:
        ++c.stable;
        if (header.right) {
          const uint64_t its_bytes = transfer_->namespaces().slot_bytes(s, header.h.namespace_index);
          ++blocks;
          fitting += its_bytes == 0 || its_bytes == cut_bytes;
        }
        // A header that changed meanwhile is not damaged: look again before saying so.
        if (!header.right && attached_->word_of(s, slot) == word && !attached_->load_header(s, slot).right)
          problem(name() + ": header checksum is wrong; the block is a miss until it is scrubbed");
        else if (header.right && !directory.has_entry(header.key(), slot, word.count()) && !writer_alive(owner, word) &&
                 attached_->word_of(s, slot) == word && !directory.has_entry(header.key(), slot, word.count()))
          // A writer that lives may be between its header and its entry.
          problem(name() + ": stored but in no bucket; nobody can find it");
        break;
    }
  }
  if (stray != 0 && unchanged()) problem(extent() + ": " + std::to_string(stray) + " slots that it does not serve are not free");
  if (serves && blocks != 0 && fitting == 0 && unchanged())
    problem(extent() + ": its descriptor is damaged (it says slots of " + std::to_string(cut_bytes) + " bytes, its blocks need others)");
}

// Beside an adoption the copies differ for a moment, or are loaded while they change: a line that is damaged does not change.
bool Region::claim_stays_damaged(const ShardMap& s, Offset at) {
  constexpr uint32_t kLooks = 8;
  ClaimLine before = load_claim(*attached_, at);
  for (uint32_t i = 0; i < kLooks; ++i) {
    if (!claim_damaged(before, at)) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    if (attached_->fresh(s.host())) {
      attached_->mem.invalidate(at, kLineBytes);
      attached_->mem.full_fence();
    }
    const ClaimLine now = load_claim(*attached_, at);
    if (std::memcmp(&now, &before, sizeof now) == 0 && i + 1 >= kLooks / 2) return true;
    before = now;
  }
  return claim_damaged(before, at);
}

void Region::check_shard(const ShardMap& s, Check& c, const Problem& problem) {
  CpuMemory& m = attached_->mem;
  const uint32_t h = to_int(s.host());
  const std::string shard = numbered("shard", h);
  if (attached_->fresh(s.host())) {
    m.invalidate(s.base(), superblock_.extents_offset);
    m.full_fence();
  }
  for (uint32_t p = 0; p < superblock_.participant_count; ++p) {
    const uint64_t word = m.load_word(s.participant(p));
    const bool me = !read_only_ && s.host() == attached_->self && p == attached_->participant;
    if (static_cast<uint32_t>(word) == static_cast<uint32_t>(ParticipantState::Live) && !me && !participant_alive(h, p))
      problem(shard + ": participant " + std::to_string(p) + " died without being reaped; the daemon or the next attach on that host does it");
  }
  const Ownership o = ownership_of(*attached_, s);
  const uint32_t owner = to_int(o.owner);
  if (!o.settled)
    problem(shard + ": host " + std::to_string(owner) + " claims it with epoch " + std::to_string(o.epoch) +
            " and has not taken it over; nobody may store there. If no adoption is under way, adopt it with a higher epoch ('kvpool adopt')");
  for (uint32_t on = 0; on < attached_->hosts(); ++on)
    if (const Offset at = s.claim(HostIndex{on}); claim_stays_damaged(s, at))
      problem(shard + ": its claim on shard " + std::to_string(on) + " has a wrong copy; the right one counts");
  for (uint32_t i = 0; i < superblock_.namespace_count; ++i) {
    NamespaceRow row;
    const SlotWord word{m.load_word(s.namespace_row(i))};
    if (word.state() == SlotState::Stable && !transfer_->namespaces().read(s, i, row))
      problem(shard + ": namespace " + std::to_string(i) + " is damaged; its blocks are misses");
    else if ((word.state() == SlotState::Lent || (word.state() == SlotState::Writing && !writer_alive(owner, word))) &&
             m.load_word(s.namespace_row(i)) == word.raw)
      problem(shard + ": namespace " + std::to_string(i) + " is being written by a process that is gone; it waits for the reaper");
  }
  for (uint32_t e = 0; e < superblock_.extent_count; ++e) check_extent(s, e, owner, c, problem);
  Directory<CpuMemory> directory(*attached_, s);
  for (uint64_t b = 0; b < superblock_.bucket_count; ++b) {
    const Line line = m.load_line(s.bucket(b));
    for (const uint64_t raw : line.words) {
      const Entry entry{raw};
      if (entry.empty()) continue;
      const char* wrong = wrong_entry(s, b, entry);
      if (wrong != nullptr)
        problem(shard + ", bucket " + std::to_string(b) + ": " + wrong);
      else if (entry.is_ghost())
        ++c.ghosts;
      else if (directory.alive(entry))
        ++c.entries;
      else
        ++c.dead_entries;
    }
  }
  LogFit fit = fit_log(s);
  if (fit.best != fit.tail || fit.misfits != 0) fit = fit_log(s);
  if (fit.best != fit.tail)
    problem(shard + ": change log: its tail is damaged; other hosts rescan more often than needed");
  else if (fit.misfits != 0)
    problem(shard + ": change log: " + std::to_string(fit.misfits) + " damaged records; other hosts rescan more often than needed");
}

Check Region::check() {
  const Use use = ensure_open();
  std::lock_guard<std::mutex> lock(maintenance_);
  Check c;
  const Problem problem = [&](const std::string& text) {
    if (c.problems.size() < kProblemsMax) c.problems.push_back(text);
  };
  log_laps_.resize(superblock_.log_record_count);
  const bool ok = guarded([&] {
    c = {};
    if (copies_right_ < 2) problem("superblock: only one of two copies is right");
    for (uint32_t h = 0; h < attached_->hosts(); ++h) check_shard(attached_->shard(HostIndex{h}), c, problem);
  });
  if (!ok) problem("the medium failed while it was checked (poisoned memory, or the file was truncated)");
  if (c.free + c.stable + c.writing + c.lent + c.retired != c.slots)
    problem("free + stored + being written + lent + retired slots are not all slots");
  return c;
}

}   // namespace kvp
