// The copy-and-checksum kernels, compiled once for each instruction set that is worth it (see CMakeLists.txt) and picked at start.
//
// Included by copy_kernel.cpp with KVP_KERNEL set to the name of the set. XXH_INLINE_ALL keeps each copy of the hash private.
#pragma once
#include <cstdint>

#include "memory.h"

namespace kvp {

struct CopyKernel {
  const char* name;
  uint64_t (*copy_in)(uint8_t* to, const Piece* pieces, uint32_t piece_count);
  uint64_t (*copy_out)(const Piece* pieces, uint32_t piece_count, const uint8_t* from, Ahead ahead);
  uint64_t (*checksum)(const uint8_t* bytes, uint64_t count);
};

extern const CopyKernel kCopyKernelBase;
#if defined(__x86_64__)
extern const CopyKernel kCopyKernelAvx2;
extern const CopyKernel kCopyKernelAvx512;
#endif

}   // namespace kvp
