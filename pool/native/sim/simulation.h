// Processes over the simulated medium: each runs the real protocol code on a stack of its own and stops before every access to memory.
//
// The scheduler picks who goes on, and what caches and store buffers do in between. A process can be stopped for ever at any access (killed), or
// for as long as a test likes (a zombie). Leaving out one access of the protocol by its place in the source makes a mutant of it.
#pragma once
#include <ucontext.h>

#include <cstring>
#include <functional>
#include <memory>
#include <set>

#include "digest.h"
#include "error.h"
#include "sim/medium.h"

namespace kvp::sim {

struct Stuck {};   // thrown into a process whose run is over, so that its stack unwinds

// A place in the protocol's source, such as "slots.h:97 store_fence".
inline std::string place_of(const char* what, const std::source_location& where) {
  std::string file = where.file_name();
  return file.substr(file.rfind('/') + 1) + ":" + std::to_string(where.line()) + " " + what;
}

class Simulation {
 public:
  Simulation(uint64_t bytes, uint32_t hosts, uint64_t seed) : medium(bytes, hosts, seed) {}
  ~Simulation() {
    over_ = true;
    for (auto& p : processes_)
      if (p->started && !p->finished) resume(*p);   // unwinds
  }
  Simulation(const Simulation&) = delete;
  Simulation& operator=(const Simulation&) = delete;

  uint32_t spawn(uint32_t host, std::function<void(uint32_t process)> body) {
    const uint32_t id = medium.add_process(host);
    auto p = std::make_unique<Process>();
    p->body = std::move(body);
    p->id = id;
    p->simulation = this;
    processes_.push_back(std::move(p));
    return id;
  }
  bool finished(uint32_t id) const { return processes_[id]->finished; }
  bool dead(uint32_t id) const { return processes_[id]->dead; }
  void kill(uint32_t id) { processes_[id]->dead = true; }
  void pause(uint32_t id, bool paused) { processes_[id]->paused = paused; }
  bool running(uint32_t id) const { return !finished(id) && !dead(id); }

  // Until every process that can go on has finished. False: `steps_max` accesses were not enough.
  bool run(uint64_t steps_max, const std::function<void()>& each_step = {}) {
    Choices& c = medium.choices;
    for (uint64_t step = 0; step < steps_max; ++step) {
      if (each_step) each_step();
      std::vector<uint32_t> ready;
      for (const auto& p : processes_)
        if (!p->finished && !p->dead && !p->paused) ready.push_back(p->id);
      if (ready.empty()) return true;
      const uint32_t what = c.below(16);
      if (what < 9) {
        // In runs of one process: a switch at every access would seldom let anybody get far.
        if (current_ >= processes_.size() || c.one_in(6) || !can_go(current_)) current_ = ready[c.below(static_cast<uint32_t>(ready.size()))];
        resume(*processes_[current_]);
      } else if (what < 12) {
        medium.complete_any(c.below(medium.process_count()));
      } else if (what < 14) {
        medium.evict_any(c.below(medium.host_count()));
      } else {
        medium.prefetch_any(c.below(medium.host_count()));
      }
    }
    return false;
  }

  // Called by SimMemory before each access.
  void access() {
    Process& me = *processes_[now_];
    swapcontext(&me.context, &scheduler_);
    if (over_) throw Stuck{};
  }
  bool left_out(const char* what, const std::source_location& where) {
    if (places != nullptr) places->insert(place_of(what, where));
    return !mutant.empty() && place_of(what, where) == mutant;
  }

  Medium medium;
  std::string mutant;                        // an access that is left out
  std::set<std::string>* places = nullptr;   // collects all that could be

 private:
  static constexpr size_t kStackBytes = 256 << 10;
  struct Process {
    uint32_t id = 0;
    std::function<void(uint32_t)> body;
    Simulation* simulation = nullptr;
    ucontext_t context{};
    std::unique_ptr<char[]> stack;
    bool started = false, finished = false, dead = false, paused = false;
  };
  bool can_go(uint32_t id) const { return !processes_[id]->finished && !processes_[id]->dead && !processes_[id]->paused; }

  void resume(Process& p) {
    now_ = p.id;
    if (!p.started) {
      p.started = true;
      p.stack = std::make_unique_for_overwrite<char[]>(kStackBytes);
      getcontext(&p.context);
      p.context.uc_stack.ss_sp = p.stack.get();
      p.context.uc_stack.ss_size = kStackBytes;
      p.context.uc_link = &scheduler_;
      const auto address = reinterpret_cast<uintptr_t>(&p);
      makecontext(&p.context, reinterpret_cast<void (*)()>(&Simulation::enter), 2, static_cast<uint32_t>(address >> 32),
                  static_cast<uint32_t>(address));
    }
    swapcontext(&scheduler_, &p.context);
  }
  static void enter(uint32_t high, uint32_t low) {
    auto* p = reinterpret_cast<Process*>(uintptr_t{high} << 32 | low);
    try {
      p->body(p->id);
    } catch (const Stuck&) {
    }
    p->finished = true;
  }

