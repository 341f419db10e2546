#include "base/socket.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/un.h>

#include <algorithm>
#include <charconv>
#include <memory>

#include "base/escape.h"
#include "base/fail.h"

namespace tessera {
namespace {

constexpr int kBacklog = 1024;

UniqueFd make_socket(int family) {
  UniqueFd fd(::socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!fd) fail_errno("socket");
  return fd;
}

void set_option(int fd, int level, int option, int value) {
  if (::setsockopt(fd, level, option, &value, sizeof(value)) != 0) fail_errno("setsockopt");
}

// Sends small messages without delay, and notices a vanished host within about half a minute. A Unix socket refuses
// these options, which does not matter.
void tune_tcp(int fd) {
  const auto set = [fd](int option, int value) { (void)::setsockopt(fd, IPPROTO_TCP, option, &value, sizeof(value)); };
  const int on = 1;
  (void)::setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof(on));
  set(TCP_NODELAY, 1);
  set(TCP_KEEPIDLE, 15);
  set(TCP_KEEPINTVL, 5);
  set(TCP_KEEPCNT, 3);
  set(TCP_USER_TIMEOUT, 30'000);
}

const sockaddr* as_sockaddr(const SocketAddress& address) {
  return reinterpret_cast<const sockaddr*>(address.bytes().data());
}

socklen_t length_of(const SocketAddress& address) {
  return static_cast<socklen_t>(address.bytes().size());
}

[[noreturn]] void fail_connect(std::string_view name, int error) {
  const bool gone = error == ENOENT || error == ECONNREFUSED || error == ECONNRESET || error == EHOSTUNREACH ||
                    error == ENETUNREACH || error == ETIMEDOUT || error == EAGAIN || error == EPIPE;
  fail(gone ? ErrorCode::kUnavailable : code_of_errno(error), "connect to {}: {}"_message, name, std::strerror(error));
}

// Whether an accept() error concerns only that connection, not the listener.
bool accept_again(int error) {
  switch (error) {
    case EINTR:
    case ECONNABORTED:
    case ENETDOWN:
    case EPROTO:
    case ENOPROTOOPT:
    case EHOSTDOWN:
    case ENONET:
    case EHOSTUNREACH:
    case ENETUNREACH:
      return true;
    default:
      return false;
  }
}

// Moves the descriptors of a received message into *fds, or closes them.
void take_fds(msghdr& message, std::vector<UniqueFd>* fds) {
  for (cmsghdr* part = CMSG_FIRSTHDR(&message); part != nullptr; part = CMSG_NXTHDR(&message, part)) {
    if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (part->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int raw = -1;
      std::memcpy(&raw, CMSG_DATA(part) + i * sizeof(int), sizeof(int));
      UniqueFd fd(raw);
      if (fds != nullptr) fds->push_back(std::move(fd));
    }
  }
}

sockaddr_storage bound_address(int fd) {
  sockaddr_storage storage{};
  socklen_t length = sizeof(storage);
  if (::getsockname(fd, reinterpret_cast<sockaddr*>(&storage), &length) != 0) fail_errno("getsockname");
  return storage;
}

}  // namespace

std::string HostPort::to_string() const {
  return host.find(':') == std::string::npos ? fmt::format("{}:{}", host, port) : fmt::format("[{}]:{}", host, port);
}

HostPort parse_host_port(std::string_view text) {
  const size_t colon = text.rfind(':');
  std::string_view host = text.substr(0, colon == std::string_view::npos ? 0 : colon);
  if (host.starts_with('[') && host.ends_with(']')) {
    host = host.substr(1, host.size() - 2);
  } else if (host.find(':') != std::string_view::npos) {
    fail(ErrorCode::kInvalidArgument, "'{}': write an IPv6 address in brackets, [::1]:7070"_message, printable(text));
  }
  // A bracket, a space or a control character is in no name of a host; at a zero the resolver would cut it.
  const bool strange = std::ranges::any_of(
      host, [](char c) { return c == '[' || c == ']' || static_cast<unsigned char>(c) <= ' ' || c == '\x7f'; });
  HostPort parsed{.host = std::string(host)};
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(end - (text.size() - std::min(colon + 1, text.size())), end, parsed.port);
  if (host.empty() || strange || colon == std::string_view::npos || error != std::errc() || stop != end)
    fail(ErrorCode::kInvalidArgument, "'{}' is not HOST:PORT with a port of 0 to 65535, such as 127.0.0.1:7070"_message,
         printable(text));
  return parsed;
}

std::vector<SocketAddress> SocketAddress::resolve(const HostPort& host_port) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV;
  addrinfo* raw = nullptr;
  const int error = ::getaddrinfo(host_port.host.c_str(), std::to_string(host_port.port).c_str(), &hints, &raw);
  if (error != 0)
    fail(ErrorCode::kUnavailable, "no address for host '{}': {}"_message, host_port.host, ::gai_strerror(error));
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> list(raw, ::freeaddrinfo);
  std::vector<SocketAddress> addresses;
  for (const addrinfo* info = list.get(); info != nullptr; info = info->ai_next) {
    SocketAddress address;
    const auto* bytes = reinterpret_cast<const std::byte*>(info->ai_addr);
    address.bytes_.assign(bytes, bytes + info->ai_addrlen);
    address.name_ = host_port.to_string();
    addresses.push_back(std::move(address));
  }
  return addresses;
}

