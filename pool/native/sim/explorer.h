// The adversary that tries everything, up to a bound: depth-first over all choices, each run from the start again.
//
// What makes it small enough (partial-order reduction):
//   - A process is switched only before an access to a line that another process also uses, one of them writing. Which lines these are is learnt;
//     when a pass has learnt more, it is done again.
//   - Operations that only go into a process's own queue are no points of choice.
//   - What happens by itself on a line (a pending operation completes, a dirty line is written back, a clean one dropped, a line prefetched) is
//     chosen right before an event on *that* line to which it makes a difference. Earlier would be the same: it commutes with all in between.
//   - A state that was seen before with at least as much left of the bound is not gone into again. A state is the medium, the caches, the queues,
//     and for each process all that it has read so far, which decides what it does next.
// The bound: switches away from a process that could go on (preemptions), and events that happen by themselves. Giving way, ending, dying, and the
// scenario's own choices cost nothing. Sources: Musuvathi and Qadeer, "Iterative context bounding" (PLDI 2007), for the bound; Godefroid,
// "Partial-order methods" (1996), for the reduction.
#pragma once
#include <unordered_map>

#include "sim/scenarios.h"

namespace kvp::sim {

class Explorer : public Adversary, public Listener {
 public:
  explicit Explorer(Bound bound) : bound_(bound) {}

  // ---- the search; the caller runs the scenario between these ----
  void begin(Simulation& sim) override {
    sim_ = &sim;
    sim.medium.listener = this;
    sim.medium.fingerprinted = true;
    sim.pushes_are_steps = false;
    depth_ = 0, picked_ = 0, p_left_ = bound_.preemptions, e_left_ = bound_.events;
    ++runs;
  }
  // The next run's choices. False: all have been tried.
  bool advance() {
    for (; !path_.empty(); path_.pop_back()) {
      Point& point = path_.back();
      while (++point.chosen < point.count)
        if (affordable(point, point.chosen)) return true;
    }
    if (uses_ == learnt_) return false;
    uses_ = learnt_;   // more lines that others use too were found: all over again, with them
    seen_.clear(), seen_ends_.clear();
    ++passes;
    return true;
  }
  // Saves the first passes when the same scenario was explored before.
  void keep_lines_of(const Explorer& other) { uses_ = learnt_ = other.learnt_; }

  uint64_t runs = 0, passes = 1;
  std::function<void(const std::string&)> trace;
  std::function<std::string(LineIndex)> name_line;
  uint64_t states() const { return seen_.size(); }

  // ---- choices ----
  uint32_t next(uint32_t current, Access what, LineIndex line, const std::vector<uint32_t>& ready) override {
    if (current == kNone) return ready[choose(static_cast<uint32_t>(ready.size()), Cost::Nothing)];
    if (what == Access::Push || ready.size() == 1) return current;
    if (what == Access::Load || what == Access::Cas) {
      use(current, line, what == Access::Cas);
      if (!contended(line)) return current;
    }
    if (what == Access::Fence) {
      bool any = false;
      for (const Pending& op : sim_->medium.queue(current)) any = any || (op.op != Op::Fence && contended(op.line));
      if (!any) return current;
    }
    const uint32_t k = choose(static_cast<uint32_t>(ready.size()), Cost::Preemption);
    // In order: the current one first (one that gives way: last), then the others.
    uint32_t n = 0;
    if (what != Access::Yield && n++ == k) return current;
    for (const uint32_t p : ready)
      if (p != current && n++ == k) return p;
    return current;
  }
  bool strikes(uint32_t death, uint32_t current, Access what) override {
    if (what == Access::Load || what == Access::Mark || what == Access::Yield) return false;   // as good as before the next change
    for (const uint32_t v : sim_->deaths[death].victims)
      if (v == current) return choose(2, Cost::Nothing) == 1;
    return false;
  }
  // All that is under way is lost, or all arrives; each exception is an event.
  void crash(uint32_t host) override {
    Medium& m = sim_->medium;
    const bool lost = choose(2, Cost::Nothing) == 0;
    for (uint32_t p = 0; p < m.processes(); ++p)
      if (m.host_of(p) == host) {
        while (!m.queue(p).empty()) {
          if ((choose(2, Cost::Event) == 0) == lost) break;
          m.complete(p, 0);
        }
        m.forget_queue(p);
      }
    for (size_t i = 0; i < m.touched().size(); ++i) {
      const LineIndex line = m.touched()[i].index;
      if (m.copy_state(host, line) == CopyState::Dirty && (choose(2, Cost::Event) == 0) != lost) m.write_back(host, line);
      m.drop(host, line);
    }
  }
  void stalls(const Stall&) override {}   // a process that is not chosen for long is one
  uint32_t below(uint32_t n) override {
    const uint32_t k = choose(n, Cost::Nothing);
    picked_ = picked_ * 64 + k + 1;   // part of the state: what the scenario does later may depend on it
    return k;
  }
  bool worth_checking() override { return seen_ends_.insert({fingerprint(), true}).second; }

