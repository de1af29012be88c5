#include "copy_kernel.h"

#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace kvp {
namespace {

#if defined(__SANITIZE_ADDRESS__)
constexpr bool kStreams = false;   // GCC's AddressSanitizer does not see a non-temporal store
#else
constexpr bool kStreams = true;
#endif

// ---- one register of 64-bit lanes, for each instruction set ----
#if defined(__AVX512F__)
struct Vec {
  __m512i v;
  static Vec load(const void* p) { return {_mm512_loadu_si512(p)}; }
  void store(void* p) const { _mm512_storeu_si512(p, v); }
  void stream(void* p) const { _mm512_stream_si512(static_cast<__m512i*>(p), v); }
  Vec operator^(Vec o) const { return {_mm512_xor_si512(v, o.v)}; }
  Vec operator+(Vec o) const { return {_mm512_add_epi64(v, o.v)}; }
  Vec low_times_high() const { return {_mm512_mul_epu32(v, _mm512_srli_epi64(v, 32))}; }
  Vec swap_pairs() const { return {_mm512_shuffle_epi32(v, _MM_PERM_BADC)}; }
  Vec shift_right_47() const { return {_mm512_srli_epi64(v, 47)}; }
  Vec times(uint32_t p) const {
    const __m512i prime = _mm512_set1_epi64(p);
    return {_mm512_add_epi64(_mm512_mul_epu32(v, prime), _mm512_slli_epi64(_mm512_mul_epu32(_mm512_srli_epi64(v, 32), prime), 32))};
  }
};
#elif defined(__AVX2__)
struct Vec {
  __m256i v;
  static Vec load(const void* p) { return {_mm256_loadu_si256(static_cast<const __m256i*>(p))}; }
  void store(void* p) const { _mm256_storeu_si256(static_cast<__m256i*>(p), v); }
  void stream(void* p) const { _mm256_stream_si256(static_cast<__m256i*>(p), v); }
  Vec operator^(Vec o) const { return {_mm256_xor_si256(v, o.v)}; }
  Vec operator+(Vec o) const { return {_mm256_add_epi64(v, o.v)}; }
  Vec low_times_high() const { return {_mm256_mul_epu32(v, _mm256_srli_epi64(v, 32))}; }
  Vec swap_pairs() const { return {_mm256_shuffle_epi32(v, _MM_SHUFFLE(1, 0, 3, 2))}; }
  Vec shift_right_47() const { return {_mm256_srli_epi64(v, 47)}; }
  Vec times(uint32_t p) const {
    const __m256i prime = _mm256_set1_epi64x(p);
    return {_mm256_add_epi64(_mm256_mul_epu32(v, prime), _mm256_slli_epi64(_mm256_mul_epu32(_mm256_srli_epi64(v, 32), prime), 32))};
  }
};
#elif defined(__x86_64__)
struct Vec {
  __m128i v;
  static Vec load(const void* p) { return {_mm_loadu_si128(static_cast<const __m128i*>(p))}; }
  void store(void* p) const { _mm_storeu_si128(static_cast<__m128i*>(p), v); }
  void stream(void* p) const { _mm_stream_si128(static_cast<__m128i*>(p), v); }
  Vec operator^(Vec o) const { return {_mm_xor_si128(v, o.v)}; }
  Vec operator+(Vec o) const { return {_mm_add_epi64(v, o.v)}; }
  Vec low_times_high() const { return {_mm_mul_epu32(v, _mm_srli_epi64(v, 32))}; }
  Vec swap_pairs() const { return {_mm_shuffle_epi32(v, _MM_SHUFFLE(1, 0, 3, 2))}; }
  Vec shift_right_47() const { return {_mm_srli_epi64(v, 47)}; }
  Vec times(uint32_t p) const {
    const __m128i prime = _mm_set1_epi64x(p);
    return {_mm_add_epi64(_mm_mul_epu32(v, prime), _mm_slli_epi64(_mm_mul_epu32(_mm_srli_epi64(v, 32), prime), 32))};
  }
};
#elif defined(__aarch64__)
struct Vec {
  uint64x2_t v;
  static Vec load(const void* p) { return {vreinterpretq_u64_u8(vld1q_u8(static_cast<const uint8_t*>(p)))}; }
  void store(void* p) const { vst1q_u8(static_cast<uint8_t*>(p), vreinterpretq_u8_u64(v)); }
  void stream(void* p) const { store(p); }   // no store is known to bypass the cache: CpuMemory::stream_copy writes the lines back
  Vec operator^(Vec o) const { return {veorq_u64(v, o.v)}; }
  Vec operator+(Vec o) const { return {vaddq_u64(v, o.v)}; }
  Vec low_times_high() const { return {vmull_u32(vmovn_u64(v), vshrn_n_u64(v, 32))}; }
  Vec swap_pairs() const { return {vextq_u64(v, v, 1)}; }
  Vec shift_right_47() const { return {vshrq_n_u64(v, 47)}; }
  Vec times(uint32_t p) const {
    const uint32x2_t prime = vdup_n_u32(p);
    return {vaddq_u64(vmull_u32(vmovn_u64(v), prime), vshlq_n_u64(vmull_u32(vshrn_n_u64(v, 32), prime), 32))};
  }
};
#endif

// ---- XXH3-64 of more than 240 bytes in whole 64-byte stripes, with the copy in the same loop ----
//
// The library hashes memory; here the value that is hashed is the very register that is stored, so that the checksum vouches for what was
// written although the source may change meanwhile, and the destination is not read. Own code for that reason only: the result is XXH3-64 of the
// specification (github.com/Cyan4973/xxHash, doc/xxhash_spec.md, "XXH3 algorithm overview"), and the tests compare it with the library.

constexpr uint64_t kStripeBytes = 64, kStripesPerBlock = 16, kShortBytes = 240;
constexpr uint32_t kVecs = kStripeBytes / sizeof(Vec);
constexpr uint32_t kPrime32_1 = 0x9E3779B1U, kPrime32_2 = 0x85EBCA77U, kPrime32_3 = 0xC2B2AE3DU;
constexpr uint64_t kPrime64_1 = 0x9E3779B185EBCA87ULL, kPrime64_2 = 0xC2B2AE3D27D4EB4FULL, kPrime64_3 = 0x165667B19E3779F9ULL,
                   kPrime64_4 = 0x85EBCA77C2B2AE63ULL, kPrime64_5 = 0x27D4EB2F165667C5ULL;
constexpr uint64_t kSecretBytes = 192, kSecretLastStripe = kSecretBytes - kStripeBytes - 7, kSecretScramble = kSecretBytes - kStripeBytes,
                   kSecretMerge = 11;
const uint8_t* const kSecret = XXH3_kSecret;   // the default secret of the specification

enum class Put { Store, Stream };

// Twice as fast as the copy: at the end of it the processor has long done with the lines that left the cache, and the fence finds nothing to wait for.
inline void drop_beside(Ahead& ahead, uint64_t copied_bytes) {
  if (ahead.bytes == 0) return;
  const uint64_t bytes = ahead.bytes < 2 * copied_bytes ? ahead.bytes : 2 * copied_bytes;
  ahead.drop(ahead.from, bytes);
  ahead.from += bytes, ahead.bytes -= bytes;
}
inline void drop_rest(Ahead& ahead) { drop_beside(ahead, ahead.bytes); }

class StripeHash {
 public:
  explicit StripeHash(uint64_t total_bytes) : total_bytes_(total_bytes), stripes_left_(total_bytes / kStripeBytes) {
    alignas(64) static constexpr uint64_t kInit[8] = {kPrime32_3, kPrime64_1, kPrime64_2, kPrime64_3, kPrime64_4, kPrime32_2, kPrime64_5, kPrime32_1};
    for (uint32_t i = 0; i < kVecs; ++i) acc_[i] = Vec::load(reinterpret_cast<const uint8_t*>(kInit) + i * sizeof(Vec));
  }

