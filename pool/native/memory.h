// Memory: the only way in which protocol code touches a medium.
//
// The real one (memory_cpu.h) issues the processor's instructions; a simulated non-coherent medium can take its place below the same
// protocol code. What each call orders (PROTOCOL, fences S and M):
//   load_word, load_line   in program order with each other; never before an earlier full_fence
//   store_word, store_half in program order with each other (x86-TSO; release on others)
//   cas_word, add_word     as store_word; only on lines that this host may write (even a failing CAS writes, PROTOCOL 0)
//   stream_copy            non-temporal stores: ordered with nothing until store_fence
//   write_back             dirty line to the medium, line stays; ordered by store_fence
//   invalidate             dirty line to the medium, line dropped; later loads are ordered after it only by full_fence
//   invalidate_all         as invalidate, of a long range; goes on behind what cannot be reached
//   copy_out               copies, and invalidates another range on the way (of 0 bytes: none)
//   store_fence (S)        all earlier stores, streams and write-backs are in the medium before any later store
//   full_fence (M)         additionally no later load runs before it
//   guarded(f)             runs f; false when the medium failed under it (a poisoned line, a truncated file). f must not own anything
//                          that needs a destructor across an access: it may be left in the middle.
//   yield()                others should go on first
//   without(check)         always false, but in the simulator: there a named check is left out, to see that a test notices
// In hardware-coherent mode write_back and invalidate do nothing; the fences stay, because non-temporal stores need them.
#pragma once
#include <atomic>
#include <concepts>
#include <cstdint>

#include "layout.h"

namespace kvp {

struct Line {
  alignas(kLineBytes) uint64_t words[8];
};
static_assert(sizeof(Line) == kLineBytes);

// A block in the caller's memory: pieces in order (an engine keeps a block's layers in different places).
struct Piece {
  uint8_t* data;
  uint64_t bytes;
};

// Lines that leave the cache beside a copy of others, so that the one does not wait for the other.
struct Ahead {
  const uint8_t* from = nullptr;
  uint64_t bytes = 0;
  void (*drop)(const void* from, uint64_t bytes) = nullptr;
};

template <class M>
concept Memory = requires(M m, const M cm, Offset at, uint64_t word, Line line, const Piece* pieces, uint32_t n) {
  { m.load_word(at) } -> std::same_as<uint64_t>;
  { m.load_line(at) } -> std::same_as<Line>;
  { m.load_half(at) } -> std::same_as<uint16_t>;
  { m.store_word(at, word) } -> std::same_as<void>;
  { m.store_half(at, uint16_t{}) } -> std::same_as<void>;
  { m.cas_word(at, word, word) } -> std::same_as<bool>;   // true: stored
  { m.add_word(at, word) } -> std::same_as<void>;
  { m.stream_copy(at, pieces, n) } -> std::same_as<uint64_t>;          // payload checksum of what was stored
  { m.copy_out(pieces, n, at, at, word) } -> std::same_as<uint64_t>;   // payload checksum of what the caller got
  { m.checksum(at, word) } -> std::same_as<uint64_t>;                  // payload checksum of bytes that stay where they are
  { m.write_back(at, word) } -> std::same_as<void>;                    // at, bytes
  { m.invalidate(at, word) } -> std::same_as<void>;
  { m.invalidate_all(at, word) } -> std::same_as<void>;
  { m.prefetch(at) } -> std::same_as<void>;
  { m.store_fence() } -> std::same_as<void>;
  { m.full_fence() } -> std::same_as<void>;
  {
    m.guarded([] {})
    } -> std::same_as<bool>;   // false: the medium failed below the call (poison, truncated file)
  { m.yield() } -> std::same_as<void>;
  { m.without("check") } -> std::same_as<bool>;
  { cm.coherent() } -> std::same_as<bool>;
};

// A named step of the protocol. Tests stop or kill the process here; otherwise it is one load and a branch never taken.
using StepHook = void (*)(const char* name);
inline std::atomic<StepHook> g_step_hook{nullptr};
inline void step(const char* name) {
  if (StepHook hook = g_step_hook.load(std::memory_order_relaxed); __builtin_expect(hook != nullptr, 0)) hook(name);
}
#define KVP_STEP(name) ::kvp::step(name)

}   // namespace kvp
