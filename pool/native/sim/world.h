// A small region on the simulated medium, the actors of the scenarios, and the properties that must hold.
//
//   no wrong load       a hit has the content of its key
//   told, then found    a block whose store was answered with stored or present is found by every lookup that begins later, on any host, until
//                       somebody takes its slot (one that is present: by who looks into the buckets; followers of the log hear of it later)
//   one writer a slot   nobody takes a slot from a living process of the owner's host that is writing it
//   one writer a line   only the host that owns a line writes it (unless the scenario has two owners)
//   nothing is lost     in the end no slot, extent or namespace row is still being written, and every block in a slot is found on every host
//   nothing is kept     in the end no line of a shard says anything in its owner's cache that it does not say in the medium
//   answers come        a load, a lookup and a store need no more than so many accesses of their own, whatever the others do
#pragma once
#include <string>

#include "recovery.h"
#include "sim/memory_sim.h"

namespace kvp::sim {

using SimAttached = Attached<SimMemory>;
using SimTransfer = Transfer<SimMemory>;

inline constexpr uint64_t kBlockBytes = 128;   // two lines: a torn payload shows
inline constexpr uint64_t kSteps = 400000;

struct WorldOptions {
  uint32_t hosts = 2;
  uint32_t slots = 2;   // an extent
  uint32_t keys = 3;
  uint32_t log_records = 16;
  uint32_t namespaces = 2;
  uint64_t load_accesses_max = 1000, store_accesses_max = 150000;   // of its own, in one operation: a store waits a little for others
};

// Content that says which key it belongs to, different in every line.
inline void fill_block(uint32_t key, uint8_t* to, uint64_t bytes) {
  for (uint64_t i = 0; i < bytes; ++i) to[i] = static_cast<uint8_t>(key * 31 + i / kLineBytes * 7 + 1);
}
// Tags collide for every second key. All keys share a bucket; three in eight have another one as well, as their first or their second.
inline Key key_number(uint32_t k) {
  constexpr uint64_t kFirstBucket = 1, kLastBucket = ~uint64_t{0};
  return {{uint64_t{k / 2 + 1} << 48, k % 8 >= 6 ? kLastBucket : kFirstBucket, k % 8 == 5 ? kLastBucket : kFirstBucket, uint64_t{k} * 7919 + 3}};
}

struct Actor {   // a process that has attached
  uint32_t host, participant, process;
  bool replicates;   // keeps a replica of other hosts' directories
  std::unique_ptr<SimAttached> a;
  std::unique_ptr<SimTransfer> t;
};

inline constexpr ReplicaPace kProbes{0, 0};   // never has a whole replica, so it probes the shard itself

struct Totals {
  uint64_t runs = 0, steps = 0, loads = 0, hits = 0, stores = 0, blocks_at_end = 0, checks = 0;
  uint64_t longest_load = 0, longest_store = 0;
};

class World {
 public:
  World(const WorldOptions& o, const Superblock& plan, Adversary& by, Totals& t)
      : options(o), sb(plan), sim(plan.region_bytes, o.hosts, by), totals(t) {
    for (uint32_t h = 0; h < o.hosts; ++h) sim.medium.set_word(ShardMap(sb, HostIndex{h}).header(), 1), owner[h] = h;
    sim.medium.may_write = [this](uint32_t host, LineIndex line) {
      const Offset at = line * kLineBytes;
      if (at < sb.shard_offset) return false;
      const auto shard = static_cast<uint32_t>((at - sb.shard_offset) / sb.shard_bytes);
      return at < ShardMap(sb, HostIndex{shard}).namespace_row(0) ? shard == host : owner[shard] == host;
    };
    sim.medium.on_note = [this](uint64_t serial) {
      for (Told& one : told_)
        if (one.serial == serial) one.known = true;
      remember();
    };
    by.begin(sim);
  }
  static Superblock plan(const WorldOptions& o) {
    GeometryRequest r;
    r.hosts = o.hosts, r.participants = 5, r.namespaces = o.namespaces, r.slot_bytes_min = kBlockBytes, r.extent_bytes = o.slots * kBlockBytes;
    r.coherence = Coherence::Software;
    for (r.region_bytes = 16 << 10;; r.region_bytes += 4096 * o.hosts) {
      try {
        Superblock sb = plan_region(r);
        KVP_CHECK(sb.extent_count == 1);
        sb.log_record_count = o.log_records;   // smaller than any real one: it has to wrap
        return sb;
      } catch (const Error&) {
      }
    }
  }

