// Processes over the simulated medium: each runs the real protocol code on a stack of its own and asks the adversary before every access.
//
// The adversary picks who goes on, who dies, and what caches and store buffers do in between. Leaving out one access or one check of the protocol
// by its place in the source makes a mutant of it.
#pragma once
#include <functional>
#include <memory>

#include "sim/fiber.h"
#include "sim/medium.h"

namespace kvp::sim {

constexpr uint32_t kNone = ~0u;

enum class Access : uint8_t {
  Load,
  Cas,
  Push,    // a store, write-back, invalidate or store fence goes into the process's queue
  Fence,   // a full fence, with something to wait for
  Mark,    // begin of an operation that a property is about
  Yield,   // the process gives way
};

struct Death {   // of one process, or of a host with all its processes
  std::vector<uint32_t> victims;
  uint32_t host = kNone;
  std::function<void()> after;
  bool done = false;
};
struct Stall {   // processes that are stopped and go on much later
  std::vector<uint32_t> victims;
};

class Simulation;

class Adversary {
 public:
  virtual ~Adversary() = default;
  virtual void begin(Simulation&) = 0;
  // Who goes on: one of `ready`. `current` is kNone when the process before it can't.
  virtual uint32_t next(uint32_t current, Access what, LineIndex line, const std::vector<uint32_t>& ready) = 0;
  virtual bool strikes(uint32_t death, uint32_t current, Access what) = 0;
  virtual void crash(uint32_t host) = 0;   // what becomes of the caches of a host that dies
  virtual void stalls(const Stall&) = 0;
  virtual uint32_t below(uint32_t n) = 0;   // a free choice of the scenario
  virtual bool worth_checking() { return true; }
};

struct Stuck {};       // thrown into a process whose run is over, so that its stack unwinds
struct Abandoned {};   // thrown out of `run`: the rest of this run was seen before, or it has failed already

class Simulation {
 public:
  Simulation(uint64_t bytes, uint32_t hosts, Adversary& by) : medium(bytes, hosts), adversary(by) {}
  ~Simulation() {
    over_ = true;
    for (auto& p : processes_)
      if (p->running()) resume(*p);   // unwinds
  }
  Simulation(const Simulation&) = delete;
  Simulation& operator=(const Simulation&) = delete;

  uint32_t add_process(uint32_t host) {
    processes_.push_back(std::make_unique<Process>());
    processes_.back()->id = medium.add_process(host);
    processes_.back()->simulation = this;
    return processes_.back()->id;
  }
  // `when`: it can't go on before that holds.
  void start(uint32_t process, std::function<void()> body, std::function<bool()> when = {}) {
    Process& p = *processes_[process];
    p.body = std::move(body), p.when = std::move(when);
    p.state = State::Ready;
  }
  void may_die(Death death) { deaths.push_back(std::move(death)); }
  void strike(uint32_t which) {
    Death& d = deaths[which];
    d.done = true;
    for (const uint32_t v : d.victims) processes_[v]->dead = true;
    if (d.host == kNone) {   // what it has retired arrives: the kernel's exit path is long and full of locked instructions
      for (const uint32_t v : d.victims) medium.full_fence(v);
    } else {
      adversary.crash(d.host);
      for (const uint32_t v : d.victims) medium.forget_queue(v);
    }
    if (d.after) d.after();
  }
  bool dead(uint32_t p) const { return processes_[p]->dead; }
  bool finished(uint32_t p) const { return !processes_[p]->running() && processes_[p]->state != State::Ready; }
  void pause(uint32_t p, bool paused) { processes_[p]->paused = paused; }
  uint64_t accesses(uint32_t p) const { return processes_[p]->accesses; }
  uint64_t steps() const { return steps_; }
  bool quiet() const { return quiet_; }

  // Until every process that can go on has finished. Throws Abandoned.
  void run(uint64_t steps_max) {
    steps_limit_ = steps_ + steps_max;
    for (;;) {
      ready_.clear();
      for (const auto& p : processes_)
        if (p->can_go()) ready_.push_back(p->id);
      if (ready_.empty()) {
        if (!wake_stalled()) return;
        continue;
      }
      if (handed_to_ == kNone) handed_to_ = adversary.next(kNone, Access::Mark, 0, ready_);
      const uint32_t now = handed_to_;
      handed_to_ = kNone;
      if (processes_[now]->can_go()) resume(*processes_[now]);
      if (abandoned_ || over_) throw Abandoned{};
    }
  }
  // One process alone, with nothing happening by itself: for setting up and for checking.
  void run_quietly(uint32_t process, std::function<void()> body) {
    quiet_ = true;
    steps_limit_ = steps_ + 10'000'000;
    start(process, std::move(body));
    resume(*processes_[process]);
    quiet_ = false;
    if (abandoned_) throw Abandoned{};
  }
  // As before, up to a step of the protocol (KVP_STEP): there it dies, or is stopped until `pause(process, false)`.
  void run_quietly_to(uint32_t process, const char* step, bool dies, std::function<void()> body) {
    stops_ = {this, step, dies};
    g_step_hook = [](const char* name) {
      if (std::strcmp(name, stops_.step) == 0) stops_.simulation->stop_here();
    };
    run_quietly(process, std::move(body));
    const bool came = g_step_hook.exchange(nullptr) == nullptr;
    if (!came && mutants[0] == ~0u) fail(std::string("the scenario's process never came to ") + step);
  }
  // All that is under way arrives.
  void settle() {
    quiet_ = true;
    medium.settle();
    quiet_ = false;
  }
  void abandon() { abandoned_ = true; }
  bool abandoned() const { return abandoned_; }
  void fail(const std::string& what) {
    if (violation.empty()) violation = what;
    abandoned_ = true;
  }

