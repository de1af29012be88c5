// kvpool_litmus_sim: the litmus test (litmus.h) between hosts on simulated media, good ones and bad ones. Prints what each host measured, one line
// of JSON a host and run; tests/sim/test_litmus.py gives it to the same verdict as what is measured on real memory.
//
//   kvpool_litmus_sim MEDIUM [--seeds FROM:COUNT] [--hosts N] [--mutant FILE:LINE ACCESS]
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "litmus.h"
#include "sim/memory_sim.h"
#include "sim/random.h"

namespace kvp::sim {
namespace {

constexpr uint64_t kSteps = 6000000;
constexpr uint32_t kRounds = 8;

enum class Kind {
  Software,   // as the simulator has it: lines are seen after write-back and invalidate, or by chance
  Coherent,   // every store is seen by the next load
  Silent,     // nothing arrives
  OneWay,     // nothing of host 0 arrives at host 1
  Sticky,     // what host 1 has once loaded of another host's test line, it keeps for ever
};

class OddMemory {
 public:
  using Where = SimMemory::Where;
  OddMemory(Kind kind, SimMemory below, const Superblock& sb, uint32_t host) : kind_(kind), m_(below), sb_(&sb), host_(host) {}

  uint64_t load_word(Offset at) {
    if (never_seen(at)) return 0;
    if (kind_ == Kind::Coherent) invalidate(at, 8), m_.full_fence();
    return m_.load_word(at);
  }
  Line load_line(Offset at) {
    if (kind_ == Kind::Sticky && host_ == 1 && owner(at) != host_) {
      if (!std::exchange(kept_any_, true)) std::memcpy(kept_, m_.load_line(at).words, sizeof kept_);
      Line line;
      std::memcpy(line.words, kept_, sizeof kept_);
      return line;
    }
    Line line;
    for (uint32_t i = 0; i < 8; ++i) line.words[i] = load_word(at + i * 8);
    return line;
  }
  void store_word(Offset at, uint64_t value) {
    m_.store_word(at, value);
    if (kind_ == Kind::Coherent) m_.write_back(at, 8), m_.full_fence();
  }
  uint64_t stream_copy(Offset at, const Piece* pieces, uint32_t n) { return m_.stream_copy(at, pieces, n); }
  void write_back(Offset at, uint64_t bytes, Where where = Where::current()) { m_.write_back(at, bytes, where); }
  void invalidate(Offset at, uint64_t bytes, Where where = Where::current()) { m_.invalidate(at, bytes, where); }
  void invalidate_all(Offset at, uint64_t bytes, Where where = Where::current()) { m_.invalidate_all(at, bytes, where); }
  void store_fence(Where where = Where::current()) { m_.store_fence(where); }
  void full_fence(Where where = Where::current()) { m_.full_fence(where); }

  // The rest of a Memory is as it is below.
  uint16_t load_half(Offset at) { return m_.load_half(at); }
  void store_half(Offset at, uint16_t value) { m_.store_half(at, value); }
  bool cas_word(Offset at, uint64_t expected, uint64_t desired) { return m_.cas_word(at, expected, desired); }
  void add_word(Offset at, uint64_t value) { m_.add_word(at, value); }
  uint64_t copy_out(const Piece* pieces, uint32_t n, Offset at, Offset drop, uint64_t drop_bytes) {
    return m_.copy_out(pieces, n, at, drop, drop_bytes);
  }
  uint64_t checksum(Offset at, uint64_t bytes) { return m_.checksum(at, bytes); }
  void prefetch(Offset at) { m_.prefetch(at); }
  template <class F>
  bool guarded(F&& f) {
    return m_.guarded(static_cast<F&&>(f));
  }
  void yield() { m_.yield(); }
  bool without(const char* check, Where where = Where::current()) { return m_.without(check, where); }
  bool coherent() const { return false; }

 private:
  uint32_t owner(Offset at) const { return static_cast<uint32_t>((at - sb_->shard_offset) / sb_->shard_bytes); }
  bool never_seen(Offset at) const {
    return owner(at) != host_ && (kind_ == Kind::Silent || (kind_ == Kind::OneWay && host_ == 1 && owner(at) == 0));
  }
  Kind kind_;
  SimMemory m_;
  const Superblock* sb_;
  uint32_t host_;
  bool kept_any_ = false;
  uint64_t kept_[8] = {};
};
static_assert(Memory<OddMemory>);

class StepClock {   // a unit is a look at it
 public:
  uint64_t now() { return ++now_; }
  void pause() { ++now_; }