  // ---- actors ----
  Actor& join(uint32_t host, uint32_t participant, ReplicaPace pace = {}) {
    const uint32_t process = sim.add_process(host);
    auto actor = std::make_unique<Actor>();
    actor->host = host, actor->participant = participant, actor->process = process, actor->replicates = pace.headers != 0;
    attach(*actor, 1, pace);
    actors_.push_back(std::move(actor));
    return *actors_.back();
  }
  // As a new process would: another generation of the same participant entry.
  void attach(Actor& actor, uint32_t generation, ReplicaPace pace = {}) {
    actor.t.reset();
    actor.a = std::make_unique<SimAttached>(SimMemory(sim, actor.process), sb, HostIndex{actor.host});
    actor.a->mem.on_store = [this, process = actor.process](Offset at, uint64_t before, uint64_t value) { word_changes(process, at, before, value); };
    actor.a->participant = actor.participant, actor.a->generation = generation;
    actor.t = std::make_unique<SimTransfer>(*actor.a, pace);
  }
  void start(Actor& actor, std::function<void()> body, std::function<bool()> when = {}) {
    sim.start(actor.process, std::move(body), std::move(when));
  }
  void quietly(Actor& actor, std::function<void()> body) { sim.run_quietly(actor.process, std::move(body)); }
  // Alone, up to a step of the protocol: there it is stopped until it is woken, or dies.
  void stop_at(Actor& actor, const char* step, std::function<void()> body) { sim.run_quietly_to(actor.process, step, false, std::move(body)); }
  void die_at(Actor& actor, const char* step, std::function<void()> body) { sim.run_quietly_to(actor.process, step, true, std::move(body)); }
  void wake(const Actor& actor) { sim.pause(actor.process, false); }
  bool gone(const Actor& actor) const { return sim.dead(actor.process) || sim.finished(actor.process); }
  bool dead(const Actor& actor) const { return sim.dead(actor.process); }
  void run() { sim.run(kSteps); }

