#include "base/runtime_dir.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <sstream>

#include "base/config.h"
#include "base/fail.h"
#include "base/file_lock.h"
#include "base/log.h"
#include "base/socket.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kPrefix = "p-";
constexpr size_t kOwnNameBytes = kPrefix.size() + 16;
constexpr size_t kMaxNoteText = 240;
// How long a process that only checks a new folder's lock may hold it.
constexpr Duration kLookTime = std::chrono::milliseconds(10);

bool is_folder(const std::string& path) {
  struct stat status{};
  return ::stat(path.c_str(), &status) == 0 && S_ISDIR(status.st_mode);
}

void check_root(const std::string& root) {
  struct stat status{};
  if (::lstat(root.c_str(), &status) != 0) fail_errno(fmt::format("runtime folder {}", root));
  const char* wrong = !S_ISDIR(status.st_mode)       ? "is not a folder (or a symbolic link to one)"
                      : status.st_uid != ::geteuid() ? "belongs to another user"
                      : (status.st_mode & 0077) != 0 ? "is open to other users (its mode must be 0700)"
                                                     : nullptr;
  if (wrong != nullptr)
    fail(ErrorCode::kPermissionDenied, "runtime folder {} {}: set TESSERA_RUNTIME_DIR to a private folder"_message,
         root, wrong);
}

// Without a final '/'. Throws if a socket's path in it would be too long.
std::string plain_root(std::string root) {
  if (root.empty()) fail(ErrorCode::kInvalidArgument, "the runtime folder's path is empty"_message);
  while (root.size() > 1 && root.ends_with('/')) root.pop_back();
  const size_t bytes = root.size() + 1 + kOwnNameBytes + 1 + RuntimeDir::kMaxNameBytes;
  if (bytes > SocketAddress::kMaxPathBytes)
    fail(ErrorCode::kInvalidArgument,
         "a socket in the runtime folder {} has a path of {} bytes, {} are possible: set TESSERA_RUNTIME_DIR to a "
         "shorter folder"_message,
         root, bytes, SocketAddress::kMaxPathBytes);
  return root;
}

std::string random_name() {
  std::random_device random;
  return fmt::format("{}{:08x}{:08x}", kPrefix, random(), random());
}

// Removes a process's folder. The lock file goes last, so that a half-removed folder can be recognised; a folder
// without a lock file is empty.
void remove_folder(const std::string& folder) {
  std::error_code ignored;
  std::vector<fs::path> entries;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder, ignored)) entries.push_back(entry.path());
  for (const fs::path& entry : entries)
    if (entry.filename() != "lock") fs::remove_all(entry, ignored);
  ::unlink((folder + "/lock").c_str());
  ::rmdir(folder.c_str());
}

// The same, once its process is dead. A folder without a lock file belongs to a process that is just starting, which
// tries another name if it loses this race, or to one that died while it removed the folder.
void remove_leftover(const std::string& folder) {
  const std::string lock_path = folder + "/lock";
  UniqueFd lock(::open(lock_path.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW));
  if (lock && (::flock(lock.get(), LOCK_EX | LOCK_NB) != 0 || !same_file(lock.get(), lock_path))) return;
  if (!lock) {
    ::rmdir(folder.c_str());
    return;
  }
  remove_folder(folder);
  log_event(LogLevel::info, "folder.removed", {{"path", folder}}, "removed {}, left over from a process that has died",
            folder);
}

std::vector<std::string> process_folders(const std::string& root) {
  std::error_code ignored;
  std::vector<std::string> folders;
  for (const fs::directory_entry& entry : fs::directory_iterator(root, ignored)) {
    const std::string name = entry.path().filename().string();
    if (name.starts_with(kPrefix) && entry.symlink_status(ignored).type() == fs::file_type::directory)
      folders.push_back(entry.path().string());
  }
  std::ranges::sort(folders);
  return folders;
}

// The same for a root that need not exist, once it has been checked.
std::vector<std::string> process_folders_if_any(const std::string& root) {
  const std::string folder = plain_root(root);
  if (::access(folder.c_str(), F_OK) != 0 && errno == ENOENT) return {};
  check_root(folder);
  return process_folders(folder);
}

// The owner file: the lines "pid N", "command TEXT" and "role TEXT".
std::string plain(std::string_view text) {
  std::string line(text.substr(0, kMaxNoteText));
  std::ranges::replace_if(line, [](unsigned char c) { return c < ' ' || c == 0x7f; }, ' ');
  while (line.ends_with(' ')) line.pop_back();
  return line;
}

