// A part of a step that is recorded once and replayed: what its streams are given, and what the host does in between.
//
// The host's part are calls in `operations`: gathers, waits for them and releases, which use the versions of now, and
// gradients, which become the rounds of now.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <optional>
#include <vector>

#include "base/clock.h"
#include "base/mutex.h"
#include "device/capture.h"
#include "device/event.h"
#include "etp/parameter.h"
#include "tessera/etp.h"

namespace tessera::etp {

struct CapturedUse {
  uint32_t unit = 0;  // of Consumptions
  Plane plane = Plane::kRow;
  Phase phase = Phase::kForward;
  int micro_batch = 0;
  bool expects_backward = true;
  std::vector<uint32_t> slots{};  // reserved in GatherMemory; empty where the shard itself is used
  // In a replay:
  device::Event arrives{};
  TimePoint issued{};
};

// A gradient where the captured operations write it.
struct CapturedGradient {
  WeightId weight = 0;
  int micro_batch = 0;
  const void* data = nullptr;
};

// Under the runtime's lock, except for `released`, which any thread adds to that releases a FullWeight.
struct CapturedPart {
  struct Released {
    uint32_t slot = 0;
    size_t after = 0;  // so many uses
  };

  device::Capture operations;
  std::optional<device::CaptureScope> scope{};  // while it is recorded
  std::vector<CapturedUse> uses{};
  std::vector<WeightId> produced{};
  bool counted = false;          // in RuntimeContext::captures
  std::exception_ptr failure{};  // of a use, while it is recorded
  Mutex mutex{};
  size_t recorded GUARDED_BY(mutex) = 0;               // uses
  std::vector<Released> released GUARDED_BY(mutex){};  // while it is recorded: others have not got it yet
  // In a replay:
  int micro_batch = 0;     // is added to those of the uses
  size_t acquired = 0;     // uses so far
  size_t next_gather = 0;  // of use
};

}  // namespace tessera::etp
