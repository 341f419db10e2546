// Where a TCP store and its clients get their token from: the environment, or a file that the store leaves in the
// runtime folder.
//
//   ROOT/p-<16 hex>/token   mode 0600, "tcp://127.0.0.1:7070 TOKEN", by the store that listens there and owns the
//   folder
#pragma once

#include <optional>
#include <string>

#include "base/runtime_dir.h"
#include "store/token.h"

namespace tessera::store {

// TESSERA_TOKEN, or the contents of the file TESSERA_TOKEN_FILE, with one warning in the log if any user can read or
// change that file. Throws kInvalidArgument if both are set or the token is too short, and names the file if it cannot
// be read.
std::optional<Token> given_token();
// The same for given values of both; each may be empty.
std::optional<Token> given_token(const std::string& value, const std::string& file);

// Writes the token of the store at `address` to its own folder; readers find all of it or nothing.
void publish_token(const RuntimeDir& dir, const std::string& address, const Token& token);
// The token that a living store at `address` has left in this root. Only a store that other users cannot access through
// the file system could have written it.
std::optional<Token> published_token(const std::string& root, const std::string& address);

// The numeric address of a TCP socket's own or other end: "tcp://127.0.0.1:7070".
std::string local_url(int fd);
std::string peer_url(int fd);
bool listens_on_loopback(int fd);

}  // namespace tessera::store