  void before(uint32_t process, LineIndex line, Use what) override {
    if (sim_->quiet()) return;
    if (line == 0) return hear_of(process);
    use(process, line, what == Use::Cas || what == Use::Store || what == Use::Stream);
    if (!contended(line)) return;
    Medium& m = sim_->medium;
    const uint32_t host = m.host_of(process);
    const bool reads = what == Use::Load || what == Use::Cas || what == Use::Store;
    while (e_left_ != 0 && !sim_->abandoned()) {
      std::vector<Event> events;
      const LineState* l = m.find(line);
      const CopyState mine = l == nullptr ? CopyState::Absent : l->copies[host].state;
      for (uint32_t q = 0; q < m.processes(); ++q) {
        const bool nearby = m.host_of(q) == host;
        if (!nearby && (!reads || mine == CopyState::Dirty)) continue;
        const Queue& queue = m.queue(q);
        for (size_t i = 0; i < queue.size(); ++i)
          if (queue[i].op != Op::Fence && queue[i].line == line) {
            if (q != process || (what == Use::Load && queue[i].op == Op::Invalidate)) events.push_back({Event::Complete, q, queue[i].id});
            break;
          }
      }
      if (l != nullptr) {
        if (reads && mine != CopyState::Dirty)
          for (uint32_t g = 0; g < m.hosts(); ++g)
            if (g != host && l->copies[g].state == CopyState::Dirty) events.push_back({Event::WriteBack, g, 0});
        if ((what == Use::Store || what == Use::Cas) && mine == CopyState::Dirty && !same(l->copies[host].line, l->medium))
          events.push_back({Event::WriteBack, host, 0});
        if (reads && mine == CopyState::Clean && !same(l->copies[host].line, l->medium)) events.push_back({Event::Drop, host, 0});
      }
      if (events.empty()) return;
      const uint32_t k = choose(static_cast<uint32_t>(events.size()) + 1, Cost::Event);
      if (k == 0) return;
      const Event e = events[k - 1];
      if (trace)
        trace((e.what == Event::Complete    ? "early, of process " + std::to_string(e.who)
               : e.what == Event::WriteBack ? "write-back by host " + std::to_string(e.who)
                                            : "dropped by host " + std::to_string(e.who)) +
              ": " + name_line(line));
      if (e.what == Event::Complete)
        m.complete_through(e.who, e.id);
      else if (e.what == Event::WriteBack)
        m.write_back(e.who, line);
      else
        m.drop(e.who, line);
    }
  }
  void before_medium_changes(uint32_t host, LineIndex line) override {
    if (sim_->quiet()) return;
    Medium& m = sim_->medium;
    const auto i = uses_.find(line);
    if (i == uses_.end()) return;
    const LineUse uses = i->second;
    while (e_left_ != 0 && !sim_->abandoned()) {
      std::vector<Event> events;
      for (uint32_t h = 0; h < m.hosts(); ++h)
        if (h != host && (uses.hosts >> h & 1) != 0 && m.copy_state(h, line) == CopyState::Absent) events.push_back({Event::Prefetch, h, 0});
      if (events.empty()) return;
      const uint32_t k = choose(static_cast<uint32_t>(events.size()) + 1, Cost::Event);
      if (k == 0) return;
      if (trace) trace("prefetched by host " + std::to_string(events[k - 1].who) + ": " + name_line(line));
      m.prefetch(events[k - 1].who, line);
    }
  }

