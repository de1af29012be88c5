// A simulated non-coherent medium: what hosts without hardware coherence may see, under the same protocol code as the real Memory.
//
//   process   pending operations, in program order: stores, write-backs, invalidates, non-temporal lines, store fences (x86-TSO and the weaker
//             ordering of CLWB, CLFLUSHOPT and NT stores). Any of them may complete at any time, as far as the fences before it allow.
//   host      one private write-back cache of whole 64-byte lines; a dirty line is written back, a clean one dropped, any line fetched at any time
//   medium    whole lines
//
// Rules: stores complete in order; CLWB, CLFLUSHOPT and NT stores stay behind earlier operations on their line only; nothing passes a store fence
// but loads; a full fence waits until all is done; a locked operation waits for earlier stores and store fences only (PROTOCOL 10: weaker than x86). A line is
// written back whole, so a host that writes another host's line destroys it - which is how a break of the rule of lines shows.
// Weak order (aarch64): payload goes through the cache by stores that keep no order among lines (`Fill`).
//
// Nothing is chosen here. When something happens by itself is up to an adversary (adversary.h): either between any two accesses, or, for the
// explorer, right before the event that it makes a difference to (`Listener`). Source: PROTOCOL 0, 8, 10.
#pragma once
#include <array>
#include <cstring>
#include <deque>
#include <functional>
#include <string>
#include <vector>

#include "digest.h"
#include "memory.h"

namespace kvp::sim {

using LineIndex = uint64_t;
constexpr LineIndex line_of(Offset at) { return at / kLineBytes; }
constexpr uint32_t word_of(Offset at) { return static_cast<uint32_t>(at % kLineBytes / 8); }

constexpr uint32_t kHosts = 4;   // at most

enum class Op : uint8_t {
  Store,
  WriteBack,
  Invalidate,
  Stream,
  Fill,
  Fence,
  Note,   // a store by which the process tells others something; what it says is not kept in the medium
};
inline bool is_store(Op op) { return op == Op::Store || op == Op::Fill || op == Op::Note; }
struct Pending {
  Op op;
  LineIndex line = 0;
  uint32_t word = 0;
  uint64_t value = 0;
  Line whole{};      // Stream, Fill
  uint64_t id = 0;   // in its queue
};
using Queue = std::deque<Pending>;

enum class CopyState : uint8_t { Absent, Clean, Dirty };
struct Copy {
  Line line;
  CopyState state = CopyState::Absent;
};
struct LineState {
  LineIndex index = 0;
  Line medium{};
  std::array<Copy, kHosts> copies;
  bool poisoned = false;
};

inline bool same(const Line& a, const Line& b) { return std::memcmp(&a, &b, sizeof a) == 0; }

// What a process is about to do with a line, or what a pending operation does when it completes.
enum class Use : uint8_t { Load, Cas, Store, WriteBack, Invalidate, Stream };

class Listener {
 public:
  virtual ~Listener() = default;
  virtual void before(uint32_t process, LineIndex line, Use use) = 0;
  virtual void before_medium_changes(uint32_t host, LineIndex line) = 0;
};

struct Poisoned {};   // thrown by a load; the real processor would raise SIGBUS

class Medium {
 public:
  Medium(uint64_t bytes, uint32_t hosts) : hosts_(hosts), index_(bytes / kLineBytes, 0) { lines_.reserve(256); }

  uint32_t add_process(uint32_t host) {
    host_of_.push_back(host);
    queues_.emplace_back();
    return static_cast<uint32_t>(queues_.size() - 1);
  }

