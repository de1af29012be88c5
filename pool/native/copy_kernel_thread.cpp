// The kernel of builds with ThreadSanitizer.
//
// Payload is read while others write it, and the checksum decides whether what was read counts (PROTOCOL 2). The wide loads and stores of copy_kernel.cpp
// cannot say so to a compiler; here each word of the medium is a relaxed atomic. What lies in the caller's memory is read and written plainly, so a
// race there is reported.
#include <cstring>

#include "copy_kernel.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace kvp {
namespace {

constexpr uint32_t kWords = kLineBytes / 8;

void load_line(const uint8_t* from, uint64_t* line) {
  for (uint32_t i = 0; i < kWords; ++i) line[i] = __atomic_load_n(reinterpret_cast<const uint64_t*>(from) + i, __ATOMIC_RELAXED);
}
void store_line(uint8_t* to, const uint64_t* line) {
  for (uint32_t i = 0; i < kWords; ++i) __atomic_store_n(reinterpret_cast<uint64_t*>(to) + i, line[i], __ATOMIC_RELAXED);
}

uint64_t copy_in(uint8_t* to, const Piece* pieces, uint32_t piece_count) {
  XXH3_state_t state;
  XXH3_64bits_reset(&state);
  uint64_t line[kWords];
  auto* bytes = reinterpret_cast<uint8_t*>(line);
  uint64_t filled = 0;
  for (uint32_t p = 0; p < piece_count; ++p)
    for (uint64_t done = 0; done < pieces[p].bytes;) {
      const uint64_t left = pieces[p].bytes - done, room = kLineBytes - filled, take = left < room ? left : room;
      std::memcpy(bytes + filled, pieces[p].data + done, take);
      XXH3_64bits_update(&state, bytes + filled, take);   // what is stored: the caller's memory may change meanwhile
      done += take, filled += take;
      if (filled < kLineBytes) continue;
      store_line(to, line);
      to += kLineBytes, filled = 0;
    }
  if (filled != 0) {
    std::memset(bytes + filled, 0, kLineBytes - filled);
    store_line(to, line);
  }
  return XXH3_64bits_digest(&state);
}

uint64_t copy_out(const Piece* pieces, uint32_t piece_count, const uint8_t* from, Ahead ahead) {
  if (ahead.bytes != 0) ahead.drop(ahead.from, ahead.bytes);
  XXH3_state_t state;
  XXH3_64bits_reset(&state);
  uint64_t line[kWords];
  const auto* bytes = reinterpret_cast<const uint8_t*>(line);
  uint64_t used = kLineBytes;
  for (uint32_t p = 0; p < piece_count; ++p)
    for (uint64_t done = 0; done < pieces[p].bytes;) {
      if (used == kLineBytes) {
        load_line(from, line);
        from += kLineBytes, used = 0;
      }
      const uint64_t left = pieces[p].bytes - done, room = kLineBytes - used, take = left < room ? left : room;
      std::memcpy(pieces[p].data + done, bytes + used, take);
      XXH3_64bits_update(&state, pieces[p].data + done, take);   // what the caller got
      done += take, used += take;
    }
  return XXH3_64bits_digest(&state);
}

uint64_t checksum(const uint8_t* from, uint64_t count) {
  XXH3_state_t state;
  XXH3_64bits_reset(&state);
  uint64_t line[kWords];
  for (uint64_t done = 0; done < count; done += kLineBytes) {
    load_line(from + done, line);
    XXH3_64bits_update(&state, line, count - done < kLineBytes ? count - done : kLineBytes);
  }
  return XXH3_64bits_digest(&state);
}

}   // namespace

const CopyKernel kCopyKernelBase{"words", copy_in, copy_out, checksum};

}   // namespace kvp
