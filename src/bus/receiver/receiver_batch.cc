#include "bus/receiver/receiver_batch.h"

#include <algorithm>

#include "base/fail.h"
#include "base/fail_point.h"
#include "base/log.h"
#include "base/mutex.h"

namespace tessera::bus {

// --- attaching -----------------------------------------------------------------------------------

std::shared_ptr<Session> ReceiverBatch::make_session(const PairView& view, Agreement agreement) {
  return std::make_shared<ReceiverSession>(session_setup(view, std::move(agreement)), *this);
}

void ReceiverBatch::on_met(std::shared_ptr<Session> session) {
  const auto made = std::static_pointer_cast<ReceiverSession>(session);
  if (closed_ || (made->broken() && made->idle())) {
    if (!made->renewed()) {
      absent_ = made->broken_status();
      const MutexLock lock(mutex_);
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
  count_session(*session, session->share());
  {
    const MutexLock lock(mutex_);
    unreported_ = false;
    lost_session_ = nullptr;
  }
  if (pending_) wait_for_version();
}

void ReceiverBatch::on_not_met(const std::string&, const Status& why) {
  absent_ = why;
}

void ReceiverBatch::on_session_retired() {
  if (!session_->renewed()) absent_ = session_->broken_status();
  // Later, because one of the session's functions is the caller.
  loop().post([self = shared_from_this(), this, over = session_] {
    if (session_ == over) session_ = nullptr;
    retire(over);
  });
}

void ReceiverBatch::close_sessions() {
  if (const auto session = std::exchange(session_, nullptr)) session->close(parting_from(*session));
}

std::vector<const Session*> ReceiverBatch::sessions() const {
  return session_ ? std::vector<const Session*>{session_.get()} : std::vector<const Session*>{};
}

std::vector<std::string> ReceiverBatch::waits_for() const {
  if (pending_) return {fmt::format("job {} to register", meetings_.front()->job())};
  std::string awaited = session_ ? session_->awaited() : std::string();
  if (awaited.empty()) return {};
  return {std::move(awaited)};
}

BatchReport ReceiverBatch::report() const {
  BatchReport report = BatchImpl::report();
  const MutexLock lock(mutex_);
  for (const VersionWait& wait : version_waits_)
    report.waits.push_back({.text = fmt::format("version {} to be on offer"_message, wait.version),
                            .microseconds = microseconds_since(wait.since)});
  return report;
}

void ReceiverBatch::check_peers() {
  if (session_) session_->check_peers();
}

// --- versions ------------------------------------------------------------------------------------

void ReceiverBatch::on_newest(int64_t version) {
  {
    const MutexLock lock(mutex_);
    newest_ = version;
  }
  changed_.notify_all();
}

void ReceiverBatch::on_unavailable(const Status& why) {
  {
    const MutexLock lock(mutex_);
    newest_ = 0;
    if (!Session::is_renewal(why) && std::exchange(lost_session_, session_.get()) != session_.get()) {
      ++losses_;
      lost_ = why;
      unreported_ = true;
    }
  }
  changed_.notify_all();
}

int64_t ReceiverBatch::wait_version(int64_t version, Timeout timeout) {
  process_.require(identity().name());
  require_version(version);
  return await_version(version, timeout, setup_.interruption->token());
}

int64_t ReceiverBatch::await_version(int64_t version, Timeout timeout, const std::stop_token& stop) {
  const MutexLock lock(mutex_);
  const uint64_t losses = unreported_ ? losses_ - 1 : losses_;
  const auto ready = [&]() REQUIRES(mutex_) { return newest_.load() >= version || losses_ != losses || ended_; };
  const VersionWait wait{.version = version, .since = Clock::steady().now()};
  version_waits_.push_back(wait);
  const auto forget = [&]() REQUIRES(mutex_) { version_waits_.erase(std::ranges::find(version_waits_, wait)); };
  const Deadline deadline = Deadline::after(timeout);
  Duration period = kSilence;
  const auto next_look = [&] { return Deadline::after(std::min(deadline.left(), period)); };
  while (!changed_.wait_until(mutex_, stop, next_look(), ready)) {
    if (!stop.stop_requested() && !deadline.passed()) {
      period = kStopPeriod;
      const MutexUnlock unlocked(mutex_);
      setup_.agent->run_on_loop([this] { check_peers(); });  // the loop outlives the batches
      continue;
    }
    forget();
    if (stop.stop_requested())
      fail(ErrorCode::kCancelled, "{}: the wait of {} for version {} was interrupted"_message, describe(),
           identity().name(), version);
    fail(ErrorCode::kDeadlineExceeded, "{}: {} waited {:.1f} s for version {}; the newest on offer is {}"_message,
         describe(), identity().name(), to_seconds(timeout), version, newest_.load());
  }
  forget();
  if (ended_) fail(ErrorCode::kCancelled, "{}: {} has closed it"_message, describe(), identity().name());
  if (newest_.load() < version) {
    unreported_ = false;
    lost_.throw_if_error();
  }
  return newest_.load();
}

std::shared_ptr<OperationClient> ReceiverBatch::recv(std::optional<int64_t> min_version, Timeout timeout) {
  return begin("recv", min_version, timeout);
}

std::shared_ptr<OperationClient> ReceiverBatch::stage(std::optional<int64_t> min_version, Timeout timeout) {
  if (!staged())
    fail(ErrorCode::kInvalidArgument, "{}: {} accepts it in place: stage() needs Mode::kStaged"_message, describe(),
         identity().name());
  return begin("stage", min_version, timeout);
}

std::shared_ptr<Operation> ReceiverBatch::begin(const char* what, std::optional<int64_t> min_version, Timeout timeout) {
  require_version(min_version.value_or(0));
  settle(timeout);
  std::shared_ptr<Operation> operation;
  setup_.agent->run_on_loop([&] {
    const bool usable = session_ && session_->usable();
    if (!usable && !closed_) {
      const MutexLock lock(mutex_);
      if (std::exchange(unreported_, false)) lost_.throw_if_error();
    }
    const int64_t ready = staged_version_.load();
    const bool stages = std::string_view(what) == "stage";
    if (ready != 0 && stages)
      fail(ErrorCode::kInvalidArgument, "{}: version {} is staged at {}: commit() it first"_message, describe(), ready,
           identity().name());
    operation = begin_operation(what, timeout);
    min_version_ = min_version.value_or(0);
    only_stages_ = stages;
    waits_then_ = ready < min_version_;
    if (ready == 0) return wait_for_version();
    operation_->set_version(ready);
    begin_commit();
  });
  return operation;
}

void ReceiverBatch::wait_for_version() {
  waits_then_ = false;
  pending_ = !session_ || !session_->usable();
  enter(pending_ ? "wait for a session" : "wait for a version");
  if (!pending_) session_->recv(min_version_);
}

void ReceiverBatch::on_chosen(int64_t version) {
  operation_->set_version(version);
  enter("pull");
  present_.data_start = Clock::steady().now();
  set_deadline(Deadline::after(setup_.stall));
}

void ReceiverBatch::on_flow() {
  set_deadline(Deadline::after(setup_.stall));
}

void ReceiverBatch::on_wait_over(const Status& status) {
  if (Session::is_renewal(status) && session_->renewed()) return wait_for_version();
  end_with(status);
}

void ReceiverBatch::on_version_over(const TakenVersion& version, const Status& status) {
  if (!status.ok()) return end_with(status);
  session_->sum_digests(figures_.sums());
  figures_.keep_sums();
  {
    const MutexLock lock(mutex_);
    newest_ = session_->complete_version();
  }
  if (!version.registered()) {
    staged_version_ = version.version();
    return only_stages_ ? end_operation({}) : begin_commit();
  }
  version_ = version.version();
  torn_ = false;
  end_operation({});
}

void ReceiverBatch::end_with(const Status& failure) {
  {
    const MutexLock lock(mutex_);
    unreported_ = false;
  }
  end_operation(failure);
}

// --- staged --------------------------------------------------------------------------------------

bool ReceiverBatch::commits_at_once() const {
  return !only_stages_ && !outdated(*session_);
}

void ReceiverBatch::observe_decision(int64_t version, const Status& status) {
  const LogScope scope = log_scope();
  if (status.ok()) {
    metrics_.versions_committed.add();
    log_event(LogLevel::debug, "version.committed", {{"version", version}});
  } else if (undecided()) {
    metrics_.versions_undecided.add();
    log_event(LogLevel::warn, "version.undecided", {{"version", version}}, "{}", status.message());
  } else {
    metrics_.versions_aborted.add();
    log_event(LogLevel::debug, "version.aborted", {{"version", version}}, "{}", status.message());
  }
}

void ReceiverBatch::on_committing() {
  enter(kCommitName);
  torn_ = true;
}

void ReceiverBatch::begin_commit() {
  on_committing();
  snapshots_->copy(0);
}

void ReceiverBatch::on_copied() {
  fail_point("staged: copied");
  const Status status = snapshots_->status();
  if (status.ok()) {
    version_ = staged_version_.exchange(0);
    torn_ = false;
  }
  if (status.ok() && waits_then_) return wait_for_version();
  end_operation(status);
}

int64_t ReceiverBatch::commit() {
  process_.require(identity().name());
  settle();
  std::shared_ptr<Operation> operation;
  setup_.agent->run_on_loop([&] {
    const int64_t ready = staged_version_.load();
    if (ready == 0)
      fail(ErrorCode::kInvalidArgument, "{}: nothing is staged at {}: stage() comes first"_message, describe(),
           identity().name());
    operation = begin_operation(kCommitName, std::chrono::hours(1));
    operation_->set_version(ready);
    waits_then_ = false;
    begin_commit();
  });
  return operation->wait();
}

bool ReceiverBatch::undecided() const {
  const MutexLock lock(mutex_);
  return undecided_.has_value();
}

// Called by the first that needs it: a call, or the meeting, so that no rank registers a version that it may not have.
void ReceiverBatch::settle(Duration timeout) const {
  std::optional<Undecided> open;
  {
    const MutexLock lock(mutex_);
    open = undecided_;
  }
  if (!open) return;
  bool commit = false;
  try {
    commit = setup_.rendezvous->decide(open->key, false, {}, std::min(timeout, Rendezvous::kDecisionTimeout));
  } catch (const Error& error) {
    fail(ErrorCode::kUnavailable, "{}: {} does not know whether version {} was taken, and holds {}: {}"_message,
         describe(), identity().name(), open->version, version_.load(), error.what());
  }
  {
    const MutexLock lock(mutex_);
    if (!undecided_ || undecided_->key != open->key) return;
    undecided_.reset();
    if (commit) staged_version_ = open->version;
  }
  setup_.agent->run_on_loop([&] {  // the version may still be on offer
    if (const auto session = open->session.lock(); commit && session) session->hold(open->version);
  });
  const LogScope scope = log_scope();
  log_event(LogLevel::info, "version.settled", {{"version", open->version}}, "it was {}",
            commit ? "taken" : "given up");
}

BatchOffer ReceiverBatch::own_offer() const {
  settle();
  BatchOffer offer = BatchImpl::own_offer();
  offer.newest = offer.version = std::max(offer.version, staged_version_.load());
  return offer;
}

std::string ReceiverBatch::decision_key(uint32_t epoch) const {
  const SessionSetup& session = session_->setup();
  return setup_.rendezvous->decision_key(session.view, session.batch, session.agreement.session, epoch);
}

void ReceiverBatch::ask_store(int64_t version, uint32_t epoch, bool commit) {
  const std::string key = decision_key(epoch);
  const std::string before = commit ? std::exchange(last_decision_, key) : std::string();
  meetings_.front()->do_in_background([this, session = session_, key, before, version, epoch, commit] {
    fail_point(commit ? "staged: before the store" : "staged: before the question");
    auto verdict = Decided::Verdict::kAskStore;
    Status reason;
    try {
      verdict = setup_.rendezvous->decide(key, commit, before, Rendezvous::kDecisionTimeout) ? Decided::Verdict::kCommit
                                                                                             : Decided::Verdict::kAbort;
      if (verdict == Decided::Verdict::kAbort)
        reason = failed(ErrorCode::kPeerLost,
                        "a rank that had lost {}, or had waited too long for it, gave the version up"_message,
                        rank_name(identity().job, 0));
    } catch (const Error& error) {
      reason = failed(ErrorCode::kUnavailable, "undecided: {}"_message, error.what());
      const MutexLock lock(mutex_);
      undecided_ = Undecided{.version = version, .key = key, .session = session};
    }
    loop().post([session, epoch, verdict, reason] { session->decided(epoch, verdict, reason); });
  });
}

void ReceiverBatch::on_closed() {
  if (last_decision_.empty()) return;
  try {
    setup_.rendezvous->forget_decision(last_decision_);
  } catch (const Error& error) {
    log_event(LogLevel::info, "records.kept", {}, "{}: the decision on its last version stays in the store: {}",
              describe(), error.what());
  }
}

void ReceiverBatch::fail_operation(const Status& status) {
  if (std::exchange(pending_, false))
    end_operation(Status(status.code(), fmt::format("{}: {} while {} waited for a session"_message, describe(),
                                                    status.message(), identity().name())));
  else if (session_)
    session_->fail_recv(status);
}

std::string ReceiverBatch::waited() const {
  return fmt::format("{}: {} waited {:.1f} s for version {} or newer"_message, describe(), identity().name(),
                     to_seconds(Clock::steady().now() - present_.start),
                     session_ ? session_->min_version() : min_version_);
}

void ReceiverBatch::on_deadline() {
  if (std::exchange(pending_, false)) {
    const ErrorCode code = absent_.ok() ? ErrorCode::kDeadlineExceeded : absent_.code();
    end_operation(failed(code, "{}, and no sending job is attached{}{}"_message, waited(), absent_.ok() ? "" : ": ",
                         absent_.message()));
  } else if (session_ && session_->waiting()) {
    session_->end_wait(failed(ErrorCode::kDeadlineExceeded, "{}: missing {}"_message, waited(), session_->missing()));
  } else if (session_) {
    session_->expire();
  }
}

bool ReceiverBatch::cancel_operation() {
  const bool waits = pending_ || (session_ && session_->waiting());
  if (!waits) return false;
  const Status why =
      failed(ErrorCode::kCancelled, "{}: the recv of {} was cancelled"_message, describe(), identity().name());
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
