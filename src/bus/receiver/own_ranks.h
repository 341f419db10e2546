// The connections of a receiving job's ranks with each other: those of rank 0 with all the others.
#pragma once

#include <map>
#include <memory>

#include "peer/identity.h"
#include "peer/link.h"

namespace tessera::bus {

// On the loop's thread.
struct OwnRanks {
  std::map<Rank, std::shared_ptr<Link>> followers;  // rank 0: the others
  std::shared_ptr<Link> leader;                     // the others: rank 0
  bool leader_ready = false;

  // To those that are still there.
  template <typename Message>
  void tell_leader(const Message& message) const {
    if (leader && leader->open()) leader->send(message);
  }
  template <typename Message>
  void tell_followers(const Message& message) const {
    for (const auto& [rank, follower] : followers)
      if (follower->open()) follower->send(message);
  }
};

}  // namespace tessera::bus