  // ---- what actors do ----
  Outcome store(Actor& actor, uint32_t key, uint64_t block_bytes = kBlockBytes) {
    const uint64_t before = begin(actor);
    const Outcome o = store_block(actor, key, block_bytes);
    ended("store", actor, before, options.store_accesses_max, totals.longest_store);
    ++totals.stores;
    return o;
  }
  Outcome load(Actor& actor, uint32_t key) { return load_batch(actor, {key}).front(); }
  std::vector<Outcome> load_batch(Actor& actor, const std::vector<uint32_t>& keys) {
    SimTransfer& t = *actor.t;
    const auto n = static_cast<uint32_t>(keys.size());
    const bool follower = actor.host != 0 && actor.replicates;
    std::vector<Key> packed;
    for (const uint32_t key : keys) packed.push_back(key_number(key));
    std::vector<Outcome> codes(n, Outcome::TierError);
    std::vector<Found> f(n);
    const uint64_t before = begin(actor);
    std::vector<std::vector<Told>> known;
    for (const Key& k : packed) known.push_back(told_of(k, follower));
    const bool medium_works = actor.a->mem.guarded([&] {
      t.refresh();
      t.lookup_group(packed.data(), n, codes.data(), f.data());
    });
    if (!medium_works) codes.assign(n, Outcome::TierError);
    std::vector<bool> found(n);
    std::vector<std::vector<uint8_t>> got(n);
    for (uint32_t i = 0; i < n; ++i) {
      found[i] = codes[i] == Outcome::Ok;
      if (found[i] && f[i].header.length_bytes > sb.extent_payload_bytes) codes[i] = Outcome::TierError;
      if (codes[i] == Outcome::Ok) got[i].resize(f[i].header.length_bytes);
    }
    for (uint32_t i = 0, end = 0; i < n; i = end) {   // all of a call have one size
      end = i + 1;
      if (codes[i] != Outcome::Ok) continue;
      while (end < n && codes[end] == Outcome::Ok && got[end].size() == got[i].size()) ++end;
      std::vector<uint64_t> base, bytes;
      for (uint32_t k = i; k < end; ++k) base.push_back(reinterpret_cast<uint64_t>(got[k].data())), bytes.push_back(got[k].size());
      Piece piece;
      t.load_group(f.data() + i, end - i, {base.data(), nullptr, bytes.data(), nullptr, 1}, 0, bytes[0], &piece, codes.data() + i,
                   [](HostIndex) { return uint16_t{1}; });
    }
    ended("load", actor, before, options.load_accesses_max * n, totals.longest_load);
    for (uint32_t i = 0; i < n; ++i) judge_load(actor, keys[i], f[i], found[i], codes[i], got[i], known[i]);
    return codes;
  }
  void add_namespace(Actor& actor, uint64_t block_bytes = kBlockBytes) {
    uint16_t index = 0;
    actor.t->namespaces().find_or_add(digest_of(block_bytes).data(), block_bytes, "", 0, index);
  }
  // What the daemon does above the high watermark: the first stored slot from `from` on becomes free.
  void free_one(Actor& actor, uint32_t from) {
    SimAttached& a = *actor.a;
    for (uint32_t i = 0; i < options.slots; ++i) {
      const SlotId slot = SlotId::make(0, (from + i) % options.slots);
      const SlotWord word = a.word_of(a.home(), slot);
      if (word.state() != SlotState::Stable) continue;
      evict_to_free(a, a.home(), slot, word);
      return;
    }
  }
  SlotId slot_of(uint32_t key) const {   // of a block that is in the medium
    const ShardMap s(sb, HostIndex{0});
    for (uint32_t i = 0; i < options.slots; ++i)
      if (sim.medium.word(s.slot_header(SlotId::make(0, i)) + offsetof(SlotHeader, key) + 24) == key_number(key).words[3]) return SlotId::make(0, i);
    return {};
  }
  void caches_write_back(uint32_t host) {   // all that is dirty there comes to the medium by itself
    for (size_t i = 0; i < sim.medium.touched().size(); ++i) sim.medium.write_back(host, sim.medium.touched()[i].index);
  }
  // A locked instruction on a line of the process's own: its stores arrive, what it writes back may not.
  void goes_on(const Actor& actor) {
    const Offset at = actor.a->home().participant(actor.participant);
    sim.access(Access::Cas, line_of(at));
    sim.medium.cas(actor.process, at, 0, 0);
  }
  void caches_are_lost() {
    for (uint32_t host = 0; host < options.hosts; ++host)
      for (size_t i = 0; i < sim.medium.touched().size(); ++i) sim.medium.drop(host, sim.medium.touched()[i].index);
  }
  // Nobody but the owner's host has a line of the shard that may still come over the medium.
  void no_late_lines(uint32_t shard) {
    for (uint32_t host = 0; host < options.hosts; ++host) {
      if (host == owner[shard]) continue;
      bool late = false;
      for (const LineState& l : sim.medium.touched()) late = late || (belongs_to_owner(l.index, shard) && l.copies[host].state == CopyState::Dirty);
      for (uint32_t p = 0; p < sim.medium.processes(); ++p)
        if (sim.medium.host_of(p) == host)
          for (const Pending& op : sim.medium.queue(p))
            late = late || (belongs_to_owner(op.line, shard) && (is_store(op.op) || op.op == Op::Stream) && op.op != Op::Note);
      if (late) sim.fail("host " + std::to_string(host) + " may still write to lines of shard " + std::to_string(shard) + ", which is not its own");
    }
  }
  // There is one owner again: from here on nothing that is told may be missed.
  void expect_from_now_on() {
    sim.settle();
    told_.clear();
    strict = true;
  }
  uint32_t below(uint32_t n) { return sim.adversary.below(n); }
  // A free choice of the adversary, but in a small configuration always the same.
  uint32_t any_key() { return below(options.keys); }

