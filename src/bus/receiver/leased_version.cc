#include "bus/receiver/leased_version.h"

#include <algorithm>

#include "base/fail_point.h"
#include "bus/receiver/receiver_batch.h"

namespace tessera::bus {

void LeasedVersion::end_leases(const Status& why) {
  for (const auto& link : parts_.links) link->end_lease(why);
}

void LeasedVersion::end_vote(Decided::Verdict verdict) {
  if (verdict == Decided::Verdict::kAbort) {
    end_leases(failure_);
    return end(failure_);
  }
  const bool commits = verdict == Decided::Verdict::kCommit;
  state_ = State::kCopying;
  if (commits) parts_.batch.on_committing();
  fail_point("staged: copying");
  // If it is undecided, a copy is kept until the store answers, which may be after the senders have gone.
  for (const auto& link : parts_.links) link->copy(commits ? PullLink::Target::kRegistered : PullLink::Target::kStaged);
}

void LeasedVersion::copied() {
  if (std::ranges::any_of(parts_.links, [](const auto& link) { return link->leased(); })) return;
  if (failure_.ok()) fail_point("staged: copied");
  end(failure_);
}

}  // namespace tessera::bus
