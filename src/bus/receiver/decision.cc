// How a version ends: the ranks agree that it is there, it fails or stalls, peers are lost; and who it waits for.
#include <algorithm>

#include "base/fail.h"
#include "base/fail_point.h"
#include "bus/receiver/receiver_session.h"

namespace tessera::bus {
namespace {

constexpr Duration kProgressPeriod = seconds(0.5);  // while data flows

}  // namespace

// --- deciding ------------------------------------------------------------------------------------

void ReceiverSession::vote() {
  fail_point("staged: pulled");
  phase_ = Phase::kVoting;
  asked_ = false;
  owner_.on_voting();
  if (leads()) return check_votes();
  tell_got({});
  fail_point("staged: voted");
  if (!leader_->open()) ask_store();
}

void ReceiverSession::ask_store() {
  if (!std::exchange(asked_, true)) owner_.on_ask_store(taking_, epoch_);
}

void ReceiverSession::give_up_deciding(const Status& why) {
  if (phase_ != Phase::kVoting || asked_) return;
  if (leads())
    decided(epoch_, Decided::Verdict::kAbort, why);
  else
    ask_store();
}

void ReceiverSession::check_votes() {
  if (asked_) return;
  if (!vote_.ok()) return decided(epoch_, Decided::Verdict::kAbort, vote_);
  if (own_ranks_have(epoch_)) {
    asked_ = true;
    return owner_.on_all_got(taking_, epoch_);
  }
  for (const auto& [rank, follower] : followers_)
    if (!follower->open() && got_[static_cast<size_t>(rank)] < epoch_)
      return decided(epoch_, Decided::Verdict::kAbort, broken_);
}

void ReceiverSession::handle_decided(const Decided& decided) {
  if (!setup_.staged) return;
  if (chosen_ && chosen_->epoch == decided.epoch && decided.verdict == Decided::Verdict::kAbort) {
    return pass_up(decided.reason);  // others have failed before this rank began
  }
  if (decided.epoch != epoch_) return;
  if (phase_ == Phase::kPulling && decided.verdict == Decided::Verdict::kAbort) return fail_recv(decided.reason);
  if (phase_ != Phase::kVoting) return;
  if (decided.verdict == Decided::Verdict::kAskStore) return ask_store();
  this->decided(decided.epoch, decided.verdict, decided.reason);
}

void ReceiverSession::decided(uint32_t epoch, Decided::Verdict verdict, const Status& reason) {
  if (phase_ != Phase::kVoting || epoch != epoch_) return;
  fail_point("staged: decided");
  for (const auto& [rank, follower] : followers_) {
    if (!follower->open()) continue;
    follower->send(Decided{.version = taking_, .epoch = epoch_, .verdict = verdict, .reason = reason});
    fail_point("staged: told one");
  }
  fail_point("staged: told all");
  if (verdict == Decided::Verdict::kCommit) {
    floor_ = taking_;
    return end_recv({});
  }
  end_recv(Status(reason.code(), fmt::format("{}: version {} is not taken by {}: {}", describe(), taking_,
                                             identity().name(), reason.message())));
}

void ReceiverSession::end_recv(const Status& status) {
  stop_holding();
  phase_ = Phase::kIdle;
  owner_.on_recv_over(status);
  if (broken_.ok() || phase_ != Phase::kIdle) return;
  owner_.on_unavailable(broken_status());
  broadcast_broken();
  if (retires()) owner_.on_receiver_retired();
}

void ReceiverSession::end_wait(const Status& status) {
  end_recv(status);
}

void ReceiverSession::sum_digests(std::vector<Digest>& sums) const {
  sums.assign(setup_.tensors.size(), {});
  for (const auto& link : links_) link->add_digests(sums);
}

void ReceiverSession::fail_recv(const Status& status) {
  if (phase_ == Phase::kIdle || phase_ == Phase::kFailing || phase_ == Phase::kVoting) return;
  const bool waiting = phase_ == Phase::kWaiting;
  failure_ = Status(status.code(),
                    fmt::format("{}: {} while {} {}", describe(), status.message(), identity().name(),
                                waiting ? "waited for a version" : fmt::format("received version {}", taking_)));
  if (waiting) {
    end_recv(failure_);
    return;
  }
  phase_ = Phase::kFailing;
  to_take_.clear();
  for (const auto& link : links_) {
    if (link->busy())
      link->abort(status);
    else if (!link->pulled(taking_))
      link->send_done(taking_, status);  // it would wait for this rank otherwise
  }
  check_ended();
}

Duration ReceiverSession::progress_period() const {
  return std::min<Duration>(kProgressPeriod, setup_.stall / 4);
}

void ReceiverSession::watch_progress() {
  progress_timer_ = 0;
  if (phase_ == Phase::kPulling) {
    int64_t bytes = 0;
    for (const auto& link : links_) {
      bytes += link->bytes_done();
      link->send_progress();
    }
    if (std::exchange(progress_seen_, bytes) != bytes) {
      flowed_ = true;
      owner_.on_flow();
    }
  } else if (phase_ != Phase::kVoting) {
    return;
  }
  if (setup_.staged && std::exchange(flowed_, false)) tell_flow();
  progress_timer_ = loop().add_timer_after(progress_period(), [this] { watch_progress(); });
}

// Staged, those that have it wait for those that have not, as long as these come nearer. Rank 0 passes it on.
void ReceiverSession::tell_flow() {
  const ProgressReport report{.version = taking_, .bytes = progress_seen_};
  if (!leads() && leader_->open()) leader_->send(report);
  for (const auto& [rank, follower] : followers_)
    if (follower->open()) follower->send(report);
}

void ReceiverSession::handle_flow(const ProgressReport& report) {
  if (!setup_.staged || report.version != taking_) return;
  if (leads()) flowed_ = true;
  if (phase_ == Phase::kVoting) owner_.on_flow();
}

Status ReceiverSession::stalled() const {
  std::vector<std::string> names;
  for (const auto& link : links_)
    if (link->busy()) names.push_back(link->name());
  return failed(ErrorCode::kDeadlineExceeded, "no progress for {:.0f} s from {}", to_seconds(setup_.stall),
                fmt::join(names, ", "));
}

std::string ReceiverSession::missing() const {
  if (!leads()) return rank_name(identity().job, 0) + " to choose a version";
  for (size_t rank = 1; rank < got_.size(); ++rank)
    if (got_[rank] < announced_)
      return fmt::format("{}, which has not taken the last one", rank_name(identity().job, static_cast<Rank>(rank)));
  std::vector<std::string> names;
  for (const auto& link : links_)
    if (link->offered() < min_version_)
      names.push_back(link->offered() == 0 ? link->name()
                                           : fmt::format("{} (offers {})", link->name(), link->offered()));
  if (names.empty())
    for (const auto& link : links_) names.push_back(fmt::format("{} (offers {})", link->name(), link->offered()));
  return fmt::format("{}", fmt::join(names, ", "));
}

std::string ReceiverSession::awaited() const {
  if (phase_ == Phase::kVoting && asked_) return fmt::format("the store to say what becomes of version {}", taking_);
  if (phase_ == Phase::kVoting && leads()) return fmt::format("the others to take version {}", taking_);
  if (phase_ == Phase::kVoting)
    return fmt::format("{} to say what becomes of version {}", rank_name(identity().job, 0), taking_);
  if (!leads() || !own_ranks_have(announced_)) return missing();
  return fmt::format("{} to offer version {}", missing(), min_version_);
}

Progress ReceiverSession::sample() const {
  Progress progress{.bytes_done = 0, .bytes_total = share_.bytes, .seconds = 0};
  for (const auto& link : links_) progress.bytes_done += link->bytes_done();
  return progress;
}

// --- losing peers --------------------------------------------------------------------------------

void ReceiverSession::on_pull_lost(PullLink&, const Status& status) {
  break_session(status);
}

void ReceiverSession::on_pull_broken(PullLink&, const Status& status) {
  break_session(status);
}

void ReceiverSession::on_pull_detached(PullLink&, const Status& reason) {
  sender_lost_ = true;
  break_session(reason);
}

void ReceiverSession::on_broken(const Status& latest) {
  if (phase_ == Phase::kVoting) {
    if (leads())
      check_votes();
    else if (!leader_->open())
      ask_store();
    return;
  }
  if (may_go_on()) return;
  owner_.on_unavailable(broken_status());
  fail_recv(latest);
  broadcast_broken();
  if (retires()) owner_.on_receiver_retired();
}

// A version that was chosen can be taken as long as all that it still needs is there: a sender may well go once this
// rank is done with it, and an own rank that has it may close.
bool ReceiverSession::may_go_on() const {
  if (phase_ == Phase::kVoting) return true;
  const bool takes = phase_ == Phase::kPulling || (phase_ == Phase::kIdle && chosen_);
  if (!takes || needs_lost_sender()) return false;
  // Staged, no rank is without the others.
  const auto lost = [](const auto& follower) { return !follower.second->open(); };
  return !setup_.staged || (leads() ? std::ranges::none_of(followers_, lost) : leader_->open());
}

bool ReceiverSession::needs_lost_sender() const {
  const int64_t version = phase_ == Phase::kIdle ? chosen_->version : taking_;
  return std::ranges::any_of(links_, [&](const auto& link) { return !link->open() && !link->pulled(version); });
}

void ReceiverSession::broadcast_broken() {
  if (std::exchange(broken_told_, true)) return;
  if (sender_lost_)
    for (const auto& link : links_) link->send_broken(broken_);
  for (const auto& [rank, follower] : followers_)
    if (follower->open()) follower->send(Broken{.status = broken_});
}

void ReceiverSession::detach_all(const Status& why) {
  loop().cancel_timer(progress_timer_);
  for (const auto& link : links_) link->detach(why);
  for (const auto& [rank, follower] : followers_) {
    if (!follower->open()) continue;
    follower->send(Detach{.status = why});
    follower->close();
  }
  if (leader_ && leader_->open()) {
    leader_->send(Detach{.status = why});
    leader_->close();
  }
}

}  // namespace tessera::bus
