// When operations ran, as a picture: the JSON of the Trace Event Format for Perfetto (https://ui.perfetto.dev). A rank
// is a process, a stream a line of it.
#pragma once

#include <cstddef>
#include <iosfwd>
#include <span>

#include "device/record/rank_log.h"

namespace tessera::device {

struct TimelineFigures {
  size_t operations = 0;
  size_t streams = 0;
};

// Draws the operations whose times kRan records tell. Time 0 is the earliest, "zero_ns" in the JSON's "otherData". The
// clocks of all ranks are taken to be one, CLOCK_MONOTONIC of one machine. Throws kNotFound if no log has a kRan
// record, kMismatch if the logs are of different runs or one rank has two.
TimelineFigures write_timeline(std::span<const RankLog> logs, std::ostream& out);

}  // namespace tessera::device
