// A transfer that can be started repeatedly: on threads of this process (TransferRun), or elsewhere.
#pragma once

#include <cstdint>
#include <span>

#include "codec/simd/digest.h"
#include "tessera/error.h"

namespace tessera {

// Begins with start() and ends when its owner is notified; then the results are there and it may start again.
class Run {
 public:
  Run() = default;
  virtual ~Run() = default;  // REQUIRES: not under way
  Run(const Run&) = delete;
  Run& operator=(const Run&) = delete;

  // Begins. `epoch` (above 0) numbers the transfers of a batch: both sides of a stream must use the same number, and a
  // new one each time.
  virtual void start(uint32_t epoch) = 0;
  // Makes it end soon with `status`, unless it has ended: the peer died, the user cancelled. The first failure stays.
  virtual void abort(const Status& status) = 0;
  // Bytes of the source's dtype done since start(); any thread.
  virtual int64_t bytes_done() const = 0;

  // Results, once it has ended.
  virtual Status status() const = 0;
  // One a route, in the order in which routes were given; empty if none are computed.
  virtual std::span<const Digest> digests() const = 0;
};

}  // namespace tessera