  template <Put put>
  void copy(uint8_t* to, const uint8_t* from, uint64_t bytes, Ahead& ahead) {
    Vec acc[kVecs];
    for (uint32_t i = 0; i < kVecs; ++i) acc[i] = acc_[i];
    uint64_t n = bytes / kStripeBytes;
    while (n != 0) {
      if (in_block_ == 0 && n > kStripesPerBlock && stripes_left_ > kStripesPerBlock) {   // a whole block: no test a stripe
        for (uint32_t s = 0; s < kStripesPerBlock; ++s) stripe<put>(acc, to + s * kStripeBytes, from + s * kStripeBytes, kSecret + s * 8ULL);
        scramble(acc);
        drop_beside(ahead, kStripesPerBlock * kStripeBytes);
        to += kStripesPerBlock * kStripeBytes, from += kStripesPerBlock * kStripeBytes;
        n -= kStripesPerBlock, stripes_left_ -= kStripesPerBlock;
        continue;
      }
      --n;
      const bool last = --stripes_left_ == 0;
      stripe<put>(acc, to, from, last ? kSecret + kSecretLastStripe : kSecret + in_block_ * 8);
      to += kStripeBytes, from += kStripeBytes;
      if (++in_block_ == kStripesPerBlock) {
        in_block_ = 0;
        if (!last) scramble(acc);
      }
    }
    for (uint32_t i = 0; i < kVecs; ++i) acc_[i] = acc[i];
  }