 private:
  uint64_t now_ = 0;
};

void print(uint64_t seed, uint32_t host, uint32_t peer, const LitmusResult& r) {
  static const char* const ends[] = {"measured", "silent", "deaf", "busy"};
  const auto n = [](uint64_t value) { return static_cast<unsigned long long>(value); };
  std::printf(
      "{\"seed\": %llu, \"by\": %u, \"host\": %u, \"end\": \"%s\", \"plain\": %llu, \"plain_stale\": %llu, \"plain_unseen\": %llu, "
      "\"flushed\": %llu, \"cached_stale\": %llu, \"flushed_lost\": %llu, \"ordered\": %llu, \"reordered\": %llu, \"abandoned\": %llu}\n",
      n(seed), host, peer, ends[static_cast<uint32_t>(r.end)], n(r.plain), n(r.plain_stale), n(r.plain_unseen), n(r.flushed), n(r.cached_stale),
      n(r.flushed_lost), n(r.ordered), n(r.reordered), n(r.abandoned));
}

Superblock plan(uint32_t hosts) {
  GeometryRequest r;
  r.region_bytes = 1 << 20, r.hosts = hosts, r.participants = 4, r.namespaces = 2, r.slot_bytes_min = 1024;
  r.coherence = Coherence::Software;
  return plan_region(r);
}

bool run(Kind kind, uint32_t hosts, uint64_t seed, const std::string& mutant, bool silent) {
  const Superblock sb = plan(hosts);
  RandomAdversary dice(seed);
  dice.be_even();
  Simulation sim(sb.region_bytes, hosts, dice);
  dice.begin(sim);
  sim.mutants[0] = mutant.empty() ? ~0u : Places::all().at(mutant);
  sim.medium.may_write = [&](uint32_t host, LineIndex line) {
    return (line * kLineBytes - sb.shard_offset) / sb.shard_bytes == host && line * kLineBytes < ShardMap(sb, HostIndex{host}).participant(0);
  };
  uint32_t finished = 0;
  for (uint32_t h = 0; h < hosts; ++h) {
    const uint32_t id = sim.add_process(h);
    sim.start(id, [&, h, id] {
      using L = Litmus<OddMemory, StepClock>;
      L litmus(OddMemory(kind, SimMemory(sim, id), sb, h), sb, HostIndex{h}, 1000 + h, {}, LitmusLimits{6000, 400, 100, 12});
      std::vector<uint64_t> seen(hosts), now(hosts);
      std::vector<bool> done(hosts);
      uint32_t missing = hosts - 1;
      litmus.beats(seen.data());
      for (uint32_t look = 0; missing != 0 && look < 40; ++look) {
        litmus.serve(1000);
        litmus.beats(now.data());
        for (uint32_t p = 0; p < hosts; ++p) {
          if (p == h || done[p] || now[p] == 0 || now[p] == seen[p]) continue;
          LitmusResult r;
          r.round_trips.reserve(kRounds);
          litmus.measure(HostIndex{p}, kRounds, r);
          if (r.end == LitmusResult::End::Busy && look + 1 < 40) continue;
          done[p] = true, --missing;
          if (!silent) print(seed, h, p, r);
        }
        seen = now;
      }
      for (uint32_t p = 0; p < hosts; ++p)
        if (p != h && !done[p] && !silent) print(seed, h, p, {});
      ++finished;
      for (uint32_t more = 0; finished < hosts && more < 400; ++more) litmus.serve(200);
      litmus.goodbye();
    });
  }
  try {
    sim.run(kSteps);
  } catch (const Abandoned&) {
  }
  if (!sim.violation.empty()) std::fprintf(stderr, "seed %llu: %s\n", static_cast<unsigned long long>(seed), sim.violation.c_str());
  return sim.violation.empty();
}

int usage() {
  std::fprintf(stderr,
               "usage: kvpool_litmus_sim software|coherent|silent|one-way|sticky [--seeds FROM:COUNT] [--hosts N] [--mutant 'FILE:LINE ACCESS']\n");
  return 2;
}

}   // namespace
}   // namespace kvp::sim

int main(int argc, char** argv) {
  using namespace kvp::sim;
  static const char* const names[] = {"software", "coherent", "silent", "one-way", "sticky"};
  int kind = -1;
  for (int k = 0; argc > 1 && k < 5; ++k)
    if (std::strcmp(argv[1], names[k]) == 0) kind = k;
  uint64_t from = 1, count = 20;
  uint32_t hosts = 2;
  std::string mutant;
  for (int i = 2; i < argc; i += 2) {
    if (i + 1 == argc) return usage();
    const std::string option = argv[i], value = argv[i + 1];
    if (option == "--mutant")
      mutant = value;
    else if (option == "--hosts")
      hosts = static_cast<uint32_t>(std::strtoul(value.c_str(), nullptr, 10));
    else if (option == "--seeds" && value.find(':') != std::string::npos)
      from = std::strtoull(value.c_str(), nullptr, 10), count = std::strtoull(value.c_str() + value.find(':') + 1, nullptr, 10);
    else
      return usage();
  }
  if (kind < 0 || hosts < 2 || hosts > kHosts) return usage();
  if (!mutant.empty()) {   // a place is known once somebody has passed it
    run(static_cast<Kind>(kind), hosts, from, "", true);
    if (Places::all().at(mutant) == ~0u) return std::fprintf(stderr, "nothing passes %s\n", mutant.c_str()), 2;
  }
  bool ok = true;
  for (uint64_t seed = from; seed < from + count; ++seed) ok = run(static_cast<Kind>(kind), hosts, seed, mutant, false) && ok;
  return ok ? 0 : 1;
}
