// Why gathers were exposed: uses that had to wait for their weight, in the last steps.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "base/clock.h"
#include "tessera/etp.h"

namespace tessera::etp {

enum class ExposureCause : uint8_t {
  kNotSeen,       // nothing was known about what follows
  kMispredicted,  // something else was expected
  kOff,           // weight_prefetch is off
  kCap,           // its prefetch did not fit
  kNotPublished,  // an owner had not published the version when its turn came
  kFirstUse,      // its first use has published it
  kUnderWay,      // it was prefetched, and had not arrived
};

struct Exposure {
  WeightId weight = 0;
  Phase phase = Phase::kForward;
  int micro_batch = 0;
  ExposureCause cause = ExposureCause::kNotSeen;
  int64_t bytes = 0;
  TimePoint began{};       // of the wait; none if it was not exposed
  double seconds = 0;      // that it took
  double head_start = 0;   // seconds between the prefetch and the use
  int64_t needed_cap = 0;  // of kCap
  int publisher = -1;      // of kNotPublished
};

// Keeps the last two steps. Not thread-safe.
class ExposureLog {
 public:
  static constexpr size_t kMostPerStep = 4096;

  void add(const Exposure& exposure);
  void end_step();
  // Of a step, or of the last whole one (-1); null if it is not kept.
  const std::vector<Exposure>* step(int64_t step) const;
  int64_t steps() const { return steps_; }

 private:
  int64_t steps_ = 0;  // that have ended
  std::array<std::vector<Exposure>, 3> kept_;
};

// One line: the use, what it waited for, and the smallest change that hides it.
std::string to_string(const Exposure& exposure, std::string_view weight, const RuntimeOptions& options);

}  // namespace tessera::etp
