#include "fault_guard.h"

#include <atomic>
#include <csignal>
#include <cstring>

namespace kvp {

thread_local sigjmp_buf* t_fault_guard = nullptr;
thread_local bool t_fault_handler_checked = false;
thread_local Fault t_last_fault;

namespace {

// The handlers that ours took the place of, newest first. None is ever freed: a handler that runs on another thread may be reading it.
struct Previous {
  struct sigaction action;
  Previous* older;
};
std::atomic<Previous*> g_previous{nullptr};

void remember(const struct sigaction& action) {
  auto* p = new Previous{action, g_previous.load(std::memory_order_acquire)};
  while (!g_previous.compare_exchange_weak(p->older, p, std::memory_order_acq_rel)) {
  }
}

constexpr uint32_t kRanges = 256, kNotices = 64;
struct Range {
  std::atomic<uintptr_t> from{0}, to{0};   // empty: `to` is 0
};
Range g_ranges[kRanges];
std::atomic<uintptr_t> g_notices[kNotices];   // an address, and in its last bits the logarithm of how much is meant
constexpr uintptr_t kPageLog2 = 12, kPageMask = (uintptr_t{1} << kPageLog2) - 1;

// A notice that finds no room is lost; the page is found out when it is touched.
bool note(const siginfo_t* info) {
  const auto at = reinterpret_cast<uintptr_t>(info->si_addr);
  const auto log2 = static_cast<uintptr_t>(info->si_addr_lsb);
  const uintptr_t told = (at & ~kPageMask) | (log2 < kPageLog2 || log2 >= 48 ? kPageLog2 : log2);
  for (const Range& range : g_ranges) {
    if (at >= range.to.load(std::memory_order_acquire) || at < range.from.load(std::memory_order_relaxed)) continue;
    for (std::atomic<uintptr_t>& place : g_notices) {
      uintptr_t empty = 0;
      if (place.load(std::memory_order_relaxed) == told || place.compare_exchange_strong(empty, told)) break;
    }
    return true;
  }
  return false;
}

void on_fault(int signal, siginfo_t* info, void* context) {
  if (info->si_code == BUS_MCEERR_AO && note(info)) return;
  if (t_fault_guard != nullptr) {
    sigjmp_buf* guard = t_fault_guard;
    t_fault_guard = nullptr;
    t_last_fault = {info->si_addr, info->si_code == BUS_MCEERR_AR || info->si_code == BUS_MCEERR_AO};
    siglongjmp(*guard, 1);   // SA_NODEFER: the signal is not blocked, so no mask has to be restored
  }
  // Python's faulthandler puts back the handler that it found, and raises the signal again: when that was ours, the two would call each other for ever.
  static thread_local bool passing_on = false;
  if (passing_on) {
    std::signal(SIGBUS, SIG_DFL);
    return;
  }
  passing_on = true;
  static const struct sigaction none = {};
  const Previous* newest = g_previous.load(std::memory_order_acquire);
  const struct sigaction previous = newest != nullptr ? newest->action : none;
  if ((previous.sa_flags & SA_SIGINFO) != 0 && previous.sa_sigaction != nullptr) {
    previous.sa_sigaction(signal, info, context);
  } else if (previous.sa_handler != SIG_DFL && previous.sa_handler != SIG_IGN && previous.sa_handler != nullptr) {
    previous.sa_handler(signal);
  } else {   // not ours and nobody else's: die as without us, when the faulting access is repeated
    std::signal(SIGBUS, SIG_DFL);
  }
  passing_on = false;
}

}   // namespace

bool watch_range(const void* from, uint64_t bytes) {
  ensure_fault_handler();
  const auto begin = reinterpret_cast<uintptr_t>(from);
  for (Range& range : g_ranges) {
    uintptr_t empty = 0;
    if (!range.from.compare_exchange_strong(empty, begin)) continue;
    range.to.store(begin + bytes, std::memory_order_release);
    return true;
  }
  return false;
}
void unwatch_range(const void* from) {
  for (Range& range : g_ranges)
    if (range.from.load() == reinterpret_cast<uintptr_t>(from)) {
      range.to.store(0);
      range.from.store(0);
      return;
    }
}
bool take_notice(const void* from, uint64_t bytes, Notice& notice) {
  const auto begin = reinterpret_cast<uintptr_t>(from);
  for (std::atomic<uintptr_t>& place : g_notices) {
    uintptr_t told = place.load();
    const uintptr_t at = told & ~kPageMask;
    if (at < begin || at - begin >= bytes || !place.compare_exchange_strong(told, 0)) continue;
    notice.bytes = uint64_t{1} << (told & kPageMask);
    notice.from = reinterpret_cast<const uint8_t*>(at & ~(notice.bytes - 1));
    return true;
  }
  return false;
}

void ensure_fault_handler() {
  struct sigaction now;
  if (sigaction(SIGBUS, nullptr, &now) == 0 && (now.sa_flags & SA_SIGINFO) != 0 && now.sa_sigaction == on_fault) return;
  remember(now);   // before ours can be called; several threads may come here at once
  struct sigaction ours;
  std::memset(&ours, 0, sizeof ours);
  ours.sa_sigaction = on_fault;
  ours.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
  sigemptyset(&ours.sa_mask);
  sigaction(SIGBUS, &ours, nullptr);
}

}   // namespace kvp
