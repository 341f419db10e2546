#include "checkpoint/atomic_file.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "base/fail.h"
#include "base/log.h"

namespace tessera::checkpoint {
namespace {

constexpr mode_t kMode = 0666;  // minus the umask
constexpr size_t kMaxWrite = 64 << 20;

bool no_tmpfile_here(int error) {
  return error == EOPNOTSUPP || error == EISDIR || error == EINVAL || error == ENOSYS;
}

}  // namespace

AtomicFile::AtomicFile(std::filesystem::path path, int64_t bytes)
    : path_(std::move(path)), hidden_name_("." + path_.filename().string() + ".new"), bytes_(bytes) {
  if (path_.filename().empty()) fail(ErrorCode::kInvalidArgument, "{}: not a file name"_message, path_.string());
  const std::filesystem::path folder = path_.has_parent_path() ? path_.parent_path() : ".";
  folder_.reset(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!folder_) fail_errno(fmt::format("{}: cannot write into folder {}", path_.string(), folder.string()));
  open_unnamed();
  if (!file_) open_named();
  try {
    reserve();
  } catch (...) {
    if (named_) ::unlinkat(folder_.get(), hidden_name_.c_str(), 0);
    throw;
  }
}

AtomicFile::~AtomicFile() {
  if (named_) ::unlinkat(folder_.get(), hidden_name_.c_str(), 0);
}

void AtomicFile::open_unnamed() {
  file_.reset(::openat(folder_.get(), ".", O_TMPFILE | O_WRONLY | O_CLOEXEC, kMode));
  if (!file_ && !no_tmpfile_here(errno)) fail_errno(fmt::format("{}: cannot create it", path_.string()));
}

void AtomicFile::open_named() {
  log().warn("{}: its file system has no O_TMPFILE; a killed writer would leave {}"_message, path_.string(),
             hidden_name_);
  ::unlinkat(folder_.get(), hidden_name_.c_str(), 0);
  file_.reset(::openat(folder_.get(), hidden_name_.c_str(), O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC, kMode));
  if (!file_) fail_errno(fmt::format("{}: cannot create {}", path_.string(), hidden_name_));
  named_ = true;
}

void AtomicFile::reserve() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_FSIZE, &limit) == 0 && static_cast<rlim_t>(bytes_) > limit.rlim_cur)
    fail(ErrorCode::kResourceExhausted, "{}: {} bytes exceed the file size limit of {}: raise ulimit -f"_message,
         path_.string(), bytes_, static_cast<uint64_t>(limit.rlim_cur));
  if (bytes_ == 0) return;
  int error = 0;
  do {
    error = ::fallocate(file_.get(), 0, 0, bytes_) == 0 ? 0 : errno;
  } while (error == EINTR);
  if (error != 0 && error != EOPNOTSUPP && error != ENOSYS) fail_write(error);
}

void AtomicFile::append(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t n = ::pwrite(file_.get(), bytes.data(), std::min(bytes.size(), kMaxWrite), written_);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail_write(errno);
    bytes = bytes.subspan(static_cast<size_t>(n));
    written_ += n;
  }
}

void AtomicFile::commit() {
  TESSERA_CHECK_EQ(written_, bytes_);
  if (::fdatasync(file_.get()) != 0) fail_write(errno);
  replace();
  if (::fsync(folder_.get()) != 0 && errno != EINVAL) fail_write(errno);
}

// linkat() does not replace: if the name is taken, the file gets its hidden name first, then rename() replaces.
void AtomicFile::replace() {
  const std::string name = path_.filename().string();
  if (!named_) {
    const std::string open_file = fmt::format("/proc/self/fd/{}", file_.get());
    const auto link_as = [&](const std::string& link) {
      return ::linkat(AT_FDCWD, open_file.c_str(), folder_.get(), link.c_str(), AT_SYMLINK_FOLLOW) == 0;
    };
    if (link_as(name)) return;
    if (errno != EEXIST) fail_errno(fmt::format("{}: cannot link the written file", path_.string()));
    ::unlinkat(folder_.get(), hidden_name_.c_str(), 0);  // left by a writer that was killed between link and rename
    if (!link_as(hidden_name_)) fail_errno(fmt::format("{}: cannot link {}", path_.string(), hidden_name_));
    named_ = true;
  }
  if (::renameat(folder_.get(), hidden_name_.c_str(), folder_.get(), name.c_str()) != 0)
    fail_errno(fmt::format("{}: cannot replace it", path_.string()));
  named_ = false;
}

void AtomicFile::fail_write(int error) const {
  if (error != ENOSPC && error != EDQUOT && error != EFBIG)
    fail_errno(fmt::format("{}: cannot write {} bytes", path_.string(), bytes_), error);
  struct statvfs disk{};
  const bool known = ::fstatvfs(file_.get(), &disk) == 0;
  fail(ErrorCode::kResourceExhausted, "{}: cannot write {} bytes: {}{}"_message, path_.string(), bytes_,
       std::strerror(error),
       known ? fmt::format(", {} bytes free", static_cast<uint64_t>(disk.f_bavail) * disk.f_frsize) : "");
}

}  // namespace tessera::checkpoint
