// A region's file or device, windows of it, and the locks by which its participants are known to live.
#pragma once
#include <fcntl.h>

#include <cstdint>
#include <string>

#include "layout.h"

namespace kvp {

struct File {
  File(const std::string& path, bool writable);   // throws Error{Medium}
  ~File();
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  int fd = -1;
  bool is_device = false;
  uint64_t bytes = 0;
};

// A mapped range; `data` is null when it cannot be mapped.
class Window {
 public:
  Window(const File& file, uint64_t offset, uint64_t count, bool writable);
  ~Window();
  Window(const Window&) = delete;
  Window& operator=(const Window&) = delete;
  uint8_t* data = nullptr;

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
