// What the simulator plays: each scenario once at random, and in a small form for the explorer.
#pragma once
#include "sim/random.h"
#include "sim/world.h"

namespace kvp::sim {

struct Scenario {
  const char* name;
  const char* what;
  void (*run)(World&);
  WorldOptions options;
  WorldOptions small;   // for the explorer
  bool explored = true;
  Damage damage{};
};

const std::vector<Scenario>& scenarios();

}   // namespace kvp::sim