 private:
  enum class Cost : uint8_t { Nothing, Preemption, Event };
  // What other processes have to tell arrives before a process begins something, or later. Costs nothing.
  void hear_of(uint32_t process) {
    Medium& m = sim_->medium;
    for (uint32_t q = 0; q < m.processes(); ++q) {
      uint64_t last = 0;
      for (const Pending& op : m.queue(q))
        if (op.op == Op::Note) last = op.id;
      if (q != process && last != 0 && choose(2, Cost::Nothing) == 1) m.complete_through(q, last);
    }
  }
  struct Point {
    uint8_t chosen, count;
    Cost cost;   // of every alternative but the first
    uint8_t p_left, e_left;
  };
  struct Event {
    enum What : uint8_t { Complete, WriteBack, Drop, Prefetch } what;
    uint32_t who;
    uint64_t id;
  };
  struct LineUse {
    uint64_t readers = 0, writers = 0;   // processes
    uint32_t hosts = 0;
    bool operator==(const LineUse&) const = default;
  };

  static bool affordable(const Point& point, uint32_t alternative) {
    return alternative == 0 || point.cost == Cost::Nothing || (point.cost == Cost::Preemption ? point.p_left : point.e_left) != 0;
  }
  void pay(const Point& point) {
    if (point.chosen == 0) return;
    if (point.cost == Cost::Preemption) --p_left_;
    if (point.cost == Cost::Event) --e_left_;
  }
  uint32_t choose(uint32_t n, Cost cost) {
    if (sim_->quiet() || sim_->abandoned() || n < 2) return 0;
    Point point{0, static_cast<uint8_t>(n), cost, static_cast<uint8_t>(p_left_), static_cast<uint8_t>(e_left_)};
    if (!affordable(point, 1)) return 0;
    if (depth_ < path_.size()) {
      pay(path_[depth_]);
      return path_[depth_++].chosen;
    }
    const uint64_t parts[3] = {fingerprint(), static_cast<uint64_t>(sim_->now()) << 8 | static_cast<uint64_t>(cost), n};
    uint64_t& seen = seen_[line_checksum(parts, sizeof parts, 3)];
    if ((seen >> (p_left_ * 8 + e_left_) & 1) != 0) {
      sim_->abandon();
      return 0;
    }
    for (uint32_t p = 0; p <= p_left_; ++p)   // whoever comes with less of the bound left finds nothing new here
      for (uint32_t e = 0; e <= e_left_; ++e) seen |= 1ULL << (p * 8 + e);
    path_.push_back(point);
    ++depth_;
    return 0;
  }
  uint64_t fingerprint() const { return sim_->fingerprint() + picked_ * 0x9e3779b97f4a7c15ULL; }
  void use(uint32_t process, LineIndex line, bool writes) {
    LineUse& u = learnt_[line];
    (writes ? u.writers : u.readers) |= 1ULL << process;
    u.hosts |= 1u << sim_->medium.host_of(process);
  }
  bool contended(LineIndex line) const {
    const auto i = uses_.find(line);
    if (i == uses_.end() || i->second.writers == 0) return false;
    const uint64_t all = i->second.readers | i->second.writers;
    return (all & (all - 1)) != 0;
  }

  const Bound bound_;
  Simulation* sim_ = nullptr;
  std::vector<Point> path_;
  size_t depth_ = 0;
  uint64_t picked_ = 0;   // what the scenario was given to choose in this run
  uint32_t p_left_ = 0, e_left_ = 0;
  std::unordered_map<LineIndex, LineUse> uses_, learnt_;   // in this pass; for the next one
  std::unordered_map<uint64_t, uint64_t> seen_;            // state -> which bounds were left when it was gone into
  std::unordered_map<uint64_t, bool> seen_ends_;
};

}   // namespace kvp::sim
