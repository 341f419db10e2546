// How a client reaches its store: by address, or by hosting it. One implementation a URL scheme.
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
  // A socket that becomes writable once connected, or refused. Throws when that is known at once.
  virtual UniqueFd start() = 0;
  // Throws unless the connection stands and its other end may be trusted.
  virtual void check(int fd) = 0;
  // What both ends must prove to know; nothing where the kernel vouches for the other end. Throws kPermissionDenied if
  // it is not known here.
  virtual std::optional<Token> token(int fd) = 0;
  // Attempts are made ever less often, down to one in this time.
  virtual Duration longest_pause() const = 0;
};

// `client` is the client's id; `root` the runtime folder, which must be there.
std::unique_ptr<Connector> make_auto_connector(const std::string& root, uint64_t client);
// Throws kInvalidArgument if it is not a HOST:PORT, and what given_token() throws if the token cannot be used.
std::unique_ptr<Connector> make_tcp_connector(std::string_view address, const std::string& root);
std::unique_ptr<Connector> make_unix_connector(std::string_view path);

}  // namespace tessera::store