  std::vector<std::unique_ptr<Process>> processes_;
  ucontext_t scheduler_{};
  uint32_t now_ = 0;
  uint32_t current_ = ~0u;
  bool over_ = false;
};

// The Memory of one simulated process.
class SimMemory {
 public:
  using Where = std::source_location;
  SimMemory(Simulation& simulation, uint32_t process) : s_(&simulation), process_(process) {}

  uint64_t load_word(Offset at) {
    s_->access();
    return s_->medium.load(process_, at);
  }
  Line load_line(Offset at) {   // word by word: a line may change in the middle
    Line line;
    for (uint32_t i = 0; i < 8; ++i) line.words[i] = load_word(at + i * 8);
    return line;
  }
  uint16_t load_half(Offset at) { return static_cast<uint16_t>(s_->medium.load(process_, at & ~7ULL) >> (at % 8 * 8)); }
  void store_word(Offset at, uint64_t value) {
    s_->access();
    s_->medium.push(process_, {Op::Store, line_of(at), word_of(at), value, {}});
  }
  void store_half(Offset at, uint16_t value) {
    const uint64_t word = s_->medium.load(process_, at & ~7ULL), shift = at % 8 * 8;
    s_->medium.push(process_, {Op::Store, line_of(at), word_of(at), (word & ~(0xffffULL << shift)) | uint64_t{value} << shift, {}});
  }
  bool cas_word(Offset at, uint64_t expected, uint64_t desired) {
    s_->access();
    return s_->medium.cas(process_, at, expected, desired);
  }
  void add_word(Offset at, uint64_t value) { s_->medium.cas(process_, at, s_->medium.load(process_, at), s_->medium.load(process_, at) + value); }

  uint64_t stream_copy(Offset at, const Piece* pieces, uint32_t n) {
    std::vector<uint8_t> bytes;
    for (uint32_t i = 0; i < n; ++i) bytes.insert(bytes.end(), pieces[i].data, pieces[i].data + pieces[i].bytes);
    const uint64_t checksum = payload_checksum(bytes.data(), bytes.size());
    bytes.resize((bytes.size() + kLineBytes - 1) / kLineBytes * kLineBytes);
    for (uint64_t i = 0; i < bytes.size(); i += kLineBytes) {
      s_->access();
      Pending p{Op::Stream, line_of(at + i), 0, 0, {}};
      std::memcpy(&p.whole, bytes.data() + i, kLineBytes);
      s_->medium.push(process_, p);
    }
    return checksum;
  }
  uint64_t copy_out(const Piece* pieces, uint32_t n, Offset at) {
    std::vector<uint8_t> all;
    for (uint32_t i = 0; i < n; ++i)
      for (uint64_t k = 0; k < pieces[i].bytes; k += 8, at += 8) {
        const uint64_t word = load_word(at);
        std::memcpy(pieces[i].data + k, &word, 8);
        all.insert(all.end(), pieces[i].data + k, pieces[i].data + k + 8);
      }
    return payload_checksum(all.data(), all.size());
  }
  uint64_t checksum(Offset at, uint64_t bytes) {
    std::vector<uint8_t> copy(bytes);
    const Piece piece{copy.data(), bytes};
    return copy_out(&piece, 1, at);
  }

  void write_back(Offset at, uint64_t bytes, Where where = Where::current()) { each_line(Op::WriteBack, "write_back", at, bytes, where); }
  void invalidate(Offset at, uint64_t bytes, Where where = Where::current()) { each_line(Op::Invalidate, "invalidate", at, bytes, where); }
  void prefetch(Offset) {}
  void store_fence(Where where = Where::current()) {
    if (s_->left_out("store_fence", where)) return;
    s_->access();
    s_->medium.push(process_, {Op::Fence, 0, 0, 0, {}});
  }
  void full_fence(Where where = Where::current()) {
    if (s_->left_out("full_fence", where)) return;
    const bool weak = s_->left_out("full_fence->store_fence", where);
    s_->access();
    if (weak)
      s_->medium.push(process_, {Op::Fence, 0, 0, 0, {}});
    else
      s_->medium.full_fence(process_);
  }
  template <class F>
  bool guarded(F&& f) {
    f();
    return true;
  }
  bool coherent() const { return false; }

 private:
  void each_line(Op op, const char* what, Offset at, uint64_t bytes, const Where& where) {
    if (s_->left_out(what, where)) return;
    for (LineIndex line = line_of(at); line <= line_of(at + bytes - 1); ++line) {
      if (bytes <= kLineBytes) s_->access();   // long ranges in one go: the interleavings inside are seen with single lines
      s_->medium.push(process_, {op, line, 0, 0, {}});
    }
  }
  Simulation* s_;
  uint32_t process_;
};
static_assert(Memory<SimMemory>);

}   // namespace kvp::sim
