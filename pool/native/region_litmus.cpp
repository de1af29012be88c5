// Region: the litmus test between hosts, on the real memory and with the processor's own instructions, whatever mode the region declares.
#include <sched.h>

#include <chrono>
#include <random>

#include "error.h"
#include "region.h"
#include "region_file.h"

namespace kvp {

namespace {
// A daemon looks for questions every 0.1 s; from then on it answers at once.
constexpr LitmusLimits kLimits{2000000000, 20000000, 10000000, 512};
}   // namespace

uint64_t CpuClock::now() {
  return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count());
}
void CpuClock::pause() {
  // The peer may be a process of this machine and wait for this core; but whoever yields each time sleeps through what it is to look at.
  constexpr uint32_t kSpins = 32;
  thread_local uint32_t calls = 0;
  if (++calls % kSpins == 0) ::sched_yield();
}

bool Region::litmus_begin() {
  const Use use = ensure_writer();
  std::lock_guard<std::mutex> lock(litmus_mutex_);
  if (litmus_ != nullptr) return true;
  struct flock turn = litmus_lock(F_WRLCK, to_int(attached_->self));
  if (::fcntl(lock_fd_, F_OFD_SETLK, &turn) != 0) return false;
  litmus_ = std::make_unique<Litmus<CpuMemory, CpuClock>>(CpuMemory(base_, false), superblock_, attached_->self, std::random_device{}(), CpuClock{},
                                                          kLimits);
  return true;
}

void Region::litmus_end() {
  const Use use = ensure_writer();
  std::lock_guard<std::mutex> lock(litmus_mutex_);
  if (litmus_ == nullptr) return;
  fault_guarded([&] { litmus_->goodbye(); });
  litmus_.reset();
  struct flock turn = litmus_lock(F_UNLCK, to_int(attached_->self));
  ::fcntl(lock_fd_, F_OFD_SETLK, &turn);
}

bool Region::litmus_serve(uint64_t budget_ns) {
  const Use use = ensure_writer();
  std::lock_guard<std::mutex> lock(litmus_mutex_);
  bool any = false;
  if (litmus_ == nullptr) return any;
  if (!fault_guarded([&] { any = litmus_->serve(budget_ns); })) medium_failed();
  return any;
}

std::vector<uint64_t> Region::litmus_beats() {
  const Use use = ensure_writer();
  std::lock_guard<std::mutex> lock(litmus_mutex_);
  std::vector<uint64_t> beats(attached_->hosts());
  if (litmus_ == nullptr) return beats;
  if (!fault_guarded([&] { litmus_->beats(beats.data()); })) medium_failed();
  return beats;
}

LitmusResult Region::litmus_measure(uint32_t peer, uint32_t rounds) {
  const Use use = ensure_writer();
  std::lock_guard<std::mutex> lock(litmus_mutex_);
  if (peer >= attached_->hosts() || HostIndex{peer} == attached_->self)
    throw Error(ErrorKind::Geometry, "region " + path_ + ": host " + std::to_string(peer) + " is no other host of it to test with.");
  LitmusResult r;
  r.round_trips.reserve(rounds);
  if (litmus_ == nullptr) return r;
  if (!fault_guarded([&] { litmus_->measure(HostIndex{peer}, rounds, r); })) medium_failed();
  return r;
}

}   // namespace kvp
