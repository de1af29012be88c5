// The Python extension kvpool._native: checks arguments, drops the GIL, translates errors. Nothing else; kvpool.region gives it its shape.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <csignal>
#include <cstring>

#include "error.h"
#include "region.h"

namespace nb = nanobind;
using namespace kvp;

namespace {

const char* exception_name(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::Region: return "RegionError";
    case ErrorKind::FormatVersion: return "FormatVersionError";
    case ErrorKind::Superblock: return "SuperblockError";
    case ErrorKind::Geometry: return "GeometryError";
    case ErrorKind::Busy: return "RegionBusyError";
    case ErrorKind::Fenced: return "FencedError";
    case ErrorKind::Medium: return "MediumUnavailable";
    case ErrorKind::BufferShape: return "BufferShapeError";
    case ErrorKind::Namespace: return "NamespaceError";
  }
  return "KvpoolError";
}

[[noreturn]] void bad_buffer(const std::string& message) { throw Error(ErrorKind::BufferShape, message); }

// Packed arrays come as Python bytes: no object per key, no dependency on an array library.
struct Keys {
  const uint8_t* data;
  uint64_t count;
};
Keys keys_of(const nb::bytes& packed) {
  if (packed.size() % kKeyBytes != 0) bad_buffer("keys: " + std::to_string(packed.size()) + " bytes are not a whole number of 32-byte keys");
  return {static_cast<const uint8_t*>(packed.data()), packed.size() / kKeyBytes};
}

// What Buffers needs, held for the length of a call.
struct BufferArguments {
  Buffers buffers;
  BufferArguments(const nb::bytes& base, const nb::bytes& stride, const nb::bytes& bytes, const nb::bytes& ids, uint32_t pieces, uint64_t blocks,
                  uint64_t block_bytes) {
    if (blocks == 0) {   // nothing to copy, so nothing is read
      buffers = {nullptr, nullptr, nullptr, nullptr, pieces};
      return;
    }
    const bool paged = ids.size() != 0;
    const uint64_t elements = paged ? pieces : blocks * pieces;
    if (pieces == 0 || base.size() != elements * 8 || bytes.size() != elements * 8 ||
        (paged && (stride.size() != elements * 8 || ids.size() != blocks * 8)))
      bad_buffer("buffers: the address arrays do not match the number of keys");
    buffers = {static_cast<const uint64_t*>(base.data()), static_cast<const uint64_t*>(stride.data()), static_cast<const uint64_t*>(bytes.data()),
               paged ? static_cast<const int64_t*>(ids.data()) : nullptr, pieces};
    for (uint64_t i = 0; i < (paged ? 1 : blocks); ++i) {
      uint64_t sum = 0;
      for (uint32_t j = 0; j < pieces; ++j) sum += buffers.bytes[i * pieces + j];
      if (sum != block_bytes)
        bad_buffer("block " + std::to_string(i) + ": its pieces have " + std::to_string(sum) + " bytes, the namespace's blocks have " +
                   std::to_string(block_bytes) + ". Give buffers of exactly that size.");
    }
    if (block_bytes >= 1ULL << 32)
      bad_buffer("a block of " + std::to_string(block_bytes) + " bytes is too large; the format holds blocks below 4 GiB");
  }
};

// Keys are copied into words: Python gives no alignment.
std::vector<Key> aligned(const Keys& keys) {
  std::vector<Key> out(keys.count);
  if (keys.count != 0) std::memcpy(out.data(), keys.data, keys.count * kKeyBytes);
  return out;
}

// Text out of the medium may be damaged, and then says so instead of raising.
nb::str text_of(const std::string& text) {
  return nb::steal<nb::str>(PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "replace"));
}

nb::bytes codes_of(const std::vector<uint8_t>& codes) { return nb::bytes(reinterpret_cast<const char*>(codes.data()), codes.size()); }

