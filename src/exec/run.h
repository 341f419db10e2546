// A transfer that can be started repeatedly: on threads of this process (TransferRun), or elsewhere.
#pragma once

#include <cstdint>
#include <span>

#include "codec/simd/digest.h"
#include "codec/simd/digest_sample.h"
#include "tessera/error.h"

namespace tessera {

// Begins with start() and ends when its owner is notified. Then its results are valid, and it may be started again.
class Run {
 public:
  Run() = default;
  virtual ~Run() = default;  // REQUIRES: it is not running
  Run(const Run&) = delete;
  Run& operator=(const Run&) = delete;

  // Starts it. `epoch` (above 0) numbers the transfers of a batch: both sides of a stream must use the same number, and
  // a new one each time. `sample`: the seed of a version whose digests are sampled, except those of quantised routes.
  virtual void start(uint32_t epoch, const SampleSeed& sample = {}) = 0;
  // Ends it soon with `status`, unless it has ended: the peer died, or the user cancelled. The first failure is kept.
  virtual void abort(const Status& status) = 0;
  // Bytes transferred since start(), counted in the source's dtype; any thread.
  virtual int64_t bytes_done() const = 0;

  // Results; valid once it has ended.
  virtual Status status() const = 0;
  // One for each route, in the order in which routes were given; empty if none are computed.
  virtual std::span<const Digest> digests() const = 0;
};

}  // namespace tessera
