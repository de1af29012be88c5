// Checksums of payload, headers and superblock (XXH3-64), and keys (SHA-256).
//
// Copy and checksum are one pass: the source is read from memory once, in pieces that stay in the first-level cache while both the hash and
// the copy see them. On a load the *destination* is hashed, so the checksum vouches for what the caller got and not for what lay in the medium.
#pragma once
#include <cstdint>

#include "memory.h"

// ThreadSanitizer has to see every access to a medium, and that those that race are meant to: they are atomics, word by word.
#if defined(__SANITIZE_THREAD__)
#define KVP_WORD_BY_WORD
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define KVP_WORD_BY_WORD
#endif
#endif

namespace kvp {

// Seeded with where the bytes belong, so that a right line at a wrong place does not pass.
uint64_t line_checksum(const void* bytes, uint64_t count, uint64_t seed);

// Non-temporal copy of `pieces` to `to` (64-byte aligned; the last line is padded with zeros). The caller fences.
uint64_t copy_in(uint8_t* to, const Piece* pieces, uint32_t piece_count);
// Copy of `from` into `pieces`. The lines `ahead` are dropped in the first half of it.
uint64_t copy_out(const Piece* pieces, uint32_t piece_count, const uint8_t* from, const Ahead& ahead = {});
uint64_t payload_checksum(const uint8_t* bytes, uint64_t count);

// keys[i] = SHA-256(format tag and version, namespace digest, block hash i); 32 bytes each. Source: DESIGN 2.
void make_keys(const uint8_t* namespace_digest, const uint8_t* block_hashes, uint64_t count, uint8_t* keys);

const char* copy_kind();   // the instruction set picked at start, for the benchmark's record

}   // namespace kvp
