#include "transport/shm/remote_read.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <span>

#include "base/fail.h"

namespace tessera {
namespace {

Status read_failed(pid_t pid, int error) {
  const ErrorCode code = error == EPERM || error == EACCES ? ErrorCode::kPermissionDenied
                         : error == EFAULT                 ? ErrorCode::kPeerLost
                         : error == ENOSYS                 ? ErrorCode::kUnimplemented
                                                           : code_of_errno(error);
  if (error == ESRCH)
    return failed(ErrorCode::kPeerLost, "pid {} cannot be asked for its memory: it has ended"_message, pid);
  const char* hint = error == EPERM ? " (Yama's ptrace_scope or a seccomp filter forbids it: use Tessera's allocator)"
                     : error == EFAULT ? " (the memory registered there is gone)"
                                       : "";
  return failed(code, "process_vm_readv from pid {}: {}{}"_message, pid, std::strerror(error), hint);
}

// Drops the first `bytes` of the memory that the vectors cover.
void advance(std::span<iovec>& vectors, size_t bytes) {
  while (!vectors.empty() && bytes >= vectors.front().iov_len) {
    bytes -= vectors.front().iov_len;
    vectors = vectors.subspan(1);
  }
  if (bytes == 0) return;
  vectors.front().iov_base = static_cast<std::byte*>(vectors.front().iov_base) + bytes;
  vectors.front().iov_len -= bytes;
}

// Extends the last vector if `data` continues it.
bool append(std::span<iovec> vectors, size_t& count, void* data, size_t bytes) {
  if (count > 0) {
    iovec& last = vectors[count - 1];
    if (static_cast<std::byte*>(last.iov_base) + last.iov_len == data) {
      last.iov_len += bytes;
      return true;
    }
  }
  if (count == vectors.size()) return false;
  vectors[count++] = {data, bytes};
  return true;
}

}  // namespace

Status probe_remote_read(pid_t pid) {
  std::byte byte{};
  iovec local{&byte, 1};
  iovec remote{nullptr, 1};  // never mapped: a permitted read ends with EFAULT
  if (::process_vm_readv(pid, &local, 1, &remote, 1, 0) >= 0 || errno == EFAULT) return {};
  return read_failed(pid, errno);
}

Status RemoteReader::add(uint64_t address, std::byte* out, size_t bytes) {
  if (remotes_ == kMaxPieces || locals_ == kMaxPieces)
    if (Status status = flush(); !status.ok()) return status;
  append(remote_, remotes_, reinterpret_cast<void*>(address), bytes);
  append(local_, locals_, out, bytes);
  return {};
}

Status RemoteReader::flush() {
  std::span<iovec> remote = std::span(remote_).first(remotes_);
  std::span<iovec> local = std::span(local_).first(locals_);
  remotes_ = locals_ = 0;
  while (!remote.empty()) {
    const ssize_t got = ::process_vm_readv(pid_, local.data(), local.size(), remote.data(), remote.size(), 0);
    if (got <= 0) return read_failed(pid_, got == 0 ? EFAULT : errno);
    advance(remote, static_cast<size_t>(got));
    advance(local, static_cast<size_t>(got));
  }
  return {};
}

}  // namespace tessera
