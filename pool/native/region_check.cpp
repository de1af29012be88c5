// Region: is its structure sound? Reads only, and may run beside living participants: what looks wrong is looked at twice.
#include <string>

#include "error.h"
#include "region.h"

namespace kvp {

Check Region::check() {
  const Use use = ensure_open();
  Check c;
  constexpr size_t kProblemsMax = 100;
  const auto problem = [&](std::string text) {
    if (c.problems.size() < kProblemsMax) c.problems.push_back(std::move(text));
  };
  if (copies_right_ < 2) problem("superblock: only one of two copies is right; 'kvpool format' is not needed, but copy what you need");
  const bool ok = fault_guarded([&] {
    CpuMemory& m = attached_->mem;
    for (uint32_t h = 0; h < attached_->hosts(); ++h) {
      const ShardMap& s = attached_->shard(HostIndex{h});
      const std::string shard = "shard " + std::to_string(h);
      if (attached_->fresh(HostIndex{h})) {
        m.invalidate(s.base(), superblock_.extents_offset);
        m.full_fence();
      }
      for (uint32_t p = 0; p < superblock_.participant_count; ++p) {
        const uint64_t word = m.load_word(s.participant(p));
        const bool me = !read_only_ && HostIndex{h} == attached_->self && p == attached_->participant;
        if (static_cast<uint32_t>(word) == static_cast<uint32_t>(ParticipantState::Live) && !me && !participant_alive(h, p))
          problem(shard + ": participant " + std::to_string(p) + " died without being reaped; the daemon or the next attach on that host does it");
      }
      for (uint32_t i = 0; i < superblock_.namespace_count; ++i) {
        NamespaceRow row;
        if (SlotWord{m.load_word(s.namespace_row(i))}.state() == SlotState::Stable && !transfer_->namespaces().read(s, i, row))
          problem(shard + ": namespace " + std::to_string(i) + " is damaged; its blocks are misses");
      }
      const uint32_t owner = to_int(ownership_of(*attached_, s).owner);
      Directory<CpuMemory> directory(*attached_, s);
      for (uint32_t e = 0; e < superblock_.extent_count; ++e) {
        uint64_t slot_bytes = 0;
        const uint32_t n = slots_in_use(*attached_, s, e, &slot_bytes);
        const SlotWord cut{m.load_word(s.extent_descriptor(e))};
        if (n == 0) ++c.unassigned;
        if (cut.state() == SlotState::Writing && !writer_alive(owner, cut) && SlotWord{m.load_word(s.extent_descriptor(e))} == cut)
          problem(shard + ", extent " + std::to_string(e) + ": being cut by a process that is gone; it waits for the reaper");
        for (uint32_t i = 0; i < n; ++i) {
          const SlotId slot = SlotId::make(e, i);
          if (attached_->fresh(HostIndex{h})) {
            m.invalidate(s.slot_header(slot), kLineBytes);
            m.full_fence();
          }
          const Header header = attached_->load_header(s, slot);
          const SlotWord word = header.word();
          const std::string name = shard + ", extent " + std::to_string(e) + ", slot " + std::to_string(i);
          ++c.slots;
          switch (word.state()) {
            case SlotState::Free: ++c.free; break;
            case SlotState::Lent: ++c.lent; break;
            case SlotState::Writing: {
              ++c.writing;
              if (!writer_alive(owner, word) && attached_->word_of(s, slot) == word)
                problem(name + ": being written by a process that is gone; it waits for the reaper");
              break;
            }
            case SlotState::Stable:
              ++c.stable;
              // A header that changed meanwhile is not damaged: look again before saying so.
              if (!header.right && attached_->word_of(s, slot) == word && !attached_->load_header(s, slot).right)
                problem(name + ": header checksum is wrong; the block is a miss until it is scrubbed");
              else if (header.right && !directory.has_entry(header.key(), slot, word.count()) && !writer_alive(owner, word) &&
                       attached_->word_of(s, slot) == word && !directory.has_entry(header.key(), slot, word.count()))
                // A writer that lives may be between its header and its entry.
                problem(name + ": stored but in no bucket; nobody can find it");
              break;
          }
        }
      }
      for (uint64_t b = 0; b < superblock_.bucket_count; ++b) {
        const Line line = m.load_line(s.bucket(b));
        for (const uint64_t raw : line.words) {
          const Entry entry{raw};
          if (entry.empty()) continue;
          if (entry.is_ghost())
            ++c.ghosts;
          else if (!s.contains(entry.slot()))
            problem(shard + ", bucket " + std::to_string(b) + ": an entry names a slot that does not exist");
          else if (directory.alive(entry))
            ++c.entries;
          else
            ++c.dead_entries;
        }
      }
    }
  });
  if (!ok) problem("the medium failed while it was checked (poisoned memory, or the file was truncated)");
  if (c.free + c.stable + c.writing + c.lent != c.slots) problem("free + stored + being written + lent slots are not all slots");
  return c;
}

}   // namespace kvp
