// Memory that turns bad under a reader (SIGBUS: poisoned line, truncated file) becomes a `false`, never a dead process.
//
// The guard is per thread; of several, the innermost catches. A fault outside a guard, or outside a mapped region, goes to the handler that was there before.
#pragma once
#include <csetjmp>
#include <cstdint>

namespace kvp {

// The last fault that a guard of this thread caught.
struct Fault {
  const void* address = nullptr;
  bool poison = false;   // the kernel says that the memory itself is bad; else there is nothing behind the address now
};
extern thread_local Fault t_last_fault;
// A mapped region. The kernel may tell every process that has bad memory mapped, whether it touches it or not (BUS_MCEERR_AO; for a DAX device it
// always does): of a range that is listed here this is only noted, for nothing is lost before somebody reads it. False: there is no room in the list.
bool watch_range(const void* from, uint64_t bytes);
void unwatch_range(const void* from);
// Takes the next notice out that is about the range. The kernel names as much as one of its pages maps, a huge one as well. False: there is none.
struct Notice {
  const uint8_t* from = nullptr;
  uint64_t bytes = 0;
};
bool take_notice(const void* from, uint64_t bytes, Notice& notice);

extern thread_local sigjmp_buf* t_fault_guard;
extern thread_local bool t_fault_handler_checked;
void ensure_fault_handler();   // a system call; when a guard is entered from outside, because another library may have replaced the handler

// Lives for the length of a call that guards each block of a batch: the handler is looked at once and not once a block.
class FaultHandlerChecked {
 public:
  FaultHandlerChecked() : before_(t_fault_handler_checked) {
    if (!before_) ensure_fault_handler();
    t_fault_handler_checked = true;
  }
  ~FaultHandlerChecked() { t_fault_handler_checked = before_; }
  FaultHandlerChecked(const FaultHandlerChecked&) = delete;
  FaultHandlerChecked& operator=(const FaultHandlerChecked&) = delete;

 private:
  bool before_;
};

template <class F>
bool fault_guarded(F&& f) {
  sigjmp_buf* const outer = t_fault_guard;
  if (outer == nullptr && !t_fault_handler_checked) ensure_fault_handler();
  sigjmp_buf here;
  if (sigsetjmp(here, 0) != 0) {
    t_fault_guard = outer;
    return false;
  }
  t_fault_guard = &here;
  try {
    f();
  } catch (...) {   // the guard must not outlive this frame
    t_fault_guard = outer;
    throw;
  }
  t_fault_guard = outer;
  return true;
}

}   // namespace kvp
