// The adversary that a seed drives: between any two accesses anything may happen.
#pragma once
#include "sim/simulation.h"

namespace kvp::sim {

class Dice {
 public:
  explicit Dice(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15ULL + 0x2545f4914f6cdd1dULL) {
    for (int i = 0; i < 4; ++i) below(2);
  }
  uint32_t below(uint32_t n) {
    state_ ^= state_ << 13, state_ ^= state_ >> 7, state_ ^= state_ << 17;
    return static_cast<uint32_t>((state_ >> 32) * n >> 32);
  }
  bool one_in(uint32_t n) { return below(n) == 0; }

 private:
  uint64_t state_;
};

struct Damage {   // what a broken medium does, once in so many accesses; 0: never
  uint32_t flip = 0, poison = 0, lost_write_back = 0;
};

class RandomAdversary : public Adversary {
 public:
  explicit RandomAdversary(uint64_t seed) : dice_(seed) {
    // A seed also has a temper: some schedules switch often, in some the caches are busy, in some they sleep but for the line that is used next.
    static constexpr uint32_t kSwitch[] = {2, 4, 6, 10, 16, 40, 100};
    static constexpr uint32_t kQuiet[] = {7, 9, 12, 100, 400};
    static constexpr uint32_t kFocus[] = {0, 2, 4, 12, 40};
    switch_one_in_ = kSwitch[dice_.below(std::size(kSwitch))];
    anywhere_one_in_ = kQuiet[dice_.below(std::size(kQuiet))];
    focus_one_in_ = kFocus[dice_.below(std::size(kFocus))];
  }

  // No temper: something happens everywhere all the time, so that nothing is put off for long.
  void be_even() { switch_one_in_ = 6, anywhere_one_in_ = 9, focus_one_in_ = 0; }

  void begin(Simulation& sim) override {
    sim_ = &sim;
    sim.wake_stalled = [this] { return wake(); };
    if (damage.lost_write_back != 0) sim.medium.lose_write_backs = [this](LineIndex) { return dice_.one_in(damage.lost_write_back); };
  }
  uint32_t next(uint32_t current, Access what, LineIndex line, const std::vector<uint32_t>& ready) override {
    recent_[recent_at_++ % kRecent] = line;
    tick();
    Medium& m = sim_->medium;
    if (anywhere_one_in_ < 16) {
      while (dice_.below(16) >= anywhere_one_in_) anything();
    } else if (dice_.one_in(anywhere_one_in_)) {
      anything();
    }
    if (focus_one_in_ != 0 && line != 0 && dice_.one_in(focus_one_in_)) something_on(line);
    if (damage.flip != 0 && dice_.one_in(damage.flip)) {
      const LineIndex at = some_line();
      m.flip_bit(at * kLineBytes + dice_.below(8) * 8, dice_.below(64));
    }
    if (damage.poison != 0 && dice_.one_in(damage.poison)) m.poison(some_line(), true);
    // In runs of one process: a switch at every access would seldom let anybody get far.
    if (current == kNone || what == Access::Yield || dice_.one_in(switch_one_in_)) return ready[dice_.below(static_cast<uint32_t>(ready.size()))];
    return current;
  }
  // Most often right after a compare-and-swap: what it began is then all undone.
  bool strikes(uint32_t death, uint32_t current, Access what) override {
    bool victim = false;
    for (const uint32_t v : sim_->deaths[death].victims) victim = victim || v == current;
    if (!victim) return false;
    if (after_cas_.size() <= current) after_cas_.resize(current + 1, false);
    const bool after = after_cas_[current];
    after_cas_[current] = what == Access::Cas;
    return dice_.one_in(after ? 12 : what == Access::Push ? 150 : 1500);
  }
  // Each dirty line and pending operation is lost, or arrives after all.
  void crash(uint32_t host) override {
    Medium& m = sim_->medium;
    const uint32_t lost_one_in = 1 + dice_.below(4);
    for (uint32_t p = 0; p < m.processes(); ++p)
      if (m.host_of(p) == host) {
        while (!m.queue(p).empty() && dice_.one_in(2)) m.complete(p, 0);
        m.forget_queue(p);
      }
    for (size_t i = 0; i < m.touched().size(); ++i) {
      const LineIndex line = m.touched()[i].index;
      if (!dice_.one_in(lost_one_in)) m.write_back(host, line);
      m.drop(host, line);
    }
  }
  void stalls(const Stall& stall) override {
    stalled_.push_back({stall.victims, sim_->steps() + dice_.below(900), sim_->steps() + dice_.below(4000), false, false});
  }
  uint32_t below(uint32_t n) override { return dice_.below(n); }

