// Where a TCP store and its clients have their token from: the environment, or what the store has left in the runtime
// folder.
//
//   ROOT/p-<16 hex>/token   0600, "tcp://127.0.0.1:7070 TOKEN": of the store that listens there and owns the folder
#pragma once

#include <optional>
#include <string>

#include "base/runtime_dir.h"
#include "store/token.h"

namespace tessera::store {

// TESSERA_TOKEN, or what TESSERA_TOKEN_FILE names; a warning in the log, once, if any user can read or change that
// file. Throws kInvalidArgument if both are set or the token is too short, and names the file if it cannot be read.
std::optional<Token> given_token();
// The parts of it: `value` and `file` may be empty.
std::optional<Token> given_token(const std::string& value, const std::string& file);

// Leaves the token of the store at `address` in its own folder; readers find all of it or nothing.
void publish_token(const RuntimeDir& dir, const std::string& address, const Token& token);
// The token that a living store at `address` has left in this root. Only a store that other users cannot reach by the
// file system could have written it.
std::optional<Token> published_token(const std::string& root, const std::string& address);

// The address of a TCP socket's own or its other end, in digits: "tcp://127.0.0.1:7070".
std::string local_url(int fd);
std::string peer_url(int fd);
bool listens_on_loopback(int fd);

}  // namespace tessera::store
