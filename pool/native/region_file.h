// A region's file or device, windows of it, and the locks by which its participants are known to live.
#pragma once
#include <fcntl.h>

#include <cstdint>
#include <string>

#include "layout.h"

namespace kvp {

enum class MediumKind : uint8_t {
  File,      // in the page cache
  DaxFile,   // of a file system that maps the medium itself (fsdax)
  Device,    // a DAX device (devdax)
};
const char* name_of(MediumKind kind);

struct Medium {
  MediumKind kind = MediumKind::File;
  uint64_t align_bytes = 4096;   // of every mapping: its address, its offset and its length
  bool synchronous = false;      // mapped with MAP_SYNC: a page that can be written to is one that the file system will not lose
};

struct File {
  File(const std::string& path, bool writable);   // throws Error{Medium}
  ~File();
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  bool is_device() const { return medium.kind == MediumKind::Device; }
  int fd = -1;
  Medium medium;
  uint64_t bytes = 0;
};

// Maps these bytes, shared; `at`: in the place of what is mapped there. Null when it cannot be done. Never anything but a mapping: a DAX device knows
// no read() and no write().
uint8_t* map_shared(int fd, Medium& medium, void* at, uint64_t offset, uint64_t bytes, bool writable);

// A mapped range; `data` is null when it cannot be mapped.
class Window {
 public:
  Window(const File& file, uint64_t offset, uint64_t count, bool writable);
  ~Window();
  Window(const Window&) = delete;
  Window& operator=(const Window&) = delete;
  uint8_t* data = nullptr;
  Medium medium;

 private:
  void* map_ = nullptr;
  uint64_t length_ = 0;
};

// Writes what a damaged copy of the superblock should say, from the right one. Returns how many were written. Only while a participant's lock is held:
// then nobody formats.
uint32_t rewrite_superblocks(const std::string& path, const Superblock& right);

// One byte a participant, far behind any content, locked by open file description: the kernel drops it when the process dies, and it can be asked
// from another PID namespace (PROTOCOL 9.15). type: F_WRLCK or F_UNLCK.
struct flock participant_lock(int type, uint32_t host, uint32_t index);
struct flock all_participants_lock(int type);
// Behind those: whose process has the turn at its host's litmus lines.
struct flock litmus_lock(int type, uint32_t host);
// And whose process takes a shard over for its host.
struct flock adoption_lock(int type, uint32_t host);

}   // namespace kvp
