// Stream sockets, TCP and Unix. All are non-blocking and close-on-exec, and every wait has a deadline.
//
// Free functions over descriptors: as thread-safe as the kernel. All throw Error; a refused or vanished peer is
// kUnavailable when connecting and kPeerLost afterwards.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.h"
#include "base/fd.h"

namespace tessera {

// The kernel's SCM_MAX_FD: the most descriptors that one message can carry.
inline constexpr size_t kMaxFdsPerMessage = 253;

struct HostPort {
  std::string host;
  uint16_t port = 0;
  std::string to_string() const;  // "127.0.0.1:7070", "[::1]:7070"
  bool operator==(const HostPort&) const = default;
};

// "host:port" or "[v6 address]:port". Throws kInvalidArgument, which quotes the text.
HostPort parse_host_port(std::string_view text);

// One resolved address, IPv4, IPv6 or Unix. A value.
class SocketAddress {
 public:
  // Asks the system's resolver, which may block on the network unless the address is numeric or "localhost".
  static std::vector<SocketAddress> resolve(const HostPort& host_port);
  static constexpr size_t kMaxPathBytes = 107;  // for a Unix socket: sun_path without its final zero
  // Throws kInvalidArgument when the path does not fit.
  static SocketAddress unix_path(const std::string& path);

  int family() const;
  std::span<const std::byte> bytes() const { return bytes_; }
  const std::string& name() const { return name_; }  // for messages

 private:
  std::vector<std::byte> bytes_;
  std::string name_;
};

// Listening sockets. A Unix socket gets mode 0600; its path must not exist. With port 0, ask local_port().
UniqueFd listen_tcp(const HostPort& host_port);
UniqueFd listen_unix(const std::string& path);
// The same, bound at `fresh` and then renamed to `path`, so that a socket found there always listens. Replaces what was
// at either path.
UniqueFd listen_unix_in_place(const std::string& fresh, const std::string& path);
uint16_t local_port(int fd);
bool listens_everywhere(int fd);  // at 0.0.0.0 or [::]

// One waiting connection; empty if there is none (or it has gone away). Throws kResourceExhausted if the process is out
// of descriptors; the connection then still waits.
UniqueFd accept_connection(int listener);

// Starts to connect. The socket becomes writable when the outcome is known: finish_connect() then throws unless it is
// connected. Only a Unix socket whose backlog is full fails here, with kUnavailable.
UniqueFd start_connect(const SocketAddress& address);
void finish_connect(int fd, std::string_view name);

// Connects, trying every address of the host in turn.
UniqueFd connect_tcp(const HostPort& host_port, Deadline deadline);
UniqueFd connect_unix(const std::string& path, Deadline deadline);

// Both ends of a connected Unix socket.
struct SocketPair {
  UniqueFd first, second;
};
SocketPair socket_pair();

// Waits until fd is readable (POLLIN) or writable (POLLOUT), as `events` says. False at the deadline.
bool wait_ready(int fd, short events, Deadline deadline);

// Throws kPermissionDenied unless the process at the other end of this Unix socket runs with our effective uid. The
// credentials are those at the time of connect() or listen(). Returns the peer's pid (0: not visible from here).
pid_t require_same_user(int fd);

// Sends some of `bytes`, at least one unless it would block (then 0). The descriptors go with the first byte. `fds`
// holds at most kMaxFdsPerMessage and goes as a whole or not at all; only Unix sockets carry any. No SIGPIPE.
size_t send_some(int fd, std::span<const std::byte> bytes, std::span<const int> fds = {});

// Receives some bytes into `into`: returns their count, 0 at the end of the stream, nothing if it would block.
// Descriptors that arrive are appended to *fds, close-on-exec. With fds == nullptr, or beyond the kernel's limit, they
// are closed (in the latter case the call throws).
std::optional<size_t> receive_some(int fd, std::span<std::byte> into, std::vector<UniqueFd>* fds = nullptr);

// A second descriptor of the same file, close-on-exec.
UniqueFd duplicate_fd(int fd);

}  // namespace tessera