  // ---- in the end, when nothing is under way ----
  void check(uint32_t shard = 0) {
    sim.settle();
    if (!sim.adversary.worth_checking()) return;
    ++totals.checks;
    std::vector<uint32_t> stored;
    Actor& own = join(owner[shard], 4);
    own.a->set_owned(HostIndex{shard}, true);
    quietly(own, [&] {
      SimAttached& a = *own.a;
      const ShardMap& s = a.shard(HostIndex{shard});
      for_each_slot(a, s, [&](SlotId slot) {
        const Header h = a.load_header(s, slot);
        if (h.word().state() == SlotState::Writing && !h.word().retired())
          sim.fail("slot " + std::to_string(slot.slot()) + " is lost: WRITING for ever");
        if (h.word().state() == SlotState::Stable && !h.right) sim.fail("a stored block has a wrong header checksum");
        if (h.word().state() == SlotState::Stable && h.right)
          for (uint32_t k = 0; k < 2 * options.keys; ++k)
            if (h.key() == key_number(k)) stored.push_back(k);
      });
      for (uint32_t e = 0; e < sb.extent_count; ++e)
        if (SlotWord{a.mem.load_word(s.extent_descriptor(e))}.state() == SlotState::Writing) sim.fail("an extent is lost: being cut for ever");
      for (uint32_t i = 0; i < sb.namespace_count; ++i)
        if (SlotWord{a.mem.load_word(s.namespace_row(i))}.state() == SlotState::Writing) sim.fail("a namespace row is lost: WRITING for ever");
    });
    totals.blocks_at_end += stored.size();
    no_late_lines(shard);
    for (const LineState& l : sim.medium.touched()) {
      const Copy& c = l.copies[owner[shard]];
      if (belongs_to_owner(l.index, shard) && c.state != CopyState::Absent && !same(c.line, l.medium))
        sim.fail("line " + std::to_string(l.index) + " stays in the owner's cache and differs from the medium for good");
    }
    for (uint32_t h = 0; h < options.hosts; ++h) {
      const Offset claim = ShardMap(sb, HostIndex{h}).claim(HostIndex{shard});
      const uint64_t epoch = sim.medium.word(claim), settled = sim.medium.word(claim + offsetof(ClaimLine, settled_epoch));
      if (!host_down[h] && owner[shard] == h && epoch != settled) sim.fail("other hosts never see that the shard was taken over");
    }
    if (strict)
      for (const Told& one : told_) {
        if (one.known == 0) continue;   // it died with its writer
        bool there = false;
        for (const uint32_t k : stored) there = there || key_number(k) == one.key;
        if (!there) sim.fail("a block was stored and told, and is gone although nobody took it away");
      }
    strict = false;   // here every miss counts, told or not
    const auto finds_all = [&](Actor& reader, const char* what) {
      if (stored.empty()) quietly(reader, [&] { load(reader, 0); });
      for (const uint32_t k : stored) {
        Outcome o = Outcome::NeverStored;
        quietly(reader, [&] { o = load(reader, k); });
        if (o != Outcome::Ok)
          sim.fail("a stored block is never found on host " + std::to_string(reader.host) + " by " + what + " (outcome " +
                   std::to_string(static_cast<int>(o)) + ")");
      }
      if (!reader.replicates || reader.host == shard) return;
      for (int i = 0; i < 100 && !reader.t->follows(HostIndex{shard}); ++i) quietly(reader, [&] { load(reader, 0); });
      if (!reader.t->follows(HostIndex{shard}))
        sim.fail("a follower of the log on host " + std::to_string(reader.host) + " walks all headers again and again");
    };
    for (size_t i = 0, living = actors_.size(); i < living; ++i)
      if (!dead(*actors_[i])) finds_all(*actors_[i], ("process " + std::to_string(actors_[i]->process) + ", there all the time").c_str());
    for (uint32_t host = 0; host < options.hosts; ++host) {
      if (host_down[host]) continue;
      for (const ReplicaPace pace : {ReplicaPace{}, kProbes}) {   // with a replica; by probing the shard
        Actor& reader = join(host, 4, pace);
        for (uint32_t h = 0; h < options.hosts; ++h) reader.a->set_owned(HostIndex{h}, owner[h] == host);
        finds_all(reader, pace.headers == 0 ? "a new process that probes" : "a new process with a replica");
      }
    }
    // The medium alone must have it all, too: whatever happens to the owner's caches now.
    if (host_down[owner[shard]]) return;
    for (uint32_t host = 0; host < options.hosts; ++host)
      if (host != owner[shard] && !host_down[host]) {
        for (size_t i = 0; i < sim.medium.touched().size(); ++i) sim.medium.drop(owner[shard], sim.medium.touched()[i].index);
        Actor& reader = join(host, 4);
        finds_all(reader, "a new process, after the owner's caches are lost");
        return;
      }
  }

