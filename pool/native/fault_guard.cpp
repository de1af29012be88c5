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

void on_fault(int signal, siginfo_t* info, void* context) {
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
