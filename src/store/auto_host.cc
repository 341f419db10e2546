#include "store/auto_host.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <optional>

#include "base/fail.h"
#include "base/fields.h"
#include "base/file_lock.h"
#include "base/log.h"
#include "base/socket.h"

namespace tessera::store {
namespace {

constexpr uint32_t kMembersMagic = 0x314d4b54;  // "TKM1"
constexpr uint32_t kMaxMembers = 65536;
constexpr size_t kMaxMembersBytes = size_t{16} << 20;
constexpr Duration kLeavingTime = std::chrono::seconds(1);  // it does not wait longer for a client that is stopped
constexpr Duration kGoingTime = std::chrono::milliseconds(100);

struct MembersFile {
  int64_t revision_floor = 0;
  std::vector<Member> members;
  static void fields(auto& f, auto& self) {
    uint32_t magic = kMembersMagic;
    f("magic", magic);
    f.require(magic == kMembersMagic, "store.members is something else"_message);
    f("revision_floor", self.revision_floor);
    f.require(self.revision_floor >= 0 && self.revision_floor <= kMaxContinued, "store.members: revision {}"_message,
              self.revision_floor);
    f("members", self.members, kMaxMembers);
  }
};

std::string lock_path(const std::string& root) {
  return root + "/store.lock";
}
std::string leaving_path(const std::string& root) {
  return root + "/store.leaving";
}
std::string members_path(const std::string& root) {
  return root + "/store.members";
}
// The temporary name of the two files above, until they are renamed.
std::string fresh_path(const std::string& root) {
  return root + "/store.new";
}
std::string fresh_members_path(const std::string& root) {
  return members_path(root) + ".new";
}

std::vector<std::byte> read_small_file(const std::string& path) {
  const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW));
  struct stat status{};
  if (!fd || ::fstat(fd.get(), &status) != 0) fail_errno(path);
  if (!S_ISREG(status.st_mode) || static_cast<uint64_t>(status.st_size) > kMaxMembersBytes)
    fail(ErrorCode::kInvalidArgument, "{}: {} bytes, {} at most"_message, path, status.st_size, kMaxMembersBytes);
  std::vector<std::byte> bytes(static_cast<size_t>(status.st_size));
  const ssize_t got = ::read(fd.get(), bytes.data(), bytes.size());
  bytes.resize(static_cast<size_t>(std::max<ssize_t>(got, 0)));
  return bytes;
}

// The state that the previous host has left; nothing if there was none, or it ended without clients.
std::optional<MembersFile> read_members(const std::string& root) {
  try {
    const std::vector<std::byte> bytes = read_small_file(members_path(root));
    return read_message<MembersFile>(bytes, "store.members");
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kNotFound) return std::nullopt;
    log_event(LogLevel::warn, "store.members_unknown", {{"path", root}},
              "{}: the last host's clients are not known: {}"_message, root, error.what());
    return MembersFile{};
  }
}

void write_members(const std::string& root, const MembersFile& file) {
  const std::vector<std::byte> bytes = message_bytes(file);
  const std::string path = members_path(root);
  const std::string fresh = fresh_members_path(root);
  const UniqueFd fd(::open(fresh.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!fd || ::write(fd.get(), bytes.data(), bytes.size()) != static_cast<ssize_t>(bytes.size()) ||
      ::rename(fresh.c_str(), path.c_str()) != 0)
    log_event(LogLevel::warn, "store.members_unknown", {{"path", path}},
              "{} cannot be written ({}): the next host will wait for the full time"_message, path,
              std::strerror(errno));
}

// Whoever ends waits for its turn: a client that is about to end still counts as one that stays, and must come after.
// If a turn cannot be had, it ends without: at worst files remain, which the next host replaces.
class Leaving {
 public:
  explicit Leaving(const std::string& root) noexcept : path_(leaving_path(root)) {
    try {
      lock_ = lock_file(path_, Deadline::after(kLeavingTime));
    } catch (const Error& error) {
      log_event(LogLevel::warn, "store.left_early", {{"path", root}},
                "left the store at {} without waiting for others that leave: {}"_message, root, error.what());
    }
  }
  ~Leaving() {
    if (lock_) ::unlink(path_.c_str());
  }
  Leaving(const Leaving&) = delete;
  Leaving& operator=(const Leaving&) = delete;

 private:
  const std::string path_;
  UniqueFd lock_;
};

// Releases the lock and leaves the next host what it needs to know of the remaining clients.
void leave(const std::string& root, UniqueFd lock, MembersFile file, uint64_t own_client) {
  std::erase_if(file.members, [&](const Member& member) {
    return member.client == own_client || liveness_of(member.incarnation) == Liveness::kDead;
  });
  ::unlink(AutoHost::socket_path(root).c_str());
  ::unlink(fresh_path(root).c_str());
  ::unlink(fresh_members_path(root).c_str());
  if (file.members.empty()) {
    ::unlink(members_path(root).c_str());
  } else {
    write_members(root, file);
  }
  ::unlink(lock_path(root).c_str());
  lock.reset();
}

}  // namespace