  uint64_t digest() const {
    uint64_t a[8];
    for (uint32_t i = 0; i < kVecs; ++i) acc_[i].store(reinterpret_cast<uint8_t*>(a) + i * sizeof(Vec));
    uint64_t h = total_bytes_ * kPrime64_1;
    for (uint64_t i = 0; i < 4; ++i) {
      uint64_t s[2];
      std::memcpy(s, kSecret + kSecretMerge + 16 * i, sizeof s);
      const auto product = static_cast<unsigned __int128>(a[2 * i] ^ s[0]) * (a[2 * i + 1] ^ s[1]);
      h += static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
    }
    h ^= h >> 37;
    h *= 0x165667919E3779F9ULL;
    return h ^ h >> 32;
  }

 private:
  template <Put put>
  static void stripe(Vec* acc, uint8_t* to, const uint8_t* from, const uint8_t* secret) {
    for (uint32_t i = 0; i < kVecs; ++i) {
      const Vec data = Vec::load(from + i * sizeof(Vec));
      if constexpr (put == Put::Stream && kStreams)
        data.stream(to + i * sizeof(Vec));
      else
        data.store(to + i * sizeof(Vec));
      const Vec keyed = data ^ Vec::load(secret + i * sizeof(Vec));
      acc[i] = acc[i] + data.swap_pairs() + keyed.low_times_high();
    }
  }
  static void scramble(Vec* acc) {
    for (uint32_t i = 0; i < kVecs; ++i)
      acc[i] = (acc[i] ^ acc[i].shift_right_47() ^ Vec::load(kSecret + kSecretScramble + i * sizeof(Vec))).times(kPrime32_1);
  }

