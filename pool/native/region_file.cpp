// Finding and writing superblocks: everything about a region that needs no attaching.
#include <fcntl.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <random>

#include "error.h"
#include "region.h"
#include "region_file.h"

namespace kvp {
namespace {

// Where the second copy can be: the alignments that media have (page, 2 MiB, 1 GiB), and all in between for the sake of odd plans.
constexpr uint64_t kAlignMax = 1ULL << 30;

std::string text(const char* format, ...) __attribute__((format(printf, 1, 2)));
std::string text(const char* format, ...) {
  char buffer[1024];
  va_list args;
  va_start(args, format);
  std::vsnprintf(buffer, sizeof buffer, format, args);
  va_end(args);
  return buffer;
}

constexpr uint64_t kHugePage = 2ULL << 20;

// What sysfs says of a device; 0: nothing.
uint64_t device_attribute(dev_t device, const char* attribute) {
  char name[80];
  std::snprintf(name, sizeof name, "/sys/dev/char/%u:%u/%s", major(device), minor(device), attribute);
  unsigned long long value = 0;
  if (std::FILE* f = std::fopen(name, "re")) {
    if (std::fscanf(f, "%llu", &value) != 1) value = 0;
    std::fclose(f);
  }
  return value;
}

uint64_t superblock_checksum(const Superblock& sb) {
  return line_checksum(reinterpret_cast<const uint8_t*>(&sb) + 8, offsetof(Superblock, checksum) - 8, 0);
}

}   // namespace

const char* name_of(MediumKind kind) {
  switch (kind) {
    case MediumKind::File: return "file";
    case MediumKind::DaxFile: return "dax-file";
    case MediumKind::Device: return "device";
  }
  return "";
}

File::File(const std::string& path, bool writable) {
  fd = ::open(path.c_str(), (writable ? O_RDWR : O_RDONLY) | O_CLOEXEC | O_NONBLOCK);   // a pipe must not wait for its other end
  if (fd < 0) {
    const int error = errno;
    const char* hint = error == ENOENT   ? "Create it first: 'kvpool up' or 'kvpool format'."
                       : error == EACCES ? "Give this user read and write permission, or run as the pool's user."
                       : error == EROFS  ? "The filesystem is mounted read-only; kvpool needs to write there."
                                         : "Check the path.";
    throw Error(ErrorKind::Medium, text("region %s: cannot be opened: %s. %s", path.c_str(), std::strerror(error), hint));
  }
  struct stat st;
  if (::fstat(fd, &st) != 0 || (!S_ISREG(st.st_mode) && !S_ISCHR(st.st_mode))) {
    ::close(fd);
    throw Error(ErrorKind::Medium, text("region %s: neither a regular file nor a DAX device. Give the path of one of these.", path.c_str()));
  }
  if (S_ISCHR(st.st_mode)) {
    medium.kind = MediumKind::Device;
    bytes = device_attribute(st.st_rdev, "size");
    if (bytes == 0) {
      ::close(fd);
      throw Error(ErrorKind::Medium, text("region %s: not a DAX device (its size is not in sysfs). Give a /dev/daxX.Y or a file.", path.c_str()));
    }
    const uint64_t align = device_attribute(st.st_rdev, "align");
    medium.align_bytes = align != 0 ? align : kHugePage;   // kernels that do not say it have no other
    return;
  }
  bytes = static_cast<uint64_t>(st.st_size);
  struct statfs fs;
  if (::fstatfs(fd, &fs) == 0 && fs.f_type == HUGETLBFS_MAGIC) medium.align_bytes = static_cast<uint64_t>(fs.f_bsize);
  struct statx more;
  if (::statx(fd, "", AT_EMPTY_PATH, 0, &more) == 0 && (more.stx_attributes & STATX_ATTR_DAX) != 0) medium.kind = MediumKind::DaxFile;
}

File::~File() {
  if (fd >= 0) ::close(fd);
}

uint8_t* map_shared(int fd, Medium& medium, void* at, uint64_t offset, uint64_t bytes, bool writable) {
  const int rights = PROT_READ | (writable ? PROT_WRITE : 0), fixed = at != nullptr ? MAP_FIXED : 0;
  void* p = MAP_FAILED;
  if (medium.kind != MediumKind::Device) {   // refused by every other file system, before anything is changed
    p = ::mmap(at, bytes, rights, MAP_SHARED_VALIDATE | MAP_SYNC | fixed, fd, static_cast<off_t>(offset));
    if (p != MAP_FAILED) medium.kind = MediumKind::DaxFile, medium.synchronous = true;
  }
  if (p == MAP_FAILED) p = ::mmap(at, bytes, rights, MAP_SHARED | fixed, fd, static_cast<off_t>(offset));
  return p == MAP_FAILED ? nullptr : static_cast<uint8_t*>(p);
}

Window::Window(const File& file, uint64_t offset, uint64_t count, bool writable) {
  const uint64_t align = file.medium.align_bytes, from = offset / align * align;
  const uint64_t length = (offset + count - from + align - 1) / align * align;
  if (file.is_device() && from + length > file.bytes) return;
  medium = file.medium;
  uint8_t* p = map_shared(file.fd, medium, nullptr, from, length, writable);
  if (p == nullptr) return;
  map_ = p;
  length_ = length;
  data = p + (offset - from);
}

Window::~Window() {
  if (map_ != nullptr) ::munmap(map_, length_);
}

namespace {

struct CopyState {
  bool magic = false, right = false;
  Superblock sb;
};

CopyState read_copy(const File& file, uint64_t offset) {
  CopyState c;
  std::memset(&c.sb, 0, sizeof c.sb);
  if (offset + kSuperblockBytes > file.bytes) return c;
  Window w(file, offset, kSuperblockBytes, false);
  if (w.data == nullptr) return c;
  if (!fault_guarded([&] { std::memcpy(&c.sb, w.data, sizeof c.sb); })) return c;
  c.magic = c.sb.magic == kMagic;
  c.right = c.magic && c.sb.checksum == superblock_checksum(c.sb);
  return c;
}

}   // namespace

bool looks_formatted(const std::string& path) {
  File file(path, false);
  for (uint64_t at = 0; at <= kAlignMax; at = at == 0 ? kSuperblockBytes : at * 2)
    if (read_copy(file, at).magic) return true;
  return false;
}

Inspection inspect_region(const std::string& path) {
  File file(path, false);
  Inspection found{};
  found.medium_bytes = file.bytes;
  found.medium = file.medium;
  if (Window w(file, 0, kSuperblockBytes, false); w.data != nullptr) found.medium = w.medium;
  bool other_version = false, any_magic = false;
  uint32_t version = 0;
  const auto consider = [&](uint64_t at) {
    const CopyState c = read_copy(file, at);
    any_magic = any_magic || c.magic;
    if (c.magic && c.sb.format_version != kFormatVersion && !c.right) {
      // Its checksum may lie elsewhere in another version, so only the version word is believed, and only when nothing else is found.
      other_version = true, version = c.sb.format_version;
      return;
    }
    if (!c.right || (at != 0 && c.sb.align_bytes != at)) return;
    if (c.sb.format_version != kFormatVersion) {
      other_version = true, version = c.sb.format_version;
      return;
    }
    if (found.copies_right != 0 && std::memcmp(&c.sb, &found.superblock, sizeof c.sb) != 0) return;   // right by itself, but of another region
    if (found.copies_right++ == 0) found.superblock = c.sb;
  };
  consider(0);
  if (found.copies_right != 0) {
    consider(found.superblock.align_bytes);
  } else {
    for (uint64_t at = kSuperblockBytes; at <= kAlignMax && found.copies_right == 0; at *= 2) consider(at);
  }
  if (found.copies_right == 0 && other_version)
    throw Error(ErrorKind::FormatVersion,
                text("region %s: format %u, this build reads %u. Nothing was changed. Use a kvpool that knows format %u, or erase with "
                     "'kvpool format %s --capacity SIZE --force'.",
                     path.c_str(), version, kFormatVersion, version, path.c_str()));
  if (found.copies_right == 0 && any_magic)
    throw Error(ErrorKind::Superblock,
                text("region %s: both copies of the superblock are damaged (checksum). Nothing was changed. The blocks cannot be "
                     "trusted; erase with 'kvpool format %s --capacity SIZE --force'.",
                     path.c_str(), path.c_str()));
  if (found.copies_right == 0)
    throw Error(ErrorKind::Superblock, text("region %s: no kvpool region here (no superblock). Nothing was changed. Make one with 'kvpool up' or "
                                            "'kvpool format'.",
                                            path.c_str()));
  check_consistent(found.superblock);
  if (found.superblock.align_bytes % file.medium.align_bytes != 0)
    throw Error(ErrorKind::Geometry,
                text("region %s: it was made for mappings of %llu bytes, and this medium maps only whole %llu bytes. Nothing was changed. "
                     "Give the device its old alignment back ('daxctl' or 'ndctl create-namespace --align'), or format it anew with "
                     "'kvpool format %s --capacity SIZE --force'.",
                     path.c_str(), static_cast<unsigned long long>(found.superblock.align_bytes),
                     static_cast<unsigned long long>(file.medium.align_bytes), path.c_str()));
  if (found.superblock.region_bytes > found.medium_bytes)
    throw Error(ErrorKind::Geometry, text("region %s: formatted for %llu bytes but the medium has only %llu now. Nothing was changed. Restore its "
                                          "size, or format it anew with 'kvpool format %s --capacity SIZE --force'.",
                                          path.c_str(), static_cast<unsigned long long>(found.superblock.region_bytes),
                                          static_cast<unsigned long long>(found.medium_bytes), path.c_str()));
  return found;
}

namespace {

// Holds the locks of all participants until the file is closed; throws Error{Busy} when somebody is attached.
void lock_out_participants(const File& lock_file, const std::string& path) {
  struct flock lock = all_participants_lock(F_WRLCK);
  if (::fcntl(lock_file.fd, F_OFD_SETLK, &lock) != 0)
    throw Error(ErrorKind::Busy,
                text("region %s: it is in use. Nothing was changed. Stop the pool ('kvpool down') and its engines first.", path.c_str()));
}

void write_superblock(CpuMemory m, const Superblock& sb) {
  const auto* words = reinterpret_cast<const uint64_t*>(&sb);
  for (uint32_t i = 1; i < kSuperblockBytes / 8; ++i) m.store_word(i * 8ULL, words[i]);
  m.write_back(0, kSuperblockBytes);
  m.store_fence();
  KVP_STEP("format.before_magic");
  m.store_word(0, words[0]);   // last: a format that was cut short leaves no valid superblock
  m.write_back(0, 8);
  m.store_fence();
}

}   // namespace

uint32_t rewrite_superblocks(const std::string& path, const Superblock& right) {
  File file(path, true);
  uint32_t written = 0;
  for (const uint64_t at : {uint64_t{0}, right.align_bytes}) {
    const CopyState copy = read_copy(file, at);
    if (copy.right && std::memcmp(&copy.sb, &right, sizeof right) == 0) continue;
    Window w(file, at, kSuperblockBytes, true);
    if (w.data != nullptr && fault_guarded([&] { write_superblock(CpuMemory(w.data, false), right); })) ++written;
  }
  return written;
}

void ensure_unused(const std::string& path, const std::string& lock_path) {
  File lock_file(lock_path, true);
  lock_out_participants(lock_file, path);
}

void format_region(const std::string& path, Superblock sb, bool force, bool zeroed, const std::string& lock_path) {
  if (!force && !zeroed && looks_formatted(path))
    throw Error(ErrorKind::Busy,
                text("region %s: there is a kvpool region already. Nothing was changed. Erase it with 'kvpool format %s --capacity SIZE --force'.",
                     path.c_str(), path.c_str()));
  File file(path, true);
  if (sb.region_bytes > file.bytes)
    throw Error(ErrorKind::Geometry,
                text("region %s: capacity %llu bytes, but the medium has only %llu. Nothing was changed. Lower the capacity.", path.c_str(),
                     static_cast<unsigned long long>(sb.region_bytes), static_cast<unsigned long long>(file.bytes)));
  if (sb.align_bytes % file.medium.align_bytes != 0)
    throw Error(ErrorKind::Geometry,
                text("region %s: an alignment of %llu bytes, but this medium maps only whole %llu bytes. Nothing was changed. Leave the "
                     "alignment out, or give a multiple of that.",
                     path.c_str(), static_cast<unsigned long long>(sb.align_bytes), static_cast<unsigned long long>(file.medium.align_bytes)));
  {   // Somebody may be attached: his lock says so. We hold the whole range while we write.
    File lock_file(lock_path, true);
    lock_out_participants(lock_file, path);
    std::random_device device;
    for (uint8_t& byte : sb.uuid) byte = static_cast<uint8_t>(device());
    sb.uuid[6] = static_cast<uint8_t>((sb.uuid[6] & 0x0f) | 0x40);   // RFC 9562, version 4
    sb.uuid[8] = static_cast<uint8_t>((sb.uuid[8] & 0x3f) | 0x80);
    sb.created_unix_s = static_cast<uint64_t>(std::time(nullptr));
    sb.magic = kMagic;
    sb.checksum = superblock_checksum(sb);

    bool ok = true;   // after a failure nothing more is written. A window is outside of the guard, which may leave its code in the middle.
    const auto with_window = [&](uint64_t at, uint64_t bytes, auto f) {
      Window w(file, at, bytes, true);
      ok = ok && w.data != nullptr && fault_guarded([&] { f(CpuMemory(w.data, false)); });
    };
    const auto erase_magic = [&](uint64_t at) {
      with_window(at, kSuperblockBytes, [](CpuMemory m) {
        m.store_word(0, 0);
        m.write_back(0, 8);
        m.store_fence();
      });
    };
    const auto write_copy = [&](uint64_t at) { with_window(at, kSuperblockBytes, [&](const CpuMemory& m) { write_superblock(m, sb); }); };
    const auto zero = [&](uint64_t at, uint64_t bytes) {
      static uint8_t zeros[1 << 16];
      constexpr uint64_t kWindow = 64ULL << 20;
      for (uint64_t done = 0; ok && done < bytes; done += kWindow) {
        const uint64_t window = bytes - done < kWindow ? bytes - done : kWindow;
        with_window(at + done, window, [&](CpuMemory m) {
          for (uint64_t i = 0; i < window; i += sizeof zeros) {
            const Piece piece{zeros, window - i < sizeof zeros ? window - i : sizeof zeros};
            m.stream_copy(i, &piece, 1);
          }
          m.store_fence();
        });
      }
    };
    if (!zeroed) {
      for (uint64_t at = 0; at <= kAlignMax && at + kSuperblockBytes <= file.bytes; at = at == 0 ? kSuperblockBytes : at * 2)
        if (read_copy(file, at).magic) erase_magic(at);
      for (uint32_t h = 0; ok && h < sb.host_count; ++h) {
        const ShardMap s(sb, HostIndex{h});
        zero(s.base(), sb.extents_offset);
        for (uint32_t e = 0; e < sb.extent_count; ++e) zero(s.extent(e), sb.extent_payload_offset);
      }
    }
    if (ok) KVP_STEP("format.before_superblock");
    write_copy(sb.align_bytes);
    write_copy(0);
    if (!ok)
      throw Error(
          ErrorKind::Medium,
          text("region %s: the medium failed while it was formatted (no space left, or bad memory). Free space or replace it.", path.c_str()));
  }
}

namespace {
constexpr uint64_t kLockBase = 1ULL << 62;
struct flock lock_range(int type, uint64_t from, uint64_t bytes) {
  struct flock lock;
  std::memset(&lock, 0, sizeof lock);
  lock.l_type = static_cast<short>(type);
  lock.l_whence = SEEK_SET;
  lock.l_start = static_cast<off_t>(kLockBase + from);
  lock.l_len = static_cast<off_t>(bytes);
  return lock;
}
}   // namespace

struct flock participant_lock(int type, uint32_t host, uint32_t index) {
  return lock_range(type, uint64_t{host} * kMaxParticipants + index, 1);
}
struct flock all_participants_lock(int type) {
  return lock_range(type, 0, uint64_t{kMaxHosts} * kMaxParticipants);
}
struct flock litmus_lock(int type, uint32_t host) {
  return lock_range(type, uint64_t{kMaxHosts} * kMaxParticipants + host, 1);
}
struct flock adoption_lock(int type, uint32_t host) {
  return lock_range(type, uint64_t{kMaxHosts} * kMaxParticipants + kMaxHosts + host, 1);
}

}   // namespace kvp
