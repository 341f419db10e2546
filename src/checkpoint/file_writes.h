// Writes to a file, whose errors name the file, its size and the space that is left.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace tessera::checkpoint {

// A file that is being written. Owns nothing.
struct Written {
  int fd = -1;
  std::string_view path;  // for messages
  int64_t bytes = 0;      // that the whole file is going to have
};

// All throw Error(kResourceExhausted), which names path and bytes, when the disk is full or the file size limit is hit.

// Gives the file its whole size on the disk; a file system that cannot is left to fail at the writes. The file size
// limit (ulimit -f) is compared first: exceeding it would be a signal.
void reserve(const Written& file);

// Threads and processes may write parts that do not overlap at the same time.
void write_exactly(const Written& file, int64_t offset, std::span<const std::byte> bytes);

// Waits until what this process has written is on the disk.
void sync(const Written& file);

[[noreturn]] void fail_write(const Written& file, int error);

}  // namespace tessera::checkpoint