void write_note(const std::string& path, std::string_view role) {
  std::ifstream arguments("/proc/self/cmdline");
  const std::string command{std::istreambuf_iterator<char>(arguments), {}};
  const std::string note = fmt::format("pid {}\ncommand {}\nrole {}\n", ::getpid(), plain(command), plain(role));
  const UniqueFd fd(::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!fd || ::write(fd.get(), note.data(), note.size()) != static_cast<ssize_t>(note.size()))
    log_event(LogLevel::info, "folder.unlabelled", {{"path", path}}, "{} is not written: {}", path,
              std::strerror(errno));
}

void read_note(const std::string& path, ProcessFolder& folder) {
  const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
  struct stat status{};
  std::array<char, 3 * kMaxNoteText> text;
  if (!fd || ::fstat(fd.get(), &status) != 0 || !S_ISREG(status.st_mode)) return;
  const ssize_t got = ::read(fd.get(), text.data(), text.size());
  folder.since = status.st_mtime;
  std::istringstream note(std::string(text.data(), static_cast<size_t>(std::max<ssize_t>(got, 0))));
  for (std::string line; std::getline(note, line);) {
    const size_t space = std::min(line.find(' '), line.size());
    const std::string field = line.substr(0, space);
    const std::string value = plain(std::string_view(line).substr(std::min(space + 1, line.size())));
    if (field == "pid") folder.pid = static_cast<int32_t>(std::strtol(value.c_str(), nullptr, 10));
    if (field == "command") folder.command = value;
    if (field == "role") folder.role = value;
  }
}

}  // namespace

std::string RuntimeDir::default_root() {
  if (!Config::get().runtime_dir.empty()) return Config::get().runtime_dir;
  const std::string& xdg = Config::get().xdg_runtime_dir;
  if (xdg.starts_with('/') && is_folder(xdg)) return xdg + "/tessera";
  return fmt::format("/tmp/tessera-{}", ::geteuid());
}

std::string RuntimeDir::prepare_root(std::string root) {
  root = plain_root(std::move(root));
  if (::mkdir(root.c_str(), 0700) != 0 && errno != EEXIST)
    fail_errno(fmt::format("create the runtime folder {}", root));
  check_root(root);
  std::ranges::for_each(process_folders(root), remove_leftover);
  return root;
}

std::vector<ProcessFolder> RuntimeDir::folders(const std::string& root) {
  std::vector<ProcessFolder> found;
  for (const std::string& path : process_folders_if_any(root)) {
    found.push_back({.path = path, .living = is_lock_held(path + "/lock")});
    read_note(path + "/owner", found.back());
  }
  return found;
}

std::vector<std::string> RuntimeDir::living_files(const std::string& root, std::string_view name) {
  std::vector<std::string> found;
  for (const std::string& folder : process_folders_if_any(root)) {
    const std::string path = fmt::format("{}/{}", folder, name);
    if (::access(path.c_str(), F_OK) == 0 && is_lock_held(folder + "/lock")) found.push_back(path);
  }
  return found;
}

void RuntimeDir::watch(const std::string& root, FolderWatch& watch) {
  watch.add(root);
  for (const std::string& folder : process_folders_if_any(root)) watch.add(folder);
}

RuntimeDir RuntimeDir::open(std::string root, std::string_view role) {
  root = prepare_root(std::move(root));
  constexpr int kAttempts = 100;
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    RuntimeDir dir;
    const std::string own = root + "/" + random_name();
    if (::mkdir(own.c_str(), 0700) != 0) {
      if (errno == EEXIST) continue;
      fail_errno(fmt::format("create {}", own));
    }
    dir.lock_ = lock_file(own + "/lock", Deadline::after(kLookTime));
    if (!dir.lock_) continue;  // another process took the new folder for a leftover
    write_note(own + "/owner", role);
    dir.root_ = root;
    dir.own_ = own;
    dir.owner_ = ::getpid();
    return dir;
  }
  fail_internal("no folder of our own could be kept in {} in {} attempts", root, kAttempts);
}

RuntimeDir& RuntimeDir::operator=(RuntimeDir&& other) noexcept {
  if (this == &other) return *this;
  remove_own();
  root_ = std::move(other.root_);
  own_ = std::move(other.own_);
  lock_ = std::move(other.lock_);
  owner_ = other.owner_;
  return *this;
}

RuntimeDir::~RuntimeDir() {
  remove_own();
}

void RuntimeDir::remove_own() noexcept {
  if (!lock_ || owner_ != ::getpid()) return;
  remove_folder(own_);
  lock_.reset();
}

std::string RuntimeDir::path(std::string_view name) const {
  if (name.empty() || name.size() > kMaxNameBytes || name.find('/') != std::string_view::npos)
    fail(ErrorCode::kInvalidArgument, "'{}' is not a name of 1 to {} bytes for the runtime folder"_message, name,
         kMaxNameBytes);
  return own_ + "/" + std::string(name);
}

}  // namespace tessera
