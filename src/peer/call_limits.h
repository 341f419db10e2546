// How long a conversation with the store may take, and what may end it.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <stop_token>

#include "base/clock.h"
#include "base/message.h"
#include "tessera/error.h"

namespace tessera {

// Limits of a conversation: its deadline, and what may end it earlier.
struct CallLimits {
  Deadline deadline;
  std::stop_token stop;
  // It waits for processes to come back, however long that takes. An absent process is logged once, and awaited even
  // if it has left.
  bool background = false;
  // It does not wait for a peer job that has left the pair altogether: rejoin() throws kNotFound.
  bool parts = false;
};

inline constexpr Duration kStoreTimeout = seconds(10);
inline constexpr Duration kStorePiece = seconds(1);  // of a wait for the store's answer

// Sends one request to the store and waits in pieces: between them it checks whether the conversation must end.
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
