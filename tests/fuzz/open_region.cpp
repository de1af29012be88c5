// libFuzzer: opens, reads, repairs and writes a small region that was damaged in the ways that the input lists.
//
// The input is a header of four bytes and then patches of any number: what to do, where, with what. A patch can also make a checksum right again,
// because nearly everything that random bytes do ends at a checksum otherwise. Without such a patch every block that is served must be the one that
// was stored; with it (a forger, not damage) memory errors, hangs and unknown exceptions are still faults.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "region.h"
#include "region_file.h"

namespace {

using namespace kvp;

constexpr uint64_t kBlockBytes = 500, kSlotBytes = 512;
constexpr uint32_t kHosts = 2, kBlocksEach = 5;
const std::string kNode = "fuzz", kBoot(16, 'b');

// A whole region in memory, reachable by a path, and how it was before the damage.
struct Target {
  std::string path;
  uint8_t* bytes = nullptr;
  uint64_t size = 0;
  std::vector<uint8_t> good;
  Superblock superblock{};
  int fd = -1;
};
Target g_targets[2];   // hardware, software
uint8_t g_digest[kKeyBytes];
std::vector<Key> g_keys;
std::vector<std::vector<uint8_t>> g_contents;

[[noreturn]] void fault(const char* what) {
  std::fprintf(stderr, "fault: %s\n", what);
  std::abort();
}

// One block in the caller's memory, as Buffers wants it.
struct Room {
  std::vector<std::vector<uint8_t>> blocks;
  std::vector<uint64_t> base, bytes;
  Room(uint64_t count, uint64_t block_bytes) : blocks(count, std::vector<uint8_t>(block_bytes, 0xee)), bytes(count, block_bytes) { point(); }
  explicit Room(const std::vector<std::vector<uint8_t>>& contents) : blocks(contents) {
    for (const auto& b : blocks) bytes.push_back(b.size());
    point();
  }
  void point() {
    for (auto& b : blocks) base.push_back(reinterpret_cast<uint64_t>(b.data()));
  }
  Buffers buffers() const { return {base.data(), nullptr, bytes.data(), nullptr, 1}; }
};

void make_blocks() {
  std::memset(g_digest, 7, sizeof g_digest);
  std::vector<uint8_t> hashes(kHosts * kBlocksEach * 32ULL);
  for (size_t i = 0; i < hashes.size(); ++i) hashes[i] = static_cast<uint8_t>(i / 32 * 31 + i);
  std::vector<uint8_t> packed(hashes.size());
  make_keys(g_digest, hashes.data(), hashes.size() / 32, packed.data());
  for (uint64_t i = 0; i < hashes.size() / 32; ++i) {
    g_keys.push_back(key_at(packed.data(), i));
    std::vector<uint8_t> content(kBlockBytes);
    for (size_t k = 0; k < content.size(); ++k) content[k] = static_cast<uint8_t>((i + 3) * (k + 1) >> (k % 5));
    g_contents.push_back(content);
  }
}

void make_target(Target& t, Coherence coherence) {
  GeometryRequest r;
  r.region_bytes = t.size = 64 << 10;
  r.hosts = kHosts, r.slot_bytes_min = kSlotBytes, r.extent_bytes = 4 * kSlotBytes, r.participants = 2, r.namespaces = 2, r.coherence = coherence;
  t.fd = ::memfd_create("kvpool-fuzz", MFD_CLOEXEC);
  if (t.fd < 0 || ::ftruncate(t.fd, static_cast<off_t>(t.size)) != 0) fault("no memory for a region");
  t.path = "/proc/self/fd/" + std::to_string(t.fd);
  t.superblock = plan_region(r);
  format_region(t.path, t.superblock, false, true, t.path);
  for (uint32_t h = 0; h < kHosts; ++h) {
    Region region(t.path, h, Role::Engine, false, false, t.path, kNode, kBoot);
    uint16_t index = 0;
    if (region.open_namespace(g_digest, kBlockBytes, "{\"model\":\"fuzz\"}", index) != 0) fault("no namespace");
    const Room room(std::vector<std::vector<uint8_t>>(g_contents.begin() + h * kBlocksEach, g_contents.begin() + (h + 1) * kBlocksEach));
    uint8_t codes[kBlocksEach];
    region.store(g_keys.data() + h * kBlocksEach, kBlocksEach, room.buffers(), kBlockBytes, index, codes);
    region.evict(0.5, 1);   // a ghost
  }
  t.superblock = inspect_region(t.path).superblock;
  void* p = ::mmap(nullptr, t.size, PROT_READ | PROT_WRITE, MAP_SHARED, t.fd, 0);
  if (p == MAP_FAILED) fault("the region cannot be mapped");
  t.bytes = static_cast<uint8_t*>(p);
  t.good.assign(t.bytes, t.bytes + t.size);
}

// ---- the input ----

struct Input {
  const uint8_t* at;
  const uint8_t* end;
  bool empty() const { return at == end; }
  uint8_t byte() { return empty() ? 0 : *at++; }
  uint32_t number() {   // three bytes
    const uint32_t a = byte(), b = byte();
    return a | b << 8 | uint32_t{byte()} << 16;
  }
};

enum Patch : uint8_t {
  kWrite,
  kFlip,
  kFill,
  kCopy,
  kSwapLines,
  kWord,
  kAddWord,
  kRightHeader,
  kRightRow,
  kRightSuperblock,
  kSameSuperblocks,
  kPatches
};

uint64_t spread(const Target& t, Input& in) { return in.number() % t.size; }

void right_superblock(uint8_t* at) {
  Superblock sb;
  std::memcpy(&sb, at, sizeof sb);
  sb.checksum = line_checksum(reinterpret_cast<const uint8_t*>(&sb) + 8, offsetof(Superblock, checksum) - 8, 0);
  std::memcpy(at, &sb, sizeof sb);
}

// True: a checksum was made right, so what is served need not be what was stored.
bool apply(Target& t, Input& in) {
  const auto patch = static_cast<Patch>(in.byte() % kPatches);
  const uint64_t at = spread(t, in);
  const auto room = [&](uint64_t from, uint64_t want) { return from + want <= t.size ? want : t.size - from; };
  const auto word_at = at / 8 * 8;
  switch (patch) {
    case kWrite: {
      const uint64_t n = room(at, in.byte() % 64 + 1ULL);
      for (uint64_t i = 0; i < n; ++i) t.bytes[at + i] = in.byte();
      return false;
    }
    case kFlip: t.bytes[at] ^= static_cast<uint8_t>(1u << in.byte() % 8); return false;
    case kFill: {
      const uint64_t n = room(at, 1ULL << in.byte() % 13);
      std::memset(t.bytes + at, in.byte(), n);
      return false;
    }
    case kCopy: {
      const uint64_t from = spread(t, in), n = 1ULL << in.byte() % 13;
      std::memmove(t.bytes + at, t.bytes + from, room(at > from ? at : from, n));
      return false;
    }
    case kSwapLines: {
      const uint64_t a = at / kLineBytes * kLineBytes, b = spread(t, in) / kLineBytes * kLineBytes;
      uint8_t line[kLineBytes];
      std::memcpy(line, t.bytes + a, kLineBytes);
      std::memmove(t.bytes + a, t.bytes + b, kLineBytes);
      std::memcpy(t.bytes + b, line, kLineBytes);
      return false;
    }
    case kWord: {
      uint64_t value = 0;
      for (int i = 0; i < 8; ++i) value |= uint64_t{in.byte()} << 8 * i;
      std::memcpy(t.bytes + word_at, &value, 8);
      return false;
    }
    case kAddWord: {
      uint64_t value;
      std::memcpy(&value, t.bytes + word_at, 8);
      value += static_cast<uint64_t>(static_cast<int8_t>(in.byte())) << in.byte() % 64;
      std::memcpy(t.bytes + word_at, &value, 8);
      return false;
    }
    case kRightHeader: {
      const ShardMap s(t.superblock, HostIndex{static_cast<uint32_t>(at & 1)});
      const Offset header = s.slot_header(s.slot_at(at / 2 % s.slots()));
      const uint64_t checksum = line_checksum(t.bytes + header, kHeaderChecksumCovers, header);
      std::memcpy(t.bytes + header + kHeaderChecksumCovers, &checksum, 8);
      return true;
    }
    case kRightRow: {
      const ShardMap s(t.superblock, HostIndex{static_cast<uint32_t>(at & 1)});
      const Offset row_at = s.namespace_row(static_cast<uint32_t>(at / 2 % t.superblock.namespace_count));
      NamespaceRow row;
      std::memcpy(&row, t.bytes + row_at, sizeof row);
      row.checksum = Namespaces<CpuMemory>::checksum(row);
      std::memcpy(t.bytes + row_at, &row, sizeof row);
      return true;
    }
    case kRightSuperblock: right_superblock(t.bytes + (at & 1) * t.superblock.align_bytes); return true;
    case kSameSuperblocks: std::memcpy(t.bytes + t.superblock.align_bytes, t.bytes, kSuperblockBytes); return false;
    case kPatches: break;
  }
  return false;
}

// ---- what is done with the region ----

void load_all(Region& region, bool honest) {
  Room room(g_keys.size(), kBlockBytes);
  std::vector<uint8_t> codes(g_keys.size());
  region.load(g_keys.data(), g_keys.size(), room.buffers(), kBlockBytes, codes.data());
  for (size_t i = 0; i < g_keys.size(); ++i) {
    if (codes[i] == static_cast<uint8_t>(Outcome::Ok) && honest && room.blocks[i] != g_contents[i]) fault("WRONG BYTES");
    if (codes[i] == static_cast<uint8_t>(Outcome::Present) || codes[i] > static_cast<uint8_t>(Outcome::Fenced)) fault("no such outcome of a load");
  }
}

template <class F>
void refused_or(F f) {   // an Error is an answer; any other exception is a fault, and ends the fuzzer
  try {
    f();
  } catch (const Error&) {
  }
}

void look(Region& region) {
  std::vector<uint8_t> codes(g_keys.size());
  refused_or([&] { region.lookup(g_keys.data(), g_keys.size(), codes.data()); });
  refused_or([&] { region.check(); });
  refused_or([&] { region.counters(0, region.superblock().host_count); });
  refused_or([&] { region.participants(); });
  refused_or([&] {
    std::vector<NamespaceUsage> namespaces;
    region.usage(namespaces, true);
  });
  for (uint32_t h = 0; h < region.superblock().host_count; ++h) {
    refused_or([&] { region.host_view(h); });
    uint64_t next = 0, calls = 0;
    refused_or([&] {
      do region.slots(h, next, 3, next);
      while (next != 0 && ++calls < 10000);
    });
    if (calls == 10000) fault("a dump that does not end");
  }
}

void write(Region& region, uint8_t how, bool honest) {
  load_all(region, honest);
  uint16_t index = 0;
  refused_or([&] {
    if (region.open_namespace(g_digest, kBlockBytes, "{}", index) != 0) return;
    const Room room(g_contents);
    std::vector<uint8_t> codes(g_keys.size());
    region.store(g_keys.data(), g_keys.size(), room.buffers(), kBlockBytes, index, codes.data());
    load_all(region, honest);
  });
  Recovered total;
  refused_or([&] { region.reap_dead(total); });
  refused_or([&] { region.heartbeat(); });
  refused_or([&] { region.acknowledge_lost(); });
  if ((how & 1) != 0) refused_or([&] { region.adopt_shard(how >> 1 & 1, 1ULL << (how >> 2 & 31)); });
  refused_or([&] { region.audit_adopted(); });
  refused_or([&] { region.scrub(0, ~0ULL, ~0ULL); });
  refused_or([&] { region.owners(); });
  if ((how & 0x80) != 0) refused_or([&] { region.repair(); });
  load_all(region, honest);
  refused_or([&] { region.evict(0.3, 4); });
  load_all(region, honest);
  look(region);
}

void run(const uint8_t* data, size_t size) {
  Input in{data, data + size};
  const uint8_t which = in.byte(), how = in.byte(), cut = in.byte(), host = in.byte();
  Target& t = g_targets[which & 1];
  std::memcpy(t.bytes, t.good.data(), t.size);
  bool honest = true;
  while (!in.empty()) honest = !apply(t, in) && honest;
  refused_or([&] { inspect_region(t.path); });
  looks_formatted(t.path);
  refused_or([&] {
    Region region(t.path, 0, Role::Tool, true, false, t.path, "", "");
    look(region);
  });
  refused_or([&] {
    Region region(t.path, host % 3, (which & 2) != 0 ? Role::Daemon : Role::Engine, false, (which & 2) != 0, t.path, kNode, kBoot);
    if ((which & 0xc) == 0xc && ::ftruncate(t.fd, static_cast<off_t>(cut) * 256) != 0) fault("truncate");
    write(region, how, honest);
    if ((which & 0x10) != 0) {   // the other host beside it
      refused_or([&] {
        Region other(t.path, 1 - host % 2, Role::Engine, false, false, t.path, kNode, kBoot);
        write(other, 0, honest);
        load_all(region, honest);
      });
    }
  });
  if ((which & 0xc) == 0xc && ::ftruncate(t.fd, static_cast<off_t>(t.size)) != 0) fault("truncate");
}

// ---- seeds: one for each field of each structure, as KVPOOL_FUZZ_SEEDS=FOLDER asks for ----

void write_seeds(const std::string& folder) {
  uint32_t number = 0;
  const auto seed = [&](const std::vector<uint8_t>& bytes) {
    const std::string name = folder + "/seed-" + std::to_string(number++);
    std::FILE* f = std::fopen(name.c_str(), "wb");
    if (f == nullptr || std::fwrite(bytes.data(), 1, bytes.size(), f) != bytes.size() || std::fclose(f) != 0) fault("a seed cannot be written");
  };
  const auto where = [](std::vector<uint8_t>& out, uint64_t at) {
    for (int i = 0; i < 3; ++i) out.push_back(static_cast<uint8_t>(at >> 8 * i));
  };
  for (uint8_t which : {0x10, 0x11, 0x13, 0x1c}) seed({which, 0xff, 100, 0});
  const auto words = [&](uint64_t from, uint64_t bytes, uint64_t step, const std::vector<uint8_t>& then) {
    for (uint64_t at = from; at < from + bytes; at += step) {
      std::vector<uint8_t> out{static_cast<uint8_t>(0x10 | (at / step & 1)), 0x0f, 0, static_cast<uint8_t>(at / step >> 1 & 1), kAddWord};
      where(out, at);
      out.push_back(1), out.push_back(static_cast<uint8_t>(at % 61));
      out.insert(out.end(), then.begin(), then.end());
      seed(out);
    }
  };
  const Superblock& sb = g_targets[0].superblock;
  words(8, 240, 8, {kRightSuperblock, 0, 0, 0, kSameSuperblocks, 0, 0, 0});
  for (uint32_t h = 0; h < kHosts; ++h) {
    const ShardMap s(sb, HostIndex{h});
    const auto host = static_cast<uint8_t>(h);
    words(s.base(), 128, 8, {});
    words(s.claim(HostIndex{0}), kHosts * kLineBytes, 8, {});
    words(s.acknowledgement(HostIndex{0}), kHosts * kLineBytes, 16, {});
    words(s.participant(0), 16, 8, {});
    words(s.namespace_row(0), 128, 8, {kRightRow, host, 0, 0});
    for (uint32_t e = 0; e < 2; ++e) {
      words(s.extent_descriptor(e), 24, 8, {});
      for (uint32_t i = 0; i < 3; ++i)
        words(s.slot_header(SlotId::make(e, i)), kLineBytes, 8, {kRightHeader, static_cast<uint8_t>(h | s.dense(SlotId::make(e, i)) << 1), 0, 0});
    }
    words(s.bucket(0), sb.bucket_count * kLineBytes, 8, {});
    words(s.log_tail(), 8, 8, {});
    words(s.log_record(0), 96, 8, {});
  }
}

}   // namespace

extern "C" int LLVMFuzzerInitialize(int*, char***) {
  make_blocks();
  make_target(g_targets[0], Coherence::Hardware);
  make_target(g_targets[1], Coherence::Software);
  if (const char* folder = std::getenv("KVPOOL_FUZZ_SEEDS")) {
    write_seeds(folder);
    std::_Exit(0);
  }
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  run(data, size);
  return 0;
}
