#include "copy_kernel.h"

#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace kvp {
namespace {

// Bytes that are hashed and copied while they are in the first-level cache. A quarter of the smallest one in use, and whole stripes of XXH3.
constexpr uint64_t kChunkBytes = 4096;

// Non-temporal stores: `to` 64-byte aligned, `count` a multiple of 64. They leave no dirty line behind that would have to be written back.
inline void stream(uint8_t* to, const uint8_t* from, uint64_t count) {
#if defined(__AVX512F__)
  for (uint64_t i = 0; i < count; i += 64) _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i), _mm512_loadu_si512(from + i));
#elif defined(__AVX2__)
  for (uint64_t i = 0; i < count; i += 64) {
    const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i));
    const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i + 32));
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i), a);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i + 32), b);
  }
#elif defined(__x86_64__)
  for (uint64_t i = 0; i < count; i += 16)
    _mm_stream_si128(reinterpret_cast<__m128i*>(to + i), _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i)));
#else
  std::memcpy(to, from, count);   // aarch64: written back by the caller (CpuMemory::stream_copy)
#endif
}

uint64_t copy_in(uint8_t* to, const Piece* pieces, uint32_t piece_count) {
  XXH3_state_t state;
  XXH3_64bits_reset(&state);
  alignas(64) uint8_t rest[kLineBytes];   // the line that a piece did not fill
  uint64_t rest_bytes = 0;
  for (uint32_t p = 0; p < piece_count; ++p) {
    const uint8_t* from = pieces[p].data;
    uint64_t left = pieces[p].bytes;
    if (rest_bytes != 0) {
      const uint64_t take = left < kLineBytes - rest_bytes ? left : kLineBytes - rest_bytes;
      XXH3_64bits_update(&state, from, take);
      std::memcpy(rest + rest_bytes, from, take);
      rest_bytes += take, from += take, left -= take;
      if (rest_bytes < kLineBytes) continue;
      stream(to, rest, kLineBytes);
      to += kLineBytes, rest_bytes = 0;
    }
    while (left >= kLineBytes) {
      const uint64_t chunk = left < kChunkBytes ? left & ~(kLineBytes - 1) : kChunkBytes;
      XXH3_64bits_update(&state, from, chunk);
      stream(to, from, chunk);
      to += chunk, from += chunk, left -= chunk;
    }
    if (left != 0) {
      XXH3_64bits_update(&state, from, left);
      std::memcpy(rest, from, left);
      rest_bytes = left;
    }
  }
  if (rest_bytes != 0) {
    std::memset(rest + rest_bytes, 0, kLineBytes - rest_bytes);
    stream(to, rest, kLineBytes);
  }
  return XXH3_64bits_digest(&state);
}

uint64_t copy_out(const Piece* pieces, uint32_t piece_count, const uint8_t* from) {
  XXH3_state_t state;
  XXH3_64bits_reset(&state);
  for (uint32_t p = 0; p < piece_count; ++p) {
    uint8_t* to = pieces[p].data;
    for (uint64_t left = pieces[p].bytes; left != 0;) {
      const uint64_t chunk = left < kChunkBytes ? left : kChunkBytes;
      std::memcpy(to, from, chunk);
      XXH3_64bits_update(&state, to, chunk);   // what the caller got, not what the medium holds
      to += chunk, from += chunk, left -= chunk;
    }
  }
  return XXH3_64bits_digest(&state);
}

uint64_t checksum(const uint8_t* bytes, uint64_t count) { return XXH3_64bits(bytes, count); }

}  // namespace

#if defined(__AVX512F__)
const CopyKernel kCopyKernelAvx512{"avx512", copy_in, copy_out, checksum};
#elif defined(__AVX2__)
const CopyKernel kCopyKernelAvx2{"avx2", copy_in, copy_out, checksum};
#else
const CopyKernel kCopyKernelBase{
#if defined(__aarch64__)
    "neon",
#else
    "base",
#endif
    copy_in, copy_out, checksum};
#endif

}  // namespace kvp
