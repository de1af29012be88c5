// Which host owns a shard: claim lines, each in its claimer's own shard, with epochs that one arbiter gives. Source: PROTOCOL 5, 9.9, 9.10.
#pragma once
#include "attached.h"

namespace kvp {

struct Ownership {
  HostIndex owner;
  uint64_t epoch;   // 0: nobody ever claimed it, so it belongs to its home host
};

// Claim lines of all hosts on this shard; those of other hosts are lines that this host never writes.
template <Memory M>
Ownership ownership_of(Attached<M>& a, const ShardMap& s) {
  M& m = a.mem;
  if (!m.coherent()) {
    for (uint32_t h = 0; h < a.hosts(); ++h)
      if (HostIndex{h} != a.self) m.invalidate(a.shard(HostIndex{h}).claim(s.host()), kLineBytes);   // fence.claim.inv
    m.full_fence();                                                                                  // fence.claim.fence
  }
  Ownership best{s.host(), 0};
  for (uint32_t h = 0; h < a.hosts(); ++h) {
    const uint64_t epoch = m.load_word(a.shard(HostIndex{h}).claim(s.host()));
    if (epoch > best.epoch) best = {HostIndex{h}, epoch};
  }
  return best;
}

// Nothing may be stored: another host has taken the shard that this host wrote so far, or this host has claimed it and is not done with taking it
// over (then a claim could be freed under the writer). Reads go on, as those of a remote host do.
template <Memory M>
bool fenced(Attached<M>& a, const ShardMap& s) {
  const Ownership o = ownership_of(a, s);
  const bool settled =
      o.epoch == 0 || a.mem.without("fence.settled") || a.mem.load_word(a.home().claim(s.host()) + offsetof(ClaimLine, settled_epoch)) == o.epoch;
  const bool ours = o.owner == a.self && settled;
  a.set_owned(s.host(), ours);
  return !ours;
}

// After all processes of this host have stopped writing to the shard: everything they left in this host's caches goes to the medium, and the new
// owner is told, so that it can audit.
template <Memory M>
void acknowledge(Attached<M>& a, const ShardMap& s, uint64_t epoch) {
  M& m = a.mem;
  m.invalidate(s.base(), a.end_of_extents(s) - s.base());   // zombie.flush
  m.full_fence();                                           // zombie.flush.fence
  m.store_word(a.home().acknowledgement(s.host()), epoch);
  m.write_back(a.home().acknowledgement(s.host()), kLineBytes);
  m.store_fence();
}

}   // namespace kvp