  uint64_t total_bytes_;
  uint64_t stripes_left_;
  uint64_t in_block_ = 0;
  Vec acc_[kVecs];
};

struct Shape {
  uint64_t bytes = 0;
  bool whole_stripes = true;   // every piece
};
Shape shape_of(const Piece* pieces, uint32_t piece_count) {
  Shape s;
  for (uint32_t p = 0; p < piece_count; ++p) {
    s.bytes += pieces[p].bytes;
    s.whole_stripes = s.whole_stripes && pieces[p].bytes % kStripeBytes == 0;
  }
  s.whole_stripes = s.whole_stripes && s.bytes > kShortBytes;
  return s;
}

// Bytes that the general path hashes and copies while they are in the first-level cache.
constexpr uint64_t kChunkBytes = 4096;

inline void stream_lines(uint8_t* to, const uint8_t* from, uint64_t count) {
  for (uint64_t i = 0; i < count; i += sizeof(Vec)) Vec::load(from + i).stream(to + i);
}

// Pieces that end anywhere: the library's streaming hash beside the copy; lines that a piece did not fill are put together first.
uint64_t copy_in_any(uint8_t* to, const Piece* pieces, uint32_t piece_count) {
  XXH3_state_t state;
  XXH3_64bits_reset(&state);
  alignas(64) uint8_t rest[kLineBytes];
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
      stream_lines(to, rest, kLineBytes);
      to += kLineBytes, rest_bytes = 0;
    }
    while (left >= kLineBytes) {
      const uint64_t chunk = left < kChunkBytes ? left & ~(kLineBytes - 1) : kChunkBytes;
      XXH3_64bits_update(&state, from, chunk);
      stream_lines(to, from, chunk);
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
    stream_lines(to, rest, kLineBytes);
  }
  return XXH3_64bits_digest(&state);
}

uint64_t copy_out_any(const Piece* pieces, uint32_t piece_count, const uint8_t* from, Ahead ahead) {
  XXH3_state_t state;
  XXH3_64bits_reset(&state);
  for (uint32_t p = 0; p < piece_count; ++p) {
    uint8_t* to = pieces[p].data;
    for (uint64_t left = pieces[p].bytes; left != 0;) {
      const uint64_t chunk = left < kChunkBytes ? left : kChunkBytes;
      std::memcpy(to, from, chunk);
      XXH3_64bits_update(&state, to, chunk);   // what the caller got, not what the medium holds
      drop_beside(ahead, chunk);
      to += chunk, from += chunk, left -= chunk;
    }
  }
  drop_rest(ahead);
  return XXH3_64bits_digest(&state);
}

uint64_t copy_in(uint8_t* to, const Piece* pieces, uint32_t piece_count) {
  const Shape shape = shape_of(pieces, piece_count);
  if (!shape.whole_stripes) return copy_in_any(to, pieces, piece_count);
  StripeHash hash(shape.bytes);
  Ahead none;
  for (uint32_t p = 0; p < piece_count; ++p) {
    hash.copy<Put::Stream>(to, pieces[p].data, pieces[p].bytes, none);
    to += pieces[p].bytes;
  }
  return hash.digest();
}

uint64_t copy_out(const Piece* pieces, uint32_t piece_count, const uint8_t* from, Ahead ahead) {
  const Shape shape = shape_of(pieces, piece_count);
  if (!shape.whole_stripes) return copy_out_any(pieces, piece_count, from, ahead);
  StripeHash hash(shape.bytes);
  for (uint32_t p = 0; p < piece_count; ++p) {
    // Non-temporal stores spare the read of the destination's lines; they need its alignment.
    if (reinterpret_cast<uintptr_t>(pieces[p].data) % sizeof(Vec) == 0)
      hash.copy<Put::Stream>(pieces[p].data, from, pieces[p].bytes, ahead);
    else
      hash.copy<Put::Store>(pieces[p].data, from, pieces[p].bytes, ahead);
    from += pieces[p].bytes;
  }
  drop_rest(ahead);
#if defined(__x86_64__)
  _mm_sfence();   // the block may be handed to another thread
#endif
  return hash.digest();
}

uint64_t checksum(const uint8_t* bytes, uint64_t count) { return XXH3_64bits(bytes, count); }

}   // namespace

#if defined(__AVX512F__)
const CopyKernel kCopyKernelAvx512{"avx512", copy_in, copy_out, checksum};
#elif defined(__AVX2__)
const CopyKernel kCopyKernelAvx2{"avx2", copy_in, copy_out, checksum};
#elif defined(__aarch64__)
const CopyKernel kCopyKernelBase{"neon", copy_in, copy_out, checksum};
#else
const CopyKernel kCopyKernelBase{"sse2", copy_in, copy_out, checksum};
#endif

}   // namespace kvp
