// Every byte that a region persists: region format 1.
//
//   region  = superblock, its copy, then one shard a host
//   shard   = lines of the host (header, claims, acknowledgements, loans, participants, touch rows): written by that host for ever
//           + lines of the shard's owner (namespaces, extent descriptors, buckets, change log, extents): they change hands by adoption
//   extent  = slot headers, one line each, then payload slots. A header line never becomes payload and keeps its count when
//             the extent is cut anew, so a delayed compare-and-swap can never hit a line that lives a second life.
//
// Fixed-width types only, little-endian, no hidden padding. Enum values are written out and append only.
// An all-zero shard is a valid empty shard: every slot FREE with count 0, every entry empty, every ring record of lap 0.
// Source: DESIGN 4.2, PROTOCOL 0.
#pragma once
#include <bit>
#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace kvp {

static_assert(std::endian::native == std::endian::little, "the region format is little-endian");

using Offset = uint64_t;   // bytes from the start of the region

inline constexpr uint64_t kLineBytes = 64;
inline constexpr uint64_t kMagic = 0x31306c6f6f70766bULL;   // "kvpool01"
inline constexpr uint32_t kFormatVersion = 1;
inline constexpr uint64_t kSuperblockBytes = 4096;
inline constexpr uint32_t kMaxHosts = 64;
inline constexpr uint32_t kMaxParticipants = 1024;   // 10 bits of the slot word
inline constexpr uint32_t kMaxNamespaces = 65535;    // 16 bits of the slot header
inline constexpr uint32_t kMaxExtents = 4095;        // 12 bits of the bucket entry, less one: no slot id is all ones (a ghost)
inline constexpr uint32_t kMaxSlotsPerExtent = 1u << 20;
inline constexpr uint32_t kEntriesPerBucket = 8;
inline constexpr uint32_t kKeyBytes = 32;

enum class Coherence : uint32_t { Hardware = 1, Software = 2 };

// What became of a block. 0 and 1 are successes; the rest are reasons (kvpool.outcomes has the same table).
enum class Outcome : uint8_t {
  Ok = 0,
  Present = 1,
  NeverStored = 2,
  Evicted = 3,
  WrongNamespace = 4,
  BelowMinimum = 5,
  DeclinedByCost = 6,
  FailedChecksum = 7,
  ChangedWhileReading = 8,
  TierError = 9,
  Quota = 10,
  NoSpace = 11,
  NamespacesFull = 12,
  Fenced = 13,
};
inline constexpr uint32_t kOutcomes = 16;

// ---- superblock: at offset 0 and again at align_bytes. The magic is stored last and is not covered by the checksum. ----
struct Superblock {
  uint64_t magic;
  uint32_t format_version;
  uint32_t header_bytes;   // kSuperblockBytes
  uint8_t uuid[16];
  uint64_t region_bytes;
  uint64_t align_bytes;   // of shards and extents, so that each can be mapped with its own protection
  uint32_t host_count;
  uint32_t coherence;           // enum Coherence
  uint32_t participant_count;   // a host
  uint32_t namespace_count;     // a shard
  uint64_t shard_offset;        // of shard 0
  uint64_t shard_bytes;
  uint32_t extent_count;       // a shard
  uint32_t slots_per_extent;   // at the smallest slot size
  uint64_t slot_bytes_min;
  uint64_t extent_bytes;            // headers + payload
  uint64_t extent_payload_offset;   // in the extent
  uint64_t extent_payload_bytes;
  uint64_t bucket_count;       // a shard
  uint64_t log_record_count;   // a shard, a power of two
  uint64_t claims_offset;      // all following offsets are from the start of the shard
  uint64_t acknowledgements_offset;
  uint64_t grants_offset;
  uint64_t returns_offset;
  uint64_t participants_offset;
  uint64_t touch_offset;
  uint64_t touch_row_bytes;
  uint64_t namespaces_offset;
  uint64_t extent_descriptors_offset;
  uint64_t buckets_offset;
  uint64_t log_tail_offset;
  uint64_t log_ring_offset;
  uint64_t extents_offset;
  uint64_t created_unix_s;
  uint8_t reserved[kSuperblockBytes - 256];
  uint64_t checksum;   // over bytes 8 .. 4087
};
static_assert(sizeof(Superblock) == kSuperblockBytes && offsetof(Superblock, reserved) == 248);
static_assert(offsetof(Superblock, uuid) == 16 && offsetof(Superblock, shard_offset) == 64 && offsetof(Superblock, claims_offset) == 136);
static_assert(offsetof(Superblock, checksum) == kSuperblockBytes - 8);
static_assert(std::has_unique_object_representations_v<Superblock>);

