// Litmus: what two hosts see of each other's stores, measured between them on the medium itself. Source: DESIGN 4.7.
//
// Each host uses two lines of its own shard that nothing else uses (layout.h): its *say line* and its *test line*. A host asks by a word in its say
// line, which names the other host and a test; that one does what the test says to its own test line, answers in its say line, and the asking
// host looks at the test line. Asking and answering use write-back, invalidate and fences as the protocol does, so an answer that arrives has shown
// already that they work both ways; the tests then say what works without them:
//   Plain    the test line is stored and left in the writer's cache. Read by a host that has it cached; then once more after an invalidate.
//   Flushed  stored and written back. Read by a host that has it cached (a stale read?); then once more after an invalidate (it must be there).
//   Ordered  as the protocol stores a block, many times: test line by non-temporal stores, S, a flag in the say line, write-back. Who sees the flag
//            must see the test line.
// Nobody waits for anybody here for ever, and a host answers while it asks, so that two hosts may ask each other at the same time.
#pragma once
#include <vector>

#include "attached.h"

namespace kvp {

enum class LitmusTest : uint32_t { Plain = 1, Flushed = 2, Ordered = 3 };

struct LitmusLimits {   // times in the units of the clock
  uint64_t answer;      // patience for an answer
  uint64_t linger;      // after the last question of a peer, before another peer may ask
  uint64_t beat;        // between two beats of a host that waits
  uint32_t burst;       // stores of one Ordered test, below 2^16
};

struct LitmusResult {
  enum class End : uint32_t { Measured = 0, Silent = 1, Deaf = 2, Busy = 3 };   // Deaf: it lives, and does not see what we ask
  End end = End::Silent;
  uint64_t plain = 0, plain_stale = 0, plain_unseen = 0;   // unseen: not even after an invalidate
  uint64_t flushed = 0, cached_stale = 0, flushed_lost = 0;
  uint64_t ordered = 0, reordered = 0;   // looks at flag and test line
  uint64_t abandoned = 0;                // rounds in which the peer had turned to somebody else: they say nothing
  std::vector<uint64_t> round_trips;     // in units of the clock
};

// One host's part in it. One process of a host at a time may use it (the caller holds the host's litmus lock). `Clock` has now() and pause().
template <Memory M, class Clock>
class Litmus {
 public:
  Litmus(M memory, const Superblock& sb, HostIndex self, uint32_t session, Clock clock, LitmusLimits limits)
      : m_(memory), hosts_(sb.host_count), self_(self), session_(session & 0xffffff), clock_(clock), limits_(limits) {
    for (uint32_t h = 0; h < hosts_; ++h) {
      const ShardMap s(sb, HostIndex{h});
      say_[h] = s.litmus_say_line();
      test_[h] = s.litmus_test_line();
    }
  }

  // Answers who asks, for as long as somebody goes on asking, at most `budget`. True: somebody asked.
  bool serve(uint64_t budget) {
    const uint64_t end = clock_.now() + budget;
    bool any = false;
    beat();
    for (uint64_t last = clock_.now();;) {
      const uint64_t now = clock_.now();
      if (answer_one()) {
        any = true, last = now;
      } else if (!any || now - last > limits_.linger) {   // whoever asked before this call, or in it, asks no more
        if (let_go()) continue;
        break;
      }
      if (now >= end) break;
      clock_.pause();
    }
    return any;
  }

  // The beat words of all hosts, fresh. One that changes is of a host that answers; 0 of one that never did, or has said goodbye.
  void beats(uint64_t* out) {
    invalidate_says();
    for (uint32_t h = 0; h < hosts_; ++h) out[h] = m_.load_word(say_[h] + kBeat);
  }
  static uint32_t session_of(uint64_t beat) { return static_cast<uint32_t>(beat >> 32 & 0xffffff); }

  void goodbye() {
    m_.store_word(say_[me()] + kBeat, 0);
    m_.store_word(say_[me()] + kRequest, 0);
    flush_say();
  }

