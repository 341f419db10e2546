#include "bus/sender/in_place_sender.h"

#include <algorithm>
#include <utility>

#include "base/fail.h"
#include "bus/sender/offered_in_place.h"

namespace tessera::bus {

// --- attaching -----------------------------------------------------------------------------------

std::unique_ptr<OfferedVersion> InPlaceSender::make_offered(SenderSession& session, uint32_t) {
  return std::make_unique<OfferedInPlace>(session, *this);
}

void InPlaceSender::on_met(std::shared_ptr<Session> session) {
  if (outdated(*session)) session->renew();
  SenderBatch::on_met(std::move(session));
}

void InPlaceSender::on_attached(SenderSession& session, bool first) {
  unreported_ = {};
  if (!several() && !first) newcomers_.insert(&session);
  session.passed(version_.load());
  if (offering_ != 0 && ending_.ok() && joining_ == 0) session.offered().offer(offering_, true);
}

void InPlaceSender::note_absence(const SenderSession& session) {
  SenderBatch::note_absence(session);
  if (!session.renewed() && !several() && reported_ != &session && !session.left())
    unreported_ = session.broken_status();
}

std::vector<std::string> InPlaceSender::waits_for() const {
  std::vector<std::string> texts = SenderBatch::waits_for();
  if (texts.empty())
    for (const auto& meeting : meetings_) texts.push_back(fmt::format("job {} to register", meeting->job()));
  return texts;
}

// --- offering ------------------------------------------------------------------------------------

void InPlaceSender::check_before_send() {
  if (!any_whole()) std::exchange(unreported_, {}).throw_if_error();
}

void InPlaceSender::offer_all() {
  joining_ = 0;
  begun_ = false;
  taken_ = false;
  lost_ = {};
  observe_offer(offering_);
  enter("wait for receivers");
  for (const auto& [job, session] : sessions_)
    if (!session->broken()) session->offered().offer(offering_, true);
}

void InPlaceSender::note_begun(int64_t version) {
  if (version == offering_) begun_ = true;
}

void InPlaceSender::on_reading(SenderSession& session) {
  if (session.begun(offering_)) newcomers_.erase(&session);
  if (!operation_ || present_.data_start != TimePoint{}) return;
  present_.data_start = Clock::steady().now();
  enter("transfer");
}

void InPlaceSender::on_offer_over(SenderSession& session, const Status& status) {
  const bool late = newcomers_.contains(&session);
  if (status.ok()) {
    session.sum_digests(figures_.sums());
    if (!taken_) figures_.keep_sums();
    if (!std::exchange(taken_, true) && several() && any_offering())
      grace_ = loop().add_timer_after(setup_.options.grace, [this] { end_grace(); });
  } else if ((session.renewed() && Session::is_renewal(status) && !session.begun(offering_)) ||
             (joining_ != 0 && !session.broken())) {
    // It is offered again: once they have met, or under the number that is joined.
  } else if (late) {
    observe_late(session, status);
  } else if (status.code() == ErrorCode::kPeerLost) {
    lost_ = status;
    reported_ = &session;
  } else if (failure_.ok()) {
    failure_ = status;
  }
  if (!status.ok() && !session.renewed() && joining_ == 0)
    known_[session.peer_job()].missed = late ? Status(ErrorCode::kDeadlineExceeded, status.message()) : status;
  check_ended();
}

// A job that was lost is no failure as long as another one has the version; of jobs that nobody waits for, nor is one
// that failed.
void InPlaceSender::check_ended() {
  leave_newcomers();
  if (offering_ == 0 || any_offering()) return;
  const bool well = taken_ && (several() || failure_.ok());
  const Status& why = !failure_.ok() ? failure_ : !lost_.ok() ? lost_ : ending_;
  if (joining_ != 0 && why.ok()) return offer_joined();
  const Status outcome = well ? Status() : why;
  if (outcome.ok() && !taken_) return;  // nobody is attached: somebody may come
  loop().cancel_timer(std::exchange(grace_, 0));
  numbers_.end();
  offering_ = 0;
  if (outcome.ok()) version_ = operation_->version();  // else it may be sent again
  end_operation(outcome);
  count_decision();
}

// Who has not begun is waited for no longer.
void InPlaceSender::end_grace() {
  grace_ = 0;
  for (const auto& [job, session] : sessions_)
    if (session->offering() && !session->begun(offering_)) newcomers_.insert(session.get());
  check_ended();
}

void InPlaceSender::on_unpinned() {
  count_decision();
  leave_newcomers();
}

void InPlaceSender::leave_newcomers() {
  const auto at_it = [&](const auto& entry) {
    return entry.second->offering() && !newcomers_.contains(entry.second.get());
  };
  if (offering_ == 0 || !ending_.ok() || !taken_ || std::ranges::any_of(sessions_, at_it)) return;
  for (const auto& [job, session] : sessions_)
    if (session->offering() && !session->undecided(offering_))
      session->fail_offer(
          failed(ErrorCode::kCancelled, "all others have it, and {}"_message, session->latest().who_has_not_taken()));
}

// --- in step with the other ranks of the job -------------------------------------------------------

// The memory may hold what belongs to an earlier call than the other ranks' is, unless this rank has just come. So it
// is not offered as theirs: the send fails, as it would in the end.
void InPlaceSender::fall_behind(int64_t version) {
  if (!may_fall_behind(version) || version <= joining_ || taken_ || begun_) return;
  if (std::ranges::any_of(sessions_, [&](const auto& entry) { return entry.second->held(offering_); })) return;
  const Status why = came_too_late(version);
  if (numbers_.follows()) return join(version, why);
  numbers_.hear(version, true);
  fail_operation(why);
}

void InPlaceSender::join(int64_t version, const Status& why) {
  if (std::exchange(joining_, version) != 0) return;
  observe_withdrawal(offering_);
  std::vector<SenderSession*> offering;
  for (const auto& [job, session] : sessions_)
    if (session->offering()) offering.push_back(session.get());
  for (SenderSession* session : offering) session->fail_offer(why);
}

void InPlaceSender::offer_joined() {
  offering_ = joining_;
  numbers_.begin(offering_, false);
  operation_->set_version(offering_);
  present_.data_start = {};
  offer_all();
}

// --- ending --------------------------------------------------------------------------------

SenderBatch::Withdrawal InPlaceSender::try_withdraw(int64_t version) {
  if (version == 0 || version != offering_ || begun_) return Withdrawal::kTooLate;
  if (any_undecided(version)) return Withdrawal::kUndecided;
  fail_operation(failed(ErrorCode::kCancelled, "version {} was withdrawn"_message, version));
  return Withdrawal::kDone;
}

Untaken InPlaceSender::untaken() const {
  if (offering_ == 0 || !ending_.ok()) return {};
  Untaken untaken{.version = offering_};
  for (const auto& [job, session] : sessions_)
    if (session->offering()) untaken.jobs.push_back(job);
  return untaken;
}

bool InPlaceSender::cancel_operation() {
  if (offering_ == 0 || !ending_.ok() || taken_) return false;
  if (std::ranges::any_of(sessions_, [&](const auto& entry) { return entry.second->begun(offering_); })) return false;
  observe_withdrawal(offering_);
  fail_operation(failed(ErrorCode::kCancelled, "the send was cancelled"_message));
  return true;
}

// Jobs that are all at it, and were heard of lately, go on.
void InPlaceSender::on_deadline() {
  if (offering_ == 0) return;
  if (!any_offering()) return fail_operation(nobody_attached());
  const TimePoint now = Clock::steady().now();
  TimePoint until = TimePoint::max();
  for (const auto& [job, session] : sessions_) {
    if (!session->offering()) continue;
    if (session->offered().flows_since(now - setup_.stall)) {
      until = std::min(until, session->last_activity() + setup_.stall);
      continue;
    }
    ending_ = failed(ErrorCode::kDeadlineExceeded, "waited {:.1f} s: {}"_message, seconds_waited(),
                     session->latest().who_has_not_taken());
    session->fail_offer(ending_);
  }
  if (offering_ != 0 && until != TimePoint::max()) set_deadline(Deadline::at(until));
}

Status InPlaceSender::nobody_attached() const {
  const std::string text = who_is_missing(0);
  ErrorCode code = ErrorCode::kDeadlineExceeded;
  for (const auto& [job, known] : known_)
    if (!several() && !known.absence.ok()) code = known.absence.code();
  return failed(code, "{}: {} waited {:.1f} s to send version {}, and no job is attached{}{}"_message, describe(),
                identity().name(), seconds_waited(), offering_, text.empty() ? "" : ": ", text);
}

}  // namespace tessera::bus