// ---- lines of the host ----
struct ShardHeader {      // two lines
  uint64_t state;         // 0 never attached, 1 ready
  uint64_t incarnation;   // raised each time the first process of the host attaches
  uint64_t heartbeat;     // raised by the daemon
  uint8_t boot_id[16];    // of the machine that wrote it last: another boot means that its caches are gone
  // What the host's daemon allows (region_limit.cpp). A build that does not know these words stores wherever there is room, and never looks here.
  uint64_t limit;         // bytes of the whole region of which this shard keeps to its share; 0: of all
  uint64_t limit_check;   // ~limit; anything else, and the limit says nothing
  uint64_t closed;        // kClosed: processes of this host store nothing new
  char node_name[64];     // zero-padded
};
static_assert(sizeof(ShardHeader) == 128 && offsetof(ShardHeader, boot_id) == 24 && offsetof(ShardHeader, limit) == 40);
static_assert(offsetof(ShardHeader, node_name) == 64);
inline constexpr uint64_t kClosed = 0x6465736f6c63;   // "closed"; no single flipped bit makes it

// Line j of host h's claims: h owns shard j since `epoch`. The highest epoch wins; no claim at all: shard j belongs to host j. `settled_epoch` follows
// when the adoption is done; until then nobody writes there but the adopter. Everything is there twice: a flipped bit claims nothing and takes no claim
// away (ownership.h).
// Line j of host h's acknowledgements: h has stopped writing to shard j and flushed it, for every claim up to `epoch`. Only the first word is used.
struct ClaimLine {
  uint64_t epoch;
  uint64_t settled_epoch;
  uint64_t epoch_copy;
  uint64_t settled_copy;
  uint64_t epoch_checksum;   // XXH3-64 over the epoch, seeded with the line's place; 0 when it is 0. Asked when the two epochs differ
  uint64_t reserved[3];
};
// Loans of extents (PROTOCOL 6) have their lines here; no code of format 1 lends yet.
struct LoanLine {
  uint64_t extent;
  uint64_t epoch;
  uint64_t host;
  uint64_t reserved[5];
};
static_assert(sizeof(ClaimLine) == 64 && sizeof(LoanLine) == 64);

// No host lends to itself, so line h of host h's own grants and of its own returns is no loan in any build: the grant line is the host's say line, the
// return line its test line in the litmus test (litmus.h). A region's format does not change by it; a build that does not know them never looks there.
struct LitmusSayLine {
  uint64_t beat;      // host that is being answered + 1: 8 | session 24 | count 32; 0: nobody answers for this host
  uint64_t request;   // host that is asked + 1: 8 | test 8 | session 24 | sequence 24; 0: none
  uint64_t answer;    // the request that is answered, with the asking host + 1 in place of the asked one; 0 while the test line changes
  uint64_t flag;      // as a word of the test line
  uint64_t reserved[4];
};
struct LitmusTestLine {
  uint64_t words[8];   // all alike: session 24 | sequence 24 (of the request) | number of the store 16
};
static_assert(sizeof(LitmusSayLine) == sizeof(LoanLine) && sizeof(LitmusTestLine) == sizeof(LoanLine));

enum class Role : uint32_t { Engine = 1, Daemon = 2, Tool = 3 };
enum class ParticipantState : uint32_t { Free = 0, Live = 1 };   // Live without its lock held = died without saying goodbye

