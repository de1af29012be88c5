// Runs scenarios: at random, exhaustively up to a bound, and without one or two places of the protocol.
#pragma once
#include <chrono>

#include "sim/explorer.h"
#include "sim/scenarios.h"

namespace kvp::sim {

struct Result {
  std::string violation;   // empty: holds
  uint64_t runs = 0;
  uint64_t seed = 0;       // at random: of the failing run
  std::string trace;       // explored: of the failing run
  bool complete = false;   // explored: nothing is left within the bound
  uint64_t states = 0, passes = 0;
};

struct Mutant {
  uint32_t places[2] = {~0u, ~0u};
};

inline void play(const Scenario& s, World& w, const Mutant& mutant, bool weak) {
  w.sim.mutants[0] = mutant.places[0], w.sim.mutants[1] = mutant.places[1];
  w.sim.weak_order = weak;
  try {
    s.run(w);
  } catch (const Abandoned&) {
  }
  if (w.sim.violation.empty()) w.sim.violation = w.sim.medium.violation;
  ++w.totals.runs, w.totals.steps += w.sim.steps();
}

inline std::string where_is(const Superblock& sb, LineIndex line) {
  const Offset at = line * kLineBytes;
  if (at < sb.shard_offset) return "superblock";
  const auto shard = static_cast<uint32_t>((at - sb.shard_offset) / sb.shard_bytes);
  const uint64_t in = (at - sb.shard_offset) % sb.shard_bytes;
  const char* part = in < sb.claims_offset                               ? "header"
                     : in < sb.acknowledgements_offset                   ? "claim"
                     : in < sb.grants_offset                             ? "acknowledgement"
                     : in < sb.namespaces_offset                         ? "participant"
                     : in < sb.extent_descriptors_offset                 ? "namespace"
                     : in < sb.buckets_offset                            ? "extent"
                     : in < sb.log_tail_offset                           ? "bucket"
                     : in < sb.log_ring_offset                           ? "log tail"
                     : in < sb.extents_offset                            ? "log"
                     : in < sb.extents_offset + sb.extent_payload_offset ? "slot header"
                                                                         : "payload";
  return std::string(part) + " line " + std::to_string(line) + " of shard " + std::to_string(shard);
}

inline void write_trace(World& w, std::string& trace) {
  w.sim.trace = [&](uint32_t process, Access what, LineIndex line, const char* detail) {
    static const char* const names[] = {"load", "cas", "push", "fence", "begins", "gives way"};
    if (!w.sim.quiet())
      trace += "  " + std::to_string(w.sim.steps()) + " process " + std::to_string(process) + " of host " +
               std::to_string(w.sim.medium.host_of(process)) + " " + names[static_cast<int>(what)] + " " + detail +
               (line != 0 ? " " + where_is(w.sb, line) : "") + "\n";
  };
}

inline Result run_random(const Scenario& s, uint64_t from, uint64_t count, const Mutant& mutant, bool weak, bool traced, Totals& totals) {
  static std::map<std::string, Superblock> plans;
  const Superblock& plan = plans.try_emplace(s.name, World::plan(s.options)).first->second;
  Result r;
  for (uint64_t seed = from; seed < from + count; ++seed) {
    RandomAdversary dice(seed);
    dice.damage = s.damage;
    World w(s.options, plan, dice, totals);
    if (traced) r.trace.clear(), write_trace(w, r.trace);
    play(s, w, mutant, weak);
    ++r.runs;
    if (!w.sim.violation.empty()) {
      r.violation = w.sim.violation, r.seed = seed;
      return r;
    }
  }
  return r;
}

inline Result explore(const Scenario& s, Bound bound, uint64_t runs_max, const Mutant& mutant, bool traced, Totals& totals,
                      Explorer* learnt = nullptr) {
  const Superblock plan = World::plan(s.small);
  Explorer explorer(bound);
  if (learnt != nullptr) explorer.keep_lines_of(*learnt);
  Result r;
  do {
    World w(s.small, plan, explorer, totals);
    w.small = true;
    std::string trace;
    if (traced) {
      write_trace(w, trace);
      explorer.trace = [&](const std::string& text) { trace += "    * " + text + "\n"; };
      explorer.name_line = [&](LineIndex line) { return where_is(plan, line); };
    }
    play(s, w, mutant, false);
    if (!w.sim.violation.empty()) {
      r.violation = w.sim.violation, r.trace = trace;
      break;
    }
    r.complete = !explorer.advance();
  } while (!r.complete && explorer.runs < runs_max);
  r.runs = explorer.runs, r.states = explorer.states(), r.passes = explorer.passes;
  if (learnt != nullptr && mutant.places[0] == ~0u) learnt->keep_lines_of(explorer);
  return r;
}

}   // namespace kvp::sim