  // ---- what a process does; the caller has chosen when ----
  uint64_t load(uint32_t process, Offset at) {
    const LineIndex line = line_of(at);
    const Queue& q = queues_[process];
    for (auto i = q.rbegin(); i != q.rend(); ++i) {   // its own stores first
      if (i->op == Op::Store && i->line == line && i->word == word_of(at)) return i->value;
      if ((i->op == Op::Stream || i->op == Op::Fill) && i->line == line) return i->whole.words[word_of(at)];
    }
    if (listener != nullptr) listener->before(process, line, Use::Load);
    return fetch(host_of_[process], line, true).line.words[word_of(at)];
  }
  // What a load would give now, without bringing the line.
  uint64_t look(uint32_t process, Offset at) const {
    const LineIndex line = line_of(at);
    for (auto i = queues_[process].rbegin(); i != queues_[process].rend(); ++i) {
      if (i->op == Op::Store && i->line == line && i->word == word_of(at)) return i->value;
      if ((i->op == Op::Stream || i->op == Op::Fill) && i->line == line) return i->whole.words[word_of(at)];
    }
    const LineState* l = find(line);
    if (l == nullptr) return 0;
    const Copy& c = l->copies[host_of_[process]];
    return (c.state == CopyState::Absent ? l->medium : c.line).words[word_of(at)];
  }
  void push(uint32_t process, const Pending& pending) {
    const uint32_t host = host_of_[process];
    // On a line that is not there, or has nothing to write, these two are done at once; doing them later allows nothing more.
    if (pending.op == Op::Invalidate && copy_state(host, pending.line) == CopyState::Absent && passes_all(process, pending.line)) return;
    if (pending.op == Op::WriteBack && copy_state(host, pending.line) != CopyState::Dirty && passes_all(process, pending.line)) return;
    if (pending.op == Op::Fence && queues_[process].empty()) return;
    queues_[process].push_back(pending);
    queues_[process].back().id = ++last_id_;
  }
  void full_fence(uint32_t process) {
    while (!queues_[process].empty()) complete(process, 0);
  }
  bool cas(uint32_t process, Offset at, uint64_t expected, uint64_t desired) {
    drain_stores(process);
    const LineIndex line = line_of(at);
    if (listener != nullptr) listener->before(process, line, Use::Cas);
    Copy& c = fetch(host_of_[process], line, true);
    note_write(host_of_[process], line);
    const uint32_t w = word_of(at);
    const bool equal = c.line.words[w] == expected;
    change_copy(line, host_of_[process], [&] {
      c.state = CopyState::Dirty;   // a locked compare writes, whatever it finds
      if (equal) c.line.words[w] = desired;
    });
    return equal;
  }

  // ---- what happens by itself ----
  static bool may_complete(const Queue& q, uint32_t i) {
    const Pending& p = q[i];
    if (p.op == Op::Fence) return i == 0;
    for (uint32_t k = 0; k < i; ++k) {
      const Pending& earlier = q[k];
      if (earlier.op == Op::Fence) return false;
      if ((p.op == Op::Store || p.op == Op::Note) && is_store(earlier.op)) return false;
      if (earlier.line == p.line) return false;   // one line: in program order
    }
    return true;
  }
  void complete(uint32_t process, uint32_t index) {
    if (listener != nullptr && queues_[process][index].op != Op::Fence) {
      const Pending& p = queues_[process][index];
      const uint64_t id = p.id;
      listener->before(process, p.line, use_of(p.op));
      if (!find(process, id, index)) return;   // what was chosen now needed ours to be done first
    }
    const Pending op = queues_[process][index];
    queues_[process].erase(queues_[process].begin() + index);
    const uint32_t host = host_of_[process];
    switch (op.op) {
      case Op::Store:
      case Op::Fill: {
        Copy& c = fetch(host, op.line);
        note_write(host, op.line);
        change_copy(op.line, host, [&] {
          if (op.op == Op::Fill)
            c.line = op.whole;
          else
            c.line.words[op.word] = op.value;
          c.state = CopyState::Dirty;
        });
        break;
      }
      case Op::WriteBack: write_back(host, op.line); break;
      case Op::Invalidate:
        write_back(host, op.line);
        drop(host, op.line);
        break;
      case Op::Stream:
        note_write(host, op.line);
        drop(host, op.line);
        change_medium(host, op.line, op.whole);
        break;
      case Op::Fence: break;
      case Op::Note: on_note(op.value); break;
    }
  }
  // An operation of a process, after all that keeps it from completing.
  void complete_through(uint32_t process, uint64_t id) {
    uint32_t index = 0;
    while (find(process, id, index)) {
      const Queue& q = queues_[process];
      if (may_complete(q, index)) {
        complete(process, index);
        continue;
      }
      for (uint32_t i = 0; i < index; ++i)
        if (may_complete(q, i) && (q[i].op == Op::Fence || holds_back(q, i, index))) {
          complete(process, i);
          break;
        }
    }
  }
  void write_back(uint32_t host, LineIndex line) {   // the copy stays, clean
    Copy* c = copy(host, line);
    if (c == nullptr || c->state != CopyState::Dirty) return;
    if (lose_write_backs != nullptr && lose_write_backs(line)) {   // a medium that is broken
      change_copy(line, host, [&] { c->state = CopyState::Clean; });
      return;
    }
    const Line value = c->line;
    change_copy(line, host, [&] { c->state = CopyState::Clean; });
    change_medium(host, line, value);
  }
  void drop(uint32_t host, LineIndex line) {   // also a dirty one: for a host that dies
    Copy* c = copy(host, line);
    if (c == nullptr || c->state == CopyState::Absent) return;
    change_copy(line, host, [&] { c->state = CopyState::Absent; });
  }
  void prefetch(uint32_t host, LineIndex line) { fetch(host, line); }
  void settle() {   // everything that is under way arrives; caches keep their clean lines
    for (uint32_t p = 0; p < queues_.size(); ++p) full_fence(p);
  }

