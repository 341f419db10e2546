#include "memory/host/mapped_arena.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "base/fail.h"

namespace tessera {
namespace {

bool cannot_shrink(int fd) {
  const int seals = ::fcntl(fd, F_GET_SEALS);
  return seals >= 0 && (seals & F_SEAL_SHRINK) != 0;
}

}  // namespace

MappedArena::MappedArena(UniqueFd fd, uint64_t bytes, std::string_view owner)
    : fd_(std::move(fd)), bytes_(bytes), owner_(owner) {
  // Reads the seal before the size: once the seal is there, the size cannot change.
  const bool mappable = cannot_shrink(fd_.get());
  struct stat file{};
  if (::fstat(fd_.get(), &file) != 0) fail_errno(fmt::format("shared memory of {}: fstat", owner));
  if (!S_ISREG(file.st_mode))
    fail(ErrorCode::kInvalidArgument, "shared memory of {}: the descriptor is not a file (mode {:o})"_message, owner,
         file.st_mode);
  if (bytes == 0 || static_cast<uint64_t>(file.st_size) < bytes)
    fail(ErrorCode::kInvalidArgument, "shared memory of {}: {} bytes announced, the file has {}"_message, owner, bytes,
         file.st_size);
  if (!mappable) return;
  void* data = ::mmap(nullptr, bytes_, PROT_READ, MAP_SHARED, fd_.get(), 0);
  if (data == MAP_FAILED) fail_errno(fmt::format("shared memory of {}: mmap of {} bytes", owner, bytes));
  ::madvise(data, bytes_, MADV_HUGEPAGE);
  data_ = static_cast<const std::byte*>(data);
  fd_.reset();
}

MappedArena::~MappedArena() {
  if (data_ != nullptr) ::munmap(const_cast<std::byte*>(data_), bytes_);
}

Status MappedArena::read(uint64_t offset, std::span<std::byte> out) const {
  if (data_ != nullptr) {
    TESSERA_CHECK_LE(offset, bytes_);
    TESSERA_CHECK_LE(out.size(), bytes_ - offset);
    std::copy_n(data_ + offset, out.size(), out.begin());
    return {};
  }
  while (!out.empty()) {
    const ssize_t got = ::pread(fd_.get(), out.data(), out.size(), static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0)
      return failed(code_of_errno(errno), "shared memory of {}: reading at {}: {}"_message, owner_, offset,
                    std::strerror(errno));
    if (got == 0)
      return failed(ErrorCode::kPeerLost, "shared memory of {}: the file was cut short at {}"_message, owner_, offset);
    offset += static_cast<uint64_t>(got);
    out = out.subspan(static_cast<size_t>(got));
  }
  return {};
}

}  // namespace tessera
