// kvpool_sim: the protocol on a simulated non-coherent medium.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <set>

#include "sim/runner.h"

namespace kvp::sim {
namespace {

using Clock = std::chrono::steady_clock;

constexpr const char* kUsage =
    "kvpool_sim: the protocol on a simulated non-coherent medium\n"
    "\n"
    "  kvpool_sim --list                                   the scenarios\n"
    "  kvpool_sim [--scenario NAME] [--seeds FROM:COUNT]   random schedules; a failure prints the command that repeats it\n"
    "             [--trace]                                each access of the failing run\n"
    "             [--weak]                                 payload through the cache, in any order (aarch64)\n"
    "  kvpool_sim --explore NAME [--preemptions N] [--events N] [--runs MAX]\n"
    "                                                      every schedule up to that bound, of a small configuration\n"
    "  kvpool_sim --places [--scenario NAME]               what can be left out: accesses and checks of the protocol\n"
    "  kvpool_sim ... --mutant PLACE [--mutant PLACE]      without it (them)\n"
    "  kvpool_sim --mutants [--scenario NAME] [--part I/N] [--schedules N] [--runs MAX] [--among FILE] [--briefly FILE]\n"
    "                                                      leaves out each place in turn: which scenario notices, after how many schedules;\n"
    "                                                      only those that a file names, a line each; those that it names with less effort\n"
    "\n"
    "Exit code 1: a property is violated.\n";

[[noreturn]] void wrong(const std::string& what) {
  std::fprintf(stderr, "kvpool_sim: %s\n\n%s", what.c_str(), kUsage);
  std::exit(2);
}
uint64_t number(const std::string& text) {
  char* end = nullptr;
  const uint64_t n = std::strtoull(text.c_str(), &end, 10);
  if (end == text.c_str() || *end != 0) wrong("\"" + text + "\" is not a number");
  return n;
}

// The places that a scenario passes. Found by playing it a little.
std::vector<std::vector<bool>> places_of_scenarios() {
  std::vector<std::vector<bool>> passed;
  Totals totals;
  for (const Scenario& s : scenarios()) {
    Places::all().start_noting();
    run_random(s, 1, 150, {}, false, false, totals);
    passed.push_back(Places::all().noted());
  }
  return passed;
}

uint32_t place_named(const std::string& name) {
  places_of_scenarios();
  for (uint32_t i = 0; i < Places::all().size(); ++i)
    if (Places::all().name(i) == name) return i;
  wrong("there is no place \"" + name + "\"; see --places");
}

struct Options {
  const char* scenario = nullptr;
  const char* explored = nullptr;
  std::vector<std::string> mutants;
  uint64_t from = 1, count = 1000, runs = ~uint64_t{0}, schedules = 2000, part = 0, parts = 1;
  Bound bound;
  bool places = false, all_mutants = false, weak = false, trace = false;
  std::string among, briefly;
};

std::set<std::string> lines_of(const std::string& file) {
  std::set<std::string> lines;
  std::ifstream in(file);
  if (!in) wrong("cannot read " + file);
  for (std::string line; std::getline(in, line);) lines.insert(line);
  return lines;
}

int random_schedules(const Options& o, const Mutant& mutant) {
  bool failed = false, any = false;
  uint64_t schedules = 0, steps = 0;
  const auto start = Clock::now();
  for (const Scenario& s : scenarios()) {
    if (o.scenario != nullptr && std::strcmp(o.scenario, s.name) != 0) continue;
    any = true;
    Totals t;
    const Result r = run_random(s, o.from, o.count, mutant, o.weak, o.trace, t);
    schedules += t.runs, steps += t.steps;
    if (r.violation.empty()) {
      std::printf(
          "%-11s holds: %llu schedules (seeds %llu:%llu), %llu steps, %llu loads, %llu hits, %llu stores; own accesses: load <= %llu, store <= "
          "%llu\n",
          s.name, static_cast<unsigned long long>(t.runs), static_cast<unsigned long long>(o.from), static_cast<unsigned long long>(o.count),
          static_cast<unsigned long long>(t.steps), static_cast<unsigned long long>(t.loads), static_cast<unsigned long long>(t.hits),
          static_cast<unsigned long long>(t.stores), static_cast<unsigned long long>(t.longest_load),
          static_cast<unsigned long long>(t.longest_store));
    } else {
      failed = true;
      std::printf("%-11s VIOLATED: %s\n%s  again: kvpool_sim --scenario %s --seeds %llu:1%s", s.name, r.violation.c_str(), r.trace.c_str(), s.name,
                  static_cast<unsigned long long>(r.seed), o.weak ? " --weak" : "");
      for (const std::string& m : o.mutants) std::printf(" --mutant '%s'", m.c_str());
      std::printf("\n");
    }
    std::fflush(stdout);
  }
  if (!any) wrong("there is no such scenario; see --list");
  const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
  std::printf("total: %llu schedules, %llu steps in %.1f s: %.1f million steps a minute\n", static_cast<unsigned long long>(schedules),
              static_cast<unsigned long long>(steps), seconds, static_cast<double>(steps) / seconds * 60e-6);
  return failed ? 1 : 0;
}

int explore_one(const Options& o, const Mutant& mutant) {
  for (const Scenario& s : scenarios()) {
    if (std::strcmp(o.explored, s.name) != 0) continue;
    if (s.damage.flip != 0) wrong(std::string("scenario ") + s.name + " is random only");
    Totals t;
    const auto start = Clock::now();
    const Result r = explore(s, o.bound, o.runs, mutant, o.trace, t);
    const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
    std::printf("%-11s %s: %llu runs, %llu states, %llu steps, %llu ends, pass %llu, %.1f s; bound: %u preemptions, %u events\n", s.name,
                !r.violation.empty() ? "VIOLATED"
                : r.complete         ? "holds, complete"
                                     : "holds so far",
                static_cast<unsigned long long>(r.runs), static_cast<unsigned long long>(r.states), static_cast<unsigned long long>(t.steps),
                static_cast<unsigned long long>(t.checks), static_cast<unsigned long long>(r.passes), seconds, o.bound.preemptions, o.bound.events);
    if (r.violation.empty()) return 0;
    std::printf("  %s\n%s  again: kvpool_sim --explore %s --preemptions %u --events %u --trace", r.violation.c_str(), r.trace.c_str(), s.name,
                o.bound.preemptions, o.bound.events);
    for (const std::string& m : o.mutants) std::printf(" --mutant '%s'", m.c_str());
    std::printf("\n");
    return 1;
  }
  wrong("there is no such scenario; see --list");
}

bool plays(const Options& o, const Scenario& s) { return o.scenario == nullptr || std::strcmp(o.scenario, s.name) == 0; }

// One line a mutant: PLACE <tab> caught <tab> scenario <tab> how <tab> schedules <tab> what was seen. Or: PLACE <tab> survives.
int leave_out_each(const Options& o) {
  const std::vector<std::vector<bool>> passed = places_of_scenarios();
  const uint32_t places = Places::all().size();
  std::vector<std::unique_ptr<Explorer>> learnt;
  for (size_t k = 0; k < scenarios().size(); ++k) learnt.push_back(nullptr);
  const std::set<std::string> among = o.among.empty() ? std::set<std::string>{} : lines_of(o.among);
  const std::set<std::string> briefly = o.briefly.empty() ? std::set<std::string>{} : lines_of(o.briefly);
  std::vector<uint32_t> order;
  for (uint32_t i = 0; i < places; ++i)
    if (o.among.empty() || among.contains(Places::all().name(i))) order.push_back(i);
  std::sort(order.begin(), order.end(), [](uint32_t a, uint32_t b) { return Places::all().name(a) < Places::all().name(b); });
  for (size_t n = o.part; n < order.size(); n += o.parts) {
    const uint32_t place = order[n];
    std::string caught;
    const bool brief = briefly.contains(Places::all().name(place));
    const uint64_t schedules = brief ? 100 : o.schedules, runs = brief ? 0 : o.runs;
    const auto at_random = [&](uint64_t from, uint64_t count) {
      for (size_t k = 0; caught.empty() && k < scenarios().size(); ++k) {
        const Scenario& s = scenarios()[k];
        if (!plays(o, s) || passed[k].size() <= place || !passed[k][place]) continue;
        Totals t;
        const Result r = run_random(s, from, count, {{place, ~0u}}, false, false, t);
        if (!r.violation.empty()) caught = std::string(s.name) + "\trandom\t" + std::to_string(r.seed) + "\t" + r.violation;
      }
    };
    // A few schedules of every scenario first: most are noticed at once. Then all of the small ones, then many.
    at_random(1, 100);
    if (!brief) at_random(101, 300);
    for (size_t k = 0; caught.empty() && runs != 0 && k < scenarios().size(); ++k) {
      const Scenario& s = scenarios()[k];
      if (!plays(o, s) || passed[k].size() <= place || !passed[k][place]) continue;
      for (const Bound bound : s.quick) {
        Totals t;
        if (learnt[k] == nullptr) {
          learnt[k] = std::make_unique<Explorer>(bound);
          explore(s, bound, 3000, {}, false, t, learnt[k].get());
        }
        const Result r = caught.empty() ? explore(s, bound, runs, {{place, ~0u}}, false, t, learnt[k].get()) : Result{};
        if (!r.violation.empty()) caught = std::string(s.name) + "\texplored\t" + std::to_string(r.runs) + "\t" + r.violation;
      }
    }
    for (uint64_t from = 401; caught.empty() && from < schedules; from += 600) at_random(from, 600);
    std::printf("%s\t%s\n", Places::all().name(place).c_str(), caught.empty() ? "survives" : ("caught\t" + caught).c_str());
    std::fflush(stdout);
  }
  return 0;
}

}   // namespace
}   // namespace kvp::sim

