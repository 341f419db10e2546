#include "memory/host/shared_arena.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <utility>

#include "base/fail.h"
#include "base/metrics.h"
#include "base/rounding.h"
#include "memory/host/memory_limit.h"

namespace tessera {
namespace {

// Reads the seal before the size: once the seal is there, the size cannot change.
size_t sealed_size(int fd, std::string_view owner) {
  const int seals = ::fcntl(fd, F_GET_SEALS);
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0)
    fail(ErrorCode::kInvalidArgument,
         "shared memory of {}: the descriptor is not a memfd sealed against shrinking"_message, owner);
  struct stat file{};
  if (::fstat(fd, &file) != 0) fail_errno(fmt::format("shared memory of {}: fstat", owner));
  if (file.st_size <= 0) fail(ErrorCode::kInvalidArgument, "shared memory of {}: it is empty"_message, owner);
  return static_cast<size_t>(file.st_size);
}

[[noreturn]] void fail_arena(const char* call, size_t bytes) {
  const int error = errno;
  const ErrorCode code = error == ENOSPC || error == ENOMEM ? ErrorCode::kResourceExhausted : code_of_errno(error);
  fail(code, "shared memory: {} of {} bytes: {}"_message, call, bytes, std::strerror(error));
}

}  // namespace

SharedArena::SharedArena(uint32_t id, size_t bytes) : id_(id), bytes_(round_up(bytes, kHugePage)), owner_(::getpid()) {
  if (bytes_ < bytes)
    fail(ErrorCode::kResourceExhausted, "shared memory: {} bytes wanted, more than any machine has"_message, bytes);
  require_memory(bytes_, "shared memory");
  fd_ = UniqueFd(::memfd_create("tessera-arena", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd_) fail_arena("memfd_create", bytes_);
  map_and_allocate();
  seal(F_SEAL_SHRINK | F_SEAL_GROW);
  free_.emplace(0, bytes_);
  Metrics::process().shared_memory_bytes.add(static_cast<int64_t>(bytes_));
}

SharedArena::SharedArena(uint32_t id, UniqueFd fd, Access access, std::string_view owner)
    : id_(id), bytes_(sealed_size(fd.get(), owner)), owner_(::getpid()), fd_(std::move(fd)) {
  const int protection = access == Access::kWrite ? PROT_READ | PROT_WRITE : PROT_READ;
  void* data = ::mmap(nullptr, bytes_, protection, MAP_SHARED, fd_.get(), 0);
  if (data == MAP_FAILED) fail_errno(fmt::format("shared memory of {}: mmap of {} bytes", owner, bytes_));
  ::madvise(data, bytes_, MADV_HUGEPAGE);
  data_ = static_cast<std::byte*>(data);
  allocated_.emplace(0, bytes_);
  pristine_ = bytes_;
  Metrics::process().shared_memory_bytes.add(static_cast<int64_t>(bytes_));
}

SharedArena::~SharedArena() {
  if (data_ == nullptr) return;
  ::munmap(data_, bytes_);
  Metrics::process().shared_memory_bytes.add(-static_cast<int64_t>(bytes_));
}

// Makes pages through the advised mapping first, because fallocate itself never makes huge ones; fallocate then
// guarantees that none is missing, also on kernels before MADV_POPULATE_WRITE (5.14).
void SharedArena::map_and_allocate() {
  if (::ftruncate(fd_.get(), static_cast<off_t>(bytes_)) != 0) fail_arena("ftruncate", bytes_);
  void* data = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, fd_.get(), 0);
  if (data == MAP_FAILED) fail_arena("mmap", bytes_);
  data_ = static_cast<std::byte*>(data);
  ::madvise(data, bytes_, MADV_HUGEPAGE);
#ifdef MADV_POPULATE_WRITE
  ::madvise(data, bytes_, MADV_POPULATE_WRITE);
#endif
  if (::fallocate(fd_.get(), 0, 0, static_cast<off_t>(bytes_)) != 0) {
    const int error = errno;
    ::munmap(std::exchange(data_, nullptr), bytes_);
    errno = error;
    fail_arena("fallocate", bytes_);
  }
}

void SharedArena::seal(int seals) {
  if (::fcntl(fd_.get(), F_ADD_SEALS, seals) == 0) return;
  const int error = errno;
  ::munmap(std::exchange(data_, nullptr), bytes_);
  errno = error;
  fail_arena("sealing", bytes_);
}

int SharedArena::fd_for_peer() {
  if (!writable_elsewhere()) return fd_.get();
  if (::fcntl(fd_.get(), F_ADD_SEALS, F_SEAL_FUTURE_WRITE | F_SEAL_SEAL) == 0) return fd_.get();
  // Another thread, or the agent's process, sealed it between the two calls: no seal can then be added.
  if (errno == EPERM && !writable_elsewhere()) return fd_.get();
  fail_arena("sealing", bytes_);
}

bool SharedArena::writable_elsewhere() const {
  const int seals = ::fcntl(fd_.get(), F_GET_SEALS);
  return seals >= 0 && (seals & F_SEAL_FUTURE_WRITE) == 0;
}

std::byte* SharedArena::allocate(size_t bytes, size_t alignment) {
  TESSERA_CHECK_EQ(owner_, ::getpid());
  const size_t wanted = round_up(bytes, kGranule);
  const size_t step = std::max(alignment, kGranule);
  size_t begin = 0;
  bool recycled = false;
  {
    const MutexLock lock(mutex_);
    const auto fits = [&](const auto& hole) {
      const size_t skipped = round_up(hole.first, step) - hole.first;
      return skipped <= hole.second && wanted <= hole.second - skipped;
    };
    const auto hole = std::find_if(free_.begin(), free_.end(), fits);
    if (hole == free_.end()) return nullptr;
    const auto [hole_begin, hole_bytes] = *hole;
    begin = round_up(hole_begin, step);
    free_.erase(hole);
    if (begin > hole_begin) free_.emplace(hole_begin, begin - hole_begin);
    if (begin + wanted < hole_begin + hole_bytes)
      free_.emplace(begin + wanted, hole_begin + hole_bytes - begin - wanted);
    allocated_.emplace(begin, wanted);
    recycled = begin < pristine_;
    pristine_ = std::max(pristine_, begin + wanted);
  }
  if (recycled) std::memset(data_ + begin, 0, wanted);
  return data_ + begin;
}

void SharedArena::release(std::byte* block) {
  if (owner_ != ::getpid()) return;
  const MutexLock lock(mutex_);
  const auto found = allocated_.find(static_cast<size_t>(block - data_));
  TESSERA_CHECK(found != allocated_.end());
  auto [begin, bytes] = *found;
  allocated_.erase(found);
  const auto next = free_.lower_bound(begin);
  if (next != free_.end() && next->first == begin + bytes) {
    bytes += next->second;
    free_.erase(next);
  }
  const auto after = free_.lower_bound(begin);
  if (after != free_.begin()) {
    const auto before = std::prev(after);
    if (before->first + before->second == begin) {
      before->second += bytes;
      return;
    }
  }
  free_.emplace(begin, bytes);
}

bool SharedArena::holds(const void* data, size_t bytes) const {
  const auto* first = static_cast<const std::byte*>(data);
  if (first < data_ || first >= data_ + bytes_ || bytes > static_cast<size_t>(data_ + bytes_ - first)) return false;
  const auto offset = static_cast<size_t>(first - data_);
  const MutexLock lock(mutex_);
  auto block = allocated_.upper_bound(offset);
  if (block == allocated_.begin()) return false;
  --block;
  return offset + bytes <= block->first + block->second;
}

}  // namespace tessera