  // ---- called by SimMemory and by bodies of processes ----
  void access(Access what, LineIndex line, const char* detail = "") {
    Process& me = *processes_[now_];
    ++me.accesses;
    if (trace) trace(now_, what, line, detail);
    if (!medium.violation.empty()) fail(medium.violation);
    if (++steps_ > steps_limit_) fail("no progress: a run needed more than its limit of accesses");
    if (!quiet_ && !abandoned_) {
      for (uint32_t d = 0; d < deaths.size(); ++d)
        if (!deaths[d].done && adversary.strikes(d, now_, what)) strike(d);
      if (what != Access::Push || pushes_are_steps) {
        ready_.clear();
        for (const auto& p : processes_)
          if (p->can_go()) ready_.push_back(p->id);
        const uint32_t who = ready_.empty() ? kNone : adversary.next(me.can_go() ? now_ : kNone, what, line, ready_);
        if (who != now_ && !abandoned_) hand_over(me, who);
      } else if (!me.can_go()) {
        hand_over(me, kNone);
      }
    }
    if (over_ || abandoned_) throw Stuck{};
  }
  void saw(uint64_t value) {   // what a process learnt from the medium decides all that it does
    uint64_t& h = processes_[now_]->history;
    h = (h ^ value) * 0x9e3779b97f4a7c15ULL;
    h ^= h >> 29;
  }
  uint32_t now() const { return now_; }
  uint64_t fingerprint() const {
    uint64_t f = medium.fingerprint() + facts;
    for (const auto& p : processes_) {
      const uint64_t parts[4] = {f, p->history, p->accesses,
                                 static_cast<uint64_t>(p->state) << 8 | static_cast<uint64_t>(p->dead) << 1 | static_cast<uint64_t>(p->paused)};
      f = line_checksum(parts, sizeof parts, 2);
    }
    return f;
  }
  bool leaves_out(uint32_t place) const { return (place == mutants[0]) | (place == mutants[1]); }

  Medium medium;
  Adversary& adversary;
  std::vector<Death> deaths;
  std::function<bool()> wake_stalled = [] { return false; };
  std::function<void(uint32_t process, Access, LineIndex, const char* detail)> trace;
  std::string violation;
  uint64_t facts = 0;                 // a fingerprint of what the properties remember
  uint32_t mutants[2] = {~0u, ~0u};   // places that are left out
  bool pushes_are_steps = true;
  bool weak_order = false;

 private:
  enum class State : uint8_t { Idle, Ready, Running };
  struct Process {
    uint32_t id = 0;
    std::function<void()> body;
    std::function<bool()> when;
    Simulation* simulation = nullptr;
    Fiber fiber;
    State state = State::Idle;
    bool dead = false, paused = false;
    uint64_t accesses = 0, history = 0;
    bool running() const { return state == State::Running; }
    bool can_go() const { return state != State::Idle && !dead && !paused && (!when || when()); }
  };

  void stop_here() {
    g_step_hook = nullptr;
    Process& me = *processes_[now_];
    medium.full_fence(me.id);   // what it has retired arrives
    (stops_.dies ? me.dead : me.paused) = true;
    hand_over(me, kNone);
    if (over_ || abandoned_) throw Stuck{};
  }
  void hand_over(Process& me, uint32_t who) {
    handed_to_ = who;
    me.fiber.leave();
    now_ = me.id;
  }
  void resume(Process& p) {
    now_ = p.id;
    if (!p.running()) {
      p.state = State::Running;
      p.fiber.begin(&Simulation::live, &p);
    }
    p.fiber.enter();
  }
  static void live(void* process) {
    auto* p = static_cast<Process*>(process);
    try {
      p->body();
    } catch (const Stuck&) {
    } catch (const Poisoned&) {
      p->simulation->fail("a poisoned line was read outside of `guarded`: the real process would have died");
    }
    p->state = State::Idle;
  }

  struct Stops {
    Simulation* simulation;
    const char* step;
    bool dies;
  };
  static inline Stops stops_{};   // a step hook has no context

  std::vector<std::unique_ptr<Process>> processes_;
  std::vector<uint32_t> ready_;
  uint32_t now_ = 0, handed_to_ = kNone;
  uint64_t steps_ = 0, steps_limit_ = 0;
  bool over_ = false, abandoned_ = false, quiet_ = false;
};

}   // namespace kvp::sim
