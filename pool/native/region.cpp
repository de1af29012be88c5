#include "region.h"

#include <pthread.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "error.h"
#include "region_file.h"

namespace kvp {

void check_failed(const char* condition, const char* file, int line) {
  std::fprintf(stderr, "kvpool: internal check failed: %s (%s:%d)\n", condition, file, line);
  std::abort();
}

namespace {

constexpr uint64_t kHugePage = 2ULL << 20;

// A child of fork shares the open file descriptions and with them the locks that say that its parent lives. It lets go of them at once: else nobody
// could clean up after the parent as long as the child runs.
std::mutex g_locks_mutex;
std::vector<int> g_locks;

void forget_locks_in_child() {
  for (const int fd : g_locks) ::close(fd);
  g_locks.clear();
  g_locks_mutex.unlock();
}
void remember_lock(int fd) {
  static const int registered = ::pthread_atfork([] { g_locks_mutex.lock(); }, [] { g_locks_mutex.unlock(); }, forget_locks_in_child);
  static_cast<void>(registered);
  std::lock_guard<std::mutex> lock(g_locks_mutex);
  g_locks.push_back(fd);
}
void close_lock(int fd) {
  std::lock_guard<std::mutex> lock(g_locks_mutex);
  std::erase(g_locks, fd);
  ::close(fd);
}

}   // namespace

Region::Region(const std::string& path, uint32_t host, Role role, bool read_only, bool take_over, const std::string& lock_path,
               const std::string& node_name, const std::string& boot_id)
    : path_(path), read_only_(read_only), pid_(::getpid()) {
  const Inspection found = inspect_region(path);
  superblock_ = found.superblock;
  opened_rows_ = std::vector<std::atomic<uint64_t>>(superblock_.namespace_count);
  copies_right_ = found.copies_right;
  if (host >= superblock_.host_count)
    throw Error(ErrorKind::Geometry, "region " + path + ": host " + std::to_string(host) + " does not exist; it was formatted for " +
                                         std::to_string(superblock_.host_count) + " host(s), 0 to " + std::to_string(superblock_.host_count - 1) +
                                         ". Give one of these.");
  try {
    File file(path, !read_only);
    File lock_file(lock_path, !read_only);
    std::swap(fd_, file.fd);
    medium_ = file.medium;
    std::swap(lock_fd_, lock_file.fd);
    remember_lock(lock_fd_);
    map_shards();
    attached_ = std::make_unique<Attached<CpuMemory>>(CpuMemory(base_, superblock_.coherence == static_cast<uint32_t>(Coherence::Hardware)),
                                                      superblock_, HostIndex{host});
    transfer_ = std::make_unique<Transfer<CpuMemory>>(*attached_);
    if (read_only) {
      attached_->set_owned(HostIndex{host}, false);
    } else {
      // The daemon is told of bad memory before anybody touches it. Engines are not, unless they ask for it: of their own memory it would end them early.
      if (role == Role::Daemon && medium_.kind != MediumKind::File) ::prctl(PR_MCE_KILL, PR_MCE_KILL_SET, PR_MCE_KILL_EARLY, 0, 0);
      protect(HostIndex{host}, true);
      const HostView last = host_view(host);
      if (!fault_guarded([&] { attach(role, take_over, node_name, boot_id, last); })) medium_failed();
      Recovered total;
      reap_dead(total);   // takes locks, so it may not be left in the middle: it has a guard of its own
    }
  } catch (...) {
    close();
    throw;
  }
}

Region::~Region() { close(); }

void Region::close() {
  closing_.store(true, std::memory_order_relaxed);
  std::unique_lock<std::shared_mutex> lock(lifetime_, std::defer_lock);
  if (pid_ == ::getpid()) lock.lock();   // in a child of fork the lock may be held by a thread that does not exist there
  if (attached_ != nullptr && !read_only_ && pid_ == ::getpid() && attached_->generation != 0) {
    const Offset word = attached_->home().participant(attached_->participant);
    const uint64_t gone = uint64_t{attached_->generation} << 32 | static_cast<uint32_t>(ParticipantState::Free);
    fault_guarded([&] { attached_->mem.store_word(word, gone); });
    unlock_participant(to_int(attached_->self), attached_->participant);
  }
  transfer_.reset();
  attached_.reset();
  if (mapped_bytes_ != 0) unwatch_range(base_);
  mapped_bytes_ = 0;
  if (reserved_ != nullptr) ::munmap(reserved_, reserved_bytes_);
  reserved_ = base_ = nullptr;
  if (fd_ >= 0) ::close(fd_);
  if (lock_fd_ >= 0 && pid_ == ::getpid()) close_lock(lock_fd_);   // in a child of fork it is closed already
  fd_ = lock_fd_ = -1;
}

void Region::map_shards() {
  // Address and offset agree modulo the largest page that there is room for, so that a huge page of the medium can be one of the mapping.
  const uint64_t align = std::max({superblock_.align_bytes, medium_.align_bytes, kHugePage});
  const uint64_t used = superblock_.shard_offset + superblock_.host_count * superblock_.shard_bytes;
  reserved_bytes_ = used + align;
  void* p = ::mmap(nullptr, reserved_bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED)
    throw Error(ErrorKind::Medium, "region " + path_ + ": no address space for " + std::to_string(used) + " bytes: " + std::strerror(errno));
  reserved_ = static_cast<uint8_t*>(p);
  base_ = reserved_ + (align - reinterpret_cast<uintptr_t>(reserved_) % align) % align;
  if (map_shared(fd_, medium_, base_, 0, used, false) == nullptr) {
    const int error = errno;
    throw Error(ErrorKind::Medium, "region " + path_ + ": cannot be mapped: " + std::strerror(error) +
                                       ". A DAX device needs the region's alignment (" + std::to_string(align) +
                                       " bytes) to be a multiple of its own.");
  }
  mapped_bytes_ = used;
  watch_range(base_, used);   // without room in the list, a notice ends the process as without us
  // Only where all the memory is there: a huge page in a hole would take more than what is stored in it.
  struct stat st;
  if (medium_.kind == MediumKind::File && ::fstat(fd_, &st) == 0 && static_cast<uint64_t>(st.st_blocks) * 512 >= used)
    ::madvise(base_, used, MADV_HUGEPAGE);   // refused where the kernel has none
}

void Region::protect(HostIndex shard, bool writable) {
  const ShardMap s(superblock_, shard);
  // What a device maps with huge pages of 1 GiB cannot change its rights before Linux 6.12: it is mapped anew instead, in one step for all who look.
  if (medium_.kind == MediumKind::Device ? map_shared(fd_, medium_, base_ + s.base(), s.base(), s.end() - s.base(), writable) == nullptr
                                         : ::mprotect(base_ + s.base(), s.end() - s.base(), PROT_READ | (writable ? PROT_WRITE : 0)) != 0)
    throw Error(ErrorKind::Medium, "region " + path_ + ": the shard of host " + std::to_string(to_int(shard)) +
                                       " cannot be made writable: " + std::strerror(errno) + ". Is the medium read-only?");
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
void Region::attach(Role role, bool take_over, const std::string& node_name, const std::string& boot_id, const HostView& last) {
  CpuMemory& m = attached_->mem;
  const ShardMap& s = attached_->home();
  const uint32_t host = to_int(attached_->self);
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
  attached_->reaped_own = m.load_word(at) == 0;   // nobody was ever there before us
  uint32_t generation = static_cast<uint32_t>(m.load_word(at) >> 32) + 1 & 0x3fff;
  if (generation == 0) generation = 1;
  attached_->participant = mine;
  attached_->generation = generation;
  follow_limit(HostIndex{host});   // the allocator is made with it
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
    h.limit = m.load_word(s.header() + offsetof(ShardHeader, limit));
    h.limit_check = m.load_word(s.header() + offsetof(ShardHeader, limit_check));
    h.closed = m.load_word(s.header() + offsetof(ShardHeader, closed));
    h.state = 1;
    const auto* words = reinterpret_cast<const uint64_t*>(&h);
    for (uint32_t i = sizeof h / 8; i-- > 0;) m.store_word(s.header() + i * 8ULL, words[i]);
    m.write_back(s.header(), sizeof h);
    m.store_fence();
  }
  fenced(*attached_, s);   // takes note of who owns the shard
}

bool Region::writer_alive(uint32_t host, SlotWord word) {
  if (word.participant() >= superblock_.participant_count) return false;
  if (!read_only_ && HostIndex{host} == attached_->self && word.participant() == attached_->participant)
    return word.generation() == attached_->generation;
  const uint64_t entry = attached_->mem.load_word(attached_->shard(HostIndex{host}).participant(word.participant()));
  return static_cast<uint32_t>(entry >> 32) == word.generation() && participant_alive(host, word.participant());
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
    const uint64_t word = m.load_word(s.header() + i * 8ULL);
    std::memcpy(reinterpret_cast<uint8_t*>(&h) + i * 8ULL, &word, 8);
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
  if (!fault_guarded([&] { v = view_host(host); })) medium_failed();
  return v;
}

uint32_t Region::participant() {
  const Use use = ensure_open();
  return attached_->participant;
}

uint32_t Region::generation() {
  const Use use = ensure_open();
  return attached_->generation;
}

uint32_t Region::reap_dead(Recovered& total) {
  const Use use = ensure_writer();
  std::lock_guard<std::mutex> lock(maintenance_);
  const uint32_t host = to_int(attached_->self);
  uint32_t dead = 0;
  const bool ok = guarded([&] {
    for (uint32_t i = 0; i < superblock_.participant_count; ++i) {
      const Offset at = attached_->home().participant(i);
      const uint64_t word = attached_->mem.load_word(at);
      const bool me = i == attached_->participant;
      // Our own entry: only right after attaching, what its earlier generations left behind.
      if (me ? attached_->reaped_own : static_cast<uint32_t>(word) != static_cast<uint32_t>(ParticipantState::Live)) continue;
      if (!me && !lock_participant(host, i)) continue;
      if (!me && attached_->mem.load_word(at) != word) {   // it left, or was reaped, while we looked
        unlock_participant(host, i);
        continue;
      }
      follow_owners();   // the dead one may have adopted a shard that we know nothing of
      for (uint32_t h = 0; h < attached_->hosts(); ++h)
        if (attached_->owns(HostIndex{h}) && !fenced(*attached_, attached_->shard(HostIndex{h}))) {
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
  if (!ok) medium_failed();
  return dead;
}

Region::Use Region::ensure_open() {
  if (closing_.load(std::memory_order_relaxed)) throw Error(ErrorKind::Region, "region " + path_ + ": it was closed. Attach again.");
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

}   // namespace kvp
