// What happens to a staged version once this rank has it, or may copy it: first the vote, then the copy into the
// registered tensors.
#include <algorithm>

#include "base/fail.h"
#include "base/fail_point.h"
#include "bus/receiver/receiver_session.h"

namespace tessera::bus {

// After the decision nothing may prevent this rank from taking the version, so all of it must lie in memory that
// outlives the senders. A version that is only staged may be committed long after the senders have gone.
bool ReceiverSession::can_lease() const {
  const auto direct = [](const auto& link) { return link->direct(); };
  return setup_.staged && !links_.empty() && std::ranges::all_of(links_, direct) && owner_.commits_at_once();
}

void ReceiverSession::vote() {
  fail_point("staged: pulled");
  phase_ = Phase::kVoting;
  owner_.on_voting();
  decision_.vote(taking_);
}

void ReceiverSession::give_up_deciding(const Status& why) {
  if (phase_ == Phase::kVoting) decision_.give_up(why);
}

void ReceiverSession::handle_decided(const Decided& decided) {
  if (!setup_.staged) return;
  const bool aborts = decided.verdict == Decided::Verdict::kAbort;
  if (election_.chosen() && election_.chosen()->epoch == decided.epoch && aborts)
    return election_.pass_up(decided.reason);  // another rank failed before this one began
  if (decided.epoch != election_.epoch()) return;
  if (phase_ == Phase::kPulling && aborts) return fail_recv(decided.reason);
  if (phase_ == Phase::kVoting) decision_.hear(decided);
}

void ReceiverSession::decided(uint32_t epoch, Decided::Verdict verdict, const Status& reason) {
  if (phase_ == Phase::kVoting && epoch == election_.epoch()) decision_.decided(verdict, reason);
}

void ReceiverSession::end_vote(Decided::Verdict verdict, const Status& reason) {
  const bool commits = verdict == Decided::Verdict::kCommit;
  failure_ = commits ? Status()
                     : Status(reason.code(), fmt::format("{}: version {} is not taken by {}: {}"_message, describe(),
                                                         taking_, identity().name(), reason.message()));
  if (commits) election_.took(taking_);
  if (verdict == Decided::Verdict::kAbort)
    for (const auto& link : links_) link->end_lease(failure_);
  if (!leases_ || verdict == Decided::Verdict::kAbort) return end_recv(failure_);
  phase_ = Phase::kCopying;
  if (commits) owner_.on_committing();
  fail_point("staged: copying");
  // If it is undecided, a copy is kept until the store answers, which may be after the senders have gone.
  for (const auto& link : links_) link->copy(commits ? PullLink::Target::kRegistered : PullLink::Target::kStaged);
}

void ReceiverSession::on_copied(PullLink&) {
  if (std::ranges::none_of(links_, [](const auto& link) { return link->leased(); })) end_recv(failure_);
}

// Staged, ranks that have it wait for the others as long as these make progress. Rank 0 passes the reports on.
void ReceiverSession::tell_flow() {
  const ProgressReport report{.version = taking_, .bytes = progress_seen_};
  own_ranks_.tell_leader(report);
  own_ranks_.tell_followers(report);
}

void ReceiverSession::handle_flow(const ProgressReport& report) {
  if (!setup_.staged || report.version != taking_) return;
  if (leads()) flowed_ = true;
  if (phase_ == Phase::kVoting) owner_.on_flow();
}

}  // namespace tessera::bus
