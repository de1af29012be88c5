// Who is evicted: one small struct a policy, pure over what the caller sampled.
//
// The policy is settled by measurement on real traces later; this one is LRU by sampling: a few random slots at a time, the best candidates of
// earlier samples kept, the oldest of all goes. Ages come from touch rows (layout.h), in ticks of the shard's clock.
#pragma once
#include <cstdint>

#include "layout.h"

namespace kvp {

struct Candidate {
  SlotId slot;
  SlotWord word;
  uint16_t age = 0;   // ticks since the last touch by any host
};

struct SampledLru {
  static constexpr uint32_t kSamples = 16;   // more: closer to LRU, but each is a cache miss in the middle of a store
  static constexpr uint32_t kPool = 24;

  void offer(const Candidate& c) {
    for (uint32_t i = 0; i < n_; ++i)
      if (pool_[i].slot == c.slot) {
        pool_[i] = c;
        return;
      }
    if (n_ < kPool) {
      pool_[n_++] = c;
      return;
    }
    uint32_t youngest = 0;
    for (uint32_t i = 1; i < n_; ++i)
      if (pool_[i].age < pool_[youngest].age) youngest = i;
    if (pool_[youngest].age < c.age) pool_[youngest] = c;
  }
  // The oldest candidate; false when there is none. What is taken may have changed since: the caller's CAS decides.
  bool take(Candidate& out) {
    if (n_ == 0) return false;
    uint32_t oldest = 0;
    for (uint32_t i = 1; i < n_; ++i)
      if (pool_[i].age > pool_[oldest].age) oldest = i;
    out = pool_[oldest];
    pool_[oldest] = pool_[--n_];
    return true;
  }
  void clear() { n_ = 0; }
  uint32_t size() const { return n_; }

 private:
  Candidate pool_[kPool];
  uint32_t n_ = 0;
};

}   // namespace kvp
