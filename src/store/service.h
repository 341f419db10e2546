// Answers requests from a State: the server without its sockets. Thread-compatible.
#pragma once

#include <deque>
#include <unordered_map>
#include <vector>

#include "base/clock.h"
#include "store/memory/state.h"
#include "store/protocol.h"

namespace tessera::store {

class Service {
 public:
  Service(State& state, const Clock& clock) : state_(state), clock_(clock) {}

  // The payload of the reply; a request that fails is answered with its error.
  std::vector<std::byte> answer(const Request& request);

 private:
  RangeReplyOf<Record> range(const Request& request) const;
  TransactReply transact(const Request& request);

  State& state_;
  const Clock& clock_;
  // The latest successful transactions by token, for a client that asks again because it lost the reply.
  std::unordered_map<uint64_t, TransactReply> done_;
  std::deque<uint64_t> done_order_;
};

}  // namespace tessera::store