  // The caller owns the result, and has reserved place for `rounds` round trips: the medium may fail in the middle (Memory::guarded).
  void measure(HostIndex peer, uint32_t rounds, LitmusResult& r) {
    const uint32_t p = to_int(peer);
    r.end = LitmusResult::End::Measured;
    for (const LitmusTest test : {LitmusTest::Flushed, LitmusTest::Plain, LitmusTest::Ordered})
      for (uint32_t i = 0; i < rounds && r.end == LitmusResult::End::Measured; ++i) r.end = round(p, test, r);
    m_.store_word(say_[me()] + kRequest, 0);
    flush_say();
  }

 private:
  static constexpr Offset kBeat = offsetof(LitmusSayLine, beat), kRequest = offsetof(LitmusSayLine, request);
  static constexpr Offset kAnswer = offsetof(LitmusSayLine, answer), kFlag = offsetof(LitmusSayLine, flag);
  static constexpr uint64_t kLow56 = (1ULL << 56) - 1;
  static uint64_t content(uint64_t request, uint64_t store) { return request << 16 | store; }

  uint32_t me() const { return to_int(self_); }
  void flush_say() {
    m_.write_back(say_[me()], kLineBytes);   // litmus.say
    m_.store_fence();
  }
  void invalidate_says() {
    for (uint32_t h = 0; h < hosts_; ++h)
      if (h != me()) m_.invalidate(say_[h], kLineBytes);   // litmus.look
    m_.full_fence();
  }
  uint64_t fresh(uint32_t peer, Offset word) {
    m_.invalidate(say_[peer], kLineBytes);   // litmus.peer
    m_.full_fence();
    return m_.load_word(say_[peer] + word);
  }
  uint64_t beat_word() { return uint64_t{asker_ == kNobodyAsks ? 0 : asker_ + 1} << 56 | uint64_t{session_} << 32 | (count_ & 0xffffffff); }
  void beat() {
    ++count_;
    last_beat_ = clock_.now();
    m_.store_word(say_[me()] + kBeat, beat_word());
    flush_say();
  }
  bool let_go() {
    if (asker_ == kNobodyAsks) return false;
    asker_ = kNobodyAsks;
    beat();
    return true;
  }

  // One peer at a time: the test line of a peer that was answered must stay as it is until that one has looked.
  bool answer_one() {
    invalidate_says();
    for (uint32_t i = 1; i <= hosts_; ++i) {
      const uint32_t h = (last_asker_ + i) % hosts_;   // whoever was answered comes last the next time
      if (h == me() || (asker_ != kNobodyAsks && asker_ != h)) continue;
      const uint64_t request = m_.load_word(say_[h] + kRequest);   // litmus.request
      const auto test = static_cast<LitmusTest>(request >> 48 & 0xff);
      if (request >> 56 != me() + 1 || request == answered_[h] || test < LitmusTest::Plain || test > LitmusTest::Ordered) continue;
      answered_[h] = request;
      asker_ = last_asker_ = h;
      // First of all no answer: whoever was answered before, and looks only now, sees that its round is void.
      m_.store_word(say_[me()] + kAnswer, 0);
      beat();
      perform(test, request);
      m_.store_word(say_[me()] + kAnswer, uint64_t{h + 1} << 56 | (request & kLow56));
      flush_say();   // litmus.answer
      return true;
    }
    return false;
  }

  void perform(LitmusTest test, uint64_t request) {
    const Offset at = test_[me()];
    if (test == LitmusTest::Ordered) {
      for (uint64_t k = 1; k <= limits_.burst; ++k) {
        Line line;
        for (uint64_t& word : line.words) word = content(request, k);
        const Piece piece{reinterpret_cast<uint8_t*>(&line), sizeof line};
        m_.stream_copy(at, &piece, 1);
        m_.store_fence();   // litmus.order.fence
        m_.store_word(say_[me()] + kFlag, content(request, k));
        m_.write_back(say_[me()], kLineBytes);
        if (k % kStoresInARow == 0) clock_.pause();   // who shares the processor with us is to look in between
      }
      return;
    }
    for (uint32_t i = 0; i < 8; ++i) m_.store_word(at + i * 8ULL, content(request, 0));
    if (test != LitmusTest::Flushed) return;
    m_.write_back(at, kLineBytes);   // litmus.flushed
    m_.store_fence();
  }