SocketAddress SocketAddress::unix_path(const std::string& path) {
  sockaddr_un raw{};
  raw.sun_family = AF_UNIX;
  static_assert(kMaxPathBytes == sizeof(raw.sun_path) - 1);
  if (path.empty() || path.size() > kMaxPathBytes || path.find('\0') != std::string::npos)
    fail(ErrorCode::kInvalidArgument,
         "socket path '{}' has {} bytes, a Unix socket takes 1 to {}: choose a shorter one"_message, path, path.size(),
         kMaxPathBytes);
  std::memcpy(raw.sun_path, path.data(), path.size());
  SocketAddress address;
  const auto* bytes = reinterpret_cast<const std::byte*>(&raw);
  address.bytes_.assign(bytes, bytes + offsetof(sockaddr_un, sun_path) + path.size() + 1);
  address.name_ = path;
  return address;
}

int SocketAddress::family() const {
  return as_sockaddr(*this)->sa_family;
}

UniqueFd listen_tcp(const HostPort& host_port) {
  const SocketAddress address = SocketAddress::resolve(host_port).front();
  UniqueFd fd = make_socket(address.family());
  set_option(fd.get(), SOL_SOCKET, SO_REUSEADDR, 1);
  if (::bind(fd.get(), as_sockaddr(address), length_of(address)) != 0 || ::listen(fd.get(), kBacklog) != 0)
    fail_errno(fmt::format("listen on {}", address.name()));
  return fd;
}

UniqueFd listen_unix(const std::string& path) {
  const SocketAddress address = SocketAddress::unix_path(path);
  UniqueFd fd = make_socket(AF_UNIX);
  // Set between bind and listen, so that nobody can connect before.
  if (::bind(fd.get(), as_sockaddr(address), length_of(address)) != 0 || ::chmod(path.c_str(), 0600) != 0 ||
      ::listen(fd.get(), kBacklog) != 0)
    fail_errno(fmt::format("listen on {}", path));
  return fd;
}

UniqueFd listen_unix_in_place(const std::string& fresh, const std::string& path) {
  ::unlink(fresh.c_str());
  UniqueFd listener = listen_unix(fresh);
  if (::rename(fresh.c_str(), path.c_str()) != 0) fail_errno(fmt::format("rename {} to {}", fresh, path));
  return listener;
}

