// Threads that do everything at once to one small region. For the sanitizers and valgrind; `make test-sanitize` builds and runs it.
//
//   kvpool_hammer SECONDS hardware|software [SCENARIO...]     exit code 0: every byte was right; the counts go to standard output
//   kvpool_hammer plant overflow|fiber|race|uninitialised|undefined|leak     a fault that the tool must report, else it sees nothing
//
// Scenarios: shared   two regions, each used by several threads as an engine does, beside their daemons' work
//            own      a region for each thread, attached and closed again and again
//            mapping  four processes of two hosts on *one* mapping: a race between two processes is one that ThreadSanitizer can see
//            hands    as `shared`, while an arbiter takes the shards from living hosts
//            faults   as `shared`, while the file is truncated and payload is overwritten under the readers. Not truncated under ThreadSanitizer:
//                     there the fault comes inside of its own code, which holds locks, and a jump out of it is the end
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "content.h"
#include "error.h"
#include "geometry.h"
#include "region.h"
#include "sim/fiber.h"

namespace {

using namespace kvp;
using namespace kvp::hammer;

// ---- regions ----

struct Place {   // a region's file, gone afterwards
  explicit Place(Coherence coherence, uint32_t namespaces = kSpaces) {
    const char* parent = ::access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp";
    folder = std::string(parent) + "/kvpool-hammer-XXXXXX";
    ensure(::mkdtemp(folder.data()) != nullptr, "no folder in " + std::string(parent));
    path = folder + "/region", lock_path = folder + "/region.lock";
    GeometryRequest request;
    request.hosts = kHosts, request.slot_bytes_min = kUnit, request.extent_bytes = 8 * kUnit, request.participants = 8;
    request.namespaces = namespaces, request.coherence = coherence;
    request.region_bytes = 256 << 10;
    sb = plan_region(request);
    const int fd = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    ensure(fd >= 0 && ::ftruncate(fd, static_cast<off_t>(sb.region_bytes)) == 0, "no file " + path);
    ::close(fd);
    ::close(::open(lock_path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
    format_region(path, sb, false, true, lock_path);
  }
  ~Place() {
    ::unlink(path.c_str()), ::unlink(lock_path.c_str());
    ::rmdir(folder.c_str());
  }
  Place(const Place&) = delete;
  Place& operator=(const Place&) = delete;
  std::unique_ptr<Region> attach(uint32_t host, Role role = Role::Engine) const {
    return std::make_unique<Region>(path, host, role, false, false, lock_path, "node " + std::to_string(host), std::string(16, 'b'));
  }
  std::string folder, path, lock_path;
  Superblock sb;
};

struct Ground {   // what a scenario's threads stand on
  std::chrono::steady_clock::time_point end;
  std::set<Outcome> honest = kHonest, honest_store = kHonestStore;
  bool medium_may_fail = false;   // then calls may throw, and check may find problems
  Tally tally;
  bool on() const { return std::chrono::steady_clock::now() < end; }
};

// False: the region was closed.
bool tolerate(Ground& g, const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& e) {
    ++g.tally.refused;
    if (e.kind == ErrorKind::Region) return false;
    ensure(g.medium_may_fail && e.kind == ErrorKind::Medium || e.kind == ErrorKind::Fenced, std::string("an error: ") + e.what());
  }
  return true;
}

void engine_call(Region& r, Dice& dice, Ground& g) {
  Batch b(dice);
  uint8_t codes[kBatchMax];
  const uint32_t what = dice.below(100);
  if (what < 45) {
    b.fill_with_nothing();
    r.load(b.keys.data(), b.size(), b.buffers, b.block_bytes, codes);
    b.judge(codes, g.honest, g.tally);
  } else if (what < 90) {
    uint8_t digest[kKeyBytes] = {static_cast<uint8_t>(b.space + 1)};
    uint16_t index = 0;
    const Outcome opened{r.open_namespace(digest, b.block_bytes, "a namespace of the hammer", index)};
    if (opened != Outcome::Ok) {
      // Declined as full also while another thread is in the middle of writing a row, and is not scheduled for long.
      ensure(g.honest_store.contains(opened) || opened == Outcome::NamespacesFull,
             "a namespace ended with outcome " + std::to_string(static_cast<uint32_t>(opened)));
      return;
    }
    b.fill_all();
    r.store(b.keys.data(), b.size(), b.buffers, b.block_bytes, index, codes);
    b.judge_store(codes, g.honest_store, g.tally);
  } else {
    r.lookup(b.keys.data(), b.size(), codes);
    for (uint32_t i = 0; i < b.size(); ++i) ensure(g.honest.contains(Outcome{codes[i]}), "a lookup ended with outcome " + std::to_string(codes[i]));
    r.record(b.size(), 0, std::vector<uint64_t>(kOutcomes, 1));
  }
}

void engine(Region& r, uint64_t seed, Ground& g) {
  Dice dice(seed);
  while (g.on() && tolerate(g, [&] { engine_call(r, dice, g); })) {
  }
}

// What a daemon does, and what tools ask.
void keeper_call(Region& r, Dice& dice, Ground& g) {
  ++g.tally.upkeep;
  switch (dice.below(10)) {
    case 0: r.evict(dice.in_100(50) ? 0.3 : 0.8, dice.in_100(50) ? 1 : 20); break;
    case 1: {
      const Scrubbed s = r.scrub(0, 50, 1 << 20);
      ensure(s.bad == 0 || g.honest.contains(Outcome::FailedChecksum), "a good block was called damaged");
      break;
    }
    case 2: {
      Recovered total;
      r.reap_dead(total);
      break;
    }
    case 3: {
      const Check c = r.check();
      ensure(c.problems.empty() || g.honest.contains(Outcome::FailedChecksum), c.problems.empty() ? "" : c.problems[0]);
      break;
    }
    case 4: {
      std::vector<NamespaceUsage> namespaces;
      for (const ShardUsage& u : r.usage(namespaces, true))
        ensure(u.used_bytes <= u.capacity_bytes || g.medium_may_fail, "more is used than there is");
      r.participants();
      r.counters(0, r.superblock().host_count);
      ensure(r.copies_right() == 2 || g.medium_may_fail, "a copy of the superblock is damaged");
      ensure(r.participant() < r.superblock().participant_count && r.generation() != 0, "no participant");
      break;
    }
    case 5: r.heartbeat(), r.host_view(dice.below(kHosts)), r.owners(); break;
    case 6: r.acknowledge_lost(), r.audit_adopted(); break;
    case 7: {
      uint64_t next = 0;
      r.slots(dice.below(kHosts), 0, 100, next);
      break;
    }
    case 8: {
      const Repair repair = r.repair();
      ensure(repair.blocks_dropped == 0 || g.honest.contains(Outcome::FailedChecksum), "a good block was dropped");
      break;
    }
    default:
      if (r.litmus_begin()) {
        r.litmus_beats();
        r.litmus_serve(1000000);
        r.litmus_end();
      }
  }
}

void keeper(Region& r, uint64_t seed, Ground& g) {
  Dice dice(seed);
  while (g.on() && tolerate(g, [&] { keeper_call(r, dice, g); })) std::this_thread::sleep_for(std::chrono::milliseconds(2));
}

// Nothing is stuck: whatever is in the region now can be evicted, and all structures fit.
void judge_end(const Place& place, Ground& g) {
  for (uint32_t host = 0; host < kHosts; ++host) {
    const auto r = place.attach(host);
    const Check c = r->check();
    ensure(c.problems.empty(), c.problems.empty() ? "" : "at the end: " + c.problems[0]);
    ensure(c.writing == 0 && c.lent == 0 && c.free + c.stable == c.slots, "slots are stuck");
    for (uint32_t space = 0; space < kSpaces; ++space)
      for (uint32_t block = 0; block < kBlocks; ++block) {
        const Key key = key_of(space, block);
        Bytes out(kSizes[space], 0xee);
        const uint64_t base = reinterpret_cast<uint64_t>(out.data()), bytes = kSizes[space];
        uint8_t code = 0;
        r->load(&key, 1, {&base, nullptr, &bytes, nullptr, 1}, bytes, &code);
        ensure(g.honest.contains(Outcome{code}) || g.medium_may_fail, "at the end: outcome " + std::to_string(code));
        if (Outcome{code} == Outcome::Ok) ensure(right(key, out.data(), bytes), "at the end: wrong bytes");
      }
    r->evict(0.0, 1000000);
    std::vector<NamespaceUsage> namespaces;
    ensure(r->usage(namespaces, true)[host].blocks == 0, "a slot is stuck");
  }
}

using Threads = std::vector<std::thread>;
void join(Threads& threads) {
  for (std::thread& t : threads) t.join();
  threads.clear();
}

// Two engines and a daemon on each host.
void crowd(const std::unique_ptr<Region>* regions, Threads& threads, Ground& g) {
  for (uint32_t i = 0; i < 4; ++i) threads.emplace_back([regions, i, &g] { engine(*regions[i % kHosts], i, g); });
  for (uint32_t i = 0; i < kHosts; ++i) threads.emplace_back([regions, i, &g] { keeper(*regions[i], 100 + i, g); });
}

// Two daemons that test the medium with each other.
void litmus(Region& asks, Region& answers, Threads& threads, Ground& g) {
  threads.emplace_back([&asks, &g] {
    while (g.on() && tolerate(g, [&] {
             if (asks.litmus_begin()) asks.litmus_measure(0, 2);
           })) {
    }
  });
  threads.emplace_back([&answers, &g] {
    while (g.on() && tolerate(g, [&] {
             if (answers.litmus_begin()) answers.litmus_serve(20000000);
           })) {
    }
  });
}

void shared(Ground& g, Coherence coherence) {
  const Place place(coherence);
  const std::unique_ptr<Region> regions[kHosts] = {place.attach(0), place.attach(1)};
  Threads threads;
  crowd(regions, threads, g);
  litmus(*regions[1], *regions[0], threads, g);
  std::this_thread::sleep_until(g.end - (g.end - std::chrono::steady_clock::now()) / 10);
  regions[1]->close();   // under its users: they get an error
  join(threads);
  for (uint32_t i = 0; i < kHosts; ++i) regions[i]->close();
  judge_end(place, g);
}

void own(Ground& g, Coherence coherence) {
  const Place place(coherence);
  const auto keep_alive = place.attach(0, Role::Daemon);
  Threads threads;
  threads.emplace_back([&] {   // another library that sets a handler of its own for what we handle
    while (g.on()) {
      std::signal(SIGBUS, SIG_DFL);
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  });
  for (uint32_t i = 0; i < 4; ++i)
    threads.emplace_back([&, i] {
      Dice dice(i);
      while (g.on()) {
        const auto r = place.attach(i % kHosts);
        ++g.tally.attached;
        for (uint32_t calls = 0; calls < 40 && g.on(); ++calls)
          tolerate(g, [&] { calls % 10 == 9 ? keeper_call(*r, dice, g) : engine_call(*r, dice, g); });
      }
    });
  join(threads);
  judge_end(place, g);
}

// An arbiter that takes shards from living hosts: stores may be refused, blocks may be damaged, bytes are never wrong.
void hands(Ground& g, Coherence coherence) {
  g.honest.insert(Outcome::FailedChecksum);
  g.honest_store.insert(Outcome::Fenced);
  const Place place(coherence);
  const std::unique_ptr<Region> regions[kHosts] = {place.attach(0), place.attach(1)};
  Threads threads;
  crowd(regions, threads, g);
  Dice dice(7);
  uint64_t epoch = 0;
  while (g.on()) {
    regions[dice.below(kHosts)]->adopt_shard(dice.below(kHosts), ++epoch);
    std::this_thread::sleep_for(std::chrono::milliseconds(dice.below(30)));
  }
  join(threads);
  ++epoch;
  for (uint32_t i = 0; i < kHosts; ++i) {
    regions[i]->adopt_shard(i, epoch);   // everybody gets his own back
    regions[i]->scrub(0, UINT64_MAX, UINT64_MAX);
  }
  for (uint32_t i = 0; i < kHosts; ++i) regions[i]->repair(), regions[i]->close();
  judge_end(place, g);
}

void faults(Ground& g, Coherence coherence) {
  g.medium_may_fail = true;
  for (const Outcome o : {Outcome::FailedChecksum, Outcome::TierError, Outcome::WrongNamespace}) g.honest.insert(o), g.honest_store.insert(o);
  g.honest_store.insert(Outcome::NamespacesFull), g.honest_store.insert(Outcome::Fenced);
  const Place place(coherence, 64);   // a damaged row of a namespace is not used again
  const int fd = ::open(place.path.c_str(), O_RDWR | O_CLOEXEC);
  const uint64_t odd = 1;
  ensure(::pwrite(fd, &odd, sizeof odd, static_cast<off_t>(place.sb.align_bytes)) == sizeof odd,
         "no damage could be done");   // the second superblock
  const std::unique_ptr<Region> regions[kHosts] = {place.attach(0), place.attach(1)};
  Threads threads;
  crowd(regions, threads, g);
  threads.emplace_back([&] {   // attaches while the medium fails
    while (g.on()) try {
        place.attach(0)->heartbeat();
        ++g.tally.attached;
      } catch (const Error&) {
        ++g.tally.refused;
      }
  });
  Dice dice(9);
  [[maybe_unused]] const auto whole = static_cast<off_t>(place.sb.region_bytes);
  while (g.on()) {
    const ShardMap s(place.sb, HostIndex{dice.below(kHosts)});
    for (uint32_t i = 0; i < 20; ++i) {   // some words of payload; some of anything behind the first superblock
      const uint64_t payload =
          s.payload(SlotId::make(dice.below(place.sb.extent_count), dice.below(place.sb.slots_per_extent)), kUnit) + 8 * dice.below(kUnit / 8);
      const uint64_t anywhere = kSuperblockBytes + 8 * dice.below(static_cast<uint32_t>((place.sb.region_bytes - kSuperblockBytes) / 8));
      const uint64_t at = dice.in_100(90) ? payload : anywhere, rubbish = dice.in_100(50) ? mix(at) : 0;
      ensure(::pwrite(fd, &rubbish, sizeof rubbish, static_cast<off_t>(at)) == sizeof rubbish, "no damage could be done");
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
#if !defined(KVP_WORD_BY_WORD)
    const off_t shorter = dice.in_100(20) ? 0 : dice.below(static_cast<uint32_t>(whole));
    ensure(::ftruncate(fd, shorter) == 0, "the file could not be truncated");
    std::this_thread::sleep_for(std::chrono::milliseconds(dice.below(5)));
    ensure(::ftruncate(fd, whole) == 0, "the file could not be made longer");
#endif
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  ::close(fd);
  join(threads);
}

// ---- processes on one mapping, without what Region adds: locks, latencies, protection ----

class Process {
 public:
  Process(const Superblock& sb, uint8_t* base, uint32_t host, uint32_t participant, Coherence coherence)
      : a_(CpuMemory(base, coherence == Coherence::Hardware), sb, HostIndex{host}) {
    a_.participant = participant, a_.generation = 1;
    t_ = std::make_unique<Transfer<CpuMemory>>(a_);
    a_.mem.store_word(a_.home().header(), 1);
    for (uint32_t space = 0; space < kSpaces; ++space) {
      uint8_t digest[kKeyBytes] = {static_cast<uint8_t>(space + 1)};
      const Outcome opened = t_->namespaces().find_or_add(digest, kSizes[space], "", 0, namespace_[space]);
      ensure(opened == Outcome::Ok, "a namespace could not be opened");
    }
  }
  void run(uint64_t seed, Ground& g) {
    Dice dice(seed);
    while (g.on()) call(dice, g);
  }
  // What a process leaves that is killed between the claim of a slot and the end of its store; then another life of it, which reaps.
  void die_and_return(Dice& dice) {
    Claim claim;
    t_->refresh();
    if (t_->begin_store(key_of(0, dice.below(kBlocks)), t_->namespaces().slot_bytes(a_.home(), namespace_[0]), claim) != Outcome::Ok) return;
    a_.generation = a_.generation % 0x3fff + 1;
    const Recovered r = reap(a_, a_.home(), a_.participant, a_.generation);
    ensure(r.freed == 1, "the slot of a dead process was not freed");
  }
  Check settle() {   // all are quiet: every slot can be emptied
    Check c;
    for_each_slot(a_, a_.home(), [&](SlotId slot) {
      const SlotWord word = a_.word_of(a_.home(), slot);
      ++c.slots;
      if (word.state() == SlotState::Stable) ensure(evict_to_free(a_, a_.home(), slot, word), "a slot is stuck"), ++c.stable;
      if (word.state() == SlotState::Writing) ++c.writing;
    });
    return c;
  }

 private:
  void call(Dice& dice, Ground& g) {
    const uint32_t what = dice.below(100);
    if (what < 2) return die_and_return(dice);
    if (what < 4) {
      const SlotId slot = a_.home().slot_at(dice.below(static_cast<uint32_t>(a_.home().slots())));
      const SlotWord word = a_.word_of(a_.home(), slot);
      if (word.state() == SlotState::Stable) evict_to_free(a_, a_.home(), slot, word);
      ++g.tally.upkeep;
      return;
    }
    Batch b(dice);
    const uint32_t n = b.size();
    const bool load = what < 50;
    load ? b.fill_with_nothing() : b.fill_all();
    Outcome outcomes[kGroup];
    Found found[kGroup];
    uint8_t codes[kGroup];
    t_->refresh();
    t_->lookup_group(b.keys.data(), n, outcomes, found);
    Piece pieces[2];
    for (uint32_t i = 0; i < n; ++i) {
      b.buffers.block(i, pieces);
      Outcome one = outcomes[i];
      if (load && one == Outcome::Ok)
        one = t_->load_block(found[i], pieces, 2, b.block_bytes, t_->tick_of(found[i].shard));
      else if (!load && one == Outcome::Ok)
        t_->vouch(b.keys[i], found[i]), one = Outcome::Present;
      else if (!load)
        one = store(b, i, pieces);
      codes[i] = static_cast<uint8_t>(one);
    }
    load ? b.judge(codes, g.honest, g.tally) : b.judge_store(codes, g.honest_store, g.tally);
  }
  Outcome store(const Batch& b, uint32_t i, const Piece* pieces) {
    const uint64_t slot_bytes = Namespaces<CpuMemory>::slot_bytes_for(a_.home(), b.block_bytes);
    Claim claim;
    const Outcome begun = t_->begin_store(b.keys[i], slot_bytes, claim);
    return begun == Outcome::Ok ? t_->complete_store(claim, b.keys[i], pieces, 2, b.block_bytes, namespace_[b.space], slot_bytes) : begun;
  }

  Attached<CpuMemory> a_;
  std::unique_ptr<Transfer<CpuMemory>> t_;
  uint16_t namespace_[kSpaces] = {};
};

void mapping(Ground& g, Coherence coherence) {
  const Place place(coherence);
  const int fd = ::open(place.path.c_str(), O_RDWR | O_CLOEXEC);
  void* base = ::mmap(nullptr, place.sb.region_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  ensure(base != MAP_FAILED, "the region could not be mapped");
  std::vector<std::unique_ptr<Process>> processes;
  for (uint32_t i = 0; i < 2 * kHosts; ++i)
    processes.push_back(std::make_unique<Process>(place.sb, static_cast<uint8_t*>(base), i % kHosts, i / kHosts, coherence));
  Threads threads;
  for (uint32_t i = 0; i < processes.size(); ++i) threads.emplace_back([&, i] { processes[i]->run(i, g); });
  join(threads);
  for (uint32_t host = 0; host < kHosts; ++host) {
    const Check c = processes[host]->settle();
    ensure(c.writing == 0, "a slot is stuck");
    ensure(c.stable != 0, "nothing was stored");
  }
  processes.clear();
  ::munmap(base, place.sb.region_bytes);
  ::close(fd);
  judge_end(place, g);
}

// ---- a fault on purpose ----

volatile uint64_t g_sink = 0;
uint64_t g_raced = 0;
void* g_medium = nullptr;

// Beyond an array on the stack of a fiber that an exception has unwound before, and that was left in between.
void overflow_on_fiber(void* fiber) {
  try {
    Bytes lost(kUnit);
    throw std::runtime_error("unwinds");
  } catch (const std::runtime_error&) {
    static_cast<sim::Fiber*>(fiber)->leave();
  }
  uint8_t small[kLineBytes];
  const Piece piece{small, 2 * kLineBytes};
  g_sink = copy_out(&piece, 1, static_cast<uint8_t*>(g_medium));
}

int plant(const std::string& what) {
  Bytes medium(4 * kUnit);
  auto* aligned = medium.data() + (kLineBytes - reinterpret_cast<uintptr_t>(medium.data()) % kLineBytes) % kLineBytes;
  if (what == "overflow") {   // the kernel copies more than the caller's buffer holds
    auto* small = static_cast<uint8_t*>(std::aligned_alloc(kLineBytes, kUnit));
    const Piece piece{small, 2 * kUnit};
    g_sink = copy_out(&piece, 1, aligned);
    std::free(small);
  } else if (what == "fiber") {
    g_medium = aligned;
    sim::Fiber fiber;
    fiber.begin(overflow_on_fiber, &fiber);
    fiber.enter();
    fiber.enter();
  } else if (what == "race") {   // two loads into one buffer
    Bytes out(kUnit);
    const Piece piece{out.data(), kUnit};
    std::thread other([&] { g_raced = copy_out(&piece, 1, aligned); });
    g_raced = copy_out(&piece, 1, aligned);
    other.join();
  } else if (what == "uninitialised") {   // a store of bytes that nobody wrote
    auto* unset = static_cast<uint8_t*>(std::malloc(2 * kUnit));
    const Piece piece{unset, 2 * kUnit};
    if (copy_in(aligned, &piece, 1) == 1) g_sink = 1;
    std::free(unset);
  } else if (what == "undefined") {   // a shift by more bits than there are
    g_sink = 1ULL << (g_sink + 64);
  } else if (what == "leak") {
    g_sink = reinterpret_cast<uintptr_t>(std::malloc(kUnit)) != 0;
  } else {
    fail("no such fault: " + what);
  }
  return 0;
}

struct Scenario {
  const char* name;
  void (*run)(Ground&, Coherence);
};
constexpr Scenario kScenarios[] = {{"shared", shared}, {"own", own}, {"mapping", mapping}, {"hands", hands}, {"faults", faults}};

}   // namespace

int main(int argc, char** argv) {
  if (argc == 3 && std::string(argv[1]) == "plant") return plant(argv[2]);
  if (argc < 3) fail("usage: kvpool_hammer SECONDS hardware|software [SCENARIO...]");
  const double seconds = std::atof(argv[1]);
  const Coherence coherence = std::string(argv[2]) == "hardware" ? Coherence::Hardware : Coherence::Software;
  const std::set<std::string> wanted(argv + 3, argv + argc);
  const double each = seconds / static_cast<double>(wanted.empty() ? std::size(kScenarios) : wanted.size());
  for (const Scenario& s : kScenarios) {
    if (!wanted.empty() && !wanted.contains(s.name)) continue;
    Ground g;
    g.end = std::chrono::steady_clock::now() + std::chrono::milliseconds(static_cast<int64_t>(each * 1000));
    s.run(g, coherence);
    const Tally& t = g.tally;
    std::printf("%-8s %s: %lu stored, %lu present, %lu declined, %lu loaded, %lu missed, %lu upkeep, %lu attached, %lu refused; 0 wrong\n", s.name,
                argv[2], t.stored.load(), t.present.load(), t.declined.load(), t.loaded.load(), t.missed.load(), t.upkeep.load(), t.attached.load(),
                t.refused.load());
    std::fflush(stdout);
    ensure(t.loaded != 0 && t.stored != 0, std::string(s.name) + ": nothing was loaded or stored; more seconds are needed");
  }
  return 0;
}
