#include "bus/receiver/decision.h"

#include <utility>

#include "base/fail_point.h"

namespace tessera::bus {

Decision::Decision(const Election& election, const OwnRanks& own_ranks, const Status& broken, Events events)
    : election_(election), own_ranks_(own_ranks), broken_(broken), events_(std::move(events)) {}

void Decision::vote(int64_t version) {
  version_ = version;
  asked_ = false;
  if (election_.leads()) return check_votes();
  election_.tell_got(version, {});
  fail_point("staged: voted");
  if (!own_ranks_.leader->open()) ask_store();
}

void Decision::ask_store() {
  if (!std::exchange(asked_, true)) events_.ask_store(version_, election_.epoch());
}

void Decision::give_up(const Status& why) {
  if (asked_) return;
  if (election_.leads())
    decided(Decided::Verdict::kAbort, why);
  else
    ask_store();
}

void Decision::check_votes() {
  if (asked_) return;
  if (!election_.refusal().ok()) return decided(Decided::Verdict::kAbort, election_.refusal());
  if (election_.all_have(election_.epoch())) {
    asked_ = true;
    return events_.all_got(version_, election_.epoch());
  }
  for (const auto& [rank, follower] : own_ranks_.followers)
    if (!follower->open() && !election_.has_got(rank, election_.epoch()))
      return decided(Decided::Verdict::kAbort, broken_);
}

void Decision::hear(const Decided& decided) {
  if (decided.verdict == Decided::Verdict::kAskStore) return ask_store();
  this->decided(decided.verdict, decided.reason);
}

void Decision::decided(Decided::Verdict verdict, const Status& reason) {
  fail_point("staged: decided");
  for (const auto& [rank, follower] : own_ranks_.followers) {
    if (!follower->open()) continue;
    follower->send(Decided{.version = version_, .epoch = election_.epoch(), .verdict = verdict, .reason = reason});
    fail_point("staged: told one");
  }
  fail_point("staged: told all");
  events_.over(verdict, reason);
}

}  // namespace tessera::bus
