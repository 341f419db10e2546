#include "bus/sender.h"

#include <algorithm>

#include "base/fail.h"
#include "base/log.h"

namespace tessera::bus {

// --- attaching
// --------------------------------------------------------------------------------------------------------

void SenderBatch::open(const PairView& view, Deadline deadline) {
  BatchImpl::open(view, deadline);
  watch_jobs();
  count_from_now();
}

void SenderBatch::watch_jobs() {
  std::unique_ptr<Watch> watch = setup_.rendezvous->watch_jobs(
      setup_.pair, setup_.id, [weak = weak_from_this(), &loop = loop()](const std::string& job) {
        loop.post([weak, job] {
          if (const auto self = std::static_pointer_cast<SenderBatch>(weak.lock())) self->meet_also(job);
        });
      });
  setup_.agent->run_on_loop([&] { std::swap(jobs_watch_, watch); });
}

void SenderBatch::meet_also(const std::string& job) {
  if (closed_) return;
  if (job.empty())
    return meetings_.front()->do_in_background(
        [self = std::static_pointer_cast<SenderBatch>(shared_from_this())] { self->watch_jobs(); });
  if (meeting_with(job) != nullptr) return;
  log().info("{}: job {} comes to receive, too", describe(), job);
  add_meeting({.name = setup_.pair, .peer_job = job, .own = {}, .peer = {}, .revision = 0}).meet_in_background();
}

std::shared_ptr<Session> SenderBatch::make_session(const PairView& view, Agreement agreement) {
  return std::make_shared<SenderSession>(session_setup(view, std::move(agreement)), *this);
}

void SenderBatch::on_met(std::shared_ptr<Session> session) {
  const std::string job = session->peer_job();
  if (closed_ || session->broken()) {
    absent_[job] = session->broken_status();
    if (!std::static_pointer_cast<SenderSession>(session)->left()) unreported_ = absent_[job];
    return retire(std::move(session));
  }
  version_ = std::max(version_.load(), session->setup().agreement.sent_version);
  newest_ = std::max(newest_, version_.load());
  absent_.erase(job);
  unreported_ = {};
  const auto made = std::static_pointer_cast<SenderSession>(session);
  sessions_[job] = made;
  made->adopted();
  int64_t rank_bytes = 0;
  for (const auto& [name, other] : sessions_) rank_bytes += other->rank_bytes();
  count_session(*session, rank_bytes);
  if (offering_ != 0 && !ending_) made->offer(offering_);
}

void SenderBatch::on_not_met(const std::string& job, const Status& why) {
  absent_[job] = why;
}

void SenderBatch::on_sender_retired(SenderSession& session) {
  const std::string job = session.peer_job();
  absent_[job] = session.broken_status();
  if (reported_ != &session && !session.left()) unreported_ = session.broken_status();
  // Later: whoever is at it may be going through the sessions.
  loop().post([self = shared_from_this(), this, job, over = sessions_.at(job)] {
    sessions_.erase(job);
    retire(over);
  });
}

void SenderBatch::close_sessions() {
  for (auto& [job, session] : std::exchange(sessions_, {})) session->close(session->broken_status());
}

// --- offering
// ---------------------------------------------------------------------------------------------------------

std::shared_ptr<Operation> SenderBatch::send(std::optional<int64_t> version, Timeout timeout) {
  std::shared_ptr<Operation> operation;
  setup_.agent->run_on_loop([&] {
    const int64_t next = version.value_or(newest_ + 1);
    if (next <= version_.load())
      fail(ErrorCode::kInvalidArgument, "{}: version {} is not newer than {}, which {} has sent already", describe(),
           next, version_.load(), identity().name());
    const auto whole = [](const auto& entry) { return !entry.second->broken(); };
    if (!closed_ && std::ranges::none_of(sessions_, whole)) std::exchange(unreported_, {}).throw_if_error();
    operation = begin_operation("send", timeout);
    operation->set_version(next);
    offering_ = next;
    newest_ = std::max(newest_, next);
    ending_ = false;
    taken_ = false;
    failure_ = {};
    lost_ = {};
    for (const auto& [job, session] : sessions_)
      if (!session->broken()) session->offer(next);
  });
  return operation;
}

void SenderBatch::on_taking(SenderSession&) {
  if (data_start_ == TimePoint{}) data_start_ = Clock::steady().now();
}

void SenderBatch::on_offer_over(SenderSession& session, const Status& status) {
  if (status.ok()) {
    session.sum_digests(sums_);
    const std::lock_guard lock(mutex_);
    if (!taken_) digests_.swap(sums_);
    taken_ = true;
  } else if (status.code() == ErrorCode::kPeerLost) {
    lost_ = status;
    reported_ = &session;
  } else if (failure_.ok()) {
    failure_ = status;
  }
  check_ended();
}

bool SenderBatch::any_offering() const {
  return std::ranges::any_of(sessions_, [](const auto& entry) { return !entry.second->idle(); });
}

// A job that was lost is no failure as long as another one has the version.
void SenderBatch::check_ended() {
  if (offering_ == 0 || any_offering()) return;
  const Status outcome = !failure_.ok() ? failure_ : taken_ ? Status() : lost_;
  if (outcome.ok() && !taken_) return;  // nobody is attached: somebody may come
  offering_ = 0;
  if (outcome.ok()) version_ = operation_->version();  // else it may be sent again
  end_operation(outcome);
}

void SenderBatch::fail_operation(const Status& status) {
  if (offering_ == 0 || std::exchange(ending_, true)) return;
  if (!any_offering()) failure_ = status;
  for (const auto& [job, session] : sessions_) session->fail_offer(status);
  check_ended();
}

Status SenderBatch::nobody_attached() const {
  std::string text;
  ErrorCode code = ErrorCode::kDeadlineExceeded;
  for (const auto& [job, why] : absent_) {
    text += fmt::format("{}job {}{}{}", text.empty() ? "" : "; ", job, why.ok() ? "" : ": ", why.message());
    if (!why.ok()) code = why.code();
  }
  return failed(code, "{}: {} waited {:.1f} s to send version {}, and no job is attached{}{}", describe(),
                identity().name(), to_seconds(Clock::steady().now() - operation_start_), offering_,
                text.empty() ? "" : ": ", text);
}

void SenderBatch::on_deadline() {
  if (offering_ == 0) return;
  if (!any_offering()) return fail_operation(nobody_attached());
  // Jobs that are all at it, and were heard of lately, go on.
  const TimePoint now = Clock::steady().now();
  TimePoint until = TimePoint::max();
  for (const auto& [job, session] : sessions_) {
    if (session->idle()) continue;
    if (session->flows_since(now - setup_.stall)) {
      until = std::min(until, session->last_activity() + setup_.stall);
      continue;
    }
    ending_ = true;
    session->fail_offer(failed(ErrorCode::kDeadlineExceeded, "waited {:.1f} s: {}", to_seconds(now - operation_start_),
                               session->who_has_not_taken()));
  }
  if (offering_ != 0 && until != TimePoint::max()) set_deadline(Deadline::at(until));
}

bool SenderBatch::cancel_operation() {
  if (offering_ == 0 || ending_ || taken_) return false;
  if (std::ranges::any_of(sessions_, [](const auto& entry) { return entry.second->begun(); })) return false;
  fail_operation(failed(ErrorCode::kCancelled, "the send was cancelled"));
  return true;
}

Progress SenderBatch::sample_sessions() const {
  Progress sum;
  for (const auto& [job, session] : sessions_) {
    const Progress one = session->sample();
    sum.bytes_done += one.bytes_done;
    sum.bytes_total += one.bytes_total;
  }
  return sum;
}

}  // namespace tessera::bus
