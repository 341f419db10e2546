#include "bus/receiver.h"

#include <algorithm>

#include "base/fail.h"
#include "base/log.h"

namespace tessera::bus {

// --- attaching
// --------------------------------------------------------------------------------------------------------

std::shared_ptr<Session> ReceiverBatch::make_session(const PairView& view, Agreement agreement) {
  return std::make_shared<ReceiverSession>(session_setup(view, std::move(agreement)), *this);
}

void ReceiverBatch::on_met(std::shared_ptr<Session> session) {
  const auto made = std::static_pointer_cast<ReceiverSession>(session);
  if (closed_ || (made->broken() && made->idle())) {
    absent_ = made->broken_status();
    {
      const std::lock_guard lock(mutex_);
      ++losses_;
      lost_ = absent_;
      unreported_ = true;
    }
    changed_.notify_all();
    return retire(std::move(session));
  }
  session_ = made;
  session_->adopted();
  absent_ = {};
  count_session(*session, session->rank_bytes());
  {
    const std::lock_guard lock(mutex_);
    unreported_ = false;
    lost_session_ = nullptr;
  }
  if (std::exchange(pending_, false)) session_->recv(min_version_);
}

void ReceiverBatch::on_not_met(const std::string&, const Status& why) {
  absent_ = why;
}

void ReceiverBatch::on_receiver_retired() {
  absent_ = session_->broken_status();
  // Later: it is one of its own functions that calls.
  loop().post([self = shared_from_this(), this, over = session_] {
    if (session_ == over) session_ = nullptr;
    retire(over);
  });
}

void ReceiverBatch::close_sessions() {
  if (const auto session = std::exchange(session_, nullptr)) session->close(session->broken_status());
}

// --- versions
// ---------------------------------------------------------------------------------------------------------

void ReceiverBatch::on_newest(int64_t version) {
  {
    const std::lock_guard lock(mutex_);
    newest_ = version;
  }
  changed_.notify_all();
}

void ReceiverBatch::on_unavailable(const Status& why) {
  {
    const std::lock_guard lock(mutex_);
    newest_ = 0;
    if (std::exchange(lost_session_, session_.get()) != session_.get()) {
      ++losses_;
      lost_ = why;
      unreported_ = true;
    }
  }
  changed_.notify_all();
}

int64_t ReceiverBatch::wait_version(int64_t version, Timeout timeout) {
  process_.require(identity().name());
  std::unique_lock lock(mutex_);
  const uint64_t losses = unreported_ ? losses_ - 1 : losses_;
  const auto ready = [&] { return newest_.load() >= version || losses_ != losses; };
  if (!changed_.wait_for(lock, setup_.stop, timeout, ready)) {
    if (setup_.stop.stop_requested())
      fail(ErrorCode::kCancelled, "{}: the wait of {} for version {} was interrupted", describe(), identity().name(),
           version);
    fail(ErrorCode::kDeadlineExceeded, "{}: {} waited {:.1f} s for version {}; the newest on offer is {}", describe(),
         identity().name(), to_seconds(timeout), version, newest_.load());
  }
  if (newest_.load() < version) {
    unreported_ = false;
    lost_.throw_if_error();
  }
  return newest_.load();
}

std::shared_ptr<Operation> ReceiverBatch::recv(std::optional<int64_t> min_version, Timeout timeout) {
  std::shared_ptr<Operation> operation;
  setup_.agent->run_on_loop([&] {
    const bool usable = session_ && session_->usable();
    if (!usable && !closed_) {
      const std::lock_guard lock(mutex_);
      if (std::exchange(unreported_, false)) lost_.throw_if_error();
    }
    operation = begin_operation("recv", timeout);
    min_version_ = min_version.value_or(0);
    pending_ = !usable;
    if (usable) session_->recv(min_version_);
  });
  return operation;
}

void ReceiverBatch::on_chosen(int64_t version) {
  operation_->set_version(version);
  data_start_ = Clock::steady().now();
  set_deadline(Deadline::after(setup_.stall));
}

void ReceiverBatch::on_flow() {
  set_deadline(Deadline::after(setup_.stall));
}

void ReceiverBatch::on_recv_over(const Status& status) {
  if (status.ok()) {
    session_->sum_digests(sums_);
    const std::lock_guard lock(mutex_);
    digests_.swap(sums_);
    version_ = operation_->version();
    torn_ = false;
    newest_ = session_->complete_version();
  }
  if (!status.ok()) {
    const std::lock_guard lock(mutex_);
    unreported_ = false;
  }
  end_operation(status);
}

void ReceiverBatch::fail_operation(const Status& status) {
  if (std::exchange(pending_, false))
    end_operation(Status(status.code(), fmt::format("{}: {} while {} waited for a session", describe(),
                                                    status.message(), identity().name())));
  else if (session_)
    session_->fail_recv(status);
}

std::string ReceiverBatch::waited() const {
  return fmt::format("{}: {} waited {:.1f} s for version {} or newer", describe(), identity().name(),
                     to_seconds(Clock::steady().now() - operation_start_),
                     session_ ? session_->min_version() : min_version_);
}

void ReceiverBatch::on_deadline() {
  if (std::exchange(pending_, false)) {
    const ErrorCode code = absent_.ok() ? ErrorCode::kDeadlineExceeded : absent_.code();
    end_operation(
        failed(code, "{}, and no sending job is attached{}{}", waited(), absent_.ok() ? "" : ": ", absent_.message()));
  } else if (session_ && session_->waiting()) {
    session_->end_wait(failed(ErrorCode::kDeadlineExceeded, "{}: missing {}", waited(), session_->missing()));
  } else if (session_) {
    session_->fail_recv(session_->stalled());
  }
}

bool ReceiverBatch::cancel_operation() {
  const bool waits = pending_ || (session_ && session_->waiting());
  if (!waits) return false;
  const Status why = failed(ErrorCode::kCancelled, "{}: the recv of {} was cancelled", describe(), identity().name());
  if (std::exchange(pending_, false))
    end_operation(why);
  else
    session_->end_wait(why);
  return true;
}

Progress ReceiverBatch::sample_sessions() const {
  return session_ ? session_->sample() : Progress{};
}

}  // namespace tessera::bus
