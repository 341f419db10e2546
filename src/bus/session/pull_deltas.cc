#include "bus/session/pull_deltas.h"

#include <algorithm>
#include <utility>

#include "base/fail.h"

namespace tessera::bus {

PullDeltas::PullDeltas(const PullEnd& exchange) : exchange_(exchange) {
  if (!exchange.deltas()) return;
  travel_.resize(exchange.pulled().size());
  bytes_.resize(exchange.pulled().size());
}

void PullDeltas::begin(Grant grant) {
  granted_ = std::move(grant.deltas);
  stamp_ = grant.stamp;
  const Stamp held = std::exchange(held_, 0);
  read_ = {};
  if (!granted_.empty() && (!exchange_.deltas() || held == 0 || granted_.size() != exchange_.routes().size()))
    fail(ErrorCode::kMismatch, "Grant with {} deltas for {} routes, on top of {}"_message, granted_.size(),
         exchange_.routes().size(), held);
  std::ranges::fill(travel_, Travel::kFull);
  for (size_t i = 0; i < travel_.size() && !granted_.empty(); ++i) {
    const uint32_t route = exchange_.pulled()[i];
    const int64_t bytes = granted_[route];
    if (bytes == Grant::kInFull) continue;
    const int64_t full = exchange_.program()->bytes_of(i);
    if (!exchange_.has_delta(route) || bytes > full)
      fail(ErrorCode::kMismatch, "Grant with a delta of {} bytes for a route of {}"_message, bytes, full);
    travel_[i] = Travel::kDelta;
    bytes_[i] = bytes;
    read_ += {1, bytes, full};
  }
}

void PullDeltas::arrived(size_t position) {
  if (!travel_.empty()) travel_[position] = Travel::kNot;
}

void PullDeltas::give_up(size_t position) {
  travel_[position] = Travel::kFull;
  read_ += {-1, -bytes_[position], -exchange_.program()->bytes_of(position)};
}

void PullDeltas::give_up_streamed() {
  for (size_t i = 0; i < travel_.size(); ++i)
    if (exchange_.program()->streams(i)) travel_[i] = Travel::kFull;
}

}  // namespace tessera::bus