  Damage damage;

 private:
  static constexpr uint32_t kRecent = 16;
  struct Stalled {
    std::vector<uint32_t> victims;
    uint64_t from, until;
    bool began, over;
  };
  void tick() {
    for (Stalled& s : stalled_) {
      if (!s.began && sim_->steps() >= s.from) {
        s.began = true;
        for (const uint32_t v : s.victims) sim_->pause(v, true);
      }
      if (s.began && !s.over && sim_->steps() >= s.until) end(s);
    }
  }
  void end(Stalled& s) {
    s.over = true;
    for (const uint32_t v : s.victims) sim_->pause(v, false);
  }
  bool wake() {
    for (Stalled& s : stalled_)
      if (s.began && !s.over) {
        end(s);
        return true;
      }
    return false;
  }
  LineIndex some_line() {
    const auto& lines = sim_->medium.touched();
    const LineIndex line = recent_[dice_.below(kRecent)];
    if (line != 0 && dice_.one_in(2)) return line;
    return lines.empty() ? 0 : lines[dice_.below(static_cast<uint32_t>(lines.size()))].index;
  }
  void anything() {
    Medium& m = sim_->medium;
    const uint32_t dice = dice_.below(10);
    if (dice < 7)
      complete_any(dice_.below(m.processes()));
    else if (dice < 9)
      evict_any(dice_.below(m.hosts()));
    else
      m.prefetch(dice_.below(m.hosts()), some_line());
  }
  void something_on(LineIndex line) {
    Medium& m = sim_->medium;
    const uint32_t dice = dice_.below(8), host = dice_.below(m.hosts());
    if (dice < 4) {
      const uint32_t process = dice_.below(m.processes());
      for (const Pending& p : m.queue(process))
        if (p.line == line && p.op != Op::Fence) return m.complete_through(process, p.id);
    } else if (dice < 6) {
      m.write_back(host, line);
    } else if (dice < 7) {
      if (m.copy_state(host, line) == CopyState::Clean) m.drop(host, line);
    } else {
      m.prefetch(host, line);
    }
  }
  void complete_any(uint32_t process) {
    const Queue& q = sim_->medium.queue(process);
    for (int tries = 0; tries < 4 && !q.empty(); ++tries) {
      const uint32_t i = dice_.below(static_cast<uint32_t>(q.size()));
      if (Medium::may_complete(q, i)) return sim_->medium.complete(process, i);
    }
  }
  void evict_any(uint32_t host) {   // write back a dirty line, or drop a clean one
    Medium& m = sim_->medium;
    for (int tries = 0; tries < 4; ++tries) {
      const LineIndex line = some_line();
      if (m.copy_state(host, line) == CopyState::Absent) continue;
      m.write_back(host, line);
      if (dice_.one_in(2)) m.drop(host, line);
      return;
    }
  }

  Dice dice_;
  Simulation* sim_ = nullptr;
  uint32_t switch_one_in_, anywhere_one_in_, focus_one_in_;
  std::vector<bool> after_cas_;   // of a process
  std::vector<Stalled> stalled_;
  LineIndex recent_[kRecent] = {};
  uint32_t recent_at_ = 0;
};

}   // namespace kvp::sim