nb::dict to_dict(const Superblock& sb) {
  nb::dict d;
  static const char digits[] = "0123456789abcdef";
  std::string uuid;
  for (uint32_t i = 0; i < 16; ++i) {
    if (i == 4 || i == 6 || i == 8 || i == 10) uuid += '-';
    uuid += digits[sb.uuid[i] >> 4], uuid += digits[sb.uuid[i] & 15];
  }
  d["uuid"] = uuid;
  d["format_version"] = sb.format_version;
  d["region_bytes"] = sb.region_bytes;
  d["align_bytes"] = sb.align_bytes;
  d["host_count"] = sb.host_count;
  d["coherence"] = sb.coherence == static_cast<uint32_t>(Coherence::Hardware) ? "hardware" : "software";
  d["participant_count"] = sb.participant_count;
  d["namespace_count"] = sb.namespace_count;
  d["shard_bytes"] = sb.shard_bytes;
  d["extent_count"] = sb.extent_count;
  d["slots_per_extent"] = sb.slots_per_extent;
  d["slot_bytes_min"] = sb.slot_bytes_min;
  d["extent_payload_bytes"] = sb.extent_payload_bytes;
  d["extent_offset"] = sb.extents_offset;
  d["extent_whole_bytes"] = sb.extent_bytes;
  d["shard_offset"] = sb.shard_offset;
  d["bucket_count"] = sb.bucket_count;
  d["log_record_count"] = sb.log_record_count;
  d["created_unix_s"] = sb.created_unix_s;
  return d;
}

void add_medium(nb::dict& d, const Medium& medium) {
  d["medium_kind"] = name_of(medium.kind);
  d["medium_align_bytes"] = medium.align_bytes;
  d["medium_synchronous"] = medium.synchronous;
}

Superblock plan(uint64_t region_bytes, uint32_t hosts, uint64_t slot_bytes_min, uint64_t extent_bytes, uint32_t participants, uint32_t namespaces,
                uint64_t align_bytes, bool hardware_coherent) {
  GeometryRequest r;
  r.region_bytes = region_bytes, r.hosts = hosts, r.slot_bytes_min = slot_bytes_min, r.extent_bytes = extent_bytes;
  r.participants = participants, r.namespaces = namespaces, r.align_bytes = align_bytes;
  r.coherence = hardware_coherent ? Coherence::Hardware : Coherence::Software;
  return plan_region(r);
}

// For crash tests: the process kills (9) or stops (19) itself the n-th time it passes the named step.
char g_step_name[64];
std::atomic<int> g_step_left{0};
int g_step_signal = 9;
void step_hook(const char* name) {
  if (std::strcmp(name, g_step_name) != 0) return;
  if (g_step_left.fetch_sub(1) == 1) ::raise(g_step_signal);
}
void stop_at(const std::string& name, int nth, int signal) {
  if (name.size() >= sizeof g_step_name) throw nb::value_error("the name of a step is shorter than 64 characters");
  g_step_hook.store(nullptr);
  std::strcpy(g_step_name, name.c_str());
  g_step_signal = signal;
  g_step_left.store(nth);
  if (!name.empty()) g_step_hook.store(step_hook);
}
// For crash tests that want to know which steps there are: all names passed so far, in order of first passing.
std::vector<std::string>* g_steps_seen = nullptr;
std::mutex g_steps_mutex;
void record_hook(const char* name) {
  std::lock_guard<std::mutex> lock(g_steps_mutex);
  for (const std::string& seen : *g_steps_seen)
    if (seen == name) return;
  g_steps_seen->push_back(name);
}

}   // namespace

