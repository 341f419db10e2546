// One look at all jobs of a namespace: who is there by the store's records, and what the agents of this machine say.
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
    kSeen,       // it has answered
    kSilent,     // it is of this machine and does not: `why` says more
    kStopped,    // likewise, because its process is stopped
    kElsewhere,  // of another machine or container: what the store knows
    kDead,       // its process has ended, its lease not yet
  };
  std::string job{};
  Rank rank = 0;
  int32_t world = 0;
  Incarnation incarnation{};
  std::string address{};
  State state = State::kElsewhere;
  std::string why{};
  Report report{};  // only its batches' names, sides and versions where it is not seen
};

struct TopPair {
  std::string name{};
  std::string job{};
  std::string peer{};
  int32_t ranks = 0;  // of that job, which have joined
  int32_t world = 0;
};

struct TopLook {
  std::string store{};
  std::string name_space{};
  TimePoint when{};
  std::vector<TopRank> ranks{};  // by job and rank
  std::vector<TopPair> pairs{};  // by name and job
  int64_t unreadable = 0;        // records that this release does not understand
};

// Asks all agents of this machine at once. Throws Error where the store cannot be asked.
TopLook look_around(Store& store, const std::string& name_space);

}  // namespace tessera::tools
