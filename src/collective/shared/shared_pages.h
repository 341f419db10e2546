// Memory of pages: a sealed memfd, mapped by its maker and by the processes that it gives the descriptor to, or plain
// memory of one process whose ranks find it by a key.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>

#include "base/fd.h"

namespace tessera::collective {

// Zeroed at first. Unmapped in the end; a forked child does not inherit it. Immutable once made, hence thread-safe.
class SharedPages {
 public:
  enum class Writers : uint8_t { kMaker, kAll };

  // A memfd that cannot change its size and, if only its maker writes, that nobody else can map for writing.
  static std::shared_ptr<SharedPages> create(size_t bytes, Writers writers);
  // Another process's, for reading, or for writing if `writers` is kAll. Throws Error(kInvalidArgument), naming
  // `owner`, unless it is a memfd of at least `bytes` bytes that cannot shrink.
  static std::shared_ptr<SharedPages> open(UniqueFd fd, size_t bytes, Writers writers, std::string_view owner);
  // Memory that find() finds under `key`, from any thread of this process, while the result lives.
  static std::shared_ptr<SharedPages> create_in_process(size_t bytes, uint64_t key);
  static std::shared_ptr<SharedPages> find(uint64_t key);  // null if there is none

  ~SharedPages();
  SharedPages(const SharedPages&) = delete;
  SharedPages& operator=(const SharedPages&) = delete;

  std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  int fd() const { return fd_.get(); }  // for peers; -1 within a process

 private:
  SharedPages(UniqueFd fd, std::byte* data, size_t bytes) : fd_(std::move(fd)), data_(data), bytes_(bytes) {}

  UniqueFd fd_;
  std::byte* data_;
  size_t bytes_;
};

}  // namespace tessera::collective
