// The persisted structures as text, made from the constants: 'kvpool layout' prints it and a snapshot test pins it.
#include <cstdio>

#include "region.h"

namespace kvp {
namespace {

struct Field {
  const char* name;
  size_t offset, size;
  const char* what;
};

void section(std::string& out, const char* title, size_t bytes, std::initializer_list<Field> fields) {
  char line[256];
  std::snprintf(line, sizeof line, "%s, %zu bytes\n", title, bytes);
  out += line;
  for (const Field& f : fields) {
    std::snprintf(line, sizeof line, "  %5zu %5zu  %-24s %s\n", f.offset, f.size, f.name, f.what);
    out += line;
  }
}

}   // namespace

#define KVP_FIELD(type, name, what) \
  Field { #name, offsetof(type, name), sizeof(type::name), what }

std::string layout_table() {
  std::string out = "kvpool region format " + std::to_string(kFormatVersion) + ", little-endian; offset and size in bytes\n\n";
  section(out, "superblock (offset 0 and again at align_bytes)", sizeof(Superblock),
          {KVP_FIELD(Superblock, magic, "\"kvpool01\", stored last"),
           KVP_FIELD(Superblock, format_version, ""),
           KVP_FIELD(Superblock, header_bytes, ""),
           KVP_FIELD(Superblock, uuid, ""),
           KVP_FIELD(Superblock, region_bytes, ""),
           KVP_FIELD(Superblock, align_bytes, "of shards and extents"),
           KVP_FIELD(Superblock, host_count, ""),
           KVP_FIELD(Superblock, coherence, "1 hardware, 2 software"),
           KVP_FIELD(Superblock, participant_count, "a host"),
           KVP_FIELD(Superblock, namespace_count, "a shard"),
           KVP_FIELD(Superblock, shard_offset, "of shard 0"),
           KVP_FIELD(Superblock, shard_bytes, ""),
           KVP_FIELD(Superblock, extent_count, "a shard"),
           KVP_FIELD(Superblock, slots_per_extent, "at the smallest slot size"),
           KVP_FIELD(Superblock, slot_bytes_min, ""),
           KVP_FIELD(Superblock, extent_bytes, "headers and payload"),
           KVP_FIELD(Superblock, extent_payload_offset, ""),
           KVP_FIELD(Superblock, extent_payload_bytes, ""),
           KVP_FIELD(Superblock, bucket_count, "a shard"),
           KVP_FIELD(Superblock, log_record_count, "a shard, a power of two"),
           KVP_FIELD(Superblock, claims_offset, "from here on: from the shard's start"),
           KVP_FIELD(Superblock, acknowledgements_offset, ""),
           KVP_FIELD(Superblock, grants_offset, ""),
           KVP_FIELD(Superblock, returns_offset, ""),
           KVP_FIELD(Superblock, participants_offset, ""),
           KVP_FIELD(Superblock, touch_offset, ""),
           KVP_FIELD(Superblock, touch_row_bytes, ""),
           KVP_FIELD(Superblock, namespaces_offset, ""),
           KVP_FIELD(Superblock, extent_descriptors_offset, ""),
           KVP_FIELD(Superblock, buckets_offset, ""),
           KVP_FIELD(Superblock, log_tail_offset, ""),
           KVP_FIELD(Superblock, log_ring_offset, ""),
           KVP_FIELD(Superblock, extents_offset, ""),
           KVP_FIELD(Superblock, created_unix_s, ""),
           KVP_FIELD(Superblock, checksum, "XXH3-64 of bytes 8..4087")});
  section(out, "shard header (the host's)", sizeof(ShardHeader),
          {KVP_FIELD(ShardHeader, state, "0 never attached, 1 ready"), KVP_FIELD(ShardHeader, incarnation, ""), KVP_FIELD(ShardHeader, heartbeat, ""),
           KVP_FIELD(ShardHeader, boot_id, ""), KVP_FIELD(ShardHeader, limit, "bytes of the region that the shard keeps to its share of; 0 all"),
           KVP_FIELD(ShardHeader, limit_check, "~limit"), KVP_FIELD(ShardHeader, closed, "\"closed\": nothing new is stored"),
           KVP_FIELD(ShardHeader, node_name, "zero-padded")});
  section(out, "claim line and acknowledgement line, one a host (the host's)", sizeof(ClaimLine),
          {KVP_FIELD(ClaimLine, epoch, "the highest claim owns the shard"),
           KVP_FIELD(ClaimLine, settled_epoch, "epoch whose adoption is done: the owner's processes may write"), KVP_FIELD(ClaimLine, epoch_copy, ""),
           KVP_FIELD(ClaimLine, settled_copy, ""),
           KVP_FIELD(ClaimLine, epoch_checksum, "XXH3-64 of the epoch, seeded with the line's offset in the region; 0 for 0")});
  section(out, "grant line and return line, one a host (no loans yet)", sizeof(LoanLine),
          {KVP_FIELD(LoanLine, extent, ""), KVP_FIELD(LoanLine, epoch, ""), KVP_FIELD(LoanLine, host, "")});
  section(out, "litmus: the host's own grant line, its say line", sizeof(LitmusSayLine),
          {KVP_FIELD(LitmusSayLine, beat, "host being answered + 1: 8 | session 24 | count 32; 0 nobody answers"),
           KVP_FIELD(LitmusSayLine, request, "host asked + 1: 8 | test 8 | session 24 | sequence 24"),
           KVP_FIELD(LitmusSayLine, answer, "the request, with the asking host + 1"), KVP_FIELD(LitmusSayLine, flag, "as a word of the test line")});
  section(out, "litmus: the host's own return line, its test line", sizeof(LitmusTestLine),
          {KVP_FIELD(LitmusTestLine, words, "all alike: session 24 | sequence 24 | store 16")});
  section(out, "participant (the host's)", sizeof(Participant),
          {KVP_FIELD(Participant, word, "generation << 32 | state (0 free, 1 live)"), KVP_FIELD(Participant, pid, ""),
           KVP_FIELD(Participant, role, "1 engine, 2 daemon, 3 tool"), KVP_FIELD(Participant, counters, "enum Counter")});
  out += "touch row, one a host (the host's): 2 bytes a slot, the tick of its last read by that host; 0 never\n";
  section(
      out, "namespace row (the owner's)", sizeof(NamespaceRow),
      {KVP_FIELD(NamespaceRow, word, "as the slot word"), KVP_FIELD(NamespaceRow, digest, "SHA-256"), KVP_FIELD(NamespaceRow, block_bytes, ""),
       KVP_FIELD(NamespaceRow, slot_bytes, "distance of two slots"),
       KVP_FIELD(NamespaceRow, checksum, "XXH3-64 of the row without word and checksum"), KVP_FIELD(NamespaceRow, tenant, ""),
       KVP_FIELD(NamespaceRow, quota_bytes, "0 none"), KVP_FIELD(NamespaceRow, description_bytes, ""), KVP_FIELD(NamespaceRow, description, "JSON")});
  section(
      out, "extent descriptor (the owner's)", sizeof(ExtentDescriptor),
      {KVP_FIELD(ExtentDescriptor, word, "as the slot word: free, being cut, serving"), KVP_FIELD(ExtentDescriptor, slot_bytes, ""),
       KVP_FIELD(ExtentDescriptor, slot_count, ""),
       KVP_FIELD(ExtentDescriptor, checksum, "XXH3-64 of slot_bytes and slot_count, seeded with the descriptor's offset in the region; 0 for 0")});
  out += "bucket (the owner's): 8 entries of 8 bytes: tag 16 | low bits of the slot's count 16 | extent 12 | slot 20\n";
  out += "log record (the owner's), 8 bytes: lap 24 | hint 8 (1 stored, 2 evicted, 3 rescan) | extent 12 | slot 20\n";
  section(out, "slot header (the owner's)", sizeof(SlotHeader),
          {KVP_FIELD(SlotHeader, word, "state 2 | count 38 | participant 10 | generation 14; states 0 free, 1 writing, 2 stable, 3 lent"),
           KVP_FIELD(SlotHeader, key, "SHA-256"), KVP_FIELD(SlotHeader, length_bytes, ""), KVP_FIELD(SlotHeader, namespace_index, ""),
           KVP_FIELD(SlotHeader, codec, "0 plain"), KVP_FIELD(SlotHeader, flags, ""), KVP_FIELD(SlotHeader, payload_checksum, "XXH3-64"),
           KVP_FIELD(SlotHeader, header_checksum, "XXH3-64 of bytes 0..55, seeded with the header's offset in the region")});
  return out;
}

}   // namespace kvp
