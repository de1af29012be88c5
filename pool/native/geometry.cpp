#include "geometry.h"

#include <cstring>
#include <string>

#include "error.h"

namespace kvp {
namespace {

constexpr uint64_t kPayloadAlign = 4096;
// Extents: few enough to scan, many enough that space follows demand in small steps; large enough that the rest that a block size leaves over
// at the end of each is small.
constexpr uint32_t kExtentsMin = 8, kExtentsWanted = 64;
constexpr uint64_t kExtentBytesWanted = 4 << 20;
constexpr uint64_t kLogRecordsMin = 64, kLogRecordsMax = 1u << 20;

constexpr uint64_t round_up(uint64_t value, uint64_t to) { return (value + to - 1) / to * to; }
constexpr bool is_power_of_two(uint64_t v) { return v != 0 && (v & (v - 1)) == 0; }
uint64_t power_of_two_from(uint64_t v) {
  uint64_t p = 1;
  while (p < v) p <<= 1;
  return p;
}

[[noreturn]] void refuse(const std::string& message) { throw Error(ErrorKind::Geometry, message); }

// Fills in all that follows from `extents` extents of `slots` smallest slots; returns the shard's size.
uint64_t lay_out(Superblock& sb, uint64_t extents, uint64_t slots) {
  sb.extent_count = static_cast<uint32_t>(extents);
  sb.slots_per_extent = static_cast<uint32_t>(slots);
  sb.extent_payload_offset = round_up(slots * kLineBytes, kPayloadAlign);
  sb.extent_bytes = round_up(sb.extent_payload_offset + slots * sb.slot_bytes_min, sb.align_bytes);
  sb.extent_payload_bytes = sb.extent_bytes - sb.extent_payload_offset;
  const uint64_t slots_total = extents * slots;
  sb.bucket_count = round_up(slots_total * 2, kEntriesPerBucket) / kEntriesPerBucket;   // half full at most
  uint64_t records = power_of_two_from(slots_total * 2);
  records = records < kLogRecordsMin ? kLogRecordsMin : records > kLogRecordsMax ? kLogRecordsMax : records;
  sb.log_record_count = records;

  uint64_t at = sizeof(ShardHeader);
  const auto place = [&](uint64_t bytes) {
    const uint64_t here = at;
    at = round_up(at + bytes, kLineBytes);
    return here;
  };
  sb.claims_offset = place(sb.host_count * kLineBytes);
  sb.acknowledgements_offset = place(sb.host_count * kLineBytes);
  sb.grants_offset = place(sb.host_count * kLineBytes);
  sb.returns_offset = place(sb.host_count * kLineBytes);
  sb.participants_offset = place(sb.participant_count * sizeof(Participant));
  sb.touch_row_bytes = round_up(slots_total * sizeof(uint16_t), kLineBytes);
  sb.touch_offset = place(sb.host_count * sb.touch_row_bytes);
  sb.namespaces_offset = place(sb.namespace_count * sizeof(NamespaceRow));
  sb.extent_descriptors_offset = place(extents * kLineBytes);
  sb.buckets_offset = place(sb.bucket_count * kLineBytes);
  sb.log_tail_offset = place(kLineBytes);
  sb.log_ring_offset = place(sb.log_record_count * 8);
  sb.extents_offset = round_up(at, sb.align_bytes > kPayloadAlign ? sb.align_bytes : kPayloadAlign);
  return sb.extents_offset + extents * sb.extent_bytes;
}

}   // namespace

Superblock plan_region(const GeometryRequest& r) {
  if (r.hosts < 1 || r.hosts > kMaxHosts) refuse("hosts: " + std::to_string(r.hosts) + "; a region has 1 to " + std::to_string(kMaxHosts) + " hosts");
  if (r.participants < 1 || r.participants > kMaxParticipants)
    refuse("participants: " + std::to_string(r.participants) + "; a host has 1 to " + std::to_string(kMaxParticipants));
  if (r.namespaces < 1 || r.namespaces > kMaxNamespaces)
    refuse("namespaces: " + std::to_string(r.namespaces) + "; a shard has 1 to " + std::to_string(kMaxNamespaces));
  if (!is_power_of_two(r.align_bytes) || r.align_bytes < kSuperblockBytes)
    refuse("alignment: " + std::to_string(r.align_bytes) + " bytes; it must be a power of two, 4096 or more");
  if (r.slot_bytes_min < kLineBytes || r.slot_bytes_min % kLineBytes != 0 || r.slot_bytes_min > 1ULL << 30)
    refuse("smallest block: " + std::to_string(r.slot_bytes_min) + " bytes; it must be a multiple of 64 up to 1Gi");

  Superblock sb;
  std::memset(&sb, 0, sizeof sb);
  sb.format_version = kFormatVersion;
  sb.header_bytes = kSuperblockBytes;
  sb.region_bytes = r.region_bytes;
  sb.align_bytes = r.align_bytes;
  sb.host_count = r.hosts;
  sb.coherence = static_cast<uint32_t>(r.coherence);
  sb.participant_count = r.participants;
  sb.namespace_count = r.namespaces;
  sb.slot_bytes_min = r.slot_bytes_min;
  sb.shard_offset = 2 * r.align_bytes;
  const uint64_t shard_bytes = r.region_bytes <= sb.shard_offset ? 0 : (r.region_bytes - sb.shard_offset) / r.hosts / r.align_bytes * r.align_bytes;
  sb.shard_bytes = shard_bytes;
  const auto too_small = [&]() {
    const uint64_t need =
        sb.shard_offset + r.hosts * round_up(lay_out(sb, 1, r.extent_bytes == 0 ? 1 : r.extent_bytes / r.slot_bytes_min), r.align_bytes);
    refuse("capacity " + std::to_string(r.region_bytes) + " bytes is too small for " + std::to_string(r.hosts) + " host(s) with blocks of " +
           std::to_string(r.slot_bytes_min) + " bytes; at least " + std::to_string(need) + " bytes are needed");
  };

  const auto fits = [&](uint64_t extents, uint64_t slots) { return lay_out(sb, extents, slots) <= shard_bytes; };
  if (r.extent_bytes != 0) {   // as many extents of the size asked for as there is room
    const uint64_t slots = r.extent_bytes / r.slot_bytes_min;
    if (slots == 0 || slots > kMaxSlotsPerExtent)
      refuse("extent size " + std::to_string(r.extent_bytes) + " bytes holds " + std::to_string(slots) + " smallest blocks; it must hold 1 to " +
             std::to_string(kMaxSlotsPerExtent));
    uint64_t low = 0, high = kMaxExtents;
    while (low < high) {
      const uint64_t mid = (low + high + 1) / 2;
      if (fits(mid, slots))
        low = mid;
      else
        high = mid - 1;
    }
    if (low == 0) too_small();
    lay_out(sb, low, slots);
  } else {
    const uint64_t rough = shard_bytes / (r.slot_bytes_min + kLineBytes);
    uint64_t extents = kExtentsWanted;
    while (extents > kExtentsMin && shard_bytes / extents < kExtentBytesWanted) extents /= 2;
    while (extents * 2 <= kMaxExtents && rough / extents > kMaxSlotsPerExtent / 2) extents *= 2;
    uint64_t slots = 0;
    for (; extents != 0; extents /= 2) {   // fewer extents when the shard is tiny
      uint64_t low = 0, high = kMaxSlotsPerExtent;
      while (low < high) {
        const uint64_t mid = (low + high + 1) / 2;
        if (fits(extents, mid))
          low = mid;
        else
          high = mid - 1;
      }
      if ((slots = low) != 0) break;
    }
    if (slots == 0) too_small();
    lay_out(sb, extents, slots);
  }
  return sb;
}

uint32_t extents_within(const Superblock& sb, uint64_t region_bytes) {
  if (region_bytes >= sb.region_bytes) return sb.extent_count;
  const uint64_t share = region_bytes <= sb.shard_offset ? 0 : (region_bytes - sb.shard_offset) / sb.host_count;
  const uint64_t extents = share <= sb.extents_offset ? 0 : (share - sb.extents_offset) / sb.extent_bytes;
  return static_cast<uint32_t>(extents < sb.extent_count ? extents : sb.extent_count);
}

void check_consistent(const Superblock& sb) {
  Superblock again;
  std::memset(&again, 0, sizeof again);
  again.host_count = sb.host_count;
  again.participant_count = sb.participant_count;
  again.namespace_count = sb.namespace_count;
  again.slot_bytes_min = sb.slot_bytes_min;
  again.align_bytes = sb.align_bytes;
  const bool in_range = sb.host_count >= 1 && sb.host_count <= kMaxHosts && sb.participant_count >= 1 && sb.participant_count <= kMaxParticipants &&
                        sb.namespace_count >= 1 && sb.namespace_count <= kMaxNamespaces && is_power_of_two(sb.align_bytes) &&
                        sb.align_bytes >= kSuperblockBytes && sb.align_bytes <= 1ULL << 40 && sb.slot_bytes_min >= kLineBytes &&
                        sb.slot_bytes_min <= 1ULL << 30 && sb.slot_bytes_min % kLineBytes == 0 && sb.extent_count >= 1 &&
                        sb.extent_count <= kMaxExtents && sb.slots_per_extent >= 1 && sb.slots_per_extent <= kMaxSlotsPerExtent &&
                        (sb.coherence == 1 || sb.coherence == 2) && sb.shard_offset == 2 * sb.align_bytes && sb.shard_bytes < 1ULL << 56 &&
                        sb.shard_bytes % sb.align_bytes == 0;
  const bool fits = in_range && lay_out(again, sb.extent_count, sb.slots_per_extent) <= sb.shard_bytes &&
                    sb.shard_offset + sb.host_count * sb.shard_bytes <= sb.region_bytes;
  const bool same =
      fits && std::memcmp(&again.extent_count, &sb.extent_count, offsetof(Superblock, created_unix_s) - offsetof(Superblock, extent_count)) == 0;
  if (!same) throw Error(ErrorKind::Superblock, "the superblock's checksum is right but its sizes contradict each other");
}

}   // namespace kvp
