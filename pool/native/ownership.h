// Which host owns a shard: claim lines, each in its claimer's own shard, with epochs that one arbiter gives. Source: PROTOCOL 5, 9.9, 9.10.
#pragma once
#include "attached.h"

namespace kvp {

struct Ownership {
  HostIndex owner;
  uint64_t epoch;   // 0: nobody ever claimed it, so it belongs to its home host
  bool settled;     // its owner has taken it over
};

inline uint64_t claim_checksum(Offset at, uint64_t epoch) { return epoch == 0 ? 0 : line_checksum(&epoch, sizeof epoch, at); }

// The epoch that a claim line stands for: of its two copies the one that the checksum vouches for. With one bit wrong, it is the right one.
inline uint64_t claimed_epoch(const ClaimLine& line, Offset at) {
  if (line.epoch == line.epoch_copy) return line.epoch;
  return line.epoch_checksum == claim_checksum(at, line.epoch)        ? line.epoch
         : line.epoch_checksum == claim_checksum(at, line.epoch_copy) ? line.epoch_copy
                                                                      : 0;
}
template <Memory M>
ClaimLine load_claim(Attached<M>& a, Offset at) {
  const Line line = a.mem.load_line(at);
  ClaimLine claim;
  std::memcpy(&claim, &line, sizeof claim);
  return claim;
}
// Has the owner done with taking it over? Either copy says so.
inline bool claim_settled(const ClaimLine& line, uint64_t epoch) { return line.settled_epoch == epoch || line.settled_copy == epoch; }

// Beside a claimer in the middle of its stores it may look so for a moment.
inline bool claim_damaged(const ClaimLine& line, Offset at) {
  return line.epoch != line.epoch_copy || line.settled_epoch != line.settled_copy || line.epoch_checksum != claim_checksum(at, line.epoch);
}

// The claimer's own line. Nothing is claimed before both copies are there, or one of them with its checksum.
template <Memory M>
void store_claim(Attached<M>& a, Offset at, uint64_t epoch) {
  a.mem.store_word(at + offsetof(ClaimLine, epoch_checksum), claim_checksum(at, epoch));
  a.mem.store_word(at + offsetof(ClaimLine, epoch), epoch);
  a.mem.store_word(at + offsetof(ClaimLine, epoch_copy), epoch);
}
template <Memory M>
void store_settled(Attached<M>& a, Offset at, uint64_t epoch) {
  a.mem.store_word(at + offsetof(ClaimLine, settled_epoch), epoch);
  a.mem.store_word(at + offsetof(ClaimLine, settled_copy), epoch);
}

// Claim lines of all hosts on this shard; those of other hosts are lines that this host never writes.
template <Memory M>
Ownership ownership_of(Attached<M>& a, const ShardMap& s) {
  M& m = a.mem;
  if (!m.coherent()) {
    for (uint32_t h = 0; h < a.hosts(); ++h)
      if (HostIndex{h} != a.self) m.invalidate(a.shard(HostIndex{h}).claim(s.host()), kLineBytes);   // fence.claim.inv
    m.full_fence();                                                                                  // fence.claim.fence
  }
  Ownership best{s.host(), 0, true};
  for (uint32_t h = 0; h < a.hosts(); ++h) {
    const Offset at = a.shard(HostIndex{h}).claim(s.host());
    const ClaimLine line = load_claim(a, at);
    const uint64_t epoch = claimed_epoch(line, at);
    if (epoch > best.epoch) best = {HostIndex{h}, epoch, claim_settled(line, epoch)};
  }
  return best;
}

// Nothing may be stored: another host has taken the shard that this host wrote so far, or this host has claimed it and is not done with taking it
// over (then a claim could be freed under the writer). Reads go on, as those of a remote host do.
template <Memory M>
bool fenced(Attached<M>& a, const ShardMap& s) {
  const Ownership o = ownership_of(a, s);
  const bool ours = o.owner == a.self && (a.mem.without("fence.settled") || o.settled);
  a.set_owned(s.host(), ours);
  return !ours;
}

// After all processes of this host have stopped writing to the shard: everything they left in this host's caches goes to the medium, and the new
// owner is told, so that it can audit.
template <Memory M>
void acknowledge(Attached<M>& a, const ShardMap& s, uint64_t epoch) {
  M& m = a.mem;
  m.invalidate_all(s.base(), a.end_of_extents(s) - s.base());   // zombie.flush
  m.store_fence();                                              // zombie.flush.fence
  m.store_word(a.home().acknowledgement(s.host()), epoch);
  m.write_back(a.home().acknowledgement(s.host()), kLineBytes);   // no fence: it may come late, nothing waits behind it
}

}   // namespace kvp
