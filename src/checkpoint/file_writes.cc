#include "checkpoint/file_writes.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/fail.h"

namespace tessera::checkpoint {
namespace {

constexpr size_t kMaxWrite = 64 << 20;

}  // namespace

void reserve(const Written& file) {
  rlimit limit{};
  if (::getrlimit(RLIMIT_FSIZE, &limit) == 0 && static_cast<rlim_t>(file.bytes) > limit.rlim_cur)
    fail(ErrorCode::kResourceExhausted, "{}: {} bytes exceed the file size limit of {}: raise ulimit -f"_message,
         file.path, file.bytes, static_cast<uint64_t>(limit.rlim_cur));
  if (file.bytes == 0) return;
  int error = 0;
  do {
    error = ::fallocate(file.fd, 0, 0, file.bytes) == 0 ? 0 : errno;
  } while (error == EINTR);
  if (error != 0 && error != EOPNOTSUPP && error != ENOSYS) fail_write(file, error);
}

void write_exactly(const Written& file, int64_t offset, std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t n = ::pwrite(file.fd, bytes.data(), std::min(bytes.size(), kMaxWrite), offset);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail_write(file, errno);
    bytes = bytes.subspan(static_cast<size_t>(n));
    offset += n;
  }
}

void sync(const Written& file) {
  if (::fdatasync(file.fd) != 0) fail_write(file, errno);
}

void fail_write(const Written& file, int error) {
  if (error != ENOSPC && error != EDQUOT && error != EFBIG)
    fail_errno(fmt::format("{}: cannot write {} bytes", file.path, file.bytes), error);
  struct statvfs disk{};
  const bool known = ::fstatvfs(file.fd, &disk) == 0;
  fail(ErrorCode::kResourceExhausted, "{}: cannot write {} bytes: {}{}"_message, file.path, file.bytes,
       std::strerror(error),
       known ? fmt::format(", {} bytes free", static_cast<uint64_t>(disk.f_bavail) * disk.f_frsize) : "");
}

}  // namespace tessera::checkpoint
