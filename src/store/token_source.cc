#include "store/token_source.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <openssl/crypto.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <set>

#include "base/config.h"
#include "base/fail.h"
#include "base/log.h"
#include "base/mutex.h"
#include "base/socket.h"

namespace tessera::store {
namespace {

constexpr std::string_view kFileName = "token";

struct Warned {
  Mutex mutex;
  std::set<std::string> paths GUARDED_BY(mutex);
};

// The first line of a file, in a buffer that is wiped.
class SecretLine {
 public:
  explicit SecretLine(const std::string& path) {
    const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
    struct stat status{};
    if (!fd || ::fstat(fd.get(), &status) != 0) fail_errno(path);
    open_to_all_ = (status.st_mode & (S_IROTH | S_IWOTH)) != 0 && S_ISREG(status.st_mode);
    const ssize_t got = ::read(fd.get(), bytes_.data(), bytes_.size());
    if (got < 0) fail_errno(path);
    const std::string_view all(bytes_.data(), static_cast<size_t>(got));
    text_ = all.substr(0, std::min(all.find_first_of("\r\n"), all.size()));
  }
  ~SecretLine() { ::OPENSSL_cleanse(bytes_.data(), bytes_.size()); }
  SecretLine(const SecretLine&) = delete;
  SecretLine& operator=(const SecretLine&) = delete;
  std::string_view text() const { return text_; }
  bool open_to_all() const { return open_to_all_; }  // any user of this machine can read or change the file

 private:
  std::array<char, 2 * Token::kMaxBytes> bytes_{};
  std::string_view text_;
  bool open_to_all_ = false;
};

// Once for each file, since every client and server of a process reads it.
void warn_of_open_file(const std::string& path) {
  static auto* const warned = new Warned;  // leaked on purpose: threads end after statics do
  const MutexLock lock(warned->mutex);
  if (warned->paths.insert(path).second)
    log_event(
        LogLevel::warn, "token.exposed", {{"path", path}},
        "TESSERA_TOKEN_FILE {}: any user of this machine can read or change it, and so the token: chmod 600 {}"_message,
        path, path);
}

std::string url_of(const sockaddr_storage& address) {
  std::array<char, INET6_ADDRSTRLEN> text{};
  if (address.ss_family == AF_INET) {
    const auto* v4 = reinterpret_cast<const sockaddr_in*>(&address);
    ::inet_ntop(AF_INET, &v4->sin_addr, text.data(), text.size());
    return "tcp://" + HostPort{.host = text.data(), .port = ntohs(v4->sin_port)}.to_string();
  }
  const auto* v6 = reinterpret_cast<const sockaddr_in6*>(&address);
  ::inet_ntop(AF_INET6, &v6->sin6_addr, text.data(), text.size());
  return "tcp://" + HostPort{.host = text.data(), .port = ntohs(v6->sin6_port)}.to_string();
}

sockaddr_storage address_of(int fd, decltype(::getsockname)* end) {
  sockaddr_storage address{};
  socklen_t length = sizeof(address);
  if (end(fd, reinterpret_cast<sockaddr*>(&address), &length) != 0) fail_errno("a socket's address");
  return address;
}

}  // namespace

std::optional<Token> given_token() {
  return given_token(Config::get().token, Config::get().token_file);
}

std::optional<Token> given_token(const std::string& value, const std::string& file) {
  if (!value.empty() && !file.empty())
    fail(ErrorCode::kInvalidArgument, "TESSERA_TOKEN and TESSERA_TOKEN_FILE are both set: unset one"_message);
  if (!value.empty()) return Token(value, "TESSERA_TOKEN");
  if (file.empty()) return std::nullopt;
  const std::string source = fmt::format("TESSERA_TOKEN_FILE {}", file);
  try {
    const SecretLine line(file);
    if (line.open_to_all()) warn_of_open_file(file);
    return Token(std::string(line.text()), source);
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kInvalidArgument) throw;
    fail(error.code(), "TESSERA_TOKEN_FILE cannot be read: {}"_message, error.what());
  }
}

void publish_token(const RuntimeDir& dir, const std::string& address, const Token& token) {
  const std::string path = dir.path(kFileName);
  const std::string fresh = path + ".new";
  std::string line = fmt::format("{} {}\n", address, token.secret());
  const UniqueFd fd(::open(fresh.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600));
  const bool written = fd && ::write(fd.get(), line.data(), line.size()) == static_cast<ssize_t>(line.size()) &&
                       ::rename(fresh.c_str(), path.c_str()) == 0;
  ::OPENSSL_cleanse(line.data(), line.size());
  if (!written) fail_errno(fmt::format("write the store's token to {}", path));
}

std::optional<Token> published_token(const std::string& root, const std::string& address) {
  for (const std::string& path : RuntimeDir::living_files(root, kFileName)) {
    try {
      const SecretLine line(path);
      const size_t space = line.text().find(' ');
      if (space == std::string_view::npos || line.text().substr(0, space) != address) continue;
      return Token(std::string(line.text().substr(space + 1)), path);
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kNotFound) throw;  // its store has just ended
    }
  }
  return std::nullopt;
}

std::string local_url(int fd) {
  return url_of(address_of(fd, ::getsockname));
}

std::string peer_url(int fd) {
  return url_of(address_of(fd, ::getpeername));
}

bool listens_on_loopback(int fd) {
  const sockaddr_storage address = address_of(fd, ::getsockname);
  if (address.ss_family == AF_INET)
    return (ntohl(reinterpret_cast<const sockaddr_in*>(&address)->sin_addr.s_addr) >> 24) == IN_LOOPBACKNET;
  const in6_addr& v6 = reinterpret_cast<const sockaddr_in6*>(&address)->sin6_addr;
  return IN6_IS_ADDR_LOOPBACK(&v6) || (IN6_IS_ADDR_V4MAPPED(&v6) && v6.s6_addr[12] == IN_LOOPBACKNET);
}

}  // namespace tessera::store
