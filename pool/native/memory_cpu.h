// The real Memory: a mapped region and the processor's own cache instructions, picked once at start.
#pragma once
#include <atomic>
#include <cstdint>
#include <cstring>
#include <thread>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "digest.h"
#include "fault_guard.h"
#include "memory.h"

namespace kvp {

using LinesOp = void (*)(const void* from, uint64_t bytes);   // of every line that has a byte of the range
struct CacheOps {
  const char* write_back_name;
  const char* invalidate_name;
  LinesOp write_back;   // CLWB, else CLFLUSHOPT, else CLFLUSH; aarch64 DC CVAC
  LinesOp invalidate;   // CLFLUSHOPT, else CLFLUSH (never CLWB: it may keep the line); aarch64 DC CIVAC
};
const CacheOps& cache_ops();

class CpuMemory {
 public:
  CpuMemory(uint8_t* base, bool coherent) : base_(base), coherent_(coherent) {}

  uint64_t load_word(Offset at) const { return __atomic_load_n(word(at), __ATOMIC_ACQUIRE); }
  uint16_t load_half(Offset at) const { return __atomic_load_n(reinterpret_cast<const uint16_t*>(base_ + at), __ATOMIC_RELAXED); }
  Line load_line(Offset at) const {
    Line line;
#if defined(__x86_64__) && !defined(KVP_WORD_BY_WORD)
    // Four loads in order, each word whole. Eight narrow ones double the time of a lookup: what reads the copy with wide loads waits for the stores.
    __m128i a, b, c, d;
    asm volatile("movdqa (%4), %0\n\tmovdqa 16(%4), %1\n\tmovdqa 32(%4), %2\n\tmovdqa 48(%4), %3"
                 : "=&x"(a), "=&x"(b), "=&x"(c), "=&x"(d)
                 : "r"(base_ + at)
                 : "memory");
    std::memcpy(&line.words[0], &a, 16);
    std::memcpy(&line.words[2], &b, 16);
    std::memcpy(&line.words[4], &c, 16);
    std::memcpy(&line.words[6], &d, 16);
#else
    for (uint32_t i = 0; i < 8; ++i) line.words[i] = __atomic_load_n(word(at) + i, __ATOMIC_ACQUIRE);
#endif
    return line;
  }
  void store_word(Offset at, uint64_t value) { __atomic_store_n(word(at), value, __ATOMIC_RELEASE); }
  void store_half(Offset at, uint16_t value) { __atomic_store_n(reinterpret_cast<uint16_t*>(base_ + at), value, __ATOMIC_RELAXED); }
  bool cas_word(Offset at, uint64_t expected, uint64_t desired) {
    return __atomic_compare_exchange_n(word(at), &expected, desired, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
  }
  void add_word(Offset at, uint64_t value) { __atomic_fetch_add(word(at), value, __ATOMIC_RELAXED); }

  uint64_t stream_copy(Offset at, const Piece* pieces, uint32_t n) {
    const uint64_t checksum = kvp::copy_in(base_ + at, pieces, n);
#if defined(__aarch64__)
    uint64_t bytes = 0;   // no non-temporal store that is known to bypass the cache: write the lines back instead
    for (uint32_t i = 0; i < n; ++i) bytes += pieces[i].bytes;
    write_back(at, bytes);
#endif
    return checksum;
  }
  uint64_t copy_out(const Piece* pieces, uint32_t n, Offset at, Offset drop, uint64_t drop_bytes) const {
    return kvp::copy_out(pieces, n, base_ + at, {base_ + drop, coherent_ ? 0 : drop_bytes, cache_ops().invalidate});
  }
  uint64_t checksum(Offset at, uint64_t bytes) const { return payload_checksum(base_ + at, bytes); }

  void write_back(Offset at, uint64_t bytes) {
    if (!coherent_) cache_ops().write_back(base_ + at, bytes);
  }
  void invalidate(Offset at, uint64_t bytes) {
    if (!coherent_) cache_ops().invalidate(base_ + at, bytes);
  }
  void invalidate_all(Offset at, uint64_t bytes) {
    constexpr uint64_t kAtOnce = 1 << 20, kPage = 4096;   // a page that the kernel took away faults as a whole
    if (coherent_) return;
    const auto each = [&](Offset from, Offset to, uint64_t step, auto f) {
      for (Offset next = 0; from < to; from = next) {
        next = (from / step + 1) * step;
        f(from, (next < to ? next : to) - from);
      }
    };
    each(at, at + bytes, kAtOnce, [&](Offset from, uint64_t n) {
      if (guarded([&] { invalidate(from, n); })) return;
      each(from, from + n, kPage, [&](Offset page, uint64_t left) { guarded([&] { invalidate(page, left); }); });
    });
  }
  // Inline always: GCC sees no effect in a function that only prefetches, and drops calls of it.
  [[gnu::always_inline]] void prefetch(Offset at) const { __builtin_prefetch(base_ + at); }
  void store_fence() {
#if defined(__x86_64__)
    _mm_sfence();
#elif defined(__aarch64__)
    asm volatile("dsb st" ::: "memory");   // orders DC CVAC too; DMB does not
#endif
  }
  void full_fence() {
#if defined(__x86_64__)
    _mm_mfence();
#elif defined(__aarch64__)
    asm volatile("dsb sy" ::: "memory");
#endif
  }
  template <class F>
  bool guarded(F&& f) {
    return fault_guarded(static_cast<F&&>(f));
  }
  void yield() const { std::this_thread::yield(); }
  static constexpr bool without(const char*) { return false; }
  bool coherent() const { return coherent_; }
  uint8_t* base() const { return base_; }

 private:
  uint64_t* word(Offset at) const { return reinterpret_cast<uint64_t*>(base_ + at); }

  uint8_t* base_;
  bool coherent_;
};
static_assert(Memory<CpuMemory>);

}   // namespace kvp
