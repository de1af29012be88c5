#include "digest.h"

#include <openssl/sha.h>

#include <cstring>

#include "copy_kernel.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace kvp {
namespace {

const CopyKernel& kernel() {
  static const CopyKernel& picked = [&]() -> const CopyKernel& {
#if defined(__x86_64__) && !defined(KVP_WORD_BY_WORD)
    if (__builtin_cpu_supports("avx512f")) return kCopyKernelAvx512;
    if (__builtin_cpu_supports("avx2")) return kCopyKernelAvx2;
#endif
    return kCopyKernelBase;
  }();
  return picked;
}

}   // namespace

uint64_t line_checksum(const void* bytes, uint64_t count, uint64_t seed) { return XXH3_64bits_withSeed(bytes, count, seed); }
uint64_t copy_in(uint8_t* to, const Piece* pieces, uint32_t piece_count) { return kernel().copy_in(to, pieces, piece_count); }
uint64_t copy_out(const Piece* pieces, uint32_t piece_count, const uint8_t* from, const Ahead& ahead) {
  return kernel().copy_out(pieces, piece_count, from, ahead);
}
uint64_t payload_checksum(const uint8_t* bytes, uint64_t count) { return kernel().checksum(bytes, count); }
const char* copy_kind() { return kernel().name; }

// The low-level interface is deprecated in OpenSSL 3, but it is the only one that lets a hashed prefix be copied without an allocation:
// tag and namespace digest fill the first 64-byte block exactly, so that a key costs one compression.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
void make_keys(const uint8_t* namespace_digest, const uint8_t* block_hashes, uint64_t count, uint8_t* keys) {
  static constexpr char kTag[32] = "kvpool block key, version 1";   // zero-padded to half a block
  SHA256_CTX prefix;
  SHA256_Init(&prefix);
  SHA256_Update(&prefix, kTag, sizeof kTag);
  SHA256_Update(&prefix, namespace_digest, 32);
  for (uint64_t i = 0; i < count; ++i) {
    SHA256_CTX c = prefix;
    SHA256_Update(&c, block_hashes + i * 32, 32);
    SHA256_Final(keys + i * kKeyBytes, &c);
  }
}
#pragma GCC diagnostic pop

}   // namespace kvp
