// Scenarios that begin in the middle: a process has just come to the step where one instruction matters, and stopped or died there.
//
// From the start, random schedules seldom come there, and an explorer only after minutes. Such a start is one that a schedule of the other scenarios
// could come to: the processes ran alone, up to a named step.
#include "sim/parts.h"
#include "sim/scenarios.h"

namespace kvp::sim {
namespace {

// A block is found present while its writer is stopped before it has written the entry back, which lies in the first or the second of two buckets.
void vouched(World& w) {
  Actor &writer = w.join(0, 0), &finder = w.join(0, 1), &far = w.join(1, 0, kProbes);
  fill(w, writer, 1, {&finder, &far});
  const uint32_t key = 5 + w.below(2);
  w.stop_at(writer, "publish.cas", [&] { w.store(writer, key); });
  w.start(finder, [&w, &finder, key] { w.store(finder, key); });
  w.start(far, [&w, &far, key] {
    for (uint32_t i = 0; i < 3; ++i) w.load(far, key);
  });
  w.run();
  w.wake(writer);
  w.run();
  w.check();
}

// Both buckets of a key are full of living entries: that of a block which is just being evicted is taken by a new one.
void taken_entry(World& w) {
  Actor &writer = w.join(0, 0), &evicter = w.join(0, 1), &far = w.join(1, 0);
  fill(w, writer, 11, {&evicter, &far});   // eight of them in one bucket
  const SlotId slot = w.slot_of(0);
  w.start(evicter, [&w, &evicter, slot] { evict_to_free(*evicter.a, evicter.a->home(), slot, evicter.a->word_of(evicter.a->home(), slot)); });
  w.start(writer, [&w, &writer] { w.store(writer, 11); });
  start_reader(w, far, {}, 2);
  w.run();
  w.check();
}

// A process died as it evicted a block, and its mark is only in the cache of its host: the slot is reaped, taken, and filled.
void died_evicting(World& w) {
  Actor &victim = w.join(0, 0), &third = w.join(0, 1), &reaper = w.join(0, 2), &far = w.join(1, 0);
  fill(w, victim, 1, {&third, &reaper, &far});
  w.die_at(victim, "evict.claim", [&] { w.store(victim, 2); });
  w.start(reaper, [&] { reap(*reaper.a, reaper.a->home(), victim.participant, kNobody); });
  const Offset header = third.a->home().slot_header(SlotId::make(0, 0));
  const uint64_t its = w.sim.medium.look(third.process, header);
  w.start(
      third, [&] { w.store(third, 1); }, [&w, &third, header, its] { return w.sim.medium.look(third.process, header) != its; });
  start_reader(w, far, {0}, 4);
  w.run();
  w.check();
}

// A process died as it stored a block that nobody else touches: all that it left in the cache is the reaper's to write back.
void died_storing(World& w) {
  Actor &victim = w.join(0, 0), &reaper = w.join(0, 2), &far = w.join(1, 0), &prober = w.join(1, 1, kProbes);
  fill(w, victim, 1, {&reaper, &far, &prober});
  static constexpr const char* kSteps[] = {"store.header.word", "publish.cas", "append.record", "append.tail"};
  w.die_at(victim, kSteps[w.below(std::size(kSteps))], [&] { w.store(victim, 1); });
  w.start(reaper, [&] { reap(*reaper.a, reaper.a->home(), victim.participant, kNobody); });
  start_reader(w, far, {1, 1}, 6);
  if (!w.small) start_reader(w, prober, {}, 4);
  w.run();
  w.check();
}

// A new process uses the entry of a dead one: one of its threads reaps what that one left, another one stores already.
void used_again(World& w) {
  Actor &victim = w.join(0, 0), &again = w.join(0, 0), &thread = w.join(0, 0), &far = w.join(1, 0);
  fill(w, victim, w.options.slots, {&again, &thread, &far});
  w.die_at(victim, "evict.claim", [&] { w.store(victim, 2); });
  for (Actor* one : {&again, &thread}) w.attach(*one, 2);
  w.start(again, [&] { reap(*again.a, again.a->home(), again.participant, 2); });
  start_writer(w, thread, {2}, 3);
  start_reader(w, far, {0}, 3);
  w.run();
  w.check();
}

// A process is stopped as it adds the first namespace, or cuts the first extent; another one uses them; their host dies.
void half_begun(World& w) {
  Actor &first = w.join(0, 0), &second = w.join(0, 1), &far = w.join(1, 0), &adopter = w.join(w.options.hosts - 1, 1);
  w.stop_at(first, w.below(2) == 0 ? "namespace.stable" : "extent.assigned", [&] { w.store(first, 0); });
  w.sim.may_die({{first.process, second.process}, 0, [&] { w.host_down[0] = true, w.owner[0] = adopter.host; }, false});
  start_writer(w, second, {1}, 2);
  start_reader(w, far, {1}, 4);
  w.start(
      adopter,
      [&] {
        if (!w.host_down[0]) w.sim.strike(0);
        adopt(*adopter.a, adopter.a->shard(HostIndex{0}), 1);
      },
      [&] { return w.host_down[0] || w.gone(second); });
  w.run();
  w.check();
}

// Two processes find the one extent cut for another size than theirs, and perhaps somebody is stopped as he fills a slot there.
void cutters(World& w) {
  Actor &first = w.join(0, 0), &second = w.join(0, 1), &third = w.join(0, 2), &far = w.join(1, 0);
  fill(w, first, w.options.slots, {&second, &far});
  const bool stopped = !w.small && w.below(32) == 0;
  if (stopped) w.stop_at(third, "store.payload", [&] { w.store(third, 5); });
  start_writer(w, first, {1}, 1, 2 * kBlockBytes);
  start_writer(w, second, {2}, 1, 2 * kBlockBytes);
  start_reader(w, far, {0}, 4);
  w.run();
  w.wake(third);
  w.run();
  w.check();
}

// An extent is taken out of use beside processes that store, in two sizes, and load; its memory goes while nobody can write there.
void shrunk(World& w) {
  Actor &keeper = w.join(0, 0), &writer = w.join(0, 1), &second = w.join(0, 2), &far = w.join(1, 0);
  fill(w, writer, w.options.slots, {&keeper, &second, &far});
  w.start(keeper, [&w, &keeper] {
    const std::vector<uint8_t> nothing(w.sb.extent_payload_bytes);   // what a hole is read as
    const Piece zeros{const_cast<uint8_t*>(nothing.data()), nothing.size()};
    const auto empty = [&] { keeper.a->mem.stream_copy(keeper.a->home().payload(SlotId::make(0, 0), 0), &zeros, 1); };
    for (uint32_t tries = 0; tries < 3 && !keeper.t->slots().retire(0, empty); ++tries) {
    }
  });
  start_writer(w, writer, {1}, 2 * w.options.slots);
  if (w.small || w.below(2) == 0)
    start_writer(w, second, {2}, 2, 2 * kBlockBytes);
  else
    start_writer(w, second, {}, w.options.slots);
  start_reader(w, far, {0}, 6);
  w.run();
  w.check();
}

// A host takes its own shard over, as after a restart. Its processes try to store all the while; another host follows the log, and may have looked when
// the ring was new and the tail was not.
void restart(World& w) {
  Actor &first = w.join(0, 0), &second = w.join(0, 1), &owner = w.join(0, 2), &far = w.join(1, 0);
  fill(w, first, w.options.slots, {&second, &far});
  w.quietly(first, [&] {
    for (uint32_t i = 0; i < 8; ++i) w.store(first, i % 3);
  });
  w.sim.settle();
  if (w.sim.medium.word(owner.a->home().log_tail()) < 8) w.sim.fail("the follower should stand in the second line of the ring");
  w.quietly(far, [&] { w.load(far, 0); });
  const bool late = w.below(2) == 1;
  w.stop_at(owner, late ? "adopt.log.refill" : "adopt.claimed", [&] {
    adopt(*owner.a, owner.a->home(), 1);
    w.goes_on(owner);
  });
  if (late && w.below(2) == 1) {
    w.caches_write_back(0);
    w.quietly(far, [&] { w.load(far, 0); });
  }
  w.wake(owner);
  start_writer(w, first, {3}, 3);
  if (!w.small) start_writer(w, second, {}, 3);
  start_reader(w, far, {3, 3}, 5);
  w.run();
  w.check();
}

// A block was damaged; an audit finds it while a process of the same host evicts it and stores.
void damaged_block(World& w) {
  Actor &first = w.join(0, 0), &auditor = w.join(0, 2), &far = w.join(1, 0);
  fill(w, first, w.options.slots, {&auditor, &far});
  const SlotId slot = w.slot_of(0);
  w.caches_are_lost();
  w.sim.medium.flip_bit(first.a->home().payload(slot, kBlockBytes), 3);
  w.expect_from_now_on();
  const bool stores = w.below(2) == 0;
  w.start(auditor, [&] { audit(*auditor.a, auditor.t->namespaces(), auditor.a->home()); });
  w.start(first, [&w, &first, slot, stores] {
    if (stores) {
      const SlotWord word = first.a->word_of(first.a->home(), slot);
      if (word.state() == SlotState::Stable) evict_to_free(*first.a, first.a->home(), slot, word);
      w.store(first, 2);
    }
    w.store(first, 1);
  });
  w.start(far, [&w, &far] {
    for (uint32_t i = 0; i < (w.small ? 1U : 4U); ++i) w.load(far, 1);
  });
  w.run();
  w.check();
}

// A header was damaged when another host adopts the shard.
void damaged_header(World& w) {
  Actor &first = w.join(0, 0), &far = w.join(1, 0), &late = w.join(1, 2), &adopter = w.join(w.options.hosts - 1, 1);
  fill(w, first, w.options.slots, {&far, &adopter});
  w.caches_are_lost();
  w.sim.medium.flip_bit(first.a->home().slot_header(w.slot_of(0)) + offsetof(SlotHeader, length_bytes), 5);
  w.damaged = true;   // of a key that is not there a reader may say that the damaged header could have been its
  w.expect_from_now_on();
  w.host_down[0] = true, w.owner[0] = adopter.host;
  w.start(adopter, [&] { adopt(*adopter.a, adopter.a->shard(HostIndex{0}), 1); });
  start_reader(w, far, {1}, 3);
  start_reader(w, late, {1}, 2);   // walks over all headers, this one too
  w.run();
  w.check();
}

// As `zombie`, when all is over but the zombie's last words: only they can come late.
void last_words(World& w) {
  w.sim.medium.may_write = {};
  w.strict = false;
  Actor &first = w.join(0, 0), &far = w.join(1, 0), &adopter = w.join(w.options.hosts - 1, 1);
  fill(w, first, w.options.slots, {&far, &adopter});
  w.quietly(first, [&] {
    for (uint32_t i = 0; i < 2 * w.options.slots; ++i) w.store(first, i % w.options.keys);
  });
  w.sim.settle();
  w.owner[0] = adopter.host;
  w.quietly(adopter, [&] { adopt(*adopter.a, adopter.a->shard(HostIndex{0}), 1); });
  if (!w.small) start_reader(w, far, {}, 8);   // time passes
  acknowledge_and_audit(w, first, adopter);
  w.check();
}

// A slot is retired beside writers. Then whoever reaps, adopts or audits finds it: it looks like the slot of a dead process, and is none.
void retired_slot(World& w) {
  Actor &first = w.join(0, 0), &second = w.join(0, 1), &reaper = w.join(0, 2), &far = w.join(1, 0), &adopter = w.join(1, 1);
  fill(w, first, w.options.slots, {&second, &reaper, &far, &adopter});
  const SlotId slot = SlotId::make(0, 0);
  if (w.below(2) == 0) w.quietly(first, [&] { w.free_one(first, 0); });
  bool done = false;
  w.start(first, [&] {
    for (uint32_t i = 0; i < 100 && !done; ++i)
      done = give_up_slot(*first.a, first.a->home(), slot, load_cut(*first.a, first.a->home(), 0).word) != Retired::Taken;
  });
  start_writer(w, second, {2}, 4);
  start_reader(w, far, {0, 2}, 4);
  w.run();
  w.sim.settle();
  const auto keeps = [&](const char* who) {
    w.sim.settle();
    if (done && !SlotWord{w.sim.medium.word(first.a->home().slot_header(slot))}.retired()) w.sim.fail(std::string(who) + " gave a retired slot back");
  };
  keeps("a writer");
  w.start(reaper, [&] { reap(*reaper.a, reaper.a->home(), SlotWord::kRetirer, kNobody); });
  w.run();
  keeps("a reaper");
  w.expect_from_now_on();
  w.host_down[0] = true, w.owner[0] = adopter.host;
  w.start(adopter, [&] { adopt(*adopter.a, adopter.a->shard(HostIndex{0}), 1); });
  w.run();
  keeps("an adopter");
  w.start(adopter, [&] { audit(*adopter.a, adopter.t->namespaces(), adopter.a->shard(HostIndex{0})); });
  w.run();
  keeps("an audit");
  w.check();
}

}   // namespace

std::vector<Scenario> directed_scenarios() {
  return {
      {"vouched", "a block is found present before its writer has written its entry back", vouched, {2, 5, 8}, {2, 5, 8}, {{1, 1}}},
      {"taken", "the entry of a block that is being evicted is taken by a new one", taken_entry, {2, 12, 12, 64}, {2, 12, 12, 64}, {{1, 0}}},
      {"evicting", "a process died as it evicted; its slot is reaped, taken and filled", died_evicting, {2, 1, 3}, {2, 1, 3}, {{2, 0}}},
      {"storing", "a process died as it stored a block that nobody else touches", died_storing, {2, 2, 3}, {2, 2, 3}, {{1, 1}, {0, 2}}},
      {"again", "the entry of a dead process is used again while it is reaped", used_again, {2, 2, 3}, {2, 2, 3}, {{1, 0}}},
      {"begun", "a process is stopped as it begins the shard; its host dies", half_begun, {3, 2, 2}, {2, 2, 2}, {{1, 0}}},
      {"cutters", "two processes cut one extent anew at once", cutters, {2, 4, 4}, {2, 2, 3}, {{1, 0}}},
      {"shrunk", "an extent is taken out of use beside writers and readers", shrunk, {2, 4, 4}, {2, 2, 3}, {{1, 0}}},
      {"restart", "a host takes its own shard over while its processes try to store", restart, {2, 2, 4}, {2, 2, 4}, {{1, 0}, {0, 2}}},
      {"unsound", "an audit finds a damaged block beside a writer", damaged_block, {2, 2, 3}, {2, 2, 3}, {{1, 0}}},
      {"header", "a host adopts a shard with a damaged header", damaged_header, {3, 2, 3}, {2, 2, 3}, {{1, 0}}},
      {"words", "a late owner acknowledges, and is audited", last_words, {2, 2, 3}, {2, 1, 3}, {{1, 0}}},
      {"retired", "a slot is taken out of use for good, and outlives reaper, adopter and audit", retired_slot, {2, 3, 4}, {2, 2, 3}, {{1, 0}}},
  };
}

}   // namespace kvp::sim