// Counters of a participant; they survive it, so the sum over all entries is the total since the region was formatted.
enum Counter : uint32_t {
  kLookups = 0,
  kHits = 1,
  kBytesLoaded = 2,
  kBytesStored = 3,
  kStored = 4,
  kPresent = 5,
  kEvictions = 6,
  kReaped = 7,
  kScrubBad = 8,
  kMisses = 16,        // 16: one a reason (enum Outcome)
  kDeclined = 32,      // 16: one a reason
  kLoadLatency = 48,   // 24: calls that took [2^(8+i), 2^(9+i)) ns
  kLookupLatency = 72,
  kStoreLatency = 96,   // 16 of them: the last one also counts all that took longer
  kCounters = 112,
};
inline constexpr uint32_t kLatencyBuckets = 24;
inline constexpr uint32_t kStoreLatencyBuckets = 16;
inline constexpr uint32_t kLatencyFirstLog2 = 8;

struct Participant {
  uint64_t word;   // state (low 32 bits) | generation (high 32 bits, 14 used)
  uint32_t pid;
  uint32_t role;
  uint64_t reserved[6];
  uint64_t counters[kCounters];
  uint64_t reserved2[8];
};
static_assert(sizeof(Participant) == 1024 && offsetof(Participant, counters) == 64);

// Touch row j of host h: one 16-bit tick a slot of shard j (index extent * slots_per_extent + slot): when a process of h last read it.
// 0 = never. The tick is the shard's log position, scaled so that one turnover of the whole shard is at most 2^13 ticks.

// ---- words of the shard's owner ----

// state 2 | count 38 | participant 10 | generation 14. Every change of state adds 1 to count. Used for slots, namespaces and extents.
enum class SlotState : uint32_t { Free = 0, Writing = 1, Stable = 2, Lent = 3 };
struct SlotWord {
  uint64_t raw = 0;
  static constexpr uint64_t kCountMask = (1ULL << 38) - 1;
  static constexpr SlotWord make(SlotState state, uint64_t count, uint32_t participant, uint32_t generation) {
    return {static_cast<uint64_t>(state) << 62 | (count & kCountMask) << 24 | static_cast<uint64_t>(participant & 0x3ff) << 14 |
            (generation & 0x3fff)};
  }
  constexpr SlotState state() const { return static_cast<SlotState>(raw >> 62); }
  constexpr uint64_t count() const { return raw >> 24 & kCountMask; }
  constexpr uint32_t participant() const { return static_cast<uint32_t>(raw >> 14 & 0x3ff); }
  constexpr uint32_t generation() const { return static_cast<uint32_t>(raw & 0x3fff); }
  constexpr SlotWord next(SlotState state, uint32_t participant, uint32_t generation) const {
    return make(state, count() + 1, participant, generation);
  }
  // A *retired* slot is WRITING by nobody: its payload cannot be trusted to the medium, and nobody stores there again. No process has generation 0, so
  // no reaper takes it for a dead one's, and who does not know of it finds a slot that is being filled.
  static constexpr uint32_t kRetirer = 0x3ff;
  constexpr SlotWord retire() const { return next(SlotState::Writing, kRetirer, 0); }
  constexpr bool retired() const { return state() == SlotState::Writing && participant() == kRetirer && generation() == 0; }
  constexpr bool operator==(const SlotWord&) const = default;
};
static_assert(sizeof(SlotWord) == 8);

// Where a slot lies in its shard: extent 12 | slot 20.
struct SlotId {
  uint32_t raw = 0;
  static constexpr SlotId make(uint32_t extent, uint32_t slot) { return {extent << 20 | slot}; }
  constexpr uint32_t extent() const { return raw >> 20; }
  constexpr uint32_t slot() const { return raw & 0xfffff; }
  constexpr bool operator==(const SlotId&) const = default;
};