std::unique_ptr<AutoHost> AutoHost::try_start(const std::string& root, uint64_t own_client) {
  UniqueFd lock = try_lock_file(lock_path(root));
  if (!lock) return nullptr;
  return std::unique_ptr<AutoHost>(new AutoHost(root, own_client, std::move(lock)));
}

AutoHost::AutoHost(std::string root, uint64_t own_client, UniqueFd lock)
    : root_(std::move(root)), own_client_(own_client), lock_(std::move(lock)) {
  ServerOptions options;
  options.same_user_only = true;
  if (const auto before = read_members(root_)) {
    revision_floor_ = options.revision_floor = before->revision_floor + kRevisionsPerStore;
    options.awaited = before->members;
  }
  options.on_members = [this](const std::vector<Member>& members) {
    write_members(root_, {.revision_floor = revision_floor_, .members = members});
  };
  // A client finds either the last host's socket, which refuses, or this one, which listens.
  const std::string path = socket_path(root_);
  UniqueFd listener = listen_unix_in_place(fresh_path(root_), path);
  log_event(LogLevel::info, "store.hosted", {{"path", path}},
            "this process hosts the store at {}, following one of {} clients", path, options.awaited.size());
  server_ = std::make_unique<Server>(std::move(listener), "unix://" + path, std::move(options));
}

AutoHost::~AutoHost() {
  const Leaving turn(root_);
  try {
    hand_over();
  } catch (...) {
    log_event(LogLevel::warn, "store.not_handed_over", {{"path", root_}},
              "the store at {} is not handed over: {}"_message, root_, status_of_current_exception().message());
  }
}

void AutoHost::hand_over() {
  server_->stop();
  std::vector<Member> members = server_->connected_members();
  // A client that has not come back to this host may be ending, after its turn: gives it a moment to do so.
  if (server_->gathering()) {
    const Deadline deadline = Deadline::after(kGoingTime);
    for (const Member& member : members)
      if (member.client != own_client_) await_end(member.incarnation, deadline);
  }
  // Before our connections end and wake the others, so that one of them can take the lock immediately.
  leave(root_, std::move(lock_), {.revision_floor = revision_floor_, .members = std::move(members)}, own_client_);
}

std::vector<std::string> AutoHost::left_over(const std::string& root) {
  std::vector<std::string> names;
  if (is_lock_held(lock_path(root))) return names;
  for (const std::string& path : {lock_path(root), socket_path(root), fresh_path(root), members_path(root),
                                  fresh_members_path(root), leaving_path(root)})
    if (::access(path.c_str(), F_OK) == 0 && !is_lock_held(path)) names.push_back(path.substr(root.size() + 1));
  return names;
}

void AutoHost::tidy(const std::string& root, uint64_t own_client) noexcept {
  try {
    const Leaving turn(root);
    UniqueFd lock = try_lock_file(lock_path(root));
    if (!lock) return;
    leave(root, std::move(lock), read_members(root).value_or(MembersFile{}), own_client);
  } catch (...) {
    log_event(LogLevel::warn, "store.not_cleaned", {{"path", root}}, "{} cannot be cleaned up: {}"_message, root,
              status_of_current_exception().message());
  }
}

}  // namespace tessera::store
