#include "sim/scenarios.h"

#include "sim/parts.h"

namespace kvp::sim {
namespace {

void evict(World& w) {
  w.batches = true;
  Actor &first = w.join(0, 0), &second = w.join(0, 1), &far = w.join(1, 0);
  fill(w, first, w.options.slots, {&second, &far});
  if (!w.small) {
    Actor &near = w.join(0, 2), &prober = w.join(1, 1, kProbes);
    fill(w, first, 0, {&prober});
    start_reader(w, near, {}, 3);
    start_reader(w, prober, {}, 6);
    start_writer(w, second, {}, 3);
  }
  start_writer(w, first, {2}, 4);
  start_reader(w, far, {0, 2}, 6);
  w.run();
  w.check();
}

void probe(World& w) {   // as `evict`, for a reader without a replica
  w.batches = true;
  Actor &first = w.join(0, 0), &far = w.join(1, 0, kProbes);
  fill(w, first, w.options.slots, {&far});
  start_writer(w, first, {2}, 8);
  start_reader(w, far, {2, 2}, 12);
  w.run();
  w.check();
}

// Two writers and nothing else: entries, slots, and the same key twice.
void writers(World& w) {
  Actor &first = w.join(0, 0), &second = w.join(0, 1), &far = w.join(1, 0);
  fill(w, first, 1, {&second, &far});
  start_writer(w, first, {1}, 3);
  start_writer(w, second, {1}, 3);
  w.run();
  w.check();
}

void overflow(World& w) {   // eight entries of one bucket are taken when the ninth block comes
  Actor &first = w.join(0, 0), &second = w.join(0, 1), &far = w.join(1, 0);
  fill(w, first, 11, {&second, &far});
  start_writer(w, first, {11}, 5);
  if (!w.small) start_writer(w, second, {}, 5);
  start_reader(w, far, {11}, 6);
  w.run();
  w.check();
}

void sizes(World& w) {   // two block sizes take one extent from each other
  Actor &first = w.join(0, 0), &second = w.join(0, 1), &far = w.join(1, 0);
  fill(w, first, w.options.slots, {&second, &far});
  if (!w.small) start_writer(w, first, {}, 3);
  start_writer(w, second, {2}, 3, 2 * kBlockBytes);
  start_reader(w, far, {0, w.options.keys + 2}, 5);
  w.run();
  w.check();
}

void namespaces(World& w) {   // two processes add the same row at once
  Actor &first = w.join(0, 0), &second = w.join(0, 1), &far = w.join(1, 0);
  start_writer(w, first, {0}, 2);
  start_writer(w, second, {1}, 2, w.below(2) == 0 ? kBlockBytes : 2 * kBlockBytes);
  start_reader(w, far, {0}, 4);
  w.run();
  w.check();
}

void keeper(World& w) {   // somebody frees slots while others take them
  w.batches = true;
  Actor &writer = w.join(0, 0), &daemon = w.join(0, 1), &far = w.join(1, 0, w.small || w.below(2) == 0 ? ReplicaPace{} : kProbes);
  fill(w, writer, w.options.slots, {&daemon, &far});
  w.start(daemon, [&] {
    for (uint32_t i = 0; i < (w.small ? 1U : 3U); ++i) w.free_one(daemon, w.small ? 0 : w.below(w.options.slots));
  });
  start_writer(w, writer, {2}, 3);
  start_reader(w, far, {0, 2}, 6);
  w.run();
  w.check();
}

void log_wraps(World& w) {   // more records than the ring has, while a follower sleeps
  Actor &writer = w.join(0, 0), &second = w.join(0, 1), &far = w.join(1, 0), &slow = w.join(1, 1, ReplicaPace{1, 1});
  fill(w, writer, w.small ? 7 : w.options.slots, {&second, &far, &slow});   // small: the next record is the last of its line
  start_writer(w, writer, {7, 8}, 8);
  if (!w.small) start_writer(w, second, {}, 8);
  start_reader(w, far, {8, 8}, 5);
  if (!w.small) start_reader(w, slow, {}, 5);
  w.run();
  w.check();
}

void crash(World& w) {   // a process dies, another one reaps it, a third goes on
  Actor &victim = w.join(0, 0), &reaper = w.join(0, 2), &far = w.join(1, 0);
  fill(w, victim, w.options.slots, {&reaper, &far});
  w.sim.may_die({{victim.process}, kNone, {}, false});
  start_writer(w, victim, {2}, 4);
  start_reader(w, far, {0, 2}, 12);
  if (!w.small && w.below(2) == 0) start_writer(w, w.join(0, 1), {}, 4);
  w.start(
      reaper,
      [&] {
        if (w.dead(victim)) reap(*reaper.a, reaper.a->home(), victim.participant, kNobody);
        w.store(reaper, 0);   // and life goes on
      },
      [&] { return w.gone(victim); });
  w.run();
  w.check();
}

void reap_beside(World& w) {   // a third process stores into the slot that the reaper frees
  Actor &victim = w.join(0, 0), &third = w.join(0, 1), &reaper = w.join(0, 2), &far = w.join(1, 0);
  fill(w, victim, w.options.slots, {&third, &reaper, &far});
  w.sim.may_die({{victim.process}, kNone, {}, false});
  if (w.small)
    w.start(victim, [&] { w.free_one(victim, 0); });
  else
    start_writer(w, victim, {}, 2);
  start_writer(w, third, {1}, 4);
  start_reader(w, far, {0}, 12);
  w.start(
      reaper,
      [&] {
        if (w.dead(victim)) reap(*reaper.a, reaper.a->home(), victim.participant, kNobody);
      },
      [&] { return w.gone(victim); });
  w.run();
  w.check();
}

void deaths(World& w) {   // two die, one of them perhaps while it reaps the other; a new process uses the first one's participant entry again
  Actor &first = w.join(0, 0), &second = w.join(0, 1), &third = w.join(0, 2), &again = w.join(0, 0), &far = w.join(1, 0);
  fill(w, first, w.options.slots, {&second, &third, &again, &far});
  w.attach(again, 2);
  w.sim.may_die({{first.process}, kNone, {}, false});
  w.sim.may_die({{second.process}, kNone, {}, false});
  start_writer(w, first, {2}, 3);
  w.start(
      second,
      [&] {
        if (w.dead(first)) reap(*second.a, second.a->home(), 0, kNobody);
        for (uint32_t i = 0; i < (w.small ? 1U : 3U); ++i) w.store(second, w.small ? 1 : w.any_key());
      },
      [&] { return w.gone(first) || w.small; });
  // The lock of an entry has one holder at a time: what the first left behind is reaped by whoever uses its entry next, before it writes.
  w.start(
      again,
      [&] {
        reap(*again.a, again.a->home(), 0, 2);
        w.store(again, 0);
      },
      [&] { return w.dead(first) && (w.dead(second) || w.sim.finished(second.process)); });
  w.start(
      third,
      [&] {
        if (w.dead(second)) reap(*third.a, third.a->home(), 1, kNobody);
        w.store(third, 1);
      },
      [&] { return w.gone(second); });
  start_reader(w, far, {0, 2}, 4);
  w.run();
  if (w.dead(first) && !w.sim.finished(again.process)) w.sim.fail("the scenario's reaper never ran");
  w.check();
}

void namespace_crash(World& w) {   // a process dies while it writes a namespace row, or cuts the first extent
  Actor &victim = w.join(0, 0), &reaper = w.join(0, 2), &far = w.join(1, 0);
  w.sim.may_die({{victim.process}, kNone, {}, false});
  start_writer(w, victim, {0}, 2);
  start_reader(w, far, {0}, 4);
  w.start(
      reaper,
      [&] {
        if (w.dead(victim)) reap(*reaper.a, reaper.a->home(), victim.participant, kNobody);
        w.store(reaper, 1);
      },
      [&] { return w.gone(victim); });
  w.run();
  w.check();
}

void sizes_crash(World& w) {   // dies while it cuts an extent anew
  Actor &first = w.join(0, 0), &victim = w.join(0, 1), &reaper = w.join(0, 2), &far = w.join(1, 0);
  fill(w, first, w.options.slots, {&victim, &reaper, &far});
  w.sim.may_die({{victim.process}, kNone, {}, false});
  start_writer(w, victim, {2}, 2, 2 * kBlockBytes);
  if (!w.small) start_writer(w, first, {}, 2);
  start_reader(w, far, {0, 2}, 4);
  w.start(
      reaper,
      [&] {
        if (w.dead(victim)) reap(*reaper.a, reaper.a->home(), victim.participant, kNobody);
        w.store(reaper, 0);
      },
      [&] { return w.gone(victim); });
  w.run();
  w.check();
}

void adopt_shard(World& w) {   // a host dies with its caches lost or kept; another one adopts its shard
  Actor &first = w.join(0, 0), &second = w.join(0, 1), &far = w.join(1, 0), &adopter = w.join(w.options.hosts - 1, 1);
  fill(w, first, w.options.slots, {&second, &far, &adopter});
  w.sim.may_die({{first.process, second.process}, 0, [&] { w.host_down[0] = true, w.owner[0] = adopter.host; }, false});
  start_writer(w, first, {2}, 4);
  if (!w.small) start_writer(w, second, {}, 3);
  start_reader(w, far, {0, 2}, 4);
  w.start(
      adopter,
      [&] {
        if (!w.host_down[0]) w.sim.strike(0);
        adopt(*adopter.a, adopter.a->shard(HostIndex{0}), 1);
        for (uint32_t k = 0; k < w.options.keys; ++k) w.load(adopter, k);
      },
      [&] { return w.host_down[0] || (w.gone(first) && w.gone(second)); });
  w.run();
  w.check();
}

void adopt_fresh(World& w) {   // a host dies while its processes add a namespace, cut the first extent and store the first blocks
  Actor &first = w.join(0, 0), &second = w.join(0, 1), &far = w.join(1, 0), &adopter = w.join(w.options.hosts - 1, 1);
  if (w.small) w.quietly(first, [&] { w.add_namespace(first); });
  w.sim.settle();
  w.sim.may_die({{first.process, second.process}, 0, [&] { w.host_down[0] = true, w.owner[0] = adopter.host; }, false});
  start_writer(w, first, {0}, 2);
  start_writer(w, second, {1}, 2);
  start_reader(w, far, {1}, 4);
  w.start(
      adopter,
      [&] {
        if (!w.host_down[0]) w.sim.strike(0);
        adopt(*adopter.a, adopter.a->shard(HostIndex{0}), 1);
      },
      [&] { return w.host_down[0] || (w.gone(first) && w.gone(second)); });
  w.run();
  w.check();
}

// The arbiter is not needed for a tie: the highest epoch wins, and who has lost stops.
void two_adopters(World& w) {
  Actor &first = w.join(0, 0), &far = w.join(1, 0), &adopter = w.join(2, 1);
  fill(w, first, w.options.slots, {&far, &adopter});
  w.sim.medium.may_write = {};
  w.sim.settle();
  w.host_down[0] = true;
  w.strict = false;
  w.owner[0] = adopter.host;
  w.start(far, [&] { adopt(*far.a, far.a->shard(HostIndex{0}), 1); });
  w.start(adopter, [&] { adopt(*adopter.a, adopter.a->shard(HostIndex{0}), 2); });
  w.run();
  w.start(far, [&] {
    if (!fenced(*far.a, far.a->shard(HostIndex{0}))) w.sim.fail("an adopter with a lower epoch does not see that it has lost");
    acknowledge(*far.a, far.a->shard(HostIndex{0}), 2);
  });
  w.run();
  w.sim.settle();
  w.start(adopter, [&] {
    if (fenced(*adopter.a, adopter.a->shard(HostIndex{0}))) w.sim.fail("the adopter with the highest epoch is fenced");
    audit(*adopter.a, adopter.t->namespaces(), adopter.a->shard(HostIndex{0}));
  });
  w.run();
  w.check();
}

// The owner is only slow: it is woken after another host has adopted its shard. Content must be right all the while (the checksum sees to it),
// the zombie must stop by itself, and after its acknowledgement and an audit every block is found again.
void zombie(World& w) {
  w.sim.medium.may_write = {};   // two hosts write until the zombie notices
  w.strict = false;              // and what it stores meanwhile may be lost
  Actor &first = w.join(0, 0), &second = w.join(0, 1), &far = w.join(1, 0), &adopter = w.join(w.options.hosts - 1, 1);
  fill(w, first, w.options.slots, {&second, &far, &adopter});
  w.sim.adversary.stalls({{first.process, second.process}});
  start_writer(w, first, {2}, 6);
  if (!w.small) start_writer(w, second, {}, 6);
  start_reader(w, far, {0, 2}, 6);
  w.start(adopter, [&] {
    w.owner[0] = adopter.host;
    adopt(*adopter.a, adopter.a->shard(HostIndex{0}), 1);
    for (uint32_t i = 0; i < 3; ++i) w.load(adopter, w.small ? i : w.any_key());
  });
  w.run();
  acknowledge_and_audit(w, first, adopter);
  w.check();
}

// The old owner gets its shard back, and its processes store while it audits: an audit beside living writers.
void back_again(World& w) {
  w.sim.medium.may_write = {};
  w.strict = false;
  Actor &first = w.join(0, 0), &second = w.join(0, 1), &auditor = w.join(0, 2), &far = w.join(1, 0), &adopter = w.join(1, 1);
  fill(w, first, w.options.slots, {&second, &auditor, &far, &adopter});
  start_writer(w, first, {2}, 2);
  w.start(adopter, [&] {
    w.owner[0] = 1;
    adopt(*adopter.a, adopter.a->shard(HostIndex{0}), 1);
  });
  w.run();
  acknowledge_and_audit(w, first, adopter);
  // Back to where it came from, while its processes try to store: they may not before it is settled.
  w.owner[0] = 0;
  w.start(auditor, [&] { adopt(*auditor.a, auditor.a->home(), 2); });
  start_writer(w, first, {0}, 4);
  if (!w.small) start_writer(w, second, {}, 4);
  w.run();
  w.expect_from_now_on();
  w.start(adopter, [&] {
    if (!fenced(*adopter.a, adopter.a->shard(HostIndex{0}))) w.sim.fail("an adopter whose shard went back does not see it");
    acknowledge(*adopter.a, adopter.a->shard(HostIndex{0}), 2);
  });
  start_writer(w, first, {0}, 4);
  if (!w.small) start_writer(w, second, {}, 4);
  const Offset acknowledged = ShardMap(w.sb, HostIndex{1}).acknowledgement(HostIndex{0});
  w.start(
      auditor,
      [&] {
        w.no_late_lines(0);
        audit(*auditor.a, auditor.t->namespaces(), auditor.a->home());
      },
      [&w, acknowledged] { return w.sim.medium.word(acknowledged) == 2; });
  start_reader(w, far, {0}, 4);
  w.run();
  w.sim.settle();
  w.run();
  w.check();
}

// A block that is already there is vouched for: its writer may not have written it back when their host dies.
void present(World& w) {
  Actor &writer = w.join(0, 0), &finder = w.join(0, 1), &far = w.join(1, 0), &adopter = w.join(w.options.hosts - 1, 1);
  fill(w, writer, 1, {&finder, &far, &adopter});
  w.sim.may_die({{writer.process, finder.process}, 0, [&] { w.host_down[0] = true, w.owner[0] = adopter.host; }, false});
  start_writer(w, writer, {1}, 2);
  start_writer(w, finder, {1}, 3);
  start_reader(w, far, {1, 1}, 6);
  w.start(
      adopter,
      [&] {
        if (!w.host_down[0]) w.sim.strike(0);
        adopt(*adopter.a, adopter.a->shard(HostIndex{0}), 1);
      },
      [&] { return w.host_down[0] || (w.gone(writer) && w.gone(finder)); });
  w.run();
  w.check();
}

// Bits flip, lines are poisoned, write-backs are lost: no wrong content, everybody answers, nobody dies.
void damage(World& w) {
  w.sim.medium.may_write = {};
  w.strict = w.exclusive = false;
  Actor &first = w.join(0, 0), &second = w.join(0, 1), &far = w.join(1, 0);
  fill(w, first, w.options.slots, {&second, &far});
  start_writer(w, first, {}, 4);
  start_writer(w, second, {}, 4);
  start_reader(w, far, {}, 8);
  w.run();
}

}   // namespace

const std::vector<Scenario>& scenarios() {
  static const std::vector<Scenario> all = [] {
    std::vector<Scenario> list = {
        {"evict", "every store evicts; readers on both hosts", evict, {}, {2, 1, 3}, {{2, 2}}},
        {"probe", "a reader that probes the shard itself", probe, {2, 6, 8, 64}, {2, 1, 3}, {{2, 2}}},
        {"writers", "two processes store at once, the same key too", writers, {2, 2, 3}, {2, 2, 2}, {{1, 1}, {2, 1}}},
        {"overflow", "more blocks than entries in a bucket", overflow, {2, 12, 12, 64}, {2, 12, 12, 64}, {{1, 1}}},
        {"sizes", "two block sizes take one extent from each other", sizes, {2, 4, 4}, {2, 2, 3}, {{1, 1}}},
        {"namespaces", "two processes add a namespace at once", namespaces, {2, 2, 3}, {2, 2, 2}, {{1, 0}, {0, 1}}},
        {"keeper", "somebody frees slots while others take them", keeper, {}, {2, 2, 3}, {{1, 1}}},
        {"log", "a follower of the change log is overtaken", log_wraps, {2, 2, 3, 16}, {2, 2, 9, 16}, {{1, 1}}},
        {"crash", "a writer dies anywhere, a reaper cleans up", crash, {2, 1, 3}, {2, 1, 3}, {{1, 0}, {0, 1}}},
        {"reap", "a third process stores into the slot that a reaper frees", reap_beside, {2, 1, 3}, {2, 1, 3}, {{1, 0}, {2, 0}}},
        {"deaths", "two die, one perhaps as it reaps the other; the entry is used again", deaths, {}, {2, 2, 3}},
        {"first", "a writer dies as it adds a namespace or cuts the first extent", namespace_crash, {}, {2, 2, 2}, {{1, 0}}},
        {"recut", "a writer dies as it cuts an extent anew", sizes_crash, {2, 4, 4}, {2, 2, 3}, {{1, 0}, {0, 1}}},
        {"adopt", "a host dies, another one adopts its shard", adopt_shard, {3, 2, 3}, {2, 1, 3}, {{1, 0}, {0, 1}}},
        {"fresh", "a host dies as its processes begin to use their shard", adopt_fresh, {3, 2, 2}, {2, 2, 2}, {{1, 0}, {0, 1}}},
        {"adopters", "two hosts adopt one shard", two_adopters, {3, 2, 3}, {3, 1, 2}, {{2, 2}}},
        {"zombie", "a host is only slow: it wakes after its shard was adopted", zombie, {3, 2, 3}, {2, 1, 3}, {{1, 1}}},
        {"back", "a shard goes to another host and back; an audit beside writers", back_again, {2, 2, 3}, {2, 1, 3}, {{1, 0}, {0, 1}}},
        {"present", "a block is found present while its writer, and their host, die", present, {2, 3, 3}, {2, 2, 2}, {{1, 0}, {0, 1}}},
        {"damage", "bits flip, lines are poisoned, write-backs are lost", damage, {2, 3, 4}, {}, {}, {40, 300, 20}},
    };
    for (const Scenario& s : directed_scenarios()) list.push_back(s);
    return list;
  }();
  return all;
}

}   // namespace kvp::sim