  bool shows(const Line& line, uint64_t request, uint64_t store_min) const {
    for (const uint64_t word : line.words)
      if (word >> 16 != content(request, 0) >> 16 || (word & 0xffff) < store_min) return false;
    return true;
  }

  LitmusResult::End round(uint32_t peer, LitmusTest test, LitmusResult& r) {
    const uint64_t request =
        uint64_t{peer + 1} << 56 | uint64_t{static_cast<uint32_t>(test)} << 48 | uint64_t{session_} << 24 | (++sequence_ & 0xffffff);
    const uint64_t answer = uint64_t{me() + 1} << 56 | (request & kLow56);
    m_.load_line(test_[peer]);   // from now on we have it cached
    const uint64_t began = clock_.now();
    m_.store_word(say_[me()] + kRequest, request);
    flush_say();
    const LitmusResult::End waited = wait_for(peer, test, request, answer, r);
    if (waited != LitmusResult::End::Measured) return waited;
    const uint64_t took = clock_.now() - began;
    if (test == LitmusTest::Ordered) return waited;
    const bool seen_cached = shows(m_.load_line(test_[peer]), request, 0);
    m_.invalidate(test_[peer], kLineBytes);   // litmus.test
    m_.full_fence();
    const bool seen_fresh = shows(m_.load_line(test_[peer]), request, 0);
    m_.full_fence();
    if (fresh(peer, kAnswer) != answer) {
      ++r.abandoned;
      return waited;
    }
    if (test == LitmusTest::Plain) {
      ++r.plain;
      r.plain_stale += !seen_cached;
      r.plain_unseen += !seen_fresh;
    } else {
      ++r.flushed;
      r.cached_stale += !seen_cached;
      r.flushed_lost += !seen_fresh;
      r.round_trips.push_back(took);
    }
    return waited;
  }

  LitmusResult::End wait_for(uint32_t peer, LitmusTest test, uint64_t request, uint64_t answer, LitmusResult& r) {
    using End = LitmusResult::End;
    const uint64_t began = clock_.now();
    const uint64_t first = fresh(peer, kBeat);
    uint32_t beats = 0, others = 0;
    for (uint64_t before = first;;) {
      const uint64_t flag = fresh(peer, kFlag);
      if (test == LitmusTest::Ordered && flag >> 16 == content(request, 0) >> 16) look_at_order(peer, request, flag & 0xffff, r);
      if (fresh(peer, kAnswer) == answer) return End::Measured;
      const uint64_t now = m_.load_word(say_[peer] + kBeat);
      if (now != before) {
        const uint64_t busy_with = now >> 56;
        ++(busy_with != 0 && busy_with != me() + 1 ? others : beats);
        before = now;
      }
      answer_one();
      if (clock_.now() - last_beat_ > limits_.beat) beat();
      // The first beat may be older than our request; the peer raises it after it has looked at all requests.
      if (clock_.now() - began > limits_.answer) return others != 0 ? End::Busy : beats > 2 ? End::Deaf : End::Silent;
      clock_.pause();
    }
  }

  void look_at_order(uint32_t peer, uint64_t request, uint64_t store, LitmusResult& r) {
    m_.invalidate(test_[peer], kLineBytes);   // litmus.order.look
    m_.full_fence();
    const bool there = shows(m_.load_line(test_[peer]), request, store);
    if (!there) {
      m_.full_fence();
      if (fresh(peer, kBeat) >> 56 != me() + 1) return;   // it has turned to somebody else
    }
    ++r.ordered;
    r.reordered += !there;
  }

  static constexpr uint32_t kNobodyAsks = 0xffffffff, kStoresInARow = 8;

  M m_;
  uint32_t hosts_;
  HostIndex self_;
  uint32_t session_;
  Clock clock_;
  LitmusLimits limits_;
  Offset say_[kMaxHosts] = {}, test_[kMaxHosts] = {};
  uint64_t answered_[kMaxHosts] = {};
  uint32_t asker_ = kNobodyAsks, last_asker_ = 0;
  uint64_t count_ = 0, sequence_ = 0, last_beat_ = 0;
};

}   // namespace kvp
