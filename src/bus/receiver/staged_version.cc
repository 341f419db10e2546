#include "bus/receiver/staged_version.h"

#include <utility>

#include "base/fail.h"
#include "base/fail_point.h"
#include "bus/receiver/receiver_batch.h"

namespace tessera::bus {

StagedVersion::StagedVersion(const ReceiverParts& parts, const Chosen& chosen)
    : TakenVersion(parts, chosen),
      decision_(parts.election, parts.own_ranks, parts.broken,
                {.all_got = [this](int64_t version,
                                   uint32_t epoch) { parts_.batch.ask_store(version, epoch, /*commit=*/true); },
                 .ask_store = [this](int64_t version,
                                     uint32_t epoch) { parts_.batch.ask_store(version, epoch, /*commit=*/false); },
                 .over = [this](Decided::Verdict verdict, const Status& reason) { over(verdict, reason); }}) {}

// Once this rank has it, it needs no sender: a lease lasts whatever becomes of them.
bool StagedVersion::may_go_on() const {
  return state_ == State::kVoting || state_ == State::kCopying || TakenVersion::may_go_on();
}

std::vector<Link*> StagedVersion::awaited_links() const {
  if (state_ == State::kVoting) return parts_.election.awaited_links();
  if (state_ == State::kCopying) return {};
  return TakenVersion::awaited_links();
}

std::string StagedVersion::awaited() const {
  if (state_ != State::kVoting) return {};
  if (decision_.asked()) return fmt::format("the store to say what becomes of version {}"_message, version());
  if (parts_.election.leads()) return fmt::format("the others to take version {}"_message, version());
  return fmt::format("{} to say what becomes of version {}"_message, rank_name(parts_.identity().job, 0), version());
}

// --- the vote ------------------------------------------------------------------------------------

void StagedVersion::complete() {
  fail_point("staged: pulled");
  state_ = State::kVoting;
  parts_.batch.on_voting();
  decision_.vote(version());
}

void StagedVersion::fail(const Status& why) {
  if (state_ == State::kVoting) return decision_.give_up(why);
  TakenVersion::fail(why);
}

Status StagedVersion::overdue() const {
  if (state_ != State::kVoting) return TakenVersion::overdue();
  return failed(ErrorCode::kDeadlineExceeded, "missing {}"_message, parts_.election.missing());
}

void StagedVersion::hear_got() {
  if (state_ == State::kVoting) return decision_.check_votes();
  if (!parts_.election.refusal().ok()) fail(parts_.election.refusal());
}

void StagedVersion::hear(const Decided& decided) {
  if (state_ == State::kVoting) return decision_.hear(decided);
  if (decided.verdict == Decided::Verdict::kAbort) fail(decided.reason);
}

void StagedVersion::decided(Decided::Verdict verdict, const Status& reason) {
  if (state_ == State::kVoting) decision_.decided(verdict, reason);
}

void StagedVersion::peer_lost() {
  if (state_ != State::kVoting) return;
  if (parts_.election.leads())
    decision_.check_votes();
  else if (!parts_.own_ranks.leader->open())
    decision_.leader_lost();
}

void StagedVersion::over(Decided::Verdict verdict, const Status& reason) {
  if (verdict == Decided::Verdict::kCommit)
    parts_.election.took(version());
  else
    failure_ = Status(reason.code(), fmt::format("{}: version {} is not taken by {}: {}"_message, parts_.name,
                                                 version(), parts_.identity().name(), reason.message()));
  end_vote(verdict);
}

void StagedVersion::end_vote(Decided::Verdict) {
  end(failure_);
}

// Tells rank 0; if rank 0 itself has not got it, all other ranks.
void StagedVersion::tell_failure() {
  TakenVersion::tell_failure();
  if (parts_.election.leads())
    parts_.own_ranks.tell_followers(Decided{.version = version(), .epoch = epoch(), .reason = failure_});
}

void StagedVersion::end(const Status& status) {
  parts_.batch.observe_decision(version(), status);
  TakenVersion::end(status);
}

// --- progress ------------------------------------------------------------------------------------

// Ranks that have it wait for the others as long as these make progress. Rank 0 passes the reports on.
bool StagedVersion::report_progress() {
  if (state_ != State::kVoting && !TakenVersion::report_progress()) return false;
  if (!std::exchange(flowed_, false)) return true;
  const ProgressReport report{.version = version(), .bytes = bytes_};
  parts_.own_ranks.tell_leader(report);
  parts_.own_ranks.tell_followers(report);
  return true;
}

void StagedVersion::moved() {
  flowed_ = true;
  TakenVersion::moved();
}

void StagedVersion::hear(const ProgressReport& report) {
  if (report.version != version()) return;
  if (parts_.election.leads()) flowed_ = true;
  if (state_ == State::kVoting) parts_.batch.on_flow();
}

}  // namespace tessera::bus