uint16_t local_port(int fd) {
  const sockaddr_storage storage = bound_address(fd);
  if (storage.ss_family == AF_INET) return ntohs(reinterpret_cast<const sockaddr_in*>(&storage)->sin_port);
  if (storage.ss_family == AF_INET6) return ntohs(reinterpret_cast<const sockaddr_in6*>(&storage)->sin6_port);
  return 0;
}

bool listens_everywhere(int fd) {
  const sockaddr_storage storage = bound_address(fd);
  if (storage.ss_family == AF_INET)
    return reinterpret_cast<const sockaddr_in*>(&storage)->sin_addr.s_addr == htonl(INADDR_ANY);
  return storage.ss_family == AF_INET6 &&
         IN6_IS_ADDR_UNSPECIFIED(&reinterpret_cast<const sockaddr_in6*>(&storage)->sin6_addr);
}

UniqueFd accept_connection(int listener) {
  while (true) {
    UniqueFd fd(::accept4(listener, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (fd) {
      tune_tcp(fd.get());
      return fd;
    }
    if (errno == EAGAIN || errno == EWOULDBLOCK) return {};
    if (!accept_again(errno)) fail_errno("accept");
  }
}

UniqueFd start_connect(const SocketAddress& address) {
  UniqueFd fd = make_socket(address.family());
  tune_tcp(fd.get());
  if (::connect(fd.get(), as_sockaddr(address), length_of(address)) != 0 && errno != EINPROGRESS)
    fail_connect(address.name(), errno);
  return fd;
}

void finish_connect(int fd, std::string_view name) {
  int error = 0;
  socklen_t length = sizeof(error);
  if (::getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length) != 0) error = errno;
  if (error != 0) fail_connect(name, error);
}

UniqueFd connect_tcp(const HostPort& host_port, Deadline deadline) {
  Status last = failed(ErrorCode::kUnavailable, "no address for {}"_message, host_port.to_string());
  for (const SocketAddress& address : SocketAddress::resolve(host_port)) {
    try {
      UniqueFd fd = start_connect(address);
      if (!wait_ready(fd.get(), POLLOUT, deadline))
        fail(ErrorCode::kDeadlineExceeded, "connect to {}: no answer before the deadline"_message, address.name());
      finish_connect(fd.get(), address.name());
      return fd;
    } catch (const Error&) {
      last = status_of_current_exception();
    }
  }
  last.throw_if_error();
  return {};
}

UniqueFd connect_unix(const std::string& path, Deadline deadline) {
  const SocketAddress address = SocketAddress::unix_path(path);
  // poll() cannot wait for room in a backlog; a blocking connect with a send timeout can.
  UniqueFd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!fd) fail_errno("socket");
  const auto left = std::chrono::duration_cast<std::chrono::microseconds>(deadline.left()).count() + 1;
  const timeval timeout{.tv_sec = left / 1'000'000, .tv_usec = left % 1'000'000};
  if (::setsockopt(fd.get(), SOL_SOCKET, SO_SNDTIMEO, &timeout, sizeof(timeout)) != 0) fail_errno("setsockopt");
  while (::connect(fd.get(), as_sockaddr(address), length_of(address)) != 0) {
    if (errno == EINTR && !deadline.passed()) continue;
    if (errno == EAGAIN || errno == EINTR)
      fail(ErrorCode::kDeadlineExceeded, "connect to {}: no room in its backlog before the deadline"_message, path);
    fail_connect(path, errno);
  }
  if (::fcntl(fd.get(), F_SETFL, O_NONBLOCK) != 0) fail_errno("fcntl");
  return fd;
}

SocketPair socket_pair() {
  int fds[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fds) != 0) fail_errno("socketpair");
  return {.first = UniqueFd(fds[0]), .second = UniqueFd(fds[1])};
}

bool wait_ready(int fd, short events, Deadline deadline) {
  while (true) {
    pollfd poll_fd{.fd = fd, .events = events, .revents = 0};
    const int ready = ::poll(&poll_fd, 1, deadline.poll_ms());
    if (ready > 0) return true;
    if (ready < 0 && errno != EINTR) fail_errno("poll");
    if (ready == 0 && deadline.passed()) return false;
  }
}

