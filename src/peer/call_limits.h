// How long a conversation with the store may take, and how it is held.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <stop_token>

#include "base/clock.h"
#include "base/message.h"
#include "tessera/error.h"

namespace tessera {

// How long a conversation may take, and what may end it before.
struct CallLimits {
  Deadline deadline;
  std::stop_token stop;
  // For processes to come back, however long that takes: an absent one is logged once, and awaited even if it
  // has left.
  bool background = false;
  // Not for a peer job that has left the pair altogether: rejoin() throws kNotFound.
  bool parts = false;
};

inline constexpr Duration kStoreTimeout = seconds(10);
inline constexpr Duration kStorePiece = seconds(1);  // of waiting for an answer of the store's

// One request of a conversation with the store, in pieces: between them it is seen whether the conversation is to end.
template <typename Request>
auto ask(const CallLimits& limits, Request&& request) {
  const TimePoint start = Clock::steady().now();
  while (true) {
    try {
      return request(std::min(limits.deadline.left(), limits.background ? kStoreTimeout : kStorePiece));
    } catch (const Error& error) {
      const bool waits = error.code() == ErrorCode::kDeadlineExceeded || error.code() == ErrorCode::kUnavailable;
      if (limits.background || !waits) throw;
      if (limits.deadline.passed())
        throw Error(error.code(), fmt::format("{}; it was asked for {:.1f} s"_message, error.what(),
                                              to_seconds(Clock::steady().now() - start)));
      if (limits.stop.stop_requested())
        throw Error(ErrorCode::kCancelled, fmt::format("{}: interrupted"_message, error.what()));
    }
  }
}

}  // namespace tessera
