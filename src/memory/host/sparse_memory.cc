#include "memory/host/sparse_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/fail.h"
#include "base/fd.h"
#include "memory/host/shared_arena.h"
#include "tessera/memory.h"

namespace tessera {
namespace {

UniqueFd make_sparse_file(size_t bytes) {
  UniqueFd fd(::memfd_create("tessera-sparse", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd || ::ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0 ||
      ::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0)
    fail(ErrorCode::kResourceExhausted, "shared memory: a sparse file of {} bytes: {}"_message, bytes,
         std::strerror(errno));
  return fd;
}

}  // namespace

SparseMemory::SparseMemory(size_t bytes, std::string_view owner) : bytes_(bytes) {
  const UniqueFd fd = make_sparse_file(std::max<size_t>(bytes, 1));
  arena_ = SharedHeap::process().adopt(fd.get(), true, owner);
}

SparseMemory::~SparseMemory() = default;

std::byte* SparseMemory::data() const {
  return arena_->data();
}

bool SparseMemory::take(size_t offset, size_t bytes) {
  TESSERA_CHECK(offset <= bytes_ && bytes <= bytes_ - offset);
  int failed = 0;
  do {
    failed =
        bytes == 0 ? 0 : ::fallocate(arena_->fd_for_agent(), 0, static_cast<off_t>(offset), static_cast<off_t>(bytes));
  } while (failed != 0 && errno == EINTR);
  return failed == 0;
}

}  // namespace tessera