pid_t require_same_user(int fd) {
  ucred peer{};
  socklen_t length = sizeof(peer);
  if (::getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &length) != 0) fail_errno("SO_PEERCRED");
  if (peer.uid != ::geteuid())
    fail(ErrorCode::kPermissionDenied,
         "the peer (pid {}) runs as uid {}, this process as uid {}: only one user's "
         "processes may talk to each other"_message,
         peer.pid, peer.uid, ::geteuid());
  return peer.pid;
}

size_t send_some(int fd, std::span<const std::byte> bytes, std::span<const int> fds) {
  if (fds.size() > kMaxFdsPerMessage)
    fail(ErrorCode::kInvalidArgument, "{} descriptors in one message, {} at most"_message, fds.size(),
         kMaxFdsPerMessage);
  iovec piece{.iov_base = const_cast<std::byte*>(bytes.data()), .iov_len = bytes.size()};
  msghdr message{};
  message.msg_iov = &piece;
  message.msg_iovlen = 1;
  alignas(cmsghdr) char control[CMSG_SPACE(kMaxFdsPerMessage * sizeof(int))];
  if (!fds.empty()) {
    std::memset(control, 0, sizeof(control));
    message.msg_control = control;
    message.msg_controllen = CMSG_SPACE(fds.size_bytes());
    cmsghdr* const part = CMSG_FIRSTHDR(&message);
    part->cmsg_level = SOL_SOCKET;
    part->cmsg_type = SCM_RIGHTS;
    part->cmsg_len = CMSG_LEN(fds.size_bytes());
    std::memcpy(CMSG_DATA(part), fds.data(), fds.size_bytes());
  }
  while (true) {
    const ssize_t sent = ::sendmsg(fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent >= 0) return static_cast<size_t>(sent);
    if (errno == EAGAIN || errno == EWOULDBLOCK) return 0;
    if (errno == EPIPE || errno == ECONNRESET) fail(ErrorCode::kPeerLost, "the peer has closed the connection"_message);
    if (errno != EINTR) fail_errno("sendmsg");
  }
}

std::optional<size_t> receive_some(int fd, std::span<std::byte> into, std::vector<UniqueFd>* fds) {
  iovec piece{.iov_base = into.data(), .iov_len = into.size()};
  msghdr message{};
  message.msg_iov = &piece;
  message.msg_iovlen = 1;
  alignas(cmsghdr) char control[CMSG_SPACE(kMaxFdsPerMessage * sizeof(int))];
  while (true) {
    if (fds != nullptr) {
      message.msg_control = control;
      message.msg_controllen = sizeof(control);
    }
    const ssize_t received = ::recvmsg(fd, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (received >= 0) {
      const bool truncated =
          (message.msg_flags & MSG_CTRUNC) != 0;  // without a control buffer: the kernel has closed them
      if (fds != nullptr) take_fds(message, truncated ? nullptr : fds);
      if (fds != nullptr && truncated)
        fail(ErrorCode::kResourceExhausted,
             "descriptors sent along could not be received: is the limit of open files "
             "(ulimit -n) reached?"_message);
      return static_cast<size_t>(received);
    }
    if (errno == EAGAIN || errno == EWOULDBLOCK) return std::nullopt;
    if (errno == ECONNRESET || errno == EPIPE || errno == ETIMEDOUT)
      fail(ErrorCode::kPeerLost, "the connection was lost: {}"_message, std::strerror(errno));
    if (errno != EINTR) fail_errno("recvmsg");
  }
}

UniqueFd duplicate_fd(int fd) {
  UniqueFd copy(::fcntl(fd, F_DUPFD_CLOEXEC, 0));
  if (!copy) fail_errno("fcntl(F_DUPFD_CLOEXEC)");
  return copy;
}

}  // namespace tessera
