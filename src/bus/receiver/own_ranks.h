// The connections between a receiving job's ranks: rank 0 has one with each of the others.
#pragma once

#include <algorithm>
#include <map>
#include <memory>

#include "peer/identity.h"
#include "peer/link.h"

namespace tessera::bus {

// On the loop's thread.
struct OwnRanks {
  std::map<Rank, std::shared_ptr<Link>> followers;  // at rank 0: to the others
  std::shared_ptr<Link> leader;                     // at the others: to rank 0
  bool leader_ready = false;

  bool all_open() const {
    const auto open = [](const auto& follower) { return follower.second->open(); };
    return std::ranges::all_of(followers, open) && (!leader || leader->open());
  }
  // Both send only to ranks that are still connected.
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