  // ---- outside the run ----
  uint64_t word(Offset at) const { return peek(line_of(at)).words[word_of(at)]; }
  void set_word(Offset at, uint64_t value) {
    LineState& l = state(line_of(at));
    l.medium.words[word_of(at)] = value;
  }
  void flip_bit(Offset at, uint32_t bit) {
    LineState& l = state(line_of(at));
    l.medium.words[word_of(at)] ^= 1ULL << bit;
  }
  void poison(LineIndex line, bool poisoned) { state(line).poisoned = poisoned; }

  // ---- looking ----
  uint32_t hosts() const { return hosts_; }
  uint32_t processes() const { return static_cast<uint32_t>(queues_.size()); }
  uint32_t host_of(uint32_t process) const { return host_of_[process]; }
  const Queue& queue(uint32_t process) const { return queues_[process]; }
  void forget_queue(uint32_t process) { queues_[process].clear(); }
  const std::vector<LineState>& touched() const { return lines_; }
  const LineState* find(LineIndex line) const { return index_[line] == 0 ? nullptr : &lines_[index_[line] - 1]; }
  CopyState copy_state(uint32_t host, LineIndex line) const {
    const LineState* l = find(line);
    return l == nullptr ? CopyState::Absent : l->copies[host].state;
  }
  uint64_t fingerprint() const {   // of medium, caches and queues; only kept when `fingerprinted`
    uint64_t f = fingerprint_;
    for (uint32_t p = 0; p < queues_.size(); ++p)
      for (const Pending& op : queues_[p]) {
        const uint64_t head[4] = {f, static_cast<uint64_t>(op.op) << 32 | p << 8 | op.word, op.line, op.value};
        f = line_checksum(head, sizeof head, 1);
        if (op.op == Op::Stream || op.op == Op::Fill) f ^= line_checksum(&op.whole, kLineBytes, f);
      }
    return f;
  }

  // The host that may write a line now; breaking it is reported, not prevented.
  std::function<bool(uint32_t host, LineIndex line)> may_write;
  std::function<bool(LineIndex line)> lose_write_backs;
  std::function<void(uint64_t what)> on_note;
  Listener* listener = nullptr;
  bool fingerprinted = false;
  std::string violation;

