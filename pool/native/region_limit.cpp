// Region: how much of it a host uses. Its daemon says so in the header of the host's own shard; each process of the host looks there before it stores.
//
// A region is laid out for more than it uses, and the file has holes there. To grow is to fill holes and then to allow more extents; to shrink is to
// allow fewer, to empty the others and to give their memory back. Slot headers stay where they are, with their counts: only payload becomes a hole.
// Every step can be the last one of a process: what it leaves is put right by the reaper, and by the next resize.
#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "error.h"
#include "region.h"
#include "region_file.h"

namespace kvp {
namespace {

uint64_t allowed(CpuMemory& m, const ShardMap& s) {
  const uint64_t limit = m.load_word(s.header() + offsetof(ShardHeader, limit));
  return m.load_word(s.header() + offsetof(ShardHeader, limit_check)) == ~limit ? limit : 0;
}

// In this order a reader in between sees no limit, and goes by the one that it saw last.
void allow(CpuMemory& m, const ShardMap& s, uint64_t bytes) {
  m.store_word(s.header() + offsetof(ShardHeader, limit), bytes);
  m.store_word(s.header() + offsetof(ShardHeader, limit_check), ~bytes);
  m.write_back(s.header(), kLineBytes);
  m.store_fence();
}

bool has_no_holes(int error) { return error == EOPNOTSUPP || error == ENODEV || error == EINVAL || error == ENOSYS || error == ESPIPE; }

}   // namespace

void limit_region(const std::string& path, uint64_t region_bytes) {
  const Superblock sb = inspect_region(path).superblock;
  File file(path, true);
  for (uint32_t h = 0; h < sb.host_count; ++h) {
    const ShardMap s(sb, HostIndex{h});
    Window w(file, s.header(), sizeof(ShardHeader), true);
    const bool ok = w.data != nullptr && fault_guarded([&] {
                      CpuMemory m(w.data - s.header(), false);
                      allow(m, s, region_bytes);
                    });
    if (!ok)
      throw Error(ErrorKind::Medium, "region " + path + ": the header of shard " + std::to_string(h) +
                                         " cannot be written (poisoned memory, or the file was truncated). Replace the medium.");
  }
}

uint64_t Region::limit_of(HostIndex host) {
  CpuMemory& m = attached_->mem;
  const ShardMap& s = attached_->shard(host);
  if (attached_->self != host && !m.coherent()) {
    m.invalidate(s.header(), kLineBytes);
    m.full_fence();
  }
  return allowed(m, s);
}

// What cannot be right (a flipped bit, a change in this moment) changes nothing.
void Region::follow_limit(HostIndex host) {
  const uint64_t limit = limit_of(host);
  const uint32_t extents = limit == 0 ? 0 : extents_within(superblock_, limit);
  if (extents != 0) attached_->set_extents(host, extents);
}

bool Region::closed() { return attached_->mem.load_word(attached_->home().header() + offsetof(ShardHeader, closed)) == kClosed; }

void Region::set_closed(bool closed) {
  const Use use = ensure_writer();
  const Offset header = attached_->home().header();
  const bool ok = fault_guarded([&] {
    CpuMemory& m = attached_->mem;
    m.store_word(header + offsetof(ShardHeader, closed), closed ? kClosed : 0);
    m.write_back(header, kLineBytes);
    m.store_fence();
  });
  if (!ok) medium_failed();
}

uint64_t Region::capacity_bytes() {
  const Use use = ensure_open();
  uint64_t limit = 0;
  if (!fault_guarded([&] { limit = limit_of(attached_->self); })) medium_failed();
  return limit == 0 || limit > superblock_.region_bytes ? superblock_.region_bytes : limit;
}

uint64_t Region::acknowledged_epoch(uint32_t shard) {
  const Use use = ensure_open();
  uint64_t epoch = 0;
  if (shard >= attached_->hosts()) throw Error(ErrorKind::Geometry, "region " + path_ + ": there is no shard " + std::to_string(shard));
  if (!fault_guarded([&] { epoch = attached_->mem.load_word(attached_->home().acknowledgement(HostIndex{shard})); })) medium_failed();
  return epoch;
}

Resized Region::resize(uint64_t region_bytes, uint64_t budget_ns) {
  const Use use = ensure_writer();
  std::scoped_lock lock(maintenance_, allocator_);
  const uint32_t wanted = extents_within(superblock_, region_bytes);
  if (wanted == 0 || region_bytes > superblock_.region_bytes)
    throw Error(ErrorKind::Geometry,
                "region " + path_ + ": it cannot have " + std::to_string(region_bytes) + " bytes; it was made for " +
                    std::to_string(superblock_.shard_offset + superblock_.host_count * (superblock_.extents_offset + superblock_.extent_bytes)) +
                    " to " + std::to_string(superblock_.region_bytes) + ". Write a capacity between the two.");
  given_back_.resize(superblock_.extent_count);   // once
  const ShardMap& s = attached_->home();
  const uint64_t until = CpuClock::now() + budget_ns;
  Resized r;
  int error = 0;
  const bool ok = guarded([&] {
    if (fenced(*attached_, s)) return;   // what is its owner's is not ours to give back
    CpuMemory& m = attached_->mem;
    follow_limit(s.host());
    uint32_t now = attached_->extents(s.host());
    if (allowed(m, s) == 0) {   // never said, or damaged: all of it was in use
      now = superblock_.extent_count;
      attached_->set_extents(s.host(), now);
    }
    const auto payload = [&](uint32_t e) { return static_cast<off_t>(s.extent(e) + superblock_.extent_payload_offset); };
    const auto length = static_cast<off_t>(superblock_.extent_payload_bytes);
    // Holes are filled before anybody may store there: memory that cannot be had is an error here, and none of an engine.
    for (; now < wanted && error == 0 && CpuClock::now() < until; ++now) {
      const auto from = static_cast<off_t>(s.extent(now));
      const auto bytes = static_cast<off_t>(superblock_.extent_bytes);
      error = ::fallocate(fd_, 0, from, bytes) == 0 || has_no_holes(errno) ? 0 : errno;
      if (error != 0) break;   // also EINTR: the next call goes on
      given_back_[now] = false;
      KVP_STEP("resize.filled");
    }
    // The share of `now` extents, as extents_within counts.
    const uint64_t reached = now >= wanted
                                 ? region_bytes
                                 : superblock_.shard_offset + superblock_.host_count * (superblock_.extents_offset + now * superblock_.extent_bytes);
    if (allowed(m, s) != reached && extents_within(superblock_, reached) != 0) allow(m, s, reached);
    KVP_STEP("resize.allowed");
    follow_limit(s.host());
    r.capacity_bytes = reached;
    r.extents = attached_->extents(s.host());
    bool left = now < wanted;
    for (uint32_t e = wanted; !left && e < superblock_.extent_count; ++e) {
      if (attached_->avoids(s.host(), e)) continue;   // nobody can say what is in it
      const bool unassigned = load_cut(*attached_, s, e).unassigned();
      // Memory that was never written to is no data; a reader who looked into a hole has made some.
      const off_t data = punches_ ? ::lseek(fd_, payload(e), SEEK_DATA) : -1;
      const bool filled = (punches_ && !given_back_[e]) || (data >= 0 && data < payload(e) + length);
      if (unassigned && !filled) continue;
      left = CpuClock::now() >= until;
      if (left) break;
      const bool retired = transfer_->slots().retire(e, [&] {
        KVP_STEP("resize.before_punch");
        // A medium without holes keeps its memory; its blocks are gone all the same.
        if (punches_ && ::fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, payload(e), length) != 0) punches_ = !has_no_holes(errno);
      });
      given_back_[e] = retired;
      if (retired) ++r.retired;
      left = !retired;
    }
    if (error == EINTR) error = 0;
    r.done = !left && now >= wanted && error == 0;
  });
  if (!ok) medium_failed();
  if (error != 0)
    throw Error(ErrorKind::Medium, "region " + path_ + ": no memory to grow to " + std::to_string(region_bytes) + " bytes: " + std::strerror(error) +
                                       ". It keeps " + std::to_string(r.capacity_bytes) + " bytes. Free some space, or lower the capacity.");
  return r;
}

}   // namespace kvp
