// Region: memory that turns bad under it. Where that was, what is given up for it, and what goes on without it.
//
// A fault of one access costs no more than what lies in that page. A payload: its block, and the slot is retired (SlotWord::retired), so that the next
// store goes elsewhere. Slot headers: this process walks past their extent. What the whole shard needs (buckets, log, rows) cannot be done without;
// loads and stores that need that page miss, and upkeep of the shard says where it failed.
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>

#include "error.h"
#include "region.h"

namespace kvp {
namespace {

constexpr uint64_t kPage = 4096;   // what the kernel takes away is whole pages, and it says no more than which

uint64_t page_of(Offset at) { return at / kPage; }

}   // namespace

Offset Region::last_fault_at() const { return static_cast<Offset>(static_cast<const uint8_t*>(t_last_fault.address) - base_); }

// Does it stay so? A file that was cut off, or a hole that a full file system could not fill, may come right again. A page that is there and cannot be
// read does not, whatever code the kernel gives for it.
bool Region::fault_stays() {
  if (t_last_fault.poison || medium_.kind != MediumKind::File) return true;
  const Fault fault = t_last_fault;
  const auto page = static_cast<off_t>(page_of(last_fault_at()) * kPage);
  const auto is_there = [&] {
    struct stat st;
    return ::fstat(fd_, &st) == 0 && page + static_cast<off_t>(kPage) <= st.st_size && ::lseek(fd_, page, SEEK_DATA) == page;
  };
  // It may have come back since: looked at once more, between two looks at the file.
  const bool stays = is_there() && !fault_guarded([&] { attached_->mem.load_word(static_cast<Offset>(page)); }) && is_there();
  t_last_fault = fault;
  return stays;
}

bool Region::place_of(Offset at, Place& place) const {
  if (at < superblock_.shard_offset || at >= superblock_.shard_offset + superblock_.host_count * superblock_.shard_bytes) return false;
  const uint64_t in_shards = at - superblock_.shard_offset;
  place = {};
  place.host = static_cast<uint32_t>(in_shards / superblock_.shard_bytes);
  const uint64_t in_shard = in_shards % superblock_.shard_bytes;
  if (in_shard < superblock_.extents_offset) return true;
  const uint64_t extent = (in_shard - superblock_.extents_offset) / superblock_.extent_bytes;
  if (extent >= superblock_.extent_count) return true;   // behind the last one there is nothing
  place.extent = static_cast<uint32_t>(extent);
  const uint64_t in_extent = (in_shard - superblock_.extents_offset) % superblock_.extent_bytes;
  place.part = in_extent < superblock_.extent_payload_offset ? Place::Headers : Place::Payload;
  return true;
}

bool Region::avoid_unreadable() {
  Place place;
  if (!fault_stays() || !place_of(last_fault_at(), place) || place.part != Place::Headers) return false;
  return attached_->avoid(HostIndex{place.host}, place.extent);
}

void Region::medium_failed() const {
  const Offset at = last_fault_at();
  Place place;
  std::string where = "at byte " + std::to_string(at);
  if (place_of(at, place)) {
    where += ", in ";
    where += place.part == Place::Headers   ? "slot headers of extent " + std::to_string(place.extent) + " of"
             : place.part == Place::Payload ? "payload in extent " + std::to_string(place.extent) + " of"
                                            : "the directory of";
    where += " shard " + std::to_string(place.host);
  }
  throw Error(ErrorKind::Medium, "region " + path_ + ": the medium failed " + where +
                                     " (poisoned memory, or the file was truncated). Restore or replace it, then run 'kvpool fsck'.");
}

// Did the last fault happen in this payload, and does it stay?
bool Region::payload_is_bad(const ShardMap& s, SlotId slot, uint64_t slot_bytes) const {
  const Offset from = s.payload(slot, slot_bytes), at = last_fault_at();
  return page_of(at) >= page_of(from) && page_of(at) <= page_of(from + slot_bytes - 1);
}

// The medium failed while this process filled a slot. True: below the payload, so that another slot may do. What cannot be kept is given back or retired.
bool Region::leave_slot(const Claim& claim, uint64_t slot_bytes) {
  const ShardMap& s = attached_->home();
  const bool bad = payload_is_bad(s, claim.slot, slot_bytes), stays = fault_stays();
  const auto ours = [&](SlotWord word) { return word.participant() == attached_->participant && word.generation() == attached_->generation; };
  const auto give_back = [&](SlotWord word) {
    if (bad && stays)
      retire_slot(*attached_, s, {claim.slot, word});
    else
      release(*attached_, s, {claim.slot, word});
    attached_->mem.store_fence();
  };
  const auto leave = [&] {
    const SlotWord word = attached_->word_of(s, claim.slot);
    if (!ours(word) || word.count() - claim.word.count() > 2) return;
    if (word.state() == SlotState::Writing)
      give_back(word);
    else if (word.state() == SlotState::Stable)   // its entry or its record could not be written
      evict_to_free(*attached_, s, claim.slot, word);
  };
  // Twice: the entry of what is evicted may be what cannot be read. Its mark is in the cache then and may not be in the medium, as a reaper's.
  if (!fault_guarded(leave))
    fault_guarded([&] {
      attached_->mem.write_back(s.slot_header(claim.slot), kLineBytes);
      attached_->mem.store_fence();
      leave();
    });
  return bad;
}

// A block of this process's host cannot be read. Where that stays so its slot is retired, else it is left to whoever can read it.
bool Region::retire_block(const ShardMap& s, SlotId slot, uint16_t namespace_index) {
  const bool stays = fault_stays();
  bool retired = false;
  fault_guarded([&] {
    const uint64_t slot_bytes = transfer_->namespaces().slot_bytes(s, namespace_index);
    if (!stays || slot_bytes == 0 || !payload_is_bad(s, slot, slot_bytes)) return;
    const Retired done = give_up_slot(*attached_, s, slot, load_cut(*attached_, s, slot.extent()).word);
    attached_->mem.store_fence();
    retired = done == Retired::Now || done == Retired::WithItsBlock;
    if (retired) attached_->count(kScrubBad, done == Retired::WithItsBlock ? 1 : 0);
  });
  return retired;
}

// Payload slots of an extent that lie in these bytes of it.
void Region::give_up_payload(const ShardMap& s, uint32_t extent, uint64_t from, uint64_t to, GivenUp& g) {
  const Cut cut = load_cut(*attached_, s, extent);
  const uint64_t slot_bytes = cut.serves();
  if (slot_bytes == 0) {   // nobody's yet, or being cut: seen to when it is somebody's
    ++g.left;
    return;
  }
  const uint64_t last = std::min<uint64_t>((to - 1) / slot_bytes + 1, s.slot_count(slot_bytes));
  for (uint64_t i = from / slot_bytes; i < last; ++i) switch (give_up_slot(*attached_, s, SlotId::make(extent, static_cast<uint32_t>(i)), cut.word)) {
      case Retired::Now: ++g.slots; break;
      case Retired::WithItsBlock: ++g.slots, ++g.blocks; break;
      case Retired::Before: ++g.before; break;
      case Retired::Taken: ++g.left; break;
    }
}

// A notice may be about a huge page of which one line is bad: each page of it is read, from the medium and not from a cache.
std::vector<ByteRange> Region::told_bad() {
  const Use use = ensure_open();
  const FaultHandlerChecked handler;
  std::vector<ByteRange> bad;
  for (Notice notice; take_notice(base_, mapped_bytes_, notice);)
    for (const uint8_t* page = std::max<const uint8_t*>(notice.from, base_); page < notice.from + notice.bytes && page < base_ + mapped_bytes_;
         page += kPage) {
      const bool readable = fault_guarded([&] {
        cache_ops().invalidate(page, kPage);
        attached_->mem.full_fence();
        attached_->mem.checksum(static_cast<Offset>(page - base_), kPage);
      });
      if (!readable) bad.push_back({static_cast<Offset>(page - base_), kPage});
    }
  return bad;
}

GivenUp Region::give_up(const std::vector<ByteRange>& ranges) {
  const Use use = ensure_writer();
  std::lock_guard<std::mutex> lock(maintenance_);
  GivenUp g;
  if (!guarded([&] {
        g = {};
        follow_owners();
        for (const ByteRange& range : ranges) {
          const Offset end = range.bytes > superblock_.region_bytes - std::min(range.from, superblock_.region_bytes) ? superblock_.region_bytes
                                                                                                                     : range.from + range.bytes;
          Place place;
          for (Offset at = range.from; at < end;) {
            if (!place_of(at, place)) {   // the superblocks have each other
              at = at < superblock_.shard_offset ? superblock_.shard_offset : end;
              continue;
            }
            const ShardMap& s = attached_->shard(HostIndex{place.host});
            Offset next = s.end();
            if (place.part == Place::Directory) {
              next = std::min(end, at < s.extent(0) ? s.extent(0) : s.end());
              if (at < s.extent(0) && attached_->owns(s.host())) g.directory_bytes += next - at;
              at = next;
              continue;
            }
            const Offset payload = s.extent(place.extent) + superblock_.extent_payload_offset;
            next = std::min(end, place.part == Place::Headers ? payload : s.extent(place.extent) + superblock_.extent_bytes);
            if (place.part == Place::Headers) {   // of any shard: nobody may look there
              attached_->avoid(s.host(), place.extent);
              if (attached_->owns(s.host())) ++g.extents;
            } else if (attached_->owns(s.host()) && !fenced(*attached_, s) && !attached_->avoids(s.host(), place.extent)) {
              give_up_payload(s, place.extent, at - payload, next - payload, g);
            }
            at = next;
          }
        }
        attached_->mem.store_fence();
      }))
    medium_failed();
  return g;
}

}   // namespace kvp
