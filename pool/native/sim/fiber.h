// A fiber: a function on a stack of its own, entered and left by hand. One thread; a fiber is left to whoever entered it.
//
// The sanitizers are told of each change of stacks: AddressSanitizer would take the other stack for an overflow, and where an exception unwinds it
// has to know which stack's marks to clear; ThreadSanitizer keeps a stack of calls a fiber.
#pragma once
#include <ucontext.h>

#include <cstddef>
#include <cstdint>
#include <memory>

#if defined(__SANITIZE_ADDRESS__)
#define KVP_FIBERS_OF_ASAN 1
#elif defined(__SANITIZE_THREAD__)
#define KVP_FIBERS_OF_TSAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define KVP_FIBERS_OF_ASAN 1
#elif __has_feature(thread_sanitizer)
#define KVP_FIBERS_OF_TSAN 1
#endif
#endif
#if defined(KVP_FIBERS_OF_ASAN)
#include <sanitizer/common_interface_defs.h>
#elif defined(KVP_FIBERS_OF_TSAN)
#include <sanitizer/tsan_interface.h>
#define KVP_LEAVES_FOR_GOOD __attribute__((no_sanitize("thread")))   // entered on one stack of calls, left on another
#endif
#if !defined(KVP_LEAVES_FOR_GOOD)
#define KVP_LEAVES_FOR_GOOD
#endif

namespace kvp::sim {

class Fiber {
 public:
  using Body = void (*)(void* argument);   // lets no exception out

  Fiber() = default;
  ~Fiber() { forget(); }
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // The next enter() calls body(argument). Only when there is no body, or it has returned.
  void begin(Body body, void* argument) {
    body_ = body, argument_ = argument;
    if (stack_ == nullptr) stack_ = std::make_unique_for_overwrite<char[]>(kStackBytes);
    getcontext(&inside_);
    inside_.uc_stack.ss_sp = stack_.get();
    inside_.uc_stack.ss_size = kStackBytes;
    inside_.uc_link = &outside_;
    const auto address = reinterpret_cast<uintptr_t>(this);
    makecontext(&inside_, reinterpret_cast<void (*)()>(&Fiber::main), 2, static_cast<uint32_t>(address >> 32), static_cast<uint32_t>(address));
    announce();
  }
  // Goes on inside until it leaves, or its body returns.
  void enter() {
#if defined(KVP_FIBERS_OF_ASAN)
    void* frames = nullptr;
    __sanitizer_start_switch_fiber(&frames, stack_.get(), kStackBytes);
    swapcontext(&outside_, &inside_);
    __sanitizer_finish_switch_fiber(frames, nullptr, nullptr);
#elif defined(KVP_FIBERS_OF_TSAN)
    outer_ = __tsan_get_current_fiber();
    __tsan_switch_to_fiber(inner_, 0);
    swapcontext(&outside_, &inside_);
#else
    swapcontext(&outside_, &inside_);
#endif
  }
  // Called inside: back to whoever entered.
  void leave() {
#if defined(KVP_FIBERS_OF_ASAN)
    void* frames = nullptr;
    __sanitizer_start_switch_fiber(&frames, outside_stack_, outside_bytes_);
    swapcontext(&inside_, &outside_);
    __sanitizer_finish_switch_fiber(frames, &outside_stack_, &outside_bytes_);
#elif defined(KVP_FIBERS_OF_TSAN)
    __tsan_switch_to_fiber(outer_, 0);
    swapcontext(&inside_, &outside_);
#else
    swapcontext(&inside_, &outside_);
#endif
  }

 private:
#if defined(KVP_FIBERS_OF_ASAN) || defined(KVP_FIBERS_OF_TSAN)
  static constexpr size_t kStackBytes = 512 << 10;   // their frames are larger
#else
  static constexpr size_t kStackBytes = 128 << 10;
#endif

  KVP_LEAVES_FOR_GOOD static void main(uint32_t high, uint32_t low) {
    auto* me = reinterpret_cast<Fiber*>(uintptr_t{high} << 32 | low);
#if defined(KVP_FIBERS_OF_ASAN)
    __sanitizer_finish_switch_fiber(nullptr, &me->outside_stack_, &me->outside_bytes_);
#endif
    me->body_(me->argument_);
#if defined(KVP_FIBERS_OF_ASAN)
    __sanitizer_start_switch_fiber(nullptr, me->outside_stack_, me->outside_bytes_);   // for good: its frames are no more
#elif defined(KVP_FIBERS_OF_TSAN)
    __tsan_switch_to_fiber(me->outer_, 0);
#endif
  }   // uc_link: back to whoever entered last

#if defined(KVP_FIBERS_OF_TSAN)
  void announce() {
    forget();
    inner_ = __tsan_create_fiber(0);
  }
  void forget() {
    if (inner_ != nullptr) __tsan_destroy_fiber(inner_);
  }
  void *inner_ = nullptr, *outer_ = nullptr;
#else
  void announce() {}
  void forget() {}
#endif
#if defined(KVP_FIBERS_OF_ASAN)
  const void* outside_stack_ = nullptr;
  size_t outside_bytes_ = 0;
#endif

  std::unique_ptr<char[]> stack_;
  ucontext_t inside_{}, outside_{};
  Body body_ = nullptr;
  void* argument_ = nullptr;
};

}   // namespace kvp::sim
