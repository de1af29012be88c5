// A simulated non-coherent medium: what two hosts without hardware coherence may see, under the same protocol code as the real Memory.
//
//   process   pending operations, in program order: stores, write-backs, invalidates, non-temporal lines, store fences (x86-TSO and the weaker
//             ordering of CLWB, CLFLUSHOPT and NT stores). Any of them may complete at any time, as far as the fences before it allow.
//   host      one private write-back cache of whole 64-byte lines; a dirty line is written back, a clean one dropped, any line fetched at any time
//   medium    whole lines
//
// Rules: stores complete in order; CLWB, CLFLUSHOPT and NT stores stay behind earlier stores of their line only; nothing passes a store fence but
// loads; a full fence waits until all is done; a locked operation waits for earlier stores only (PROTOCOL 10: weaker than x86). A line is written
// back whole, so a host that writes another host's line destroys it - which is how a break of the rule of lines shows.
//
// Every choice is made by `Choices`, so that one seed repeats a run. Source: PROTOCOL 0, 8, 10; issue "Proof".
#pragma once
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <source_location>
#include <string>
#include <unordered_map>
#include <vector>

#include "memory.h"

namespace kvp::sim {

using LineIndex = uint64_t;
constexpr LineIndex line_of(Offset at) { return at / kLineBytes; }
constexpr uint32_t word_of(Offset at) { return static_cast<uint32_t>(at % kLineBytes / 8); }

// Where choices come from: a seed, or a recorded list.
class Choices {
 public:
  explicit Choices(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15ULL + 0x2545f4914f6cdd1dULL) {}
  uint32_t below(uint32_t n) {
    state_ ^= state_ << 13, state_ ^= state_ >> 7, state_ ^= state_ << 17;
    return static_cast<uint32_t>((state_ >> 32) * n >> 32);
  }
  bool one_in(uint32_t n) { return below(n) == 0; }

 private:
  uint64_t state_;
};

enum class Op : uint8_t { Store, WriteBack, Invalidate, Stream, Fence };
struct Pending {
  Op op;
  LineIndex line = 0;
  uint32_t word = 0;
  uint64_t value = 0;
  Line whole{};   // Stream
};

struct CachedLine {
  Line line;
  bool dirty = false;
};

struct Host {
  std::unordered_map<LineIndex, CachedLine> cache;
};

struct ProcessQueue {
  uint32_t host = 0;
  std::deque<Pending> pending;
};

class Medium {
 public:
  Medium(uint64_t bytes, uint32_t hosts, uint64_t seed) : choices(seed), lines_(bytes / kLineBytes), hosts_(hosts) {}

  uint32_t add_process(uint32_t host) {
    processes_.push_back({host, {}});
    return static_cast<uint32_t>(processes_.size() - 1);
  }

  // ---- what a process does; the caller has chosen when ----
  uint64_t load(uint32_t process, Offset at) {
    const ProcessQueue& p = processes_[process];
    for (auto i = p.pending.rbegin(); i != p.pending.rend(); ++i) {   // its own stores first
      if (i->op == Op::Store && i->line == line_of(at) && i->word == word_of(at)) return i->value;
      if (i->op == Op::Stream && i->line == line_of(at)) return i->whole.words[word_of(at)];
    }
    return fetch(p.host, line_of(at)).line.words[word_of(at)];
  }
  void push(uint32_t process, Pending pending) { processes_[process].pending.push_back(pending); }
  void full_fence(uint32_t process) {
    while (!processes_[process].pending.empty()) complete(process, 0);
  }
  bool cas(uint32_t process, Offset at, uint64_t expected, uint64_t desired) {
    drain_stores(process);
    CachedLine& c = fetch(processes_[process].host, line_of(at));
    note_write(processes_[process].host, line_of(at));
    c.dirty = true;   // a locked compare writes, whatever it finds
    if (c.line.words[word_of(at)] != expected) return false;
    c.line.words[word_of(at)] = desired;
    return true;
  }

