// What scenarios are made of.
#pragma once
#include "sim/world.h"

namespace kvp::sim {

// Blocks 0.. in the first slots, and every actor has looked at them: their caches hold lines that will be stale.
inline void fill(World& w, Actor& writer, uint32_t blocks, std::initializer_list<Actor*> lookers) {
  w.quietly(writer, [&] {
    for (uint32_t k = 0; k < blocks; ++k) w.store(writer, k);
  });
  w.sim.settle();
  w.first_words.clear();
  for (uint32_t i = 0; i < w.options.slots; ++i) w.first_words.push_back({w.sim.medium.word(writer.a->home().slot_header(SlotId::make(0, i)))});
  for (Actor* looker : lookers)
    w.quietly(*looker, [&] {
      for (uint32_t k = 0; k < w.options.keys; ++k) w.load(*looker, k);
    });
}

// In the small form: just these keys. Blocks of another size have keys of their own: a real key says the size, too.
inline void start_writer(World& w, Actor& actor, std::vector<uint32_t> small, uint32_t stores, uint64_t block_bytes = kBlockBytes) {
  w.start(actor, [&w, &actor, small, stores, block_bytes] {
    for (uint32_t i = 0; i < (w.small ? small.size() : stores); ++i) {
      const uint32_t key = w.small ? small[i] : w.any_key();
      w.store(actor, block_bytes == kBlockBytes ? key : key + w.options.keys, block_bytes);
    }
  });
}
inline void start_reader(World& w, Actor& actor, std::vector<uint32_t> small, uint32_t loads, std::function<bool()> when = {}) {
  w.start(
      actor,
      [&w, &actor, small, loads] {
        const auto key = [&w] { return w.below(5) == 0 ? w.options.keys + w.any_key() : w.any_key(); };
        for (uint32_t i = 0; i < (w.small ? small.size() : loads); ++i)
          if (w.small)
            w.load(actor, small[i]);
          else if (w.batches && w.below(3) == 0)
            w.load_batch(actor, {key(), key(), key()});
          else
            w.load(actor, key());
      },
      std::move(when));
}

// The zombie finds that it is fenced, flushes and acknowledges; as soon as that is in the medium, the new owner audits.
inline void acknowledge_and_audit(World& w, Actor& zombie, Actor& adopter) {
  bool stopped = false;
  const Offset acknowledged = ShardMap(w.sb, HostIndex{0}).acknowledgement(HostIndex{0});
  w.start(zombie, [&] {
    // First what a slow process of its host had in mind long ago: victims that are others by now. A failing compare-and-swap writes, too.
    for (uint32_t i = 0; i < w.options.slots; ++i) evict_to_free(*zombie.a, zombie.a->home(), SlotId::make(0, i), w.first_words[i]);
    stopped = w.store(zombie, w.options.keys) == Outcome::Fenced;   // a key that nobody has stored
    acknowledge(*zombie.a, zombie.a->home(), 1);
  });
  w.start(
      adopter,
      [&] {
        w.no_late_lines(0);
        audit(*adopter.a, adopter.t->namespaces(), adopter.a->shard(HostIndex{0}));
      },
      [&w, acknowledged] { return w.sim.medium.word(acknowledged) == 1; });
  w.run();
  w.sim.settle();
  if (!stopped) w.sim.fail("the zombie stored a block after it was fenced");
  if (w.sim.medium.word(acknowledged) != 1) w.sim.fail("the acknowledgement never comes to the medium");
  w.run();
}

}   // namespace kvp::sim
