// The Memory of one simulated process.
#pragma once
#include <map>
#include <source_location>

#include "sim/simulation.h"

namespace kvp::sim {

// The places that can be left out: accesses and named checks in the protocol's source. A place is known by file, function, access, and its number
// among those, so that it keeps its name when lines move.
class Places {
 public:
  using Where = std::source_location;
  struct Place {
    std::string file, function, what;
    uint32_t line = 0, column = 0;
    bool operator<(const Place& o) const {
      return std::tie(file, function, what, line, column) < std::tie(o.file, o.function, o.what, o.line, o.column);
    }
  };
  static Places& all() {
    static Places places;
    return places;
  }
  // Called at every access: the strings of a source location and of an access are literals, so their addresses identify them.
  uint32_t number(const char* what, const Where& where) {
    const Key key{where.file_name(), what, where.line() << 12 | where.column()};
    const size_t slot = (reinterpret_cast<uintptr_t>(key.file) >> 3 ^ reinterpret_cast<uintptr_t>(what) * 31 ^ key.at * 0x9e3779b9U) & (kCached - 1);
    if (cached_[slot].key == key) return note(cached_[slot].number);
    const Place place{short_file(where.file_name()), short_function(where.function_name()), what, where.line(), where.column()};
    const auto [i, fresh] = numbers_.try_emplace(place, static_cast<uint32_t>(places_.size()));
    if (fresh) places_.push_back(place);
    cached_[slot] = {key, i->second};
    return note(i->second);
  }
  void start_noting() { noted_.assign(1024, false); }
  const std::vector<bool>& noted() const { return noted_; }
  std::string name(uint32_t number) const {
    const Place& p = places_[number];
    uint32_t before = 0, alike = 0;
    for (const auto& [other, ignored] : numbers_)
      if (other.file == p.file && other.function == p.function && other.what == p.what) ++alike, before += other < p;
    return p.file + " " + p.function + " " + p.what + (alike > 1 ? " #" + std::to_string(before + 1) : "");
  }
  // As "file:line access"; ~0 if nothing passed there yet.
  uint32_t at(const std::string& place) const {
    for (uint32_t i = 0; i < places_.size(); ++i)
      if (places_[i].file + ":" + std::to_string(places_[i].line) + " " + places_[i].what == place) return i;
    return ~0u;
  }
  uint32_t line(uint32_t number) const { return places_[number].line; }
  uint32_t size() const { return static_cast<uint32_t>(places_.size()); }

 private:
  uint32_t note(uint32_t number) {
    if (number < noted_.size()) noted_[number] = true;
    return number;
  }
  struct Key {
    const char *file, *what;
    uint32_t at;
    bool operator==(const Key&) const = default;
  };
  struct Cached {
    Key key;
    uint32_t number;
  };
  static std::string short_file(const std::string& path) { return path.substr(path.rfind('/') + 1); }
  static std::string short_function(std::string s) {   // "Outcome kvp::Transfer<M>::fill(...) const [with M = ...]" -> "fill"
    int depth = 0;
    std::string flat;
    for (const char c : s) {
      depth += c == '<';
      if (depth == 0) flat += c;
      depth -= c == '>';
    }
    const std::string head = flat.substr(0, flat.find('('));
    const size_t from = head.find_last_of(" :");
    return from == std::string::npos ? head : head.substr(from + 1);
  }
  static constexpr size_t kCached = 4096;
  std::array<Cached, kCached> cached_{};
  std::map<Place, uint32_t> numbers_;
  std::vector<Place> places_;
  std::vector<bool> noted_;
};

class SimMemory {
 public:
  using Where = std::source_location;
  SimMemory(Simulation& simulation, uint32_t process) : s_(&simulation), process_(process) {}

  uint64_t load_word(Offset at) {
    s_->access(Access::Load, line_of(at));
    const uint64_t value = s_->medium.load(process_, at);
    s_->saw(value);
    return value;
  }
  Line load_line(Offset at) {
    Line line;
    if (s_->pushes_are_steps) {   // word by word: a line may change in the middle
      for (uint32_t i = 0; i < 8; ++i) line.words[i] = load_word(at + i * 8);
    } else {
      line.words[0] = load_word(at);
      for (uint32_t i = 1; i < 8; ++i) s_->saw(line.words[i] = s_->medium.load(process_, at + i * 8));
    }
    return line;
  }
  // Touch rows: no content of theirs, stale or torn, can matter for safety (PROTOCOL 9.17), so they are not simulated in detail.
  uint16_t load_half(Offset at) {
    const auto value = static_cast<uint16_t>(s_->medium.word(at & ~7ULL) >> (at % 8 * 8));
    s_->saw(value);
    return value;
  }
  void store_half(Offset at, uint16_t value) {
    const uint64_t word = s_->medium.word(at & ~7ULL), shift = at % 8 * 8;
    s_->medium.set_word(at & ~7ULL, (word & ~(0xffffULL << shift)) | uint64_t{value} << shift);
  }
  void store_word(Offset at, uint64_t value) {
    if (on_store) on_store(at, s_->medium.look(process_, at), value);
    push(Op::Store, at, value);
  }
  bool cas_word(Offset at, uint64_t expected, uint64_t desired, Where where = Where::current()) {
    if (s_->leaves_out(Places::all().number("cas->store", where))) {   // a plain load, then a plain store
      const bool equal = load_word(at) == expected;
      if (equal) store_word(at, desired);
      return equal;
    }
    s_->access(Access::Cas, line_of(at));
    const bool equal = s_->medium.cas(process_, at, expected, desired);
    s_->saw(equal);
    if (equal && on_store) on_store(at, expected, desired);
    return equal;
  }
  void add_word(Offset, uint64_t) {}   // counters: no part of the protocol

