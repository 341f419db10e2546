// One of the steps that prepare a version before it is offered. Used on the loop's thread.
#pragma once

#include <cstdint>
#include <string>

#include "tessera/error.h"

namespace tessera::bus {

class PreparationStep {
 public:
  virtual ~PreparationStep() = default;

  // Begins, for that slot. REQUIRES: not busy. Its end is reported, but never before this returns.
  virtual void start(int64_t version, uint32_t slot) = 0;
  virtual void abort(const Status& status) = 0;  // its end is reported, if it is busy
  // This rank will not start a version that other ranks may have started. REQUIRES: not busy
  virtual void give_up(int64_t /*version*/, const Status&) {}
  virtual bool busy() const = 0;
  // What keeps a version in this step: "it was still being quantised".
  virtual std::string missing() const = 0;
  virtual std::string awaited(int64_t version) const = 0;  // "version 7 to be quantised"
};

}  // namespace tessera::bus
