// Blocks whose content follows from their key, so that anybody can tell whether bytes are right; batches of them; and what became of them.
#pragma once
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <set>
#include <string>
#include <vector>

#include "attached.h"
#include "transfer.h"

namespace kvp::hammer {

using Bytes = std::vector<uint8_t>;

inline constexpr uint64_t kUnit = 256;
inline constexpr uint64_t kSizes[] = {kUnit - 7, kUnit, 3 * kUnit + 1, 8 * kUnit};   // of a block, one a namespace
inline constexpr uint32_t kSpaces = std::size(kSizes);
inline constexpr uint32_t kBlocks = 150, kHot = 20;   // of each namespace: several times what fits
inline constexpr uint32_t kHosts = 2;
inline constexpr uint32_t kBatchMax = 30;
inline const std::set<Outcome> kHonest{Outcome::Ok, Outcome::NeverStored, Outcome::Evicted, Outcome::ChangedWhileReading};
inline const std::set<Outcome> kHonestStore{Outcome::Ok, Outcome::Present, Outcome::NoSpace};

[[noreturn]] inline void fail(const std::string& what) {
  std::fprintf(stderr, "hammer: %s\n", what.c_str());
  std::abort();
}
inline void ensure(bool condition, const std::string& what) {
  if (!condition) fail(what);
}

inline uint64_t mix(uint64_t v) {
  v = (v ^ v >> 30) * 0xbf58476d1ce4e5b9ULL;
  v = (v ^ v >> 27) * 0x94d049bb133111ebULL;
  return v ^ v >> 31;
}
class Dice {
 public:
  explicit Dice(uint64_t seed) : state_(mix(seed + 1)) {}
  uint32_t below(uint32_t n) { return static_cast<uint32_t>(mix(state_ += 0x9e3779b97f4a7c15ULL) % n); }
  bool in_100(uint32_t percent) { return below(100) < percent; }

 private:
  uint64_t state_;
};

inline Key key_of(uint32_t space, uint32_t block) {
  Key key;
  for (uint32_t i = 0; i < 4; ++i) key.words[i] = mix((uint64_t{space} << 32 | block) * 4 + i + 1);
  return key;
}
inline uint8_t byte_of(const Key& key, uint64_t at) { return static_cast<uint8_t>(mix(key.words[2] + at / 8) >> at % 8 * 8); }
inline void fill(const Key& key, uint8_t* to, uint64_t bytes) {
  for (uint64_t i = 0; i < bytes; ++i) to[i] = byte_of(key, i);
}
inline bool right(const Key& key, const uint8_t* from, uint64_t bytes) {
  for (uint64_t i = 0; i < bytes; ++i)
    if (from[i] != byte_of(key, i)) return false;
  return true;
}

struct Tally {
  std::atomic<uint64_t> stored{0}, present{0}, declined{0}, loaded{0}, missed{0}, wrong{0}, upkeep{0}, attached{0}, refused{0};
};

// A batch of keys of one namespace, and room for their blocks: each block in two pieces, or as pages of an engine.
class Batch {
 public:
  explicit Batch(Dice& dice) : space(dice.below(kSpaces)), block_bytes(kSizes[space]) {
    constexpr uint32_t kCounts[] = {1, 2, 8, kBatchMax};
    const uint32_t n = kCounts[dice.below(4)];
    const bool hot = dice.in_100(70), pages = dice.in_100(30);
    for (uint32_t i = 0; i < n; ++i) keys.push_back(key_of(space, dice.below(hot ? kHot : kBlocks)));
    const uint64_t cut =
        dice.in_100(50) ? 64 * dice.below(static_cast<uint32_t>(block_bytes / 64) + 1) : dice.below(static_cast<uint32_t>(block_bytes));
    const uint64_t parts[2] = {cut, block_bytes - cut};
    memory_.resize(n * block_bytes + kLineBytes);   // a piece may end where the allocation does: what writes beyond it is seen
    uint8_t* first = memory_.data() + dice.below(2) * 32;
    for (uint32_t j = 0; j < 2; ++j)
      if (pages) {   // all first pieces, then all second ones
        base_.push_back(reinterpret_cast<uint64_t>(first) + (j == 0 ? 0 : n * parts[0]));
        stride_.push_back(parts[j]);
        bytes_.push_back(parts[j]);
      }
    for (uint32_t i = 0; i < n; ++i) {
      if (pages) {
        ids_.push_back(n - 1 - i);
        continue;
      }
      for (uint32_t j = 0; j < 2; ++j) {
        base_.push_back(reinterpret_cast<uint64_t>(first) + i * block_bytes + (j == 0 ? 0 : cut));
        bytes_.push_back(parts[j]);
      }
    }
    buffers = {base_.data(), stride_.data(), bytes_.data(), pages ? ids_.data() : nullptr, 2};
  }
  uint32_t size() const { return static_cast<uint32_t>(keys.size()); }

  void fill_all() {
    Bytes block(block_bytes);
    Piece pieces[2];
    for (uint32_t i = 0; i < size(); ++i) {
      fill(keys[i], block.data(), block_bytes);
      buffers.block(i, pieces);
      for (uint64_t j = 0, at = 0; j < 2; at += pieces[j++].bytes)
        if (pieces[j].bytes != 0) std::memcpy(pieces[j].data, block.data() + at, pieces[j].bytes);
    }
  }
  void fill_with_nothing() { std::fill(memory_.begin(), memory_.end(), uint8_t{0xee}); }
  bool block_right(uint32_t i) const {
    Bytes block(block_bytes);
    Piece pieces[2];
    buffers.block(i, pieces);
    for (uint64_t j = 0, at = 0; j < 2; at += pieces[j++].bytes)
      if (pieces[j].bytes != 0) std::memcpy(block.data() + at, pieces[j].data, pieces[j].bytes);
    return right(keys[i], block.data(), block_bytes);
  }
  // Judges what a load gave.
  void judge(const uint8_t* codes, const std::set<Outcome>& honest, Tally& tally) const {
    for (uint32_t i = 0; i < size(); ++i) {
      const Outcome code{codes[i]};
      ensure(honest.contains(code), "a load ended with outcome " + std::to_string(codes[i]));
      if (code == Outcome::Ok) {
        ++tally.loaded;
        if (!block_right(i)) ++tally.wrong, fail("wrong bytes of " + std::to_string(block_bytes));
      } else {
        ++tally.missed;
      }
    }
  }
  void judge_store(const uint8_t* codes, const std::set<Outcome>& honest, Tally& tally) const {
    for (uint32_t i = 0; i < size(); ++i) {
      const Outcome code{codes[i]};
      ensure(honest.contains(code), "a store ended with outcome " + std::to_string(codes[i]));
      ++(code == Outcome::Ok ? tally.stored : code == Outcome::Present ? tally.present : tally.declined);
    }
  }

  const uint32_t space;
  const uint64_t block_bytes;
  std::vector<Key> keys;
  Buffers buffers{};

 private:
  Bytes memory_;
  std::vector<uint64_t> base_, stride_, bytes_;
  std::vector<int64_t> ids_;
};

}   // namespace kvp::hammer