  const WorldOptions options;
  const Superblock& sb;
  Simulation sim;
  Totals& totals;
  std::array<uint32_t, kHosts> owner{};
  std::array<bool, kHosts> host_down{};
  bool strict = true;                  // told, then found
  bool damaged = false;                // the scenario itself has flipped a bit: a header that fails its checksum may be that
  std::vector<SlotWord> first_words;   // of the slots, after the scenario's set-up
  bool exclusive = true;               // one writer a slot
  bool batches = false;                // readers load several blocks at once, too
  bool small = false;                  // a configuration for the explorer

 private:
  struct Told {
    Offset at;   // of the header
    uint64_t word;
    Key key;
    uint64_t serial;
    uint64_t known;    // has it reached the others?
    uint64_t logged;   // not only vouched for: the change log says it too
    bool operator==(const Told&) const = default;
  };
  void judge_load(const Actor& actor, uint32_t key, const Found& f, bool found, Outcome code, const std::vector<uint8_t>& got,
                  const std::vector<Told>& known) {
    std::vector<uint8_t> want(got.size());
    fill_block(key, want.data(), want.size());
    if (code == Outcome::Ok && got != want) sim.fail("a hit returned wrong content");
    ++totals.loads, totals.hits += code == Outcome::Ok;
    if (code != Outcome::Ok && strict)
      for (const Told& one : told_of(key_number(key), actor.host != 0 && actor.replicates))
        for (const Told& then : known)
          if (one == then &&
              (code != Outcome::ChangedWhileReading || actor.a->shard(f.shard).slot_header(f.slot) == one.at))   // else it was another copy
            sim.fail("key " + std::to_string(key) + " was stored, told, and never taken away, but host " + std::to_string(actor.host) +
                     " got outcome " + std::to_string(static_cast<int>(code)));
    if (code == Outcome::FailedChecksum && strict && (found || !damaged)) sim.fail("a payload does not fit its unchanged header");
  }
  bool belongs_to_owner(LineIndex line, uint32_t shard) const {
    const ShardMap s(sb, HostIndex{shard});
    return line * kLineBytes >= s.namespace_row(0) && line * kLineBytes < s.end();
  }
  // Who follows the log may not know yet what a finder has vouched for; its writer, or the reaper, will say it.
  std::vector<Told> told_of(const Key& key, bool follower) const {
    std::vector<Told> found;
    for (const Told& one : told_)
      if (one.key == key && one.known != 0 && (one.logged != 0 || !follower)) found.push_back(one);
    return found;
  }
  // The process tells the others, by a store: it arrives when the process's fences let it.
  void tell(const Actor& actor, SlotId slot, SlotWord word, const Key& key, bool logged) {
    const Told told{actor.a->home().slot_header(slot), word.raw, key, ++last_serial_, 0, logged};
    told_.push_back(told);
    sim.access(Access::Push, 0, "tells");
    sim.medium.push(actor.process, {Op::Note, 0, 0, told.serial, {}});
  }
  // A slot, row or extent that a living process of the owner's host is writing is nobody else's.
  void check_holder(uint32_t process, Offset at, SlotWord now) {
    for (size_t i = 0; i < held_.size(); ++i)
      if (held_[i].at == at) {
        const uint32_t holder = held_[i].process;
        const auto shard = static_cast<uint32_t>((at - sb.shard_offset) / sb.shard_bytes);
        if (exclusive && holder != process && !sim.dead(holder) && sim.medium.host_of(holder) == owner[shard])
          sim.fail("process " + std::to_string(process) + " took from process " + std::to_string(holder) + " what that one is writing");
        held_.erase(held_.begin() + static_cast<long>(i));
        break;
      }
    if (now.state() == SlotState::Writing) held_.push_back({at, process});
  }
  bool is_slot_word(Offset at) const {
    if (at < sb.shard_offset || at % kLineBytes != 0) return false;
    const uint64_t in = (at - sb.shard_offset) % sb.shard_bytes;
    return (in >= sb.namespaces_offset && in < sb.extent_descriptors_offset && (in - sb.namespaces_offset) % sizeof(NamespaceRow) == 0) ||
           (in >= sb.extent_descriptors_offset && in < sb.buckets_offset) ||
           (in >= sb.extents_offset && in < sb.extents_offset + sb.slots_per_extent * kLineBytes);
  }
  // A block is taken away by who sees it and changes its word; not by an adopter that finds another word, because it was lost.
  void word_changes(uint32_t process, Offset at, uint64_t before, uint64_t value) {
    if (is_slot_word(at)) check_holder(process, at, SlotWord{value});
    for (size_t i = 0; i < told_.size(); ++i)
      if (told_[i].at == at && told_[i].word == before) {
        told_.erase(told_.begin() + static_cast<long>(i--));
        remember();
      }
  }
  void remember() {
    sim.facts = 0;
    for (const Told& one : told_)
      if (one.known != 0) sim.facts += line_checksum(&one, offsetof(Told, serial), 4 + one.logged);
  }
  uint64_t begin(Actor& actor) {
    sim.access(Access::Mark, 0);
    if (sim.medium.listener != nullptr) sim.medium.listener->before(actor.process, 0, Use::Load);   // what others tell may arrive just now
    return sim.accesses(actor.process);
  }
  void ended(const char* what, const Actor& actor, uint64_t before, uint64_t most, uint64_t& longest) {
    const uint64_t used = sim.accesses(actor.process) - before;
    if (used > longest) longest = used;
    if (used > most) sim.fail(std::string("a ") + what + " needed " + std::to_string(used) + " accesses of its own");
  }
  static std::array<uint8_t, kKeyBytes> digest_of(uint64_t block_bytes) {
    std::array<uint8_t, kKeyBytes> digest{};
    digest[0] = static_cast<uint8_t>(block_bytes / kLineBytes);
    return digest;
  }
  Outcome store_block(Actor& actor, uint32_t key, uint64_t block_bytes) {
    SimAttached& a = *actor.a;
    SimTransfer& t = *actor.t;
    Outcome o = Outcome::TierError;
    uint16_t ns = 0;
    std::vector<uint8_t> bytes(block_bytes);
    fill_block(key, bytes.data(), block_bytes);
    const Piece piece{bytes.data(), block_bytes};
    const Key k = key_number(key);
    const uint64_t slot_bytes = Namespaces<SimMemory>::slot_bytes_for(a.home(), block_bytes);
    Claim claim;
    const bool medium_works = a.mem.guarded([&] {
      if ((o = t.namespaces().find_or_add(digest_of(block_bytes).data(), block_bytes, "", 0, ns)) != Outcome::Ok) return;
      o = t.begin_store(k, slot_bytes, claim);
      if (o != Outcome::Ok) return;
      o = t.complete_store(claim, k, &piece, 1, block_bytes, ns, slot_bytes);
    });
    if (!medium_works) o = Outcome::TierError;
    // Told, unless somebody took it away meanwhile.
    if (o == Outcome::Present && newest_word(actor, a.home().slot_header(claim.slot)) == claim.word) tell(actor, claim.slot, claim.word, k, false);
    if (o == Outcome::Ok) {
      const SlotWord word = newest_word(actor, a.home().slot_header(claim.slot));
      if (word.state() == SlotState::Stable && word.participant() == a.participant && word.generation() == a.generation &&
          word.count() <= claim.word.count() + 1)
        tell(actor, claim.slot, word, k, true);
    }
    return o;
  }
  // As the process sees it. One whose host is not the owner: as the owner's host does, in some process's queue, in the cache, or in the medium.
  SlotWord newest_word(const Actor& actor, Offset at) {
    const LineIndex line = line_of(at);
    const auto shard = static_cast<uint32_t>((at - sb.shard_offset) / sb.shard_bytes);
    const uint32_t host = owner[shard];
    if (actor.host == host) return {sim.medium.look(actor.process, at)};
    for (uint32_t p = 0; p < sim.medium.processes(); ++p)
      if (sim.medium.host_of(p) == host)
        for (auto i = sim.medium.queue(p).rbegin(); i != sim.medium.queue(p).rend(); ++i)
          if (i->op == Op::Store && i->line == line && i->word == word_of(at)) return {i->value};
    const LineState* l = sim.medium.find(line);
    if (l == nullptr) return {};
    return {l->copies[host].state != CopyState::Absent ? l->copies[host].line.words[word_of(at)] : l->medium.words[word_of(at)]};
  }

  std::vector<std::unique_ptr<Actor>> actors_;
  struct Held {
    Offset at;
    uint32_t process;
  };
  std::vector<Told> told_;
  std::vector<Held> held_;
  uint64_t last_serial_ = 0;
};

}   // namespace kvp::sim
