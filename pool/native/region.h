// A region in a file or device: found, formatted, mapped, and attached by one process on one host.
//
// Other hosts' shards are mapped read-only, so that a bug in this process cannot break the rule of lines. Everything here works on the real
// Memory; the protocol itself is in the templates below it.
#pragma once
#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <vector>

#include "litmus.h"
#include "memory_cpu.h"
#include "recovery.h"
#include "region_file.h"

namespace kvp {

struct Inspection {
  Superblock superblock;
  uint32_t copies_right;   // of 2
  uint64_t medium_bytes;
  Medium medium;
};

// Reads the superblock without changing anything. Throws Error: Medium, Superblock, FormatVersion.
Inspection inspect_region(const std::string& path);
void limit_region(const std::string& path, uint64_t region_bytes);           // of all its shards; before anybody is attached
bool looks_formatted(const std::string& path);                               // a magic is there, whatever the rest says
void ensure_unused(const std::string& path, const std::string& lock_path);   // throws Error{Busy} while somebody is attached

// `zeroed`: the medium is known to be all zero (a new file), so only the superblocks have to be written.
void format_region(const std::string& path, Superblock plan, bool force, bool zeroed, const std::string& lock_path);

struct HostView {   // a shard's header
  uint64_t state = 0, incarnation = 0, heartbeat = 0;
  std::string boot_id, node_name;
};
struct ShardUsage {
  uint32_t host = 0;
  std::string node_name;
  uint64_t state = 0, incarnation = 0, heartbeat = 0, epoch = 0;
  uint32_t owner = 0;
  uint64_t capacity_bytes = 0, used_bytes = 0, blocks = 0, slots = 0, slots_free = 0, slots_writing = 0, slots_retired = 0, extents = 0,
           extents_free = 0;
};
struct NamespaceUsage {
  std::string digest, description;
  uint64_t block_bytes = 0, blocks = 0, bytes = 0;
};
struct ParticipantView {
  uint32_t host, index, pid, role, generation;
  bool alive;
};
struct SlotView {
  static constexpr uint32_t kRetired = 4;   // beside the states of a slot word
  uint32_t host, extent, slot, state, participant, generation, length_bytes, namespace_index, flags, age;
  uint64_t count;
  bool header_right;
  std::string key;
};
struct Scrubbed {
  uint64_t checked = 0, bad = 0, next = 0, bytes = 0;   // of those that are bad, `failed` could not be read at all
  uint64_t failed = 0;
};
struct Owner {   // of a shard; not settled: it is being taken over
  uint32_t host;
  uint64_t epoch;
  bool settled;
};
struct Check {
  std::vector<std::string> problems;
  uint64_t slots = 0, free = 0, stable = 0, writing = 0, lent = 0, unassigned = 0, entries = 0, ghosts = 0, dead_entries = 0, retired = 0;
};

struct Repair {
  std::vector<std::string> done, left;   // sentences; left: what is damaged still, and why
  uint64_t blocks_checked = 0, blocks_dropped = 0;
};

struct Resized {
  uint64_t capacity_bytes = 0;   // that the host's daemon allows now; of the whole region
  uint32_t extents = 0;          // of the shard, that may be used
  uint64_t retired = 0;          // extents that this call took out of use
  bool done = false;             // nothing is left to do for the size that was asked for
};

struct ByteRange {
  uint64_t from, bytes;
};
struct GivenUp {                    // of memory that is known to be bad
  uint64_t slots = 0, blocks = 0;   // retired now; those of them that held a block
  uint64_t before = 0;              // retired already
  uint64_t left = 0;                // being filled, or in an extent that nobody uses yet
  uint64_t extents = 0;             // whose slot headers cannot be read
  uint64_t directory_bytes = 0;     // that nothing can take the place of
};

struct CpuClock {   // nanoseconds
  static uint64_t now();
  static void pause();
};

class Region {
 public:
  // Throws Error: Medium, Superblock, FormatVersion, Busy. `read_only` takes no participant entry and can only look.
  // `take_over`: a shard that another boot used last is adopted instead of refused.
  Region(const std::string& path, uint32_t host, Role role, bool read_only, bool take_over, const std::string& lock_path,
         const std::string& node_name, const std::string& boot_id);
  ~Region();
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;
  void close();

  void lookup(const Key* keys, uint64_t n, uint8_t* codes);
  // Returns the bytes copied by hits.
  uint64_t load(const Key* keys, uint64_t n, const Buffers& to, uint64_t block_bytes, uint8_t* codes);
  void store(const Key* keys, uint64_t n, const Buffers& from, uint64_t block_bytes, uint16_t namespace_index, uint8_t* codes);
  uint8_t open_namespace(const uint8_t* digest, uint64_t block_bytes, const std::string& description, uint16_t& index);
  void record(uint64_t lookups, uint64_t hits, const std::vector<uint64_t>& misses);