int main(int argc, char** argv) {
  using namespace kvp::sim;
  Options o;
  for (int i = 1; i < argc; ++i) {
    const std::string arg = argv[i];
    if (arg == "--list") {
      for (const Scenario& s : scenarios()) std::printf("%-11s %s%s\n", s.name, s.what, s.quick.empty() ? " (random only in the usual run)" : "");
      return 0;
    }
    if (arg == "--help") return std::fputs(kUsage, stdout), 0;
    if (arg == "--places") {
      o.places = true;
    } else if (arg == "--mutants") {
      o.all_mutants = true;
    } else if (arg == "--weak") {
      o.weak = true;
    } else if (arg == "--trace") {
      o.trace = true;
    } else if (i + 1 == argc) {
      wrong("\"" + arg + "\" is not known, or needs a value");
    } else {
      const char* value = argv[++i];
      const std::string text = value;
      const size_t colon = text.find_first_of(":/");
      if (arg == "--scenario")
        o.scenario = value;
      else if (arg == "--explore")
        o.explored = value;
      else if (arg == "--mutant")
        o.mutants.push_back(text);
      else if (arg == "--among")
        o.among = text;
      else if (arg == "--briefly")
        o.briefly = text;
      else if (arg == "--preemptions")
        o.bound.preemptions = static_cast<uint32_t>(std::min<uint64_t>(number(text), 7));
      else if (arg == "--events")
        o.bound.events = static_cast<uint32_t>(std::min<uint64_t>(number(text), 7));
      else if (arg == "--runs")
        o.runs = number(text);
      else if (arg == "--schedules")
        o.schedules = number(text);
      else if (arg == "--seeds" && colon != std::string::npos)
        o.from = number(text.substr(0, colon)), o.count = number(text.substr(colon + 1));
      else if (arg == "--part" && colon != std::string::npos)
        o.part = number(text.substr(0, colon)), o.parts = std::max<uint64_t>(1, number(text.substr(colon + 1)));
      else
        wrong("\"" + arg + " " + text + "\" is not known");
    }
  }
  if (o.places) {
    const auto passed = places_of_scenarios();
    for (uint32_t i = 0; i < Places::all().size(); ++i) {
      std::string by;
      for (size_t k = 0; k < passed.size(); ++k)
        if (i < passed[k].size() && passed[k][i]) by += std::string(by.empty() ? "" : " ") + scenarios()[k].name;
      if (o.scenario == nullptr || (" " + by + " ").find(" " + std::string(o.scenario) + " ") != std::string::npos)
        std::printf("%s\tline %u\t%s\n", Places::all().name(i).c_str(), Places::all().line(i), by.c_str());
    }
    return 0;
  }
  if (o.all_mutants) return leave_out_each(o);
  if (o.mutants.size() > 2) wrong("at most two mutants at a time");
  Mutant mutant;
  for (size_t i = 0; i < o.mutants.size(); ++i) mutant.places[i] = place_named(o.mutants[i]);
  return o.explored != nullptr ? explore_one(o, mutant) : random_schedules(o, mutant);
}
