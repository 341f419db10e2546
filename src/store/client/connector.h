// How a client reaches its store: by address, or by hosting it. One implementation for each URL scheme.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "base/clock.h"
#include "base/fd.h"
#include "store/token.h"

namespace tessera::store {

// Used on the client's thread only.
class Connector {
 public:
  virtual ~Connector() = default;
  // A socket that becomes writable once it is connected or refused. Throws if that is known immediately.
  virtual UniqueFd start() = 0;
  // Throws unless the socket is connected and its other end can be trusted.
  virtual void check(int fd) = 0;
  // The token that both ends must prove to know; nothing if the kernel vouches for the other end. Throws
  // kPermissionDenied if it is not known here.
  virtual std::optional<Token> token(int fd) = 0;
  // The pause between attempts grows up to this.
  virtual Duration longest_pause() const = 0;
};

// `client` is the client's id; `root` is the runtime folder, which must exist.
std::unique_ptr<Connector> make_auto_connector(const std::string& root, uint64_t client);
// Throws kInvalidArgument if the address is not HOST:PORT, and the errors of given_token().
std::unique_ptr<Connector> make_tcp_connector(std::string_view address, const std::string& root);
std::unique_ptr<Connector> make_unix_connector(std::string_view path);

}  // namespace tessera::store