  HostView host_view(uint32_t host);
  std::vector<uint64_t> counters(uint32_t from, uint32_t to);   // sums over the participants of these hosts, without the last
  std::vector<ShardUsage> usage(std::vector<NamespaceUsage>& namespaces, bool count_slots);   // without: names only, no walk
  std::vector<ParticipantView> participants();
  std::vector<SlotView> slots(uint32_t host, uint64_t from, uint64_t limit, uint64_t& next);
  Check check();
  // Puts in order what check() finds in the shards that this host owns, and in the superblock; reads all payloads. Others may go on meanwhile.
  Repair repair();

  uint64_t evict(double used_fraction, uint64_t blocks_max);
  // Lets this host's shard have its share of so many bytes of the region, a step of about `budget_ns` at a time: first of those that are there, down to
  // which it evicts; more than it had once their memory was got. Throws Error{Medium} when there is none, Error{Geometry} for less than an extent.
  Resized resize(uint64_t region_bytes, uint64_t budget_ns);
  // Does this host store at all?
  void set_closed(bool closed);
  // Memory of these bytes of the region is known to be bad: in the shards that this host owns, nobody stores there any more, and what lies there is gone.
  GivenUp give_up(const std::vector<ByteRange>& ranges);
  // Pages that the kernel has told this process are bad, and that cannot be read; each once.
  std::vector<ByteRange> told_bad();
  uint64_t capacity_bytes();                     // what the host's daemon allows
  uint64_t acknowledged_epoch(uint32_t shard);   // up to which claims this host has said that it stopped
  uint32_t reap_dead(Recovered& total);
  void heartbeat();
  // All shards that this host owns, its own first. Stops after `limit` blocks, or as soon as `bytes_max` were read.
  Scrubbed scrub(uint64_t from, uint64_t limit, uint64_t bytes_max);
  Recovered adopt_shard(uint32_t host, uint64_t epoch);
  // Fenced away from a shard that this process's host wrote: flush it and tell the new owner. Returns one bit a shard that was
  // acknowledged.
  uint64_t acknowledge_lost();
  // A shard that changed hands and whose old owner has acknowledged: what that one wrote late is put in order. Each call reads a part of it; one bit a
  // shard that is through.
  uint64_t audit_adopted();
  std::vector<Owner> owners();

  // The litmus test between hosts (litmus.h). One process of a host has the turn at a time: begin says whether we have it.
  bool litmus_begin();
  void litmus_end();
  bool litmus_serve(uint64_t budget_ns);
  std::vector<uint64_t> litmus_beats();
  LitmusResult litmus_measure(uint32_t peer, uint32_t rounds);

  const Superblock& superblock() const { return superblock_; }
  uint32_t copies_right() const { return copies_right_; }
  uint32_t participant();
  uint32_t generation();
  bool read_only() const { return read_only_; }
  const Medium& medium() const { return medium_; }

 private:
  void map_shards();
  void protect(HostIndex shard, bool writable);
  void attach(Role role, bool take_over, const std::string& node_name, const std::string& boot_id, const HostView& last);
  using Use = std::shared_lock<std::shared_mutex>;
  Use ensure_open();
  Use ensure_writer();
  HostView view_host(uint32_t host);
  bool lock_participant(uint32_t host, uint32_t index);
  void unlock_participant(uint32_t host, uint32_t index);
  bool participant_alive(uint32_t host, uint32_t index);
  bool writer_alive(uint32_t host, SlotWord word);   // the process that set this word, on the host that owns the shard
  void refresh();
  uint64_t limit_of(HostIndex host);   // bytes of the region; 0: none
  void follow_limit(HostIndex host);
  bool closed();
  void follow_owners();
  bool acknowledged(const ShardMap& s, uint64_t epoch);
  void scrub_rows(Scrubbed& r, uint64_t bytes_max);
  uint64_t scrub_slot(const ShardMap& s, SlotId slot, Scrubbed& r);
  void repair_directory(const ShardMap& s);
  uint32_t judge_descriptor(const ShardMap& s, uint32_t extent);   // 1: it was damaged, and put right

