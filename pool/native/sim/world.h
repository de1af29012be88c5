// A small region on the simulated medium, and the processes that the scenarios are made of.
#pragma once
#include <array>
#include <string>
#include <vector>

#include "recovery.h"
#include "sim/simulation.h"

namespace kvp::sim {

using SimAttached = Attached<SimMemory>;
using SimTransfer = Transfer<SimMemory>;

inline constexpr uint64_t kBlockBytes = 128;   // two lines: a torn payload shows

struct WorldOptions {
  uint32_t hosts = 3;
  uint32_t slots = 2;   // an extent
  uint32_t keys = 3;
  uint64_t slot_bytes = kBlockBytes;
};

// Content that says which key it belongs to, different in every line.
inline void fill_block(uint32_t key, uint8_t* to, uint64_t bytes) {
  for (uint64_t i = 0; i < bytes; ++i) to[i] = static_cast<uint8_t>(key * 31 + i / kLineBytes * 7 + 1);
}
inline Key key_number(uint32_t k) {   // tags and buckets collide on purpose: there are few of each
  return {{uint64_t{k + 1} << 48, 1, 2, uint64_t{k} * 7919 + 3}};
}

class World {
 public:
  World(const WorldOptions& options, uint64_t seed) : options(options), sb(plan(options)), sim(sb.region_bytes, options.hosts, seed) {
    for (uint32_t h = 0; h < options.hosts; ++h) sim.medium.set_word(ShardMap(sb, HostIndex{h}).header(), 1);
    sim.medium.may_write = [this](uint32_t host, LineIndex line) {
      const Offset at = line * kLineBytes;
      const auto shard = static_cast<uint32_t>((at - sb.shard_offset) / sb.shard_bytes);
      return at < sb.shard_offset || shard == host || (at >= ShardMap(sb, HostIndex{shard}).namespace_row(0) && owner[shard] == host);
    };
    for (uint32_t h = 0; h < options.hosts; ++h) owner[h] = h;
  }

  void fail(const std::string& what) {
    if (violation.empty()) violation = what;
  }
  std::string verdict() const { return !violation.empty() ? violation : sim.medium.violation; }

  // ---- bodies of processes ----

  // Stores `stores` blocks, chosen freely.
  uint32_t spawn_writer(uint32_t host, uint32_t participant, uint32_t stores, uint64_t block_bytes = kBlockBytes) {
    live(host, participant);
    return sim.spawn(host, [=, this](uint32_t id) {
      SimAttached a(SimMemory(sim, id), sb, HostIndex{host});
      a.participant = participant, a.generation = 1;
      SimTransfer t(a);
      for (uint32_t i = 0; i < stores; ++i) store(a, t, sim.medium.choices.below(options.keys), block_bytes);
    });
  }
  // `wrong_checksum`: is a block whose header did not change, but whose payload does not fit, an error here? (PROTOCOL 2.6: it would be a wrong
  // hit if the payload checksum were not checked.)
  uint32_t spawn_reader(uint32_t host, uint32_t loads, bool wrong_checksum) {
    return sim.spawn(host, [=, this](uint32_t id) {
      SimAttached a(SimMemory(sim, id), sb, HostIndex{host});
      a.participant = 3, a.generation = 1;
      for (uint32_t h = 0; h < options.hosts; ++h) a.set_owned(HostIndex{h}, h == host);
      SimTransfer t(a);
      for (uint32_t i = 0; i < loads; ++i) load(t, sim.medium.choices.below(options.keys), wrong_checksum);
    });
  }
  uint32_t spawn_reaper(uint32_t host, uint32_t dead_participant) {
    live(host, 2);
    return sim.spawn(host, [=, this](uint32_t id) {
      SimAttached a(SimMemory(sim, id), sb, HostIndex{host});
      a.participant = 2, a.generation = 1;
      reap(a, a.home(), dead_participant, kNobody);
    });
  }
  uint32_t spawn_adopter(uint32_t host, uint32_t shard, uint64_t epoch) {
    live(host, 1);
    return sim.spawn(host, [=, this](uint32_t id) {
      SimAttached a(SimMemory(sim, id), sb, HostIndex{host});
      a.participant = 1, a.generation = 1;
      adopt(a, a.shard(HostIndex{shard}), epoch);
    });
  }
  uint32_t spawn(uint32_t host, uint32_t participant, std::function<void(SimAttached&, SimTransfer&)> body) {
    live(host, participant);
    return sim.spawn(host, [=, this](uint32_t id) {
      SimAttached a(SimMemory(sim, id), sb, HostIndex{host});
      a.participant = participant, a.generation = 1;
      SimTransfer t(a);
      body(a, t);
    });
  }