  uint64_t stream_copy(Offset at, const Piece* pieces, uint32_t n) {
    std::vector<uint8_t> bytes;
    for (uint32_t i = 0; i < n; ++i) bytes.insert(bytes.end(), pieces[i].data, pieces[i].data + pieces[i].bytes);
    const uint64_t checksum = payload_checksum(bytes.data(), bytes.size());
    bytes.resize((bytes.size() + kLineBytes - 1) / kLineBytes * kLineBytes);
    for (uint64_t i = 0; i < bytes.size(); i += kLineBytes) {
      Pending p{s_->weak_order ? Op::Fill : Op::Stream, line_of(at + i)};
      std::memcpy(&p.whole, bytes.data() + i, kLineBytes);
      s_->access(Access::Push, p.line, "stream");
      s_->medium.push(process_, p);
      if (s_->weak_order) s_->medium.push(process_, {Op::WriteBack, p.line});
    }
    return checksum;
  }
  uint64_t copy_out(const Piece* pieces, uint32_t n, Offset at, Offset drop, uint64_t drop_bytes, Where where = Where::current()) {
    std::vector<uint8_t> all;
    uint64_t bytes = 0;
    const bool drops = drop_bytes != 0 && !s_->leaves_out(Places::all().number("copy_out.invalidate", where));
    for (uint32_t i = 0; i < n; ++i) bytes += pieces[i].bytes;
    all.resize(bytes);
    const uint64_t words = bytes / 8, first = s_->weak_order ? s_->adversary.below(static_cast<uint32_t>(words)) : 0;
    for (uint64_t k = 0; k < words;
         ++k) {   // weak order: plain loads come in any order; a rotation shows what a later line before an earlier one does
      const uint64_t i = (k + first) % words;
      if (drops && k * 8 < drop_bytes && k % (kLineBytes / 8) == 0) each_line(Op::Invalidate, drop + k * 8, kLineBytes);
      const uint64_t word = s_->pushes_are_steps || (at + i * 8) % kLineBytes == 0 ? load_word(at + i * 8) : s_->medium.load(process_, at + i * 8);
      if (!s_->pushes_are_steps) s_->saw(word);
      std::memcpy(all.data() + i * 8, &word, 8);
    }
    uint64_t from = 0;
    for (uint32_t i = 0; i < n; from += pieces[i].bytes, ++i) std::memcpy(pieces[i].data, all.data() + from, pieces[i].bytes);
    return payload_checksum(all.data(), all.size());
  }
  uint64_t checksum(Offset at, uint64_t bytes) {
    std::vector<uint8_t> copy(bytes);
    const Piece piece{copy.data(), bytes};
    return copy_out(&piece, 1, at, 0, 0);
  }

  void write_back(Offset at, uint64_t bytes, Where where = Where::current()) { each_line(Op::WriteBack, "write_back", at, bytes, where); }
  void invalidate(Offset at, uint64_t bytes, Where where = Where::current()) { each_line(Op::Invalidate, "invalidate", at, bytes, where); }
  void invalidate_all(Offset at, uint64_t bytes, Where where = Where::current()) { each_line(Op::Invalidate, "invalidate", at, bytes, where); }
  void prefetch(Offset) {}
  void store_fence(Where where = Where::current()) {
    if (s_->leaves_out(Places::all().number("store_fence", where))) return;
    s_->access(Access::Push, 0, "fence");
    s_->medium.push(process_, {Op::Fence});
  }
  void full_fence(Where where = Where::current()) {
    if (s_->leaves_out(Places::all().number("full_fence", where))) return;
    if (s_->leaves_out(Places::all().number("full_fence->store_fence", where))) {
      s_->access(Access::Push, 0);
      s_->medium.push(process_, {Op::Fence});
      return;
    }
    s_->access(Access::Fence, 0);
    s_->medium.full_fence(process_);
  }
  void yield() { s_->access(Access::Yield, 0); }
  bool without(const char* check, Where where = Where::current()) { return s_->leaves_out(Places::all().number(check, where)); }
  template <class F>
  bool guarded(F&& f) {
    try {
      f();
      return true;
    } catch (const Poisoned&) {
      return false;
    }
  }
  bool coherent() const { return false; }

  std::function<void(Offset at, uint64_t before, uint64_t value)> on_store;   // a word has got this value, or is about to

 private:
  void push(Op op, Offset at, uint64_t value) {
    s_->access(Access::Push, line_of(at), "store");
    s_->medium.push(process_, {op, line_of(at), word_of(at), value, {}});
  }
  void each_line(Op op, const char* what, Offset at, uint64_t bytes, const Where& where) {
    if (!s_->leaves_out(Places::all().number(what, where))) each_line(op, at, bytes, what);
  }
  void each_line(Op op, Offset at, uint64_t bytes, const char* what = "invalidate") {
    for (LineIndex line = line_of(at); line <= line_of(at + bytes - 1); ++line) {
      if (bytes <= kLineBytes) s_->access(Access::Push, line, what);   // long ranges in one go: the interleavings inside are seen with single lines
      s_->medium.push(process_, {op, line});
    }
  }
  Simulation* s_;
  uint32_t process_;
};
static_assert(Memory<SimMemory>);

}   // namespace kvp::sim