 private:
  static Use use_of(Op op) {
    switch (op) {
      case Op::WriteBack: return Use::WriteBack;
      case Op::Invalidate: return Use::Invalidate;
      case Op::Stream: return Use::Stream;
      default: return Use::Store;
    }
  }
  bool passes_all(uint32_t process, LineIndex line) const {
    for (const Pending& p : queues_[process])
      if (p.op == Op::Fence || p.line == line) return false;
    return true;
  }
  // Must operation i complete before operation `target` can?
  static bool holds_back(const Queue& q, uint32_t i, uint32_t target) {
    bool fence = false;
    for (uint32_t k = i + 1; k <= target; ++k) {
      fence = fence || q[k].op == Op::Fence;
      if (k == target || is_store(q[k].op))
        if (fence || q[k].line == q[i].line || ((q[k].op == Op::Store || q[k].op == Op::Note) && is_store(q[i].op))) return true;
    }
    return false;
  }
  void drain_stores(uint32_t process) {   // and the store fences: what is locked is a store behind them
    for (;;) {
      uint64_t id = 0;
      for (const Pending& p : queues_[process])
        if (is_store(p.op) || p.op == Op::Fence) {
          id = p.id;
          break;
        }
      if (id == 0) return;
      complete_through(process, id);
    }
  }
  bool find(uint32_t process, uint64_t id, uint32_t& index) const {
    const Queue& q = queues_[process];
    for (index = 0; index < q.size(); ++index)
      if (q[index].id == id) return true;
    return false;
  }

  LineState& state(LineIndex line) {
    uint16_t& i = index_[line];
    if (i == 0) {
      lines_.emplace_back();
      lines_.back().index = line;
      i = static_cast<uint16_t>(lines_.size());
    }
    return lines_[i - 1];
  }
  Copy* copy(uint32_t host, LineIndex line) { return index_[line] == 0 ? nullptr : &lines_[index_[line] - 1].copies[host]; }
  Line peek(LineIndex line) const {
    const LineState* l = find(line);
    return l == nullptr ? Line{} : l->medium;
  }
  Copy& fetch(uint32_t host, LineIndex line, bool checks_poison = false) {
    LineState& l = state(line);
    Copy& c = l.copies[host];
    if (c.state == CopyState::Absent) {
      if (l.poisoned && checks_poison) throw Poisoned{};
      change_copy(line, host, [&] { c.line = l.medium, c.state = CopyState::Clean; });
    }
    return c;
  }
  void change_medium(uint32_t host, LineIndex line, const Line& value) {
    if (listener != nullptr) listener->before_medium_changes(host, line);
    LineState& l = state(line);
    if (fingerprinted) fingerprint_ ^= hash_medium(l);
    l.medium = value;
    l.poisoned = false;
    if (fingerprinted) fingerprint_ ^= hash_medium(l);
  }
  template <class F>
  void change_copy(LineIndex line, uint32_t host, F f) {
    LineState& l = state(line);
    if (fingerprinted) fingerprint_ ^= hash_copy(l, host);
    f();
    if (fingerprinted) fingerprint_ ^= hash_copy(l, host);
  }
  static uint64_t hash_medium(const LineState& l) { return line_checksum(&l.medium, kLineBytes, l.index * 16 + 1); }
  static uint64_t hash_copy(const LineState& l, uint32_t host) {
    const Copy& c = l.copies[host];
    return c.state == CopyState::Absent ? 0 : line_checksum(&c.line, kLineBytes, l.index * 16 + 2 + host * 2 + (c.state == CopyState::Dirty ? 1 : 0));
  }
  void note_write(uint32_t host, LineIndex line) {
    if (violation.empty() && may_write && !may_write(host, line))
      violation = "host " + std::to_string(host) + " wrote line " + std::to_string(line) + " of another host";
  }

  uint32_t hosts_;
  std::vector<uint16_t> index_;    // of a line in lines_, from 1; 0: nobody touched it, it is all zero
  std::vector<LineState> lines_;   // in the order in which they were first touched
  std::vector<uint32_t> host_of_;
  std::vector<Queue> queues_;
  uint64_t fingerprint_ = 0, last_id_ = 0;
};

}   // namespace kvp::sim
