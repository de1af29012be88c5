// What the simulator plays: each scenario once at random, and in a small form for the explorer.
#pragma once
#include "sim/random.h"
#include "sim/world.h"

namespace kvp::sim {

struct Bound {   // of what the explorer tries
  uint32_t preemptions = 2, events = 2;
};

struct Scenario {
  const char* name;
  const char* what;
  void (*run)(World&);
  WorldOptions options;
  WorldOptions small;           // for the explorer
  std::vector<Bound> quick{};   // bounds within which all schedules take some seconds at most; none: random only
  Damage damage{};
};

const std::vector<Scenario>& scenarios();
std::vector<Scenario> directed_scenarios();   // part of them

}   // namespace kvp::sim
