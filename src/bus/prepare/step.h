// One of the steps that prepare a version before it is offered. On the loop's thread.
#pragma once

#include <cstdint>
#include <string>

#include "tessera/error.h"

namespace tessera::bus {

class PreparationStep {
 public:
  virtual ~PreparationStep() = default;

  // Begins, for that slot. REQUIRES: not busy. Its end is reported, and never before this returns.
  virtual void start(int64_t version, uint32_t slot) = 0;
  virtual void abort(const Status& status) = 0;  // its end is reported, if it is busy
  // It will not be started for a version for which other ranks may have started theirs. REQUIRES: not busy
  virtual void give_up(int64_t /*version*/, const Status&) {}
  virtual bool busy() const = 0;
  // What a version that is in this step lacks: "it was still being quantised".
  virtual std::string missing() const = 0;
  virtual std::string awaited(int64_t version) const = 0;  // "version 7 to be quantised"
};

}  // namespace tessera::bus