  Outcome store(SimAttached& a, SimTransfer& t, uint32_t key, uint64_t block_bytes) {
    uint16_t ns = 0;
    std::array<uint8_t, 32> digest{};
    digest[0] = static_cast<uint8_t>(block_bytes / kLineBytes);
    if (const Outcome o = t.namespaces().find_or_add(digest.data(), block_bytes, "", 0, ns); o != Outcome::Ok) return o;
    std::vector<uint8_t> bytes(block_bytes);
    fill_block(key, bytes.data(), block_bytes);
    const Piece piece{bytes.data(), block_bytes};
    Claim claim;
    const uint64_t slot_bytes = Namespaces<SimMemory>::slot_bytes_for(a.home(), block_bytes);
    const Outcome begun = t.begin_store(key_number(key), slot_bytes, claim);
    return begun == Outcome::Ok ? t.complete_store(claim, key_number(key), &piece, 1, block_bytes, ns, slot_bytes) : begun;
  }
  Outcome load(SimTransfer& t, uint32_t key, bool wrong_checksum) {
    const Key k = key_number(key);
    Outcome code{};
    Found f;
    t.refresh();
    t.lookup_group(&k, 1, &code, &f);
    if (code != Outcome::Ok) return code;
    std::vector<uint8_t> got(f.header.length_bytes), want(f.header.length_bytes);
    const Piece piece{got.data(), got.size()};
    const Outcome loaded = t.load_block(f, &piece, 1, got.size(), 1);
    fill_block(key, want.data(), want.size());
    if (loaded == Outcome::Ok) ++hits;
    if (loaded == Outcome::Ok && got != want) fail("a hit returned wrong content");
    if (loaded == Outcome::FailedChecksum && wrong_checksum)
      fail("wrong content below an unchanged header: without the payload checksum this were a hit");
    return loaded;
  }

  // In the end, when nothing is under way: no slot of the shard is lost, and every stored block is a hit on every host.
  void check_quiet(uint32_t shard, uint64_t steps_max) {
    sim.medium.settle();
    std::vector<uint32_t> stored;
    const uint32_t owner_host = owner[shard];
    spawn_check(owner_host, [&](SimAttached& a, SimTransfer&) {
      for_each_slot(a, a.shard(HostIndex{shard}), [&](SlotId slot) {
        const Header h = a.load_header(a.shard(HostIndex{shard}), slot);
        if (h.word().state() == SlotState::Writing) fail("slot lost: WRITING for ever");
        if (h.word().state() == SlotState::Stable && !h.right) fail("a stored block has a wrong header checksum");
        if (h.word().state() == SlotState::Stable && h.right)
          for (uint32_t k = 0; k < options.keys; ++k)
            if (h.key() == key_number(k)) stored.push_back(k);
      });
    });
    finish(steps_max);
    blocks_at_end = static_cast<uint32_t>(stored.size());
    for (uint32_t host = 0; host < options.hosts; ++host) {
      if (host_down[host]) continue;
      spawn_check(host, [&, host](SimAttached& a, SimTransfer& t) {
        for (uint32_t h = 0; h < options.hosts; ++h) a.set_owned(HostIndex{h}, owner[h] == host);
        for (const uint32_t k : stored)
          if (const Outcome o = load(t, k, true); o != Outcome::Ok)
            fail("a stored block is never found on host " + std::to_string(host) + " (outcome " + std::to_string(static_cast<int>(o)) + ")");
      });
      finish(steps_max);
    }
  }
  void finish(uint64_t steps_max) {
    if (!sim.run(steps_max)) fail("no progress: " + std::to_string(steps_max) + " accesses were not enough");
  }

  const WorldOptions options;
  const Superblock sb;
  Simulation sim;
  std::array<uint32_t, kMaxHosts> owner{};
  std::array<bool, kMaxHosts> host_down{};
  std::string violation;
  uint64_t hits = 0;
  uint32_t blocks_at_end = 0;

 private:
  static Superblock plan(const WorldOptions& o) {
    GeometryRequest r;
    r.hosts = o.hosts, r.participants = 4, r.namespaces = 2, r.slot_bytes_min = o.slot_bytes, r.extent_bytes = o.slots * o.slot_bytes;
    r.coherence = Coherence::Software;
    for (r.region_bytes = 64 << 10;; r.region_bytes += 4096 * o.hosts) {
      try {
        return plan_region(r);
      } catch (const Error&) {
      }
    }
  }
  void live(uint32_t host, uint32_t participant) {
    sim.medium.set_word(ShardMap(sb, HostIndex{host}).participant(participant), uint64_t{1} << 32 | 1);
  }
  void spawn_check(uint32_t host, std::function<void(SimAttached&, SimTransfer&)> body) { spawn(host, 3, std::move(body)); }
};

}   // namespace kvp::sim
