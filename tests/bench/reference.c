// What the pool is measured against, without the interpreter in between: memcpy of the same buffers, and one memory access after the other.
#include <stdint.h>
#include <string.h>

// n pieces of `bytes`, from[i] to to[i].
void copy_pieces(const uint64_t* to, const uint64_t* from, uint64_t bytes, uint64_t n) {
  for (uint64_t i = 0; i < n; ++i) memcpy((void*)(uintptr_t)to[i], (const void*)(uintptr_t)from[i], bytes);
}

// The index of the first piece that differs, or n.
uint64_t first_difference(const uint64_t* a, const uint64_t* b, uint64_t bytes, uint64_t n) {
  for (uint64_t i = 0; i < n; ++i)
    if (memcmp((const void*)(uintptr_t)a[i], (const void*)(uintptr_t)b[i], bytes) != 0) return i;
  return n;
}

// A cycle through all lines in an order that no prefetcher guesses: line i holds the number of the line after it.
void make_cycle(uint64_t* lines, uint32_t* order, uint64_t n, uint64_t seed) {
  for (uint64_t i = 0; i < n; ++i) order[i] = (uint32_t)i;
  for (uint64_t i = n - 1; i > 0; --i) {
    seed ^= seed << 13, seed ^= seed >> 7, seed ^= seed << 17;
    const uint64_t j = seed % (i + 1);
    const uint32_t t = order[i];
    order[i] = order[j], order[j] = t;
  }
  for (uint64_t i = 0; i < n; ++i) lines[order[i] * 8ULL] = order[(i + 1) % n];
}

// `steps` accesses, each of which needs the one before. Returns where it ended.
uint64_t follow(const uint64_t* lines, uint64_t start, uint64_t steps) {
  uint64_t at = start;
  for (uint64_t i = 0; i < steps; ++i) at = lines[at * 8];
  return at;
}
