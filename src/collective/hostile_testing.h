// For tests: a group of two whose other rank is the caller.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/message.h"
#include "collective/messages.h"

namespace tessera::collective {

// What rank 0 gets for its own blob at the bootstrap: rank 1 agrees to all of it, with its page under `key`.
inline std::vector<std::string> blobs_of_two(const std::string& own, uint64_t key) {
  auto other = read_message<Bootstrap>(std::as_bytes(std::span(own)), "own");
  other.rank = 1;
  other.key = key;
  const auto bytes = message_bytes(other);
  return {own, {reinterpret_cast<const char*>(bytes.data()), bytes.size()}};
}

}  // namespace tessera::collective
