// kvpool_sim: scenarios of the real protocol code on a simulated non-coherent medium.
//
//   kvpool_sim [--scenario NAME] [--seeds FROM:COUNT]     random schedules; a failure prints the command that repeats it
//   kvpool_sim --places NAME                              every access of the protocol that the scenario passes (each one can be left out)
//   kvpool_sim --scenario NAME --mutant PLACE             the scenario without that access
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "sim/world.h"

namespace kvp::sim {
namespace {

constexpr uint64_t kSteps = 400000;

struct Scenario {
  const char* name;
  const char* what;
  void (*run)(World&);
  WorldOptions options;
};

void evict(World& w) {
  w.spawn_writer(0, 0, 4);
  w.spawn_writer(0, 1, 3);
  w.spawn_reader(1, 6, true);
  w.spawn_reader(0, 3, true);
  w.finish(kSteps);
  w.check_quiet(0, kSteps);
}

void sizes(World& w) {   // two block sizes take one extent from each other
  w.spawn_writer(0, 0, 3, kBlockBytes);
  w.spawn_writer(0, 1, 3, 2 * kBlockBytes);
  w.spawn_reader(1, 5, false);
  w.finish(kSteps);
  w.check_quiet(0, kSteps);
}

void kill_at_any_step(World& w, uint32_t victim) {
  const uint64_t when = w.sim.medium.choices.below(900);
  uint64_t step = 0;
  const bool done = w.sim.run(kSteps, [&] {
    if (step++ == when && w.sim.running(victim)) {
      w.sim.medium.full_fence(victim);   // the kernel's exit path is long and full of locked instructions
      w.sim.kill(victim);
    }
  });
  if (!done) w.fail("no progress");
}

void crash(World& w) {
  const uint32_t victim = w.spawn_writer(0, 0, 4);
  w.spawn_writer(0, 1, 2);
  w.spawn_reader(1, 4, true);
  kill_at_any_step(w, victim);
  const bool died = w.sim.dead(victim);
  if (died) w.spawn_reaper(0, 0);
  w.spawn_writer(0, 1, 2);
  w.spawn_reader(1, 4, true);
  w.finish(kSteps);
  w.check_quiet(0, kSteps);
}

void adopt_after_crash(World& w) {
  const uint32_t first = w.spawn_writer(0, 0, 4), second = w.spawn_writer(0, 1, 3);
  w.spawn_reader(1, 4, false);
  const uint64_t when = w.sim.medium.choices.below(1200);
  uint64_t step = 0;
  w.sim.run(kSteps, [&] {
    if (step++ != when) return;
    w.sim.kill(first), w.sim.kill(second);
    w.sim.medium.crash_host(0);
    w.host_down[0] = true;
    w.owner[0] = 2;
  });
  if (!w.host_down[0]) {
    w.sim.medium.crash_host(0);
    w.host_down[0] = true;
    w.owner[0] = 2;
  }
  w.spawn_adopter(2, 0, 1);
  w.spawn_reader(1, 3, true);
  w.finish(kSteps);
  w.check_quiet(0, kSteps);
}

// The owner is only slow: it is woken after another host has adopted its shard. Content must be right all the while (the checksum sees to it),
// the zombie must stop by itself, and after its acknowledgement and an audit every block is found again.
void zombie(World& w) {
  w.sim.medium.may_write = {};   // two hosts write until the zombie notices
  const uint32_t first = w.spawn_writer(0, 0, 6), second = w.spawn_writer(0, 1, 6);
  w.spawn_reader(1, 6, false);
  const uint64_t when = w.sim.medium.choices.below(900);
  uint64_t step = 0;
  w.sim.run(kSteps, [&] {
    if (step++ == when) w.sim.pause(first, true), w.sim.pause(second, true);
  });
  w.owner[0] = 2;
  const uint32_t adopter = w.spawn_adopter(2, 0, 1);
  w.spawn_reader(1, 4, false);
  step = 0;
  const uint64_t wake = w.sim.medium.choices.below(2500);
  w.sim.run(kSteps, [&] {
    if (step++ == wake || w.sim.finished(adopter)) w.sim.pause(first, false), w.sim.pause(second, false);
  });
  w.sim.pause(first, false), w.sim.pause(second, false);
  w.finish(kSteps);
  bool stopped = false;
  w.spawn(0, 2, [&](SimAttached& a, SimTransfer& t) {
    stopped = w.store(a, t, 0, kBlockBytes) != Outcome::Ok;
    acknowledge(a, a.home(), 1);
  });
  w.finish(kSteps);
  if (!stopped) w.fail("the zombie stored a block after it was fenced");
  w.spawn(2, 1, [](SimAttached& a, SimTransfer& t) {
    a.set_owned(HostIndex{0}, true);
    audit(a, t.namespaces(), a.shard(HostIndex{0}));
  });
  w.finish(kSteps);
  w.check_quiet(0, kSteps);
}

const Scenario kScenarios[] = {
    {"evict", "two writers, two slots: every store evicts; readers on both hosts", evict, {}},
    {"full", "three slots in one bucket, five keys", evict, {3, 3, 5, kBlockBytes}},
    {"sizes", "two block sizes in one extent", sizes, {3, 4, 4, kBlockBytes}},
    {"crash", "a writer dies at any access, a reaper cleans up, another writer goes on", crash, {}},
    {"adopt", "a host dies with its caches lost or kept, another host adopts its shard", adopt_after_crash, {}},
    {"zombie", "a host is only slow: it wakes after its shard was adopted", zombie, {3, 2, 2, kBlockBytes}},
};

struct Result {
  uint64_t runs = 0, hits = 0, blocks = 0;
  std::string violation;
  uint64_t seed = 0;
};

Result run(const Scenario& s, uint64_t from, uint64_t count, const std::string& mutant, std::set<std::string>* places) {
  Result r;
  for (uint64_t seed = from; seed < from + count; ++seed) {
    World w(s.options, seed);
    w.sim.mutant = mutant;
    w.sim.places = places;
    s.run(w);
    ++r.runs, r.hits += w.hits, r.blocks += w.blocks_at_end;
    if (!w.verdict().empty()) {
      r.violation = w.verdict(), r.seed = seed;
      return r;
    }
  }
  return r;
}

int usage() {
  std::fprintf(stderr, "usage: kvpool_sim [--scenario NAME] [--seeds FROM:COUNT] [--mutant PLACE] | --list | --places NAME\n");
  return 2;
}

}   // namespace
}   // namespace kvp::sim

