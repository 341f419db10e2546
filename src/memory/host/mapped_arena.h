// Another process's memfd in this process: mapped read-only if its seals make that safe, otherwise read by pread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "base/fd.h"
#include "tessera/error.h"

namespace tessera {

// Immutable once opened, hence thread-safe.
class MappedArena {
 public:
  // Takes a descriptor that came from `owner` (a name for messages). Checks seals and size before it maps anything. A
  // file sealed against shrinking is mapped; any other is not, since shrinking it would kill a reader with SIGBUS.
  // Throws Error(kInvalidArgument) if it is not a regular file of at least `bytes` bytes.
  MappedArena(UniqueFd fd, uint64_t bytes, std::string_view owner);
  ~MappedArena();
  MappedArena(const MappedArena&) = delete;
  MappedArena& operator=(const MappedArena&) = delete;

  uint64_t bytes() const { return bytes_; }
  // Null if the file could shrink: use read().
  const std::byte* data() const { return data_; }
  // Copies [offset, offset + out.size()), which must lie within bytes(). kPeerLost if the file has become shorter than
  // that.
  Status read(uint64_t offset, std::span<std::byte> out) const;

 private:
  UniqueFd fd_;  // only if it is not mapped
  uint64_t bytes_ = 0;
  const std::byte* data_ = nullptr;
  std::string owner_;
};

}  // namespace tessera
