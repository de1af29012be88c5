#include "memory_cpu.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace kvp {
namespace {

#if defined(__x86_64__)
__attribute__((target("clwb"))) void clwb(const void* line) { _mm_clwb(const_cast<void*>(line)); }
__attribute__((target("clflushopt"))) void clflushopt(const void* line) { _mm_clflushopt(const_cast<void*>(line)); }
void clflush(const void* line) { _mm_clflush(line); }

CacheOps pick() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  __get_cpuid_count(7, 0, &a, &b, &c, &d);
  const bool has_clflushopt = (b & 1u << 23) != 0, has_clwb = (b & 1u << 24) != 0;
  const LineOp drop = has_clflushopt ? clflushopt : clflush;
  const char* drop_name = has_clflushopt ? "clflushopt" : "clflush";
  return {has_clwb ? "clwb" : drop_name, drop_name, has_clwb ? clwb : drop, drop};
}
#elif defined(__aarch64__)
void dc_cvac(const void* line) { asm volatile("dc cvac, %0" ::"r"(line) : "memory"); }
void dc_civac(const void* line) { asm volatile("dc civac, %0" ::"r"(line) : "memory"); }
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