  // region_poison.cpp
  struct Place {
    enum Part : uint8_t { Directory, Headers, Payload };
    uint32_t host = 0, extent = 0;
    Part part = Directory;
  };
  bool place_of(Offset at, Place& place) const;
  Offset last_fault_at() const;
  bool fault_stays();
  bool avoid_unreadable();
  [[noreturn]] void medium_failed() const;   // throws Error{Medium}
  bool payload_is_bad(const ShardMap& s, SlotId slot, uint64_t slot_bytes) const;
  bool leave_slot(const Claim& claim, uint64_t slot_bytes);
  bool retire_block(const ShardMap& s, SlotId slot, uint16_t namespace_index);
  void give_up_payload(const ShardMap& s, uint32_t extent, uint64_t from, uint64_t to, GivenUp& g);
  // Runs f, and once more for each extent whose slot headers turn out to be unreadable: it is avoided from then on. f must begin anew each time.
  template <class F>
  bool guarded(F&& f) {
    while (!fault_guarded(f))
      if (!avoid_unreadable()) return false;
    return true;
  }

  // region_check.cpp
  using Problem = std::function<void(const std::string&)>;
  struct LogFit {
    uint64_t tail, best, misfits;
  };
  bool plausible_slot_bytes(uint64_t bytes) const;
  const char* wrong_entry(const ShardMap& s, uint64_t bucket, Entry entry);
  uint64_t log_lap(uint64_t tail, uint64_t i) const;
  bool log_lap_fits(uint64_t tail, uint64_t before, uint64_t i, uint64_t lap) const;
  LogFit fit_log(const ShardMap& s);
  void check_extent(const ShardMap& s, uint32_t extent, uint32_t owner, Check& c, const Problem& problem);
  bool claim_stays_damaged(const ShardMap& s, Offset at);
  void check_shard(const ShardMap& s, Check& c, const Problem& problem);
  // region_repair.cpp
  struct Tally;
  bool others_alive();
  void repair_claim(Tally& t);
  void repair_claim_lines(Tally& t);
  uint64_t own_claim(const ShardMap& s);   // the epoch of this host's claim on it, 0 without one
  enum class Judged : uint8_t { Right, Restored, Freed };
  Judged judge_namespace(const ShardMap& s, uint32_t index);
  uint32_t judge_namespaces(const ShardMap& s, uint32_t from, uint32_t to, uint64_t* restored = nullptr);
  void repair_namespaces(const ShardMap& s, Tally& t);
  bool readable_slot(const ShardMap& s, SlotId slot, uint64_t slot_bytes);
  void repair_extent(const ShardMap& s, uint32_t extent, Tally& t);
  void repair_descriptor(const ShardMap& s, uint32_t extent, Tally& t);
  void repair_buckets(const ShardMap& s, Tally& t);
  void repair_log(const ShardMap& s, Tally& t);
  void repair_shard(const ShardMap& s, Tally& t);

  void lookup_group(const Key* keys, uint32_t n, Outcome* outcomes, Found* found);
  void drop_damaged(const Found& found);
  Outcome store_block(const Key& key, const Piece* pieces, uint32_t piece_count, uint64_t block_bytes, uint16_t namespace_index, uint64_t slot_bytes);

  std::string path_;
  Superblock superblock_{};
  std::atomic<uint32_t> copies_right_ = 0;
  bool read_only_;
  int fd_ = -1, lock_fd_ = -1;
  Medium medium_;
  int pid_ = 0;
  uint8_t* reserved_ = nullptr;   // address space
  uint64_t reserved_bytes_ = 0;
  uint8_t* base_ = nullptr;
  uint64_t mapped_bytes_ = 0;
  std::unique_ptr<Attached<CpuMemory>> attached_;
  std::unique_ptr<Transfer<CpuMemory>> transfer_;
  struct Audit {
    uint64_t epoch = 0;   // of the claim that it is about
    AuditProgress progress;
  };
  Audit audits_[kMaxHosts];                  // under way, of shards that changed hands
  uint64_t audited_epoch_[kMaxHosts] = {};   // of those that are through
  uint32_t next_row_ = 0;                    // of the home shard's namespaces, to be judged by the next scrub
  std::atomic<bool> closing_ = false;        // those who wait to use the region would keep close() from ever getting its turn
  std::shared_mutex lifetime_;
  std::mutex allocator_;   // Slots and namespace rows are one thread's at a time
  std::mutex lookup_;      // so is the replica
  std::mutex maintenance_;
  bool punches_ = true;                              // the medium can have holes, as far as is known
  std::vector<bool> given_back_;                     // extents whose memory this process gave back
  std::vector<std::atomic<uint64_t>> opened_rows_;   // the word of each namespace row of the home shard when it was opened; 0: never
  std::vector<uint64_t> log_laps_;                   // of check and repair: no memory is taken while the medium may fail
  std::mutex litmus_mutex_;
  std::unique_ptr<Litmus<CpuMemory, CpuClock>> litmus_;   // while we have the turn
};

std::string layout_table();   // the persisted structures, for people

}   // namespace kvp
