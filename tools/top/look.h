// One look at all jobs of a namespace: their ranks in the store's records, and the answers of this machine's agents.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/clock.h"
#include "peer/report.h"
#include "tessera/store.h"

namespace tessera::tools {

struct TopRank {
  enum class State {
    kSeen,       // its agent has answered
    kSilent,     // it is on this machine but does not answer: see `why`
    kStopped,    // likewise, because its process is stopped
    kElsewhere,  // on another machine or in another container: only the store's records
    kDead,       // its process has ended, but its lease has not
  };
  std::string job{};
  Rank rank = 0;
  int32_t world = 0;
  Incarnation incarnation{};
  std::string address{};
  State state = State::kElsewhere;
  std::string why{};
  Report report{};  // unless it was seen, only its batches' names, sides and versions
};

struct TopPair {
  std::string name{};
  std::string job{};
  std::string peer{};
  int32_t ranks = 0;  // of that job that have joined
  int32_t world = 0;
};

struct TopLook {
  std::string store{};
  std::string name_space{};
  TimePoint when{};
  std::vector<TopRank> ranks{};  // by job and rank
  std::vector<TopPair> pairs{};  // by name and job
  int64_t unreadable = 0;        // records that this release cannot read
};

// Asks all agents of this machine concurrently. Throws Error if the store cannot be read.
TopLook look_around(Store& store, const std::string& name_space);

}  // namespace tessera::tools
