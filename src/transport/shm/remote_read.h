// process_vm_readv with many pieces in each request.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <array>
#include <cstddef>
#include <cstdint>

#include "tessera/error.h"

namespace tessera {

// Whether this process may read the private memory of `pid` at all; reads nothing. kPermissionDenied (another user,
// Yama, a seccomp filter), kPeerLost, kUnimplemented (no such system call).
Status probe_remote_read(pid_t pid);

// Collects stretches and reads them in as few system calls as the kernel's limits allow. Used by one thread.
class RemoteReader {
 public:
  explicit RemoteReader(pid_t pid) : pid_(pid) {}

  // Queues `bytes` at `address` of the process for `out`; if the queue is full, reads it first.
  Status add(uint64_t address, std::byte* out, size_t bytes);
  // Reads what is queued. kPeerLost if the process has gone, or no longer has memory there.
  Status flush();

 private:
  static constexpr size_t kMaxPieces = 1024;  // UIO_MAXIOV

  pid_t pid_;
  size_t remotes_ = 0;
  size_t locals_ = 0;
  std::array<iovec, kMaxPieces> remote_;
  std::array<iovec, kMaxPieces> local_;
};

}  // namespace tessera