// tag 16 | low bits of the slot's count 16 | slot id 32. 0 = empty; a tag is never 0.
// Dead as soon as the slot's count differs. A *ghost* keeps the tag of an evicted block (slot id all ones): it is dead for everybody
// and lets a reader say "evicted" instead of "never stored".
struct Entry {
  uint64_t raw = 0;
  static constexpr uint32_t kGhostSlot = 0xffffffff;
  static constexpr Entry make(uint16_t tag, uint64_t count, SlotId slot) {
    return {static_cast<uint64_t>(tag) << 48 | (count & 0xffff) << 32 | slot.raw};
  }
  static constexpr Entry ghost(uint16_t tag) { return {static_cast<uint64_t>(tag) << 48 | kGhostSlot}; }
  constexpr bool empty() const { return raw == 0; }
  constexpr bool is_ghost() const { return static_cast<uint32_t>(raw) == kGhostSlot; }
  constexpr uint16_t tag() const { return static_cast<uint16_t>(raw >> 48); }
  constexpr uint16_t count_low() const { return static_cast<uint16_t>(raw >> 32); }
  constexpr SlotId slot() const { return {static_cast<uint32_t>(raw)}; }
  constexpr bool operator==(const Entry&) const = default;
};
static_assert(SlotId::make(kMaxExtents - 1, kMaxSlotsPerExtent - 1).raw != Entry::kGhostSlot);

// Slot header: one line. An unknown codec, flag or namespace makes the slot a miss, not an error: a newer build may have written it.
struct SlotHeader {
  uint64_t word;   // SlotWord
  uint8_t key[kKeyBytes];
  uint32_t length_bytes;
  uint16_t namespace_index;
  uint8_t codec;   // 0 = plain
  uint8_t flags;
  uint64_t payload_checksum;   // XXH3-64 over length_bytes of payload
  uint64_t header_checksum;    // XXH3-64 over bytes 0..55, seeded with the slot's place, so that a copied line does not pass
};
static_assert(sizeof(SlotHeader) == 64 && offsetof(SlotHeader, length_bytes) == 40 && offsetof(SlotHeader, payload_checksum) == 48);
static_assert(std::has_unique_object_representations_v<SlotHeader>);

struct NamespaceRow {   // immutable once its word is Stable
  uint64_t word;        // SlotWord
  uint8_t digest[kKeyBytes];
  uint64_t block_bytes;
  uint64_t slot_bytes;   // distance of two payload slots: block_bytes rounded up
  uint64_t checksum;     // XXH3-64 over digest, block_bytes, slot_bytes and the description
  uint64_t tenant;
  uint64_t quota_bytes;   // 0 = none
  uint64_t reserved[6];
  uint16_t description_bytes;
  char description[894];   // JSON, for people: what makes the namespace differ from others
};
static_assert(sizeof(NamespaceRow) == 1024 && offsetof(NamespaceRow, description) == 130);

struct ExtentDescriptor {   // one line
  uint64_t word;            // SlotWord: Free = unassigned (then all else is 0), Writing = being cut, Stable = serves slot_bytes
  uint64_t slot_bytes;
  uint64_t slot_count;
  uint64_t checksum;   // XXH3-64 over slot_bytes and slot_count, seeded with the descriptor's place; 0 when both are 0
  uint64_t reserved[4];
};
static_assert(sizeof(ExtentDescriptor) == 64 && offsetof(ExtentDescriptor, checksum) == 24);

// Change log record: lap 24 | hint 8 | slot id 32. lap = position / ring size + 1; 0 = never used. It says where to look, never what to believe.
enum class LogHint : uint32_t { Stored = 1, Evicted = 2, Rescan = 3 };
struct LogRecord {
  uint64_t raw = 0;
  static constexpr uint64_t kLapMask = (1ULL << 24) - 1;
  static constexpr LogRecord make(uint64_t lap, LogHint hint, SlotId slot) {
    return {(lap & kLapMask) << 40 | static_cast<uint64_t>(hint) << 32 | slot.raw};
  }
  constexpr uint64_t lap() const { return raw >> 40; }
  constexpr LogHint hint() const { return static_cast<LogHint>(raw >> 32 & 0xff); }
  constexpr SlotId slot() const { return {static_cast<uint32_t>(raw)}; }
};

}   // namespace kvp