int main(int argc, char** argv) {
  using namespace kvp::sim;
  const char* only = nullptr;
  std::string mutant;
  uint64_t from = 1, count = 200;
  bool places = false;
  for (int i = 1; i < argc; ++i) {
    const std::string arg = argv[i];
    if (arg == "--list") {
      for (const Scenario& s : kScenarios) std::printf("%s\n", s.name);
      return 0;
    }
    if (i + 1 == argc) return usage();
    const char* value = argv[++i];
    if (arg == "--scenario")
      only = value;
    else if (arg == "--places")
      only = value, places = true;
    else if (arg == "--mutant")
      mutant = value;
    else if (arg == "--seeds") {
      char* end = nullptr;
      from = std::strtoull(value, &end, 10);
      if (*end != ':') return usage();
      count = std::strtoull(end + 1, nullptr, 10);
    } else
      return usage();
  }
  bool failed = false, any = false;
  for (const Scenario& s : kScenarios) {
    if (only != nullptr && std::strcmp(only, s.name) != 0) continue;
    any = true;
    std::set<std::string> seen;
    const Result r = run(s, from, count, mutant, places ? &seen : nullptr);
    if (places) {
      for (const std::string& place : seen) std::printf("%s\n", place.c_str());
      continue;
    }
    if (r.violation.empty()) {
      std::printf("%s: %llu runs hold, %llu hits, %llu blocks at the end\n", s.name, static_cast<unsigned long long>(r.runs),
                  static_cast<unsigned long long>(r.hits), static_cast<unsigned long long>(r.blocks));
    } else {
      failed = true;
      std::printf("%s: VIOLATED: %s; again: kvpool_sim --scenario %s --seeds %llu:1%s%s%s\n", s.name, r.violation.c_str(), s.name,
                  static_cast<unsigned long long>(r.seed), mutant.empty() ? "" : " --mutant '", mutant.c_str(), mutant.empty() ? "" : "'");
    }
  }
  return any ? failed : usage();
}
