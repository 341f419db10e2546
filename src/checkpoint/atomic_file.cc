#include "checkpoint/atomic_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <utility>

#include "base/fail.h"
#include "base/log.h"
#include "checkpoint/file_writes.h"

namespace tessera::checkpoint {
namespace {

constexpr mode_t kMode = 0666;  // minus the umask

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
    reserve({file_.get(), path_.native(), bytes_});
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
  log_event(LogLevel::warn, "file.visible", {{"path", path_.string()}},
            "{}: its file system has no O_TMPFILE; a killed writer would leave {}"_message, path_.string(),
            hidden_name_);
  ::unlinkat(folder_.get(), hidden_name_.c_str(), 0);
  file_.reset(::openat(folder_.get(), hidden_name_.c_str(), O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC, kMode));
  if (!file_) fail_errno(fmt::format("{}: cannot create {}", path_.string(), hidden_name_));
  named_ = true;
}

void AtomicFile::append(std::span<const std::byte> bytes) {
  write_exactly({file_.get(), path_.native(), bytes_}, written_, bytes);
  written_ += static_cast<int64_t>(bytes.size());
}

void AtomicFile::commit() {
  TESSERA_CHECK_EQ(written_, bytes_);
  const Written file{file_.get(), path_.native(), bytes_};
  sync(file);
  replace();
  if (::fsync(folder_.get()) != 0 && errno != EINVAL) fail_write(file, errno);
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

}  // namespace tessera::checkpoint
