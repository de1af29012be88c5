#include "region.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>

#include "error.h"
#include "region_file.h"

namespace kvp {

void check_failed(const char* condition, const char* file, int line) {
  std::fprintf(stderr, "kvpool: internal check failed: %s (%s:%d)\n", condition, file, line);
  std::abort();
}

namespace {

uint64_t now_ns() {
  return static_cast<uint64_t>(
      std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count());
}

uint32_t latency_bucket(uint64_t ns, uint32_t buckets) {
  const uint32_t log2 = ns == 0 ? 0 : 63 - static_cast<uint32_t>(__builtin_clzll(ns));
  const uint32_t i = log2 < kLatencyFirstLog2 ? 0 : log2 - kLatencyFirstLog2;
  return i < buckets ? i : buckets - 1;
}

std::string hex(const uint8_t* bytes, uint32_t n) {
  static const char digits[] = "0123456789abcdef";
  std::string out;
  for (uint32_t i = 0; i < n; ++i) out += digits[bytes[i] >> 4], out += digits[bytes[i] & 15];
  return out;
}

[[noreturn]] void medium_failed(const std::string& path) {
  throw Error(ErrorKind::Medium, "region " + path + ": the medium failed (poisoned memory, or the file was truncated). Restore or replace it, then run "
                                 "'kvpool fsck'.");
}

}  // namespace

Region::Region(const std::string& path, uint32_t host, Role role, bool read_only, bool take_over, const std::string& lock_path,
               const std::string& node_name, const std::string& boot_id)
    : path_(path), read_only_(read_only), pid_(::getpid()) {
  const Inspection found = inspect_region(path);
  superblock_ = found.superblock;
  copies_right_ = found.copies_right;
  if (host >= superblock_.host_count)
    throw Error(ErrorKind::Geometry, "region " + path + ": host " + std::to_string(host) + " does not exist; it was formatted for " +
                                         std::to_string(superblock_.host_count) + " host(s), 0 to " + std::to_string(superblock_.host_count - 1) +
                                         ". Give one of these.");
  try {
    File file(path, !read_only);
    File lock_file(lock_path, !read_only);
    std::swap(fd_, file.fd);
    std::swap(lock_fd_, lock_file.fd);
    map_shards();
    attached_ = std::make_unique<Attached<CpuMemory>>(CpuMemory(base_, superblock_.coherence == static_cast<uint32_t>(Coherence::Hardware)), superblock_,
                                                      HostIndex{host});
    transfer_ = std::make_unique<Transfer<CpuMemory>>(*attached_);
    if (read_only) {
      attached_->set_owned(HostIndex{host}, false);
    } else {
      protect(HostIndex{host}, true);
      bool ok = false;
      ok = fault_guarded([&] { attach(role, take_over, node_name, boot_id); });
      if (!ok) medium_failed(path_);
    }
  } catch (...) {
    close();
    throw;
  }
}

Region::~Region() { close(); }

void Region::close() {
  std::unique_lock<std::shared_mutex> lock(lifetime_);
  if (attached_ != nullptr && !read_only_ && pid_ == ::getpid() && attached_->generation != 0) {
    const Offset word = attached_->home().participant(attached_->participant);
    const uint64_t gone = uint64_t{attached_->generation} << 32 | static_cast<uint32_t>(ParticipantState::Free);
    fault_guarded([&] { attached_->mem.store_word(word, gone); });
    unlock_participant(to_int(attached_->self), attached_->participant);
  }
  transfer_.reset();
  attached_.reset();
  if (reserved_ != nullptr) ::munmap(reserved_, reserved_bytes_);
  reserved_ = base_ = nullptr;
  if (fd_ >= 0) ::close(fd_);
  if (lock_fd_ >= 0) ::close(lock_fd_);
  fd_ = lock_fd_ = -1;
}

void Region::map_shards() {
  const uint64_t align = superblock_.align_bytes;
  const uint64_t used = superblock_.shard_offset + superblock_.host_count * superblock_.shard_bytes;
  reserved_bytes_ = used + align;
  void* p = ::mmap(nullptr, reserved_bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) throw Error(ErrorKind::Medium, "region " + path_ + ": no address space for " + std::to_string(used) + " bytes: " + std::strerror(errno));
  reserved_ = static_cast<uint8_t*>(p);
  base_ = reserved_ + (align - reinterpret_cast<uintptr_t>(reserved_) % align) % align;
  if (::mmap(base_, used, PROT_READ, MAP_SHARED | MAP_FIXED, fd_, 0) == MAP_FAILED) {
    const int error = errno;
    throw Error(ErrorKind::Medium, "region " + path_ + ": cannot be mapped: " + std::strerror(error) + ". A DAX device needs the region's alignment (" +
                                       std::to_string(align) + " bytes) to be a multiple of its own.");
  }
}

void Region::protect(HostIndex shard, bool writable) {
  const ShardMap s(superblock_, shard);
  if (::mprotect(base_ + s.base(), s.end() - s.base(), PROT_READ | (writable ? PROT_WRITE : 0)) != 0)
    throw Error(ErrorKind::Medium, "region " + path_ + ": the shard of host " + std::to_string(to_int(shard)) + " cannot be made writable: " +
                                       std::strerror(errno) + ". Is the medium read-only?");
}

bool Region::lock_participant(uint32_t host, uint32_t index) {
  struct flock lock = participant_lock(F_WRLCK, host, index);
  return ::fcntl(lock_fd_, F_OFD_SETLK, &lock) == 0;
}

void Region::unlock_participant(uint32_t host, uint32_t index) {
  struct flock lock = participant_lock(F_UNLCK, host, index);
  ::fcntl(lock_fd_, F_OFD_SETLK, &lock);
}

bool Region::participant_alive(uint32_t host, uint32_t index) {
  struct flock lock = participant_lock(read_only_ ? F_RDLCK : F_WRLCK, host, index);
  return ::fcntl(lock_fd_, F_OFD_GETLK, &lock) == 0 && lock.l_type != F_UNLCK;
}

// PROTOCOL 4: take an entry by raising its generation. The lock comes first, so that an entry that says Live without being locked is a dead process.
void Region::attach(Role role, bool take_over, const std::string& node_name, const std::string& boot_id) {
  CpuMemory& m = attached_->mem;
  const ShardMap& s = attached_->home();
  const uint32_t host = to_int(attached_->self);
  const HostView last = view_host(host);
  const bool other_boot = last.state != 0 && last.boot_id != boot_id && last.boot_id != std::string(16, '\0');
  if (other_boot && !take_over)
    throw Error(ErrorKind::Fenced, "region " + path_ + ": host " + std::to_string(host) + " was last used by node " + last.node_name +
                                       " in another boot. Nothing was changed. Start the pool's daemon here ('kvpool up'), which takes the shard "
                                       "over, or give this machine its own host number (KVPOOL_HOST).");
  uint32_t mine = superblock_.participant_count;
  bool alone = true;
  for (uint32_t pass = 0; pass < 2 && mine == superblock_.participant_count; ++pass)   // clean entries first, then those of the dead
    for (uint32_t i = 0; i < superblock_.participant_count && mine == superblock_.participant_count; ++i) {
      const bool clean = static_cast<uint32_t>(m.load_word(s.participant(i))) == static_cast<uint32_t>(ParticipantState::Free);
      if (participant_alive(host, i)) alone = false;
      if (clean == (pass == 0) && lock_participant(host, i)) mine = i;
    }
  for (uint32_t i = 0; alone && i < superblock_.participant_count; ++i)
    if (i != mine && participant_alive(host, i)) alone = false;
  if (mine == superblock_.participant_count)
    throw Error(ErrorKind::Busy, "region " + path_ + ": all " + std::to_string(mine) + " participant entries of host " + std::to_string(host) +
                                     " are in use. Close some engines, or format with more participants.");
  const Offset at = s.participant(mine);
  uint32_t generation = static_cast<uint32_t>(m.load_word(at) >> 32) + 1 & 0x3fff;
  if (generation == 0) generation = 1;
  attached_->participant = mine;
  attached_->generation = generation;
  m.store_word(at + 8, uint64_t{static_cast<uint32_t>(role)} << 32 | static_cast<uint32_t>(pid_));
  m.store_word(at, uint64_t{generation} << 32 | static_cast<uint32_t>(ParticipantState::Live));
  KVP_STEP("attach.live");
  transfer_ = std::make_unique<Transfer<CpuMemory>>(*attached_);   // its random walk starts from the participant's number

  // After another boot the caches that held the shard's last lines are gone: it is adopted like any shard whose owner died (PROTOCOL 5).
  if (other_boot) adopt(*attached_, s, ownership_of(*attached_, s).epoch + 1);
  if (alone || other_boot) {
    ShardHeader h;
    std::memset(&h, 0, sizeof h);
    std::memcpy(h.node_name, node_name.data(), std::min(node_name.size(), sizeof h.node_name - 1));
    std::memcpy(h.boot_id, boot_id.data(), std::min(boot_id.size(), sizeof h.boot_id));
    h.incarnation = m.load_word(s.header() + 8) + 1;
    h.heartbeat = m.load_word(s.header() + 16);
    h.state = 1;
    const auto* words = reinterpret_cast<const uint64_t*>(&h);
    for (uint32_t i = sizeof h / 8; i-- > 0;) m.store_word(s.header() + i * 8, words[i]);
    m.write_back(s.header(), sizeof h);
    m.store_fence();
  }
  if (fenced(*attached_, s)) attached_->set_owned(attached_->self, false);
  Recovered total;
  reap_dead(total);
}

HostView Region::view_host(uint32_t host) {
  CpuMemory& m = attached_->mem;
  const ShardMap& s = attached_->shard(HostIndex{host});
  if (!m.coherent()) {
    m.invalidate(s.header(), sizeof(ShardHeader));
    m.full_fence();
  }
  ShardHeader h;
  for (uint32_t i = 0; i < sizeof h / 8; ++i) {
    const uint64_t word = m.load_word(s.header() + i * 8);
    std::memcpy(reinterpret_cast<uint8_t*>(&h) + i * 8, &word, 8);
  }
  HostView v;
  v.state = h.state, v.incarnation = h.incarnation, v.heartbeat = h.heartbeat;
  v.boot_id.assign(reinterpret_cast<const char*>(h.boot_id), sizeof h.boot_id);
  v.node_name.assign(h.node_name, strnlen(h.node_name, sizeof h.node_name));
  return v;
}

HostView Region::host_view(uint32_t host) {
  const Use use = ensure_open();
  HostView v;
  if (host >= attached_->hosts()) throw Error(ErrorKind::Geometry, "region " + path_ + ": there is no host " + std::to_string(host));
  if (!fault_guarded([&] { v = view_host(host); })) medium_failed(path_);
  return v;
}

uint32_t Region::reap_dead(Recovered& total) {
  const Use use = ensure_writer();
  std::lock_guard<std::mutex> lock(maintenance_);
  const uint32_t host = to_int(attached_->self);
  uint32_t dead = 0;
  const bool ok = fault_guarded([&] {
    for (uint32_t i = 0; i < superblock_.participant_count; ++i) {
      const Offset at = attached_->home().participant(i);
      const uint64_t word = attached_->mem.load_word(at);
      const bool me = i == attached_->participant;
      // Our own entry: only right after attaching, what its earlier generations left behind.
      if (me ? (attached_->reaped_own || word >> 32 == 1) : static_cast<uint32_t>(word) != static_cast<uint32_t>(ParticipantState::Live)) continue;
      if (!me && !lock_participant(host, i)) continue;
      if (!me && attached_->mem.load_word(at) != word) {   // it left, or was reaped, while we looked
        unlock_participant(host, i);
        continue;
      }
      for (uint32_t h = 0; h < attached_->hosts(); ++h)
        if (attached_->owns(HostIndex{h})) {
          const Recovered r = reap(*attached_, attached_->shard(HostIndex{h}), i, me ? attached_->generation : kNobody);
          total.freed += r.freed, total.republished += r.republished;
        }
      if (me) {
        attached_->reaped_own = true;
        continue;
      }
      KVP_STEP("reap.before_clean");
      attached_->mem.store_word(at, word >> 32 << 32);
      unlock_participant(host, i);
      ++dead;
    }
  });
  if (!ok) medium_failed(path_);
  return dead;
}

Region::Use Region::ensure_open() {
  Use use(lifetime_);   // close() waits for running calls
  if (attached_ == nullptr) throw Error(ErrorKind::Region, "region " + path_ + ": it was closed. Attach again.");
  if (pid_ != ::getpid())
    throw Error(ErrorKind::Region, "region " + path_ + ": it was attached before a fork. A child process must attach for itself.");
  return use;
}

Region::Use Region::ensure_writer() {
  Use use = ensure_open();
  if (read_only_) throw Error(ErrorKind::Region, "region " + path_ + ": opened read-only. Attach as a participant to do this.");
  return use;
}

void Region::refresh() {
  std::lock_guard<std::mutex> lock(lookup_);
  fault_guarded([&] { transfer_->refresh(); });   // a medium that fails now fails in the probe too, and there it is a reason
}

void Region::lookup_group(const Key* keys, uint32_t n, Outcome* outcomes, Found* found) {
  std::lock_guard<std::mutex> lock(lookup_);
  if (!fault_guarded([&] { transfer_->lookup_group(keys, n, outcomes, found); })) std::fill_n(outcomes, n, Outcome::TierError);
}

void Region::lookup(const Key* keys, uint64_t n, uint8_t* codes) {
  const Use use = ensure_open();
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

uint64_t Region::load(const Key* keys, uint64_t n, const Buffers& to, uint64_t block_bytes, uint8_t* codes) {
  const Use use = ensure_writer();
  const uint64_t start = now_ns();
  uint64_t bytes = 0;
  std::vector<Piece> pieces(to.pieces);
  std::vector<Found> found(kGroup);
  refresh();
  for (uint64_t i = 0; i < n; i += kGroup) {
    const auto group = static_cast<uint32_t>(std::min<uint64_t>(kGroup, n - i));
    Outcome outcomes[kGroup];
    lookup_group(keys + i, group, outcomes, found.data());
    for (uint32_t k = 0; k < group; ++k) {
      if (outcomes[k] == Outcome::Ok) {
        to.block(i + k, pieces.data());
        Outcome one = Outcome::TierError;
        fault_guarded([&] {
          one = transfer_->load_block(found[k], pieces.data(), to.pieces, block_bytes, transfer_->tick_of(found[k].shard));
        });
        outcomes[k] = one;
        if (one == Outcome::Ok) bytes += block_bytes;
      }
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

void Region::store(const Key* keys, uint64_t n, const Buffers& from, uint64_t block_bytes, uint16_t namespace_index, uint8_t* codes) {
  const Use use = ensure_writer();
  const uint64_t start = now_ns();
  const uint64_t slot_bytes = Namespaces<CpuMemory>::slot_bytes_for(attached_->home(), block_bytes);
  std::vector<Piece> pieces(from.pieces);
  std::vector<Found> found(kGroup);
  refresh();
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
      } else if (outcomes[k] != Outcome::TierError) {
        from.block(i + k, pieces.data());
        Claim claim{};
        {
          std::lock_guard<std::mutex> lock(allocator_);
          fault_guarded([&] {   // the same key twice in one batch, or stored by somebody since the look at the group
            one = transfer_->present_at_home(keys[i + k]) ? Outcome::Present : transfer_->slots().claim(slot_bytes, claim);
          });
        }
        if (one == Outcome::Ok) {
          one = Outcome::TierError;
          fault_guarded([&] {
            const SlotWord stable =
                transfer_->fill(claim, keys[i + k], pieces.data(), from.pieces, block_bytes, namespace_index, slot_bytes);
            one = transfer_->publish(claim, stable, keys[i + k]) ? Outcome::Ok : Outcome::NoSpace;
          });
        }
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
  Outcome outcome = Outcome::TierError;
  std::lock_guard<std::mutex> lock(allocator_);
  fault_guarded([&] {
    outcome = fenced(*attached_, attached_->home())
                  ? Outcome::Fenced
                  : transfer_->namespaces().find_or_add(digest, block_bytes, description.data(), static_cast<uint32_t>(description.size()), index);
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

std::vector<uint64_t> Region::counters() {
  const Use use = ensure_open();
  std::vector<uint64_t> sums(kCounters);
  const bool ok = fault_guarded([&] {
    CpuMemory& m = attached_->mem;
    for (uint32_t h = 0; h < attached_->hosts(); ++h) {
      const ShardMap& s = attached_->shard(HostIndex{h});
      const bool fresh = attached_->fresh(HostIndex{h});
      for (uint32_t p = 0; p < superblock_.participant_count; ++p) {
        if (fresh) {
          m.invalidate(s.participant(p), sizeof(Participant));
          m.full_fence();
        }
        if (m.load_word(s.participant(p)) == 0) continue;   // never used
        for (uint32_t c = 0; c < kCounters; ++c) sums[c] += m.load_word(s.counter(p, c));
      }
    }
  });
  if (!ok) medium_failed(path_);
  return sums;
}

std::vector<ParticipantView> Region::participants() {
  const Use use = ensure_open();
  std::vector<ParticipantView> all;
  const bool ok = fault_guarded([&] {
    for (uint32_t h = 0; h < attached_->hosts(); ++h) {
      const ShardMap& s = attached_->shard(HostIndex{h});
      for (uint32_t p = 0; p < superblock_.participant_count; ++p) {
        if (attached_->fresh(HostIndex{h})) {
          attached_->mem.invalidate(s.participant(p), kLineBytes);
          attached_->mem.full_fence();
        }
        const uint64_t word = attached_->mem.load_word(s.participant(p));
        if (static_cast<uint32_t>(word) != static_cast<uint32_t>(ParticipantState::Live)) continue;
        const uint64_t who = attached_->mem.load_word(s.participant(p) + 8);
        const bool me = !read_only_ && HostIndex{h} == attached_->self && p == attached_->participant;
        all.push_back({h, p, static_cast<uint32_t>(who), static_cast<uint32_t>(who >> 32), static_cast<uint32_t>(word >> 32), me || participant_alive(h, p)});
      }
    }
  });
  if (!ok) medium_failed(path_);
  return all;
}

std::vector<ShardUsage> Region::usage(std::vector<NamespaceUsage>& namespaces, bool count_slots) {
  const Use use = ensure_open();
  std::vector<ShardUsage> shards;
  std::map<std::string, NamespaceUsage> by_digest;
  const bool ok = fault_guarded([&] {
    CpuMemory& m = attached_->mem;
    for (uint32_t h = 0; h < attached_->hosts(); ++h) {
      const ShardMap& s = attached_->shard(HostIndex{h});
      const HostView v = view_host(h);
      ShardUsage u;
      u.host = h;
      u.state = v.state, u.incarnation = v.incarnation, u.heartbeat = v.heartbeat, u.node_name = v.node_name;
      const Ownership o = ownership_of(*attached_, s);
      u.owner = to_int(o.owner), u.epoch = o.epoch;
      u.extents = superblock_.extent_count;
      u.capacity_bytes = u.extents * superblock_.extent_payload_bytes;
      std::vector<uint64_t> blocks_of(superblock_.namespace_count);
      for (uint32_t e = 0; count_slots && e < superblock_.extent_count; ++e) {
        uint64_t slot_bytes = 0;
        const uint32_t n = slots_in_use(*attached_, s, e, &slot_bytes);
        if (n == 0) {
          ++u.extents_free;
          continue;
        }
        if (slot_bytes == 0) slot_bytes = superblock_.slot_bytes_min;   // being cut: nothing but claims in it
        for (uint32_t i = 0; i < n; ++i) {
          const Offset at = s.slot_header(SlotId::make(e, i));
          if (attached_->fresh(HostIndex{h})) m.invalidate(at, kLineBytes);
          const SlotWord word{m.load_word(at)};
          ++u.slots;
          if (word.state() == SlotState::Free) {
            ++u.slots_free;
            continue;
          }
          u.used_bytes += slot_bytes;
          if (word.state() != SlotState::Stable) {
            ++u.slots_writing;
            continue;
          }
          ++u.blocks;
          const auto index = static_cast<uint16_t>(m.load_word(at + 40) >> 32);
          if (index < blocks_of.size()) ++blocks_of[index];
        }
      }
      for (uint32_t i = 0; i < superblock_.namespace_count; ++i) {
        NamespaceRow row;
        if (SlotWord{m.load_word(s.namespace_row(i))}.state() != SlotState::Stable || !transfer_->namespaces().read(s, i, row)) continue;
        NamespaceUsage& u_ns = by_digest[hex(row.digest, kKeyBytes)];
        u_ns.digest = hex(row.digest, kKeyBytes);
        u_ns.description.assign(row.description, std::min<size_t>(row.description_bytes, sizeof row.description));
        u_ns.block_bytes = row.block_bytes;
        u_ns.blocks += blocks_of[i];
        u_ns.bytes += blocks_of[i] * row.block_bytes;
      }
      shards.push_back(u);
    }
  });
  if (!ok) medium_failed(path_);
  for (auto& [digest, u] : by_digest) namespaces.push_back(u);
  return shards;
}

std::vector<SlotView> Region::slots(uint32_t host, uint64_t from, uint64_t limit, uint64_t& next) {
  const Use use = ensure_open();
  std::vector<SlotView> out;
  if (host >= attached_->hosts()) return out;
  const ShardMap& s = attached_->shard(HostIndex{host});
  uint64_t dense = from;
  const bool ok = fault_guarded([&] {
    const uint16_t now = shard_tick(*attached_, s);
    for (; dense < s.slots() && out.size() < limit; ++dense) {
      const SlotId slot = s.slot_at(dense);
      const uint32_t in_use = slots_in_use(*attached_, s, slot.extent());
      if (slot.slot() >= in_use) {   // skip the rest of the extent
        dense = uint64_t{slot.extent() + 1} * superblock_.slots_per_extent - 1;
        continue;
      }
      if (attached_->fresh(HostIndex{host})) {
        attached_->mem.invalidate(s.slot_header(slot), kLineBytes);
        attached_->mem.full_fence();
      }
      const Header header = attached_->load_header(s, slot);
      const SlotWord word = header.word();
      if (word.state() == SlotState::Free) continue;
      out.push_back({host, slot.extent(), slot.slot(), static_cast<uint32_t>(word.state()), word.participant(), word.generation(), header.h.length_bytes,
                     header.h.namespace_index, header.h.flags, slot_age(*attached_, s, slot, now), word.count(), header.right, hex(header.h.key, 6)});
    }
  });
  if (!ok) medium_failed(path_);
  next = dense >= s.slots() ? 0 : dense;
  return out;
}

uint64_t Region::evict(double used_fraction, uint64_t blocks_max) {
  const Use use = ensure_writer();
  std::lock_guard<std::mutex> lock(maintenance_);
  uint64_t evicted = 0;
  std::vector<uint64_t> bytes_by_age(1u << 12);   // ages in steps of 16 ticks
  const bool ok = fault_guarded([&] {
    const ShardMap& s = attached_->home();
    if (fenced(*attached_, s)) return;
    const uint16_t now = shard_tick(*attached_, s);
    uint64_t used = 0;
    const auto each_stable = [&](auto f) {
      for (uint32_t e = 0; e < superblock_.extent_count; ++e) {
        uint64_t slot_bytes = 0;
        const uint32_t n = slots_in_use(*attached_, s, e, &slot_bytes);
        if (slot_bytes == 0) continue;
        for (uint32_t i = 0; i < n; ++i) {
          const SlotId slot = SlotId::make(e, i);
          const SlotWord word = attached_->word_of(s, slot);
          if (word.state() == SlotState::Stable && !f(slot, word, slot_bytes)) return;
        }
      }
    };
    each_stable([&](SlotId slot, SlotWord, uint64_t slot_bytes) {
      used += slot_bytes;
      bytes_by_age[slot_age(*attached_, s, slot, now) >> 4] += slot_bytes;
      return true;
    });
    const auto capacity = static_cast<double>(uint64_t{superblock_.extent_count} * superblock_.extent_payload_bytes);
    const auto target = static_cast<uint64_t>(capacity * used_fraction);
    if (used <= target) return;
    uint64_t to_free = used - target, above = 0;
    uint32_t threshold = static_cast<uint32_t>(bytes_by_age.size());
    while (threshold > 0 && above < to_free) above += bytes_by_age[--threshold];
    each_stable([&](SlotId slot, SlotWord word, uint64_t slot_bytes) {
      if (slot_age(*attached_, s, slot, now) >> 4 < threshold) return true;
      if (evict_to_free(*attached_, s, slot, word)) {
        ++evicted;
        to_free = to_free > slot_bytes ? to_free - slot_bytes : 0;
      }
      return to_free != 0 && evicted < blocks_max;
    });
  });
  if (!ok) medium_failed(path_);
  return evicted;
}

void Region::heartbeat() {
  const Use use = ensure_writer();
  const Offset at = attached_->home().header() + offsetof(ShardHeader, heartbeat);
  const bool ok = fault_guarded([&] {
    attached_->mem.add_word(at, 1);
    attached_->mem.write_back(at, 8);
    attached_->mem.store_fence();
  });
  if (!ok) medium_failed(path_);
}

Scrubbed Region::scrub(uint64_t from, uint64_t limit) {
  const Use use = ensure_writer();
  std::lock_guard<std::mutex> lock(maintenance_);
  Scrubbed r;
  const ShardMap& s = attached_->home();
  uint64_t dense = from;
  CpuMemory& m = attached_->mem;
  for (; dense < s.slots() && r.checked < limit; ++dense) {
    bool bad = false, stable = false;
    SlotWord word{};
    const SlotId slot = s.slot_at(dense);
    uint32_t in_use = 0;
    const bool ok = fault_guarded([&] {
      in_use = slots_in_use(*attached_, s, slot.extent());
      if (slot.slot() >= in_use) return;
      const Header header = attached_->load_header(s, slot);
      word = header.word();
      if (word.state() != SlotState::Stable) return;
      stable = true;
      const uint64_t slot_bytes = header.right ? transfer_->namespaces().slot_bytes(s, header.h.namespace_index) : 0;
      bad = slot_bytes == 0 || header.h.length_bytes > slot_bytes || slot.slot() >= s.slot_count(slot_bytes) ||
            m.checksum(s.payload(slot, slot_bytes), header.h.length_bytes) != header.h.payload_checksum;
    });
    if (ok && slot.slot() >= in_use) {
      dense = uint64_t{slot.extent() + 1} * superblock_.slots_per_extent - 1;
      continue;
    }
    if (!ok) bad = stable = true;
    if (!stable) continue;
    ++r.checked;
    if (bad)   // only if it is still the same block: it may have been evicted and filled anew while we read it
      fault_guarded([&] {
        if (attached_->owns(attached_->self) && evict_to_free(*attached_, s, slot, word)) {
          ++r.bad;
          attached_->count(kScrubBad);
        }
      });
  }
  r.next = dense >= s.slots() ? 0 : dense;
  return r;
}

Recovered Region::adopt_shard(uint32_t host, uint64_t epoch) {
  const Use use = ensure_writer();
  std::lock_guard<std::mutex> lock(maintenance_);
  if (host >= attached_->hosts())
    throw Error(ErrorKind::Geometry, "region " + path_ + ": there is no shard " + std::to_string(host) + " to adopt; it has " +
                                         std::to_string(attached_->hosts()) + ".");
  Recovered r;
  const ShardMap& s = attached_->shard(HostIndex{host});
  const Ownership o = ownership_of(*attached_, s);
  if (epoch <= o.epoch)
    throw Error(ErrorKind::Fenced, "region " + path_ + ": shard " + std::to_string(host) + " is already claimed with epoch " + std::to_string(o.epoch) +
                                       " by host " + std::to_string(to_int(o.owner)) + "; epoch " + std::to_string(epoch) +
                                       " is not higher. The arbiter must give a higher one.");
  protect(HostIndex{host}, true);
  const bool ok = fault_guarded([&] { r = adopt(*attached_, s, epoch); });
  if (!ok) medium_failed(path_);
  return r;
}

bool Region::acknowledge_lost() {
  const Use use = ensure_writer();
  std::lock_guard<std::mutex> lock(maintenance_);
  bool any = false;
  const bool ok = fault_guarded([&] {
    for (uint32_t h = 0; h < attached_->hosts(); ++h) {
      const ShardMap& s = attached_->shard(HostIndex{h});
      const Ownership o = ownership_of(*attached_, s);
      const bool once_ours = HostIndex{h} == attached_->self || attached_->mem.load_word(attached_->home().claim(HostIndex{h})) != 0;
      if (!once_ours || o.owner == attached_->self || attached_->mem.load_word(attached_->home().acknowledgement(HostIndex{h})) >= o.epoch) continue;
      // Our other processes see the claim before their next claim of a slot; those in the middle of a store must end first.
      bool writing = false;
      for_each_slot(*attached_, s, [&](SlotId slot) {
        const SlotWord w = attached_->word_of(s, slot);
        writing = writing || (w.state() == SlotState::Writing && participant_alive(to_int(attached_->self), w.participant()));
      });
      if (writing) continue;
      attached_->set_owned(HostIndex{h}, false);
      acknowledge(*attached_, s, o.epoch);
      any = true;
    }
  });
  if (!ok) medium_failed(path_);
  return any;
}

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
      Directory<CpuMemory> directory(*attached_, s);
      for (uint32_t e = 0; e < superblock_.extent_count; ++e) {
        uint64_t slot_bytes = 0;
        const uint32_t n = slots_in_use(*attached_, s, e, &slot_bytes);
        if (n == 0) ++c.unassigned;
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
              const uint32_t owner = to_int(ownership_of(*attached_, s).owner);
              const bool mine = !read_only_ && HostIndex{owner} == attached_->self && word.participant() == attached_->participant;
              const bool alive = mine ? word.generation() == attached_->generation : participant_alive(owner, word.participant());
              if (!alive && attached_->word_of(s, slot) == word) problem(name + ": being written by a process that is gone; it waits for the reaper");
              break;
            }
            case SlotState::Stable:
              ++c.stable;
              // A header that changed meanwhile is not damaged: look again before saying so.
              if (!header.right && attached_->word_of(s, slot) == word && !attached_->load_header(s, slot).right)
                problem(name + ": header checksum is wrong; the block is a miss until it is scrubbed");
              else if (header.right && !directory.has_entry(header.key(), slot, word.count()) && attached_->word_of(s, slot) == word &&
                       !directory.has_entry(header.key(), slot, word.count()))
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
          if (entry.is_ghost()) ++c.ghosts;
          else if (!s.contains(entry.slot())) problem(shard + ", bucket " + std::to_string(b) + ": an entry names a slot that does not exist");
          else if (directory.alive(entry)) ++c.entries;
          else ++c.dead_entries;
        }
      }
    }
  });
  if (!ok) problem("the medium failed while it was checked (poisoned memory, or the file was truncated)");
  if (c.free + c.stable + c.writing + c.lent != c.slots) problem("free + stored + being written + lent slots are not all slots");
  return c;
}

}  // namespace kvp