NB_MODULE(_native, m) {
  m.doc() = "The native core of kvpool: region format 1 and its protocol. Use kvpool.region.";
  nb::register_exception_translator([](const std::exception_ptr& p, void*) {
    try {
      std::rethrow_exception(p);
    } catch (const Error& e) {
      const nb::object type = nb::module_::import_("kvpool.errors").attr(exception_name(e.kind));
      // A message may quote a damaged medium (a node's name), so it need not be UTF-8.
      const nb::object message = nb::steal(PyUnicode_DecodeUTF8(e.what(), static_cast<Py_ssize_t>(std::strlen(e.what())), "replace"));
      if (message.is_valid()) PyErr_SetObject(type.ptr(), message.ptr());
    }
  });

  m.def("layout_table", &layout_table, "The persisted structures as text.");
  m.attr("FORMAT_VERSION") = kFormatVersion;
  m.def("copy_kind", &copy_kind, "The instruction set of the copy-and-checksum kernel in use.");
  m.def(
      "cache_ops",
      [] {
        return std::vector<std::string>{cache_ops().write_back_name, cache_ops().invalidate_name};
      },
      "The instructions that write a cache line back and drop it.");
  m.def("stop_at", &stop_at, nb::arg("step"), nb::arg("nth") = 1, nb::arg("signal") = 9, "For tests: raise a signal at the nth passing of a step.");
  m.def(
      "record_steps",
      [] {
        std::lock_guard<std::mutex> lock(g_steps_mutex);
        if (g_steps_seen == nullptr) g_steps_seen = new std::vector<std::string>;
        g_steps_seen->clear();
        g_step_hook.store(record_hook);
      },
      "For tests: from now on remember the names of the steps that are passed.");
  m.def("recorded_steps", [] {
    std::lock_guard<std::mutex> lock(g_steps_mutex);
    return g_steps_seen == nullptr ? std::vector<std::string>{} : *g_steps_seen;
  });

  m.def(
      "buffer_address",
      [](const nb::object& view) {   // the caller holds the view, so the address stays good
        Py_buffer b;
        if (PyObject_GetBuffer(view.ptr(), &b, PyBUF_SIMPLE) != 0) throw nb::python_error();
        const auto address = reinterpret_cast<uint64_t>(b.buf);
        PyBuffer_Release(&b);
        return address;
      },
      nb::arg("view"), "The address of a contiguous buffer.");
  m.def(
      "dlpack_address",
      [](const nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>& a) { return nb::make_tuple(reinterpret_cast<uint64_t>(a.data()), a.nbytes()); },
      nb::arg("array").noconvert(), "Address and bytes of a contiguous DLPack array in host memory.");

  m.def(
      "make_keys",
      [](const nb::bytes& digest, const nb::bytes& hashes) {
        if (digest.size() != 32 || hashes.size() % 32 != 0) bad_buffer("keys are made from a 32-byte digest and whole 32-byte block hashes");
        const uint64_t n = hashes.size() / 32;
        std::string keys(n * kKeyBytes, '\0');
        {
          const auto* d = static_cast<const uint8_t*>(digest.data());
          const auto* h = static_cast<const uint8_t*>(hashes.data());
          nb::gil_scoped_release release;
          make_keys(d, h, n, reinterpret_cast<uint8_t*>(keys.data()));
        }
        return nb::bytes(keys.data(), keys.size());
      },
      nb::arg("namespace_digest"), nb::arg("block_hashes"));

  m.def(
      "plan",
      [](uint64_t region_bytes, uint32_t hosts, uint64_t slot_bytes_min, uint64_t extent_bytes, uint32_t participants, uint32_t namespaces,
         uint64_t align_bytes, bool hardware_coherent) {
        return to_dict(plan(region_bytes, hosts, slot_bytes_min, extent_bytes, participants, namespaces, align_bytes, hardware_coherent));
      },
      nb::arg("region_bytes"), nb::arg("hosts"), nb::arg("slot_bytes_min"), nb::arg("extent_bytes"), nb::arg("participants"), nb::arg("namespaces"),
      nb::arg("align_bytes"), nb::arg("hardware_coherent"));
  m.def(
      "format",
      [](const std::string& path, const std::string& lock_path, uint64_t region_bytes, uint32_t hosts, uint64_t slot_bytes_min, uint64_t extent_bytes,
         uint32_t participants, uint32_t namespaces, uint64_t align_bytes, bool hardware_coherent, bool force, bool zeroed) {
        const Superblock sb = plan(region_bytes, hosts, slot_bytes_min, extent_bytes, participants, namespaces, align_bytes, hardware_coherent);
        nb::gil_scoped_release release;
        format_region(path, sb, force, zeroed, lock_path);
      },
      nb::arg("path"), nb::arg("lock_path"), nb::arg("region_bytes"), nb::arg("hosts"), nb::arg("slot_bytes_min"), nb::arg("extent_bytes"),
      nb::arg("participants"), nb::arg("namespaces"), nb::arg("align_bytes"), nb::arg("hardware_coherent"), nb::arg("force"), nb::arg("zeroed"));
  m.def(
      "inspect",
      [](const std::string& path) {
        const Inspection i = inspect_region(path);
        nb::dict d = to_dict(i.superblock);
        d["superblock_copies_right"] = i.copies_right;
        d["medium_bytes"] = i.medium_bytes;
        add_medium(d, i.medium);
        return d;
      },
      nb::arg("path"));
  m.def("limit_region", &limit_region, nb::arg("path"), nb::arg("region_bytes"));
  m.def("looks_formatted", &looks_formatted, nb::arg("path"));
  m.def("ensure_unused", &ensure_unused, nb::arg("path"), nb::arg("lock_path"));

  nb::class_<Region>(m, "Region")
      .def(
          "__init__",
          [](Region* self, const std::string& path, uint32_t host, uint32_t role, bool read_only, bool take_over, const std::string& lock_path,
             const std::string& node_name, const nb::bytes& boot_id) {
            const std::string boot(static_cast<const char*>(boot_id.data()), boot_id.size());
            nb::gil_scoped_release release;
            new (self) Region(path, host, static_cast<Role>(role), read_only, take_over, lock_path, node_name, boot);
          },
          nb::arg("path"), nb::arg("host"), nb::arg("role"), nb::arg("read_only"), nb::arg("take_over"), nb::arg("lock_path"), nb::arg("node_name"),
          nb::arg("boot_id"))
      .def("close", &Region::close, nb::call_guard<nb::gil_scoped_release>())
      .def(
          "host",
          [](Region& r, uint32_t host) {
            const HostView v = r.host_view(host);
            return nb::make_tuple(v.state, v.incarnation, v.heartbeat, nb::bytes(v.boot_id.data(), v.boot_id.size()), text_of(v.node_name));
          },
          nb::arg("host"), "state, incarnation, heartbeat, boot id and node name of a host's shard")
      .def("superblock",
           [](const Region& r) {
             nb::dict d = to_dict(r.superblock());
             d["superblock_copies_right"] = r.copies_right();
             add_medium(d, r.medium());
             return d;
           })
      .def_prop_ro("participant", &Region::participant)
      .def_prop_ro("generation", &Region::generation)
      .def_prop_ro("read_only", &Region::read_only)
      .def(
          "lookup",
          [](Region& r, const nb::bytes& keys) {
            const std::vector<Key> k = aligned(keys_of(keys));
            std::vector<uint8_t> codes(k.size());
            {
              nb::gil_scoped_release release;
              r.lookup(k.data(), k.size(), codes.data());
            }
            return codes_of(codes);
          },
          nb::arg("keys"))
      .def(
          "load",
          [](Region& r, const nb::bytes& keys, const nb::bytes& base, const nb::bytes& stride, const nb::bytes& bytes, const nb::bytes& ids,
             uint32_t pieces, uint64_t block_bytes) {
            const std::vector<Key> k = aligned(keys_of(keys));
            const BufferArguments args(base, stride, bytes, ids, pieces, k.size(), block_bytes);
            std::vector<uint8_t> codes(k.size());
            uint64_t copied = 0;
            {
              nb::gil_scoped_release release;
              copied = r.load(k.data(), k.size(), args.buffers, block_bytes, codes.data());
            }
            return nb::make_tuple(codes_of(codes), copied);
          },
          nb::arg("keys"), nb::arg("base"), nb::arg("stride"), nb::arg("bytes"), nb::arg("ids"), nb::arg("pieces"), nb::arg("block_bytes"))
      .def(
          "store",
          [](Region& r, const nb::bytes& keys, const nb::bytes& base, const nb::bytes& stride, const nb::bytes& bytes, const nb::bytes& ids,
             uint32_t pieces, uint64_t block_bytes, uint16_t namespace_index) {
            const std::vector<Key> k = aligned(keys_of(keys));
            const BufferArguments args(base, stride, bytes, ids, pieces, k.size(), block_bytes);
            std::vector<uint8_t> codes(k.size());
            {
              nb::gil_scoped_release release;
              r.store(k.data(), k.size(), args.buffers, block_bytes, namespace_index, codes.data());
            }
            return codes_of(codes);
          },
          nb::arg("keys"), nb::arg("base"), nb::arg("stride"), nb::arg("bytes"), nb::arg("ids"), nb::arg("pieces"), nb::arg("block_bytes"),
          nb::arg("namespace_index"))
      .def(
          "open_namespace",
          [](Region& r, const nb::bytes& digest, uint64_t block_bytes, const std::string& description) {
            if (digest.size() != 32) bad_buffer("a namespace digest has 32 bytes");
            uint16_t index = 0;
            const uint8_t code = r.open_namespace(static_cast<const uint8_t*>(digest.data()), block_bytes, description, index);
            return nb::make_tuple(code, index);
          },
          nb::arg("digest"), nb::arg("block_bytes"), nb::arg("description"))
      .def("record", &Region::record, nb::arg("lookups"), nb::arg("hits"), nb::arg("misses"))
      .def("counters", &Region::counters, nb::arg("first"), nb::arg("end"), nb::call_guard<nb::gil_scoped_release>())
      .def(
          "usage",
          [](Region& r, bool count_slots) {
            std::vector<NamespaceUsage> namespaces;
            std::vector<ShardUsage> shards;
            {
              nb::gil_scoped_release release;
              shards = r.usage(namespaces, count_slots);
            }
            nb::list hosts, spaces;
            for (const ShardUsage& u : shards) {
              nb::dict d;
              d["host"] = u.host, d["node_name"] = text_of(u.node_name), d["state"] = u.state, d["incarnation"] = u.incarnation,
              d["heartbeat"] = u.heartbeat;
              d["epoch"] = u.epoch, d["owner"] = u.owner, d["capacity_bytes"] = u.capacity_bytes, d["used_bytes"] = u.used_bytes,
              d["blocks"] = u.blocks;
              d["slots"] = u.slots, d["slots_free"] = u.slots_free, d["slots_writing"] = u.slots_writing, d["slots_retired"] = u.slots_retired;
              d["extents"] = u.extents;
              d["extents_free"] = u.extents_free;
              hosts.append(d);
            }
            for (const NamespaceUsage& u : namespaces) {
              nb::dict d;
              d["digest"] = u.digest, d["description"] = text_of(u.description), d["block_bytes"] = u.block_bytes, d["blocks"] = u.blocks,
              d["bytes"] = u.bytes;
              spaces.append(d);
            }
            return nb::make_tuple(hosts, spaces);
          },
          nb::arg("count_slots") = true)
      .def("participants",
           [](Region& r) {
             nb::list out;
             for (const ParticipantView& p : r.participants()) out.append(nb::make_tuple(p.host, p.index, p.role, p.pid, p.generation, p.alive));
             return out;
           })
      .def(
          "slots",
          [](Region& r, uint32_t host, uint64_t from, uint64_t limit) {
            uint64_t next = 0;
            nb::list out;
            for (const SlotView& v : r.slots(host, from, limit, next))
              out.append(nb::make_tuple(v.host, v.extent, v.slot, v.state, v.count, v.participant, v.generation, v.key, v.length_bytes,
                                        v.namespace_index, v.flags, v.header_right, v.age));
            return nb::make_tuple(out, next);
          },
          nb::arg("host"), nb::arg("start"), nb::arg("limit"))
      .def("check",
           [](Region& r) {
             Check c;
             {
               nb::gil_scoped_release release;
               c = r.check();
             }
             nb::dict totals;
             totals["slots"] = c.slots, totals["free"] = c.free, totals["stored"] = c.stable, totals["writing"] = c.writing, totals["lent"] = c.lent;
             totals["retired"] = c.retired;
             totals["extents_unassigned"] = c.unassigned, totals["entries"] = c.entries, totals["entries_dead"] = c.dead_entries,
             totals["ghosts"] = c.ghosts;
             return nb::make_tuple(c.problems, totals);
           })
      .def("evict", &Region::evict, nb::arg("used_fraction"), nb::arg("blocks_max"), nb::call_guard<nb::gil_scoped_release>())
      .def("reap",
           [](Region& r) {
             Recovered total;
             uint32_t dead = 0;
             {
               nb::gil_scoped_release release;
               dead = r.reap_dead(total);
             }
             return nb::make_tuple(dead, total.freed, total.republished);
           })
      .def("heartbeat", &Region::heartbeat)
      .def(
          "resize",
          [](Region& r, uint64_t region_bytes, uint64_t budget_ns) {
            Resized done;
            {
              nb::gil_scoped_release release;
              done = r.resize(region_bytes, budget_ns);
            }
            return nb::make_tuple(done.capacity_bytes, done.extents, done.retired, done.done);
          },
          nb::arg("region_bytes"), nb::arg("budget_ns"))
      .def("set_closed", &Region::set_closed, nb::arg("closed"))
      .def("told_bad",
           [](Region& r) {
             nb::list out;
             for (const ByteRange& range : r.told_bad()) out.append(nb::make_tuple(range.from, range.bytes));
             return out;
           })
      .def(
          "give_up",
          [](Region& r, const std::vector<uint64_t>& ends) {
            if (ends.size() % 2 != 0) throw nb::value_error("ranges are pairs of a first byte and a length");
            std::vector<ByteRange> ranges;
            for (size_t i = 0; i < ends.size(); i += 2) ranges.push_back({ends[i], ends[i + 1]});
            GivenUp g;
            {
              nb::gil_scoped_release release;
              g = r.give_up(ranges);
            }
            return nb::make_tuple(g.slots, g.blocks, g.before, g.left, g.extents, g.directory_bytes);
          },
          nb::arg("ranges"))
      .def("capacity_bytes", &Region::capacity_bytes)
      .def("acknowledged_epoch", &Region::acknowledged_epoch, nb::arg("shard"))
      .def(
          "scrub",
          [](Region& r, uint64_t start, uint64_t limit, uint64_t bytes_max) {
            Scrubbed s;
            {
              nb::gil_scoped_release release;
              s = r.scrub(start, limit, bytes_max);
            }
            return nb::make_tuple(s.checked, s.bad, s.next, s.bytes, s.failed);
          },
          nb::arg("start"), nb::arg("limit"), nb::arg("bytes_max"))
      .def("repair",
           [](Region& r) {
             Repair done;
             {
               nb::gil_scoped_release release;
               done = r.repair();
             }
             return nb::make_tuple(done.done, done.left, done.blocks_checked, done.blocks_dropped);
           })
      .def("litmus_begin", &Region::litmus_begin)
      .def("litmus_end", &Region::litmus_end)
      .def("litmus_serve", &Region::litmus_serve, nb::arg("budget_ns"), nb::call_guard<nb::gil_scoped_release>())
      .def("litmus_beats", &Region::litmus_beats, nb::call_guard<nb::gil_scoped_release>())
      .def(
          "litmus_measure",
          [](Region& r, uint32_t peer, uint32_t rounds) {
            LitmusResult l;
            {
              nb::gil_scoped_release release;
              l = r.litmus_measure(peer, rounds);
            }
            nb::dict d;
            static const char* const ends[] = {"measured", "silent", "deaf", "busy"};
            d["end"] = ends[static_cast<uint32_t>(l.end)];
            d["plain"] = l.plain, d["plain_stale"] = l.plain_stale, d["plain_unseen"] = l.plain_unseen;
            d["flushed"] = l.flushed, d["cached_stale"] = l.cached_stale, d["flushed_lost"] = l.flushed_lost;
            d["ordered"] = l.ordered, d["reordered"] = l.reordered, d["abandoned"] = l.abandoned;
            return nb::make_tuple(d, l.round_trips);
          },
          nb::arg("peer"), nb::arg("rounds"))
      .def("owners",
           [](Region& r) {
             nb::list out;
             for (const Owner& o : r.owners()) out.append(nb::make_tuple(o.host, o.epoch, o.settled));
             return out;
           })
      .def(
          "adopt",
          [](Region& r, uint32_t host, uint64_t epoch) {
            Recovered a;
            {
              nb::gil_scoped_release release;
              a = r.adopt_shard(host, epoch);
            }
            return nb::make_tuple(a.kept, a.freed, a.republished);
          },
          nb::arg("host"), nb::arg("epoch"))
      .def("audit_adopted", &Region::audit_adopted, nb::call_guard<nb::gil_scoped_release>())
      .def("acknowledge_lost", &Region::acknowledge_lost, nb::call_guard<nb::gil_scoped_release>());
}