  // ---- what happens by itself ----
  bool complete_any(uint32_t process) {
    std::vector<uint32_t> ready;
    for (uint32_t i = 0; i < processes_[process].pending.size(); ++i)
      if (may_complete(processes_[process].pending, i)) ready.push_back(i);
    if (ready.empty()) return false;
    complete(process, ready[choices.below(static_cast<uint32_t>(ready.size()))]);
    return true;
  }
  void evict_any(uint32_t host) {   // write back a dirty line, or drop a clean one
    Host& h = hosts_[host];
    if (h.cache.empty()) return;
    auto i = h.cache.begin();
    std::advance(i, choices.below(static_cast<uint32_t>(h.cache.size())));
    if (i->second.dirty) write_line(i->first, i->second.line);
    h.cache.erase(i);
  }
  void prefetch_any(uint32_t host) {
    if (seen_list_.empty()) return;
    fetch(host, seen_list_[choices.below(static_cast<uint32_t>(seen_list_.size()))]);
  }
  void settle() {   // everything that is under way arrives; caches keep their clean lines
    for (uint32_t p = 0; p < processes_.size(); ++p) full_fence(p);
  }
  // A dead host: each dirty line and pending operation is lost, or arrives after all.
  void crash_host(uint32_t host) {
    for (ProcessQueue& p : processes_)
      if (p.host == host) {
        while (!p.pending.empty() && choices.one_in(2)) complete(static_cast<uint32_t>(&p - processes_.data()), 0);
        p.pending.clear();
      }
    for (auto& [line, cached] : hosts_[host].cache)
      if (cached.dirty && choices.one_in(2)) write_line(line, cached.line);
    hosts_[host].cache.clear();
  }
  // A dead process: what it had retired still arrives, some time.
  uint64_t medium_word(Offset at) const { return lines_[line_of(at)].words[word_of(at)]; }
  void set_word(Offset at, uint64_t value) { lines_[line_of(at)].words[word_of(at)] = value; }   // before the run
  void flip_bit(Offset at, uint32_t bit) { lines_[line_of(at)].words[word_of(at)] ^= 1ULL << bit; }
  uint32_t process_count() const { return static_cast<uint32_t>(processes_.size()); }
  uint32_t host_count() const { return static_cast<uint32_t>(hosts_.size()); }

  // The host that may write a line now; breaking it is reported, not prevented.
  std::function<bool(uint32_t host, LineIndex line)> may_write;
  std::string violation;

  Choices choices;

 private:
  static bool may_complete(const std::deque<Pending>& q, uint32_t i) {
    const Pending& p = q[i];
    if (p.op == Op::Fence) return i == 0;
    for (uint32_t k = 0; k < i; ++k) {
      const Pending& earlier = q[k];
      if (earlier.op == Op::Fence) return false;
      if (p.op == Op::Store && earlier.op == Op::Store) return false;
      if (earlier.line == p.line) return false;   // one line: in program order
    }
    return true;
  }
  void drain_stores(uint32_t process) {   // stores, and what the fences between them hold back
    std::deque<Pending>& q = processes_[process].pending;
    for (;;) {
      uint32_t last = 0;
      bool any = false;
      for (uint32_t i = 0; i < q.size(); ++i)
        if (q[i].op == Op::Store) last = i, any = true;
      if (!any) return;
      for (uint32_t i = 0; i <= last && i < q.size(); ++i)
        if (may_complete(q, i) && (q[i].op == Op::Store || q[i].op == Op::Fence || holds_back_a_store(q, i))) {
          complete(process, i);
          break;
        }
    }
  }
  static bool holds_back_a_store(const std::deque<Pending>& q, uint32_t i) {
    bool fence = false;
    for (uint32_t k = i + 1; k < q.size(); ++k) {
      fence = fence || q[k].op == Op::Fence;
      if (q[k].op == Op::Store && (fence || q[k].line == q[i].line)) return true;
    }
    return false;
  }
  void complete(uint32_t process, uint32_t index) {
    ProcessQueue& p = processes_[process];
    const Pending op = p.pending[index];
    p.pending.erase(p.pending.begin() + index);
    Host& h = hosts_[p.host];
    switch (op.op) {
      case Op::Store: {
        CachedLine& c = fetch(p.host, op.line);
        note_write(p.host, op.line);
        c.line.words[op.word] = op.value;
        c.dirty = true;
        break;
      }
      case Op::WriteBack:
        if (auto i = h.cache.find(op.line); i != h.cache.end() && i->second.dirty) write_line(op.line, i->second.line), i->second.dirty = false;
        break;
      case Op::Invalidate:
        if (auto i = h.cache.find(op.line); i != h.cache.end()) {
          if (i->second.dirty) write_line(op.line, i->second.line);
          h.cache.erase(i);
        }
        break;
      case Op::Stream:
        note_write(p.host, op.line);
        h.cache.erase(op.line);
        write_line(op.line, op.whole);
        break;
      case Op::Fence: break;
    }
  }
  CachedLine& fetch(uint32_t host, LineIndex line) {
    if (seen_.insert(line).second) seen_list_.push_back(line);
    auto [i, fresh] = hosts_[host].cache.try_emplace(line);
    if (fresh) i->second.line = lines_[line];
    return i->second;
  }
  void note_write(uint32_t host, LineIndex line) {
    if (violation.empty() && may_write && !may_write(host, line))
      violation = "host " + std::to_string(host) + " wrote line " + std::to_string(line) + " of another host";
  }
  void write_line(LineIndex line, const Line& value) { lines_[line] = value; }

  std::vector<Line> lines_;
  std::vector<Host> hosts_;
  std::vector<ProcessQueue> processes_;
  std::set<LineIndex> seen_;
  std::vector<LineIndex> seen_list_;   // lines that anybody touched: what a prefetcher would bring
};

}   // namespace kvp::sim
