#include "memory_cpu.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace kvp {
namespace {

const char* first_line(const void* from) { return static_cast<const char*>(from) - reinterpret_cast<uintptr_t>(from) % kLineBytes; }

#if defined(__x86_64__)
__attribute__((target("clwb"))) void clwb(const void* from, uint64_t bytes) {
  for (const char* line = first_line(from); line < static_cast<const char*>(from) + bytes; line += kLineBytes) _mm_clwb(const_cast<char*>(line));
}
__attribute__((target("clflushopt"))) void clflushopt(const void* from, uint64_t bytes) {
  for (const char* line = first_line(from); line < static_cast<const char*>(from) + bytes; line += kLineBytes)
    _mm_clflushopt(const_cast<char*>(line));
}
void clflush(const void* from, uint64_t bytes) {
  for (const char* line = first_line(from); line < static_cast<const char*>(from) + bytes; line += kLineBytes) _mm_clflush(line);
}

CacheOps pick() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  __get_cpuid_count(7, 0, &a, &b, &c, &d);
  const bool has_clflushopt = (b & 1u << 23) != 0, has_clwb = (b & 1u << 24) != 0;
  const LinesOp drop = has_clflushopt ? clflushopt : clflush;
  const char* drop_name = has_clflushopt ? "clflushopt" : "clflush";
  return {has_clwb ? "clwb" : drop_name, drop_name, has_clwb ? clwb : drop, drop};
}
#elif defined(__aarch64__)
void dc_cvac(const void* from, uint64_t bytes) {
  for (const char* line = first_line(from); line < static_cast<const char*>(from) + bytes; line += kLineBytes)
    asm volatile("dc cvac, %0" ::"r"(line) : "memory");
}
void dc_civac(const void* from, uint64_t bytes) {
  for (const char* line = first_line(from); line < static_cast<const char*>(from) + bytes; line += kLineBytes)
    asm volatile("dc civac, %0" ::"r"(line) : "memory");
}
CacheOps pick() { return {"dc cvac", "dc civac", dc_cvac, dc_civac}; }
#else
#error "kvpool needs x86-64 or aarch64: on other processors it is not known how to write back and invalidate a line"
#endif

}   // namespace

const CacheOps& cache_ops() {
  static const CacheOps ops = pick();
  return ops;
}

}   // namespace kvp
