#include "fault_guard.h"

#include <csignal>
#include <cstring>

namespace kvp {

thread_local sigjmp_buf* t_fault_guard = nullptr;
thread_local bool t_fault_handler_checked = false;

namespace {

struct sigaction g_previous;

void on_fault(int signal, siginfo_t* info, void* context) {
  if (t_fault_guard != nullptr) {
    sigjmp_buf* guard = t_fault_guard;
    t_fault_guard = nullptr;
    siglongjmp(*guard, 1);   // SA_NODEFER: the signal is not blocked, so no mask has to be restored
  }
  // Python's faulthandler puts back the handler that it found, and raises the signal again: when that was ours, the two would call each other for ever.
  static thread_local bool passing_on = false;
  if (passing_on) {
    std::signal(SIGBUS, SIG_DFL);
    return;
  }
  passing_on = true;
  if ((g_previous.sa_flags & SA_SIGINFO) != 0 && g_previous.sa_sigaction != nullptr) {
    g_previous.sa_sigaction(signal, info, context);
  } else if (g_previous.sa_handler != SIG_DFL && g_previous.sa_handler != SIG_IGN && g_previous.sa_handler != nullptr) {
    g_previous.sa_handler(signal);
  } else {   // not ours and nobody else's: die as without us, when the faulting access is repeated
    std::signal(SIGBUS, SIG_DFL);
  }
  passing_on = false;
}

}   // namespace

void ensure_fault_handler() {
  struct sigaction now;
  if (sigaction(SIGBUS, nullptr, &now) == 0 && (now.sa_flags & SA_SIGINFO) != 0 && now.sa_sigaction == on_fault) return;
  g_previous = now;
  struct sigaction ours;
  std::memset(&ours, 0, sizeof ours);
  ours.sa_sigaction = on_fault;
  ours.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
  sigemptyset(&ours.sa_mask);
  sigaction(SIGBUS, &ours, nullptr);
}

}   // namespace kvp
