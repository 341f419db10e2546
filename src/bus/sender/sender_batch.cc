#include "bus/sender/sender_batch.h"

#include <algorithm>

#include "base/fail.h"
#include "base/log.h"
#include "base/mutex.h"

namespace tessera::bus {
namespace {

constexpr Duration kPauseOfWatching = seconds(1);   // for other jobs, after the store has failed
constexpr Duration kWithdrawTimeout = seconds(10);  // of receivers that are about to choose

}  // namespace

// --- attaching -----------------------------------------------------------------------------------

void SenderBatch::open(const PairView& view, const CallLimits& limits) {
  if (staged()) slots_.assign(static_cast<size_t>(setup_.options.snapshots), {});
  BatchImpl::open(view, limits);
  watch_jobs();
  figures_.count_from_now();
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

// On the meeting's thread.
void SenderBatch::watch_jobs_again() {
  try {
    watch_jobs();
  } catch (const Error& error) {
    const LogScope scope = log_scope();
    log_event(LogLevel::warn, "jobs.unwatched", {},
              "new receiving jobs are not noticed until the store answers: {}"_message, error.what());
    setup_.agent->run_on_loop([&] {
      loop().add_timer_after(kPauseOfWatching, [weak = weak_from_this()] {
        if (const auto self = std::static_pointer_cast<SenderBatch>(weak.lock())) self->meet_also({});
      });
    });
  }
}

void SenderBatch::meet_also(const std::string& job) {
  if (closed_) return;
  if (job.empty()) return meetings_.front()->do_in_background([this] { watch_jobs_again(); });
  if (meeting_with(job) != nullptr) return;
  if (setup_.rendezvous->is_named(setup_.pair, job)) return;  // it is another pair's of this process
  const auto let_go = [weak = weak_from_this(), job] {
    if (const auto self = std::static_pointer_cast<SenderBatch>(weak.lock())) self->let_go(job);
  };
  if (!setup_.agent->claim_batch_of(setup_.pair, setup_.id, job, let_go)) return;  // another batch feeds it
  const LogScope scope = log_scope();
  log_event(LogLevel::info, "job.joined", {{"with", job}}, "it comes to receive, too");
  add_meeting({.name = setup_.pair, .peer_job = job, .own = {}, .peer = {}, .revision = 0}, true).meet_in_background();
}

void SenderBatch::let_go(const std::string& job) {
  std::unique_ptr<Meeting> meeting;
  const auto end_session = [&] {
    if (const auto it = sessions_.find(job); it != sessions_.end()) it->second->renew();
  };
  setup_.agent->run_on_loop([&] {
    const auto it = std::ranges::find(meetings_, job, [](const auto& each) { return each->job(); });
    if (it == meetings_.end()) return;
    meeting = std::move(*it);
    meetings_.erase(it);
    end_session();
  });
  if (!meeting) return;
  meeting->stop();
  setup_.agent->run_on_loop(end_session);  // one that it has made meanwhile
}

// A job that comes again is seen as any other: jobs of ever new names leave nothing behind.
void SenderBatch::on_parted(const std::string& job) {
  if (closed_) return;
  const auto it = std::ranges::find(meetings_, job, [](const auto& meeting) { return meeting->job(); });
  parted_.push_back(std::move(*it));
  meetings_.erase(it);
  known_.erase(job);
  setup_.agent->release_batch(setup_.pair, setup_.id, job);
  const LogScope scope = log_scope();
  log_event(LogLevel::info, "job.left", {{"with", job}});
  meetings_.front()->do_in_background([this] {
    stop_parted();
    watch_jobs_again();  // it may have come again meanwhile
  });
}

void SenderBatch::stop_parted() {
  std::vector<std::unique_ptr<Meeting>> parted;
  setup_.agent->run_on_loop([&] { parted.swap(parted_); });
  for (const auto& meeting : parted) meeting->stop();
}

std::shared_ptr<Session> SenderBatch::make_session(const PairView& view, Agreement agreement) {
  return std::make_shared<SenderSession>(session_setup(view, std::move(agreement)), *this);
}

// Not what is being sent: an own rank that comes back now is yet to send that, too.
BatchOffer SenderBatch::own_offer() const {
  BatchOffer offer = BatchImpl::own_offer();
  offer.newest = std::max(offer.version, numbers_.tried());
  return offer;
}

void SenderBatch::on_met(std::shared_ptr<Session> session) {
  const std::string& job = session->peer_job();
  const Agreement& agreement = session->setup().agreement;
  if (numbers_.meet(agreement.newest_version)) version_ = std::max(version_.load(), agreement.sent_version);
  if (!staged() && outdated(*session)) session->renew();
  if (closed_ || session->broken()) {
    note_absence(static_cast<const SenderSession&>(*session));
    return retire(std::move(session));
  }
  known_[job] = {.version = agreement.floor, .world = static_cast<int>(session->setup().view.peer.size())};
  unreported_ = {};
  const auto made = std::static_pointer_cast<SenderSession>(session);
  const auto whole = [](const auto& entry) { return !entry.second->broken(); };
  if (!several() && std::ranges::any_of(sessions_, whole)) newcomers_.insert(made.get());
  sessions_[job] = made;
  made->adopted();
  made->passed(staged() ? std::max(version_.load(), offering_) : version_.load());
  RankShare share;
  for (const auto& [name, other] : sessions_) share += other->share();
  count_session(*session, share);
  if (staged()) {
    const int64_t newest = slots_[newest_slot_].version;
    if (newest != 0 && !made->must_prepare()) made->offer_slot(newest, newest_slot_);
  } else if (offering_ != 0 && ending_.ok() && joining_ == 0) {
    made->offer(offering_);
  }
  count_decision();
}

void SenderBatch::on_sender_retired(SenderSession& session) {
  const std::string& job = session.peer_job();
  note_absence(session);
  // Later: whoever is at it may be going through the sessions.
  newcomers_.erase(&session);
  copying_.prepared.erase(&session);
  loop().post([self = shared_from_this(), this, job, over = sessions_.at(job)] {
    sessions_.erase(job);
    retire(over);
  });
}

void SenderBatch::close_sessions() {
  for (auto& [job, session] : std::exchange(sessions_, {})) session->close(parting_from(*session));
  count_decision();
}

void SenderBatch::renew_sessions() {
  for (const auto& [job, session] : sessions_) session->renew();
}

std::vector<const Session*> SenderBatch::sessions() const {
  std::vector<const Session*> all;
  for (const auto& [job, session] : sessions_) all.push_back(session.get());
  return all;
}

BatchReport SenderBatch::report() const {
  BatchReport report = BatchImpl::report();
  report.newest = numbers_.newest();
  return report;
}

std::vector<std::string> SenderBatch::waits_for() const {
  std::vector<std::string> texts;
  for (const auto& [job, session] : sessions_)
    if (session->offering()) texts.push_back(session->awaited());
  if (staged() && !copying_.target)
    texts.push_back(fmt::format("one of {} snapshots that nobody reads"_message, slots_.size()));
  if (!staged() && texts.empty())
    for (const auto& meeting : meetings_) texts.push_back(fmt::format("job {} to register", meeting->job()));
  return texts;
}

void SenderBatch::check_peers() {
  if (staged() && copying_.target && copying_.preparing.empty()) return;  // the copy is on its way
  for (const auto& [job, session] : sessions_) session->check_peers();
}

// --- offering ------------------------------------------------------------------------------------

std::shared_ptr<OperationClient> SenderBatch::send(std::optional<int64_t> version, Timeout timeout) {
  std::shared_ptr<Operation> operation;
  setup_.agent->run_on_loop([&] {
    const int64_t next = numbers_.of(version);
    require_version(next);
    if (next <= version_.load())
      fail(ErrorCode::kInvalidArgument, "{}: version {} is not newer than {}, which {} has sent already"_message,
           describe(), next, version_.load(), identity().name());
    const auto whole = [](const auto& entry) { return !entry.second->broken(); };
    if (!closed_ && !staged() && std::ranges::none_of(sessions_, whole))
      std::exchange(unreported_, {}).throw_if_error();
    operation = begin_operation("send", timeout);
    operation->set_version(next);
    offering_ = next;
    numbers_.begin(next, version.has_value());
    joining_ = 0;
    ending_ = {};
    begun_ = false;
    outcome_ = {};
    if (staged()) return begin_snapshot();
    observe_offer(next);
    enter("wait for receivers");
    for (const auto& [job, session] : sessions_)
      if (!session->broken()) session->offer(next);
  });
  return operation;
}

void SenderBatch::count_decision() {
  {
    const MutexLock lock(mutex_);
    ++decisions_;
  }
  changed_.notify_all();
}

void SenderBatch::on_begun(int64_t version) {
  numbers_.begun();
  if (version == offering_) begun_ = true;
  for (Snapshot& slot : slots_)
    if (slot.version == version) slot.begun = true;
  count_decision();
}

bool SenderBatch::begun(int64_t version) const {
  const auto it = std::ranges::find(slots_, version, &Snapshot::version);
  return it != slots_.end() ? it->begun : version == offering_ && begun_;
}

void SenderBatch::on_taking(SenderSession& session) {
  if (session.begun(offering_)) newcomers_.erase(&session);
  if (!operation_ || present_.data_start != TimePoint{}) return;
  present_.data_start = Clock::steady().now();
  enter("transfer");
}

void SenderBatch::on_offer_over(SenderSession& session, const Status& status) {
  if (status.ok()) {
    session.sum_digests(figures_.sums());
    if (!outcome_.taken) figures_.keep_sums();
    if (!std::exchange(outcome_.taken, true) && several() && any_offering()) begin_grace();
  } else if ((session.renewed() && Session::is_renewal(status) && !session.begun(offering_)) ||
             (joining_ != 0 && !session.broken())) {
    // It is offered again: once they have met, or under the number that is joined.
  } else if (newcomers_.contains(&session)) {
    observe_late(session, status);
  } else if (status.code() == ErrorCode::kPeerLost) {
    outcome_.lost = status;
    reported_ = &session;
  } else if (outcome_.failure.ok()) {
    outcome_.failure = status;
  }
  if (!status.ok() && !session.renewed() && joining_ == 0)
    known_[session.peer_job()].missed =
        newcomers_.contains(&session) ? Status(ErrorCode::kDeadlineExceeded, status.message()) : status;
  check_ended();
}

bool SenderBatch::any_offering() const {
  return std::ranges::any_of(sessions_, [](const auto& entry) { return entry.second->offering(); });
}

// A job that was lost is no failure as long as another one has the version; of jobs that nobody waits for, nor is one
// that failed.
void SenderBatch::check_ended() {
  leave_newcomers();
  if (offering_ == 0 || any_offering()) return;
  const bool well = outcome_.taken && (several() || outcome_.failure.ok());
  const Status& why = !outcome_.failure.ok() ? outcome_.failure : !outcome_.lost.ok() ? outcome_.lost : ending_;
  if (joining_ != 0 && why.ok()) return offer_joined();
  const Status outcome = well ? Status() : why;
  if (outcome.ok() && !outcome_.taken) return;  // nobody is attached: somebody may come
  loop().cancel_timer(std::exchange(outcome_.grace, 0));
  numbers_.end();
  offering_ = 0;
  if (outcome.ok()) version_ = operation_->version();  // else it may be sent again
  end_operation(outcome);
}

void SenderBatch::fail_operation(const Status& status) {
  if (offering_ == 0 || !ending_.ok()) return;
  ending_ = status;
  if (!any_offering()) outcome_.failure = status;
  for (const auto& [job, session] : sessions_) session->fail_offer(status);
  if (staged())
    check_snapshot();
  else
    check_ended();
}

// --- in step with the other ranks of the job -------------------------------------------------------

void SenderBatch::on_ahead(int64_t version, bool over) {
  numbers_.hear(version, false);
  if (!over) return;
  // Later: whoever tells may be in the middle of an offer.
  loop().post([weak = weak_from_this(), version] {
    if (const auto self = std::static_pointer_cast<SenderBatch>(weak.lock())) self->fall_behind(version);
  });
}

// The memory may hold what belongs to an earlier call than the other ranks' is, unless this rank has just come. So it
// is not offered as theirs: the send fails, as it would in the end.
void SenderBatch::fall_behind(int64_t version) {
  if (closed_ || offering_ == 0 || version <= std::max(offering_, joining_) || numbers_.given() || !ending_.ok())
    return;
  const auto held = [&](const auto& entry) { return entry.second->held(offering_); };
  if (outcome_.taken || begun(offering_) || std::ranges::any_of(sessions_, held) || !any_offering()) return;
  const Status why =
      failed(ErrorCode::kDeadlineExceeded, "it came too late: other ranks of job {} offer version {} by now"_message,
             identity().job, version);
  if (numbers_.follows() && !staged()) return join(version, why);
  numbers_.hear(version, true);
  fail_operation(why);
}

void SenderBatch::join(int64_t version, const Status& why) {
  if (std::exchange(joining_, version) != 0) return;
  observe_withdrawal(offering_);
  std::vector<SenderSession*> offering;
  for (const auto& [job, session] : sessions_)
    if (session->offering()) offering.push_back(session.get());
  for (SenderSession* session : offering) session->fail_offer(why);
}

void SenderBatch::offer_joined() {
  offering_ = std::exchange(joining_, 0);
  numbers_.begin(offering_, false);
  operation_->set_version(offering_);
  present_.data_start = {};
  observe_offer(offering_);
  enter("wait for receivers");
  for (const auto& [job, session] : sessions_)
    if (!session->broken()) session->offer(offering_);
}

// --- taking back ---------------------------------------------------------------------------------

SenderBatch::Withdrawal SenderBatch::try_withdraw(int64_t version) {
  const auto slot = std::ranges::find(slots_, version, &Snapshot::version);
  if (version == 0 || (version != offering_ && slot == slots_.end())) return Withdrawal::kTooLate;
  if (begun(version)) return Withdrawal::kTooLate;
  for (const auto& [job, session] : sessions_)
    if (session->undecided(version)) return Withdrawal::kUndecided;
  if (version == offering_) {
    if (staged() && copying_.target) return Withdrawal::kUndecided;  // until it is copied
    fail_operation(failed(ErrorCode::kCancelled, "version {} was withdrawn"_message, version));
  } else {
    *slot = {};
    for (const auto& [job, session] : sessions_) session->clear(static_cast<uint32_t>(slot - slots_.begin()));
  }
  return Withdrawal::kDone;
}

void SenderBatch::observe_offer(int64_t version) {
  metrics_.versions_offered.add();
  const LogScope scope = log_scope();
  log_event(LogLevel::debug, "version.offered", {{"version", version}});
}

void SenderBatch::observe_withdrawal(int64_t version) {
  metrics_.versions_withdrawn.add();
  const LogScope scope = log_scope();
  log_event(LogLevel::debug, "version.withdrawn", {{"version", version}});
}

bool SenderBatch::withdraw(int64_t version) {
  const Deadline deadline = Deadline::after(kWithdrawTimeout);
  while (true) {
    uint64_t seen = 0;
    {
      const MutexLock lock(mutex_);
      seen = decisions_;
    }
    Withdrawal outcome = Withdrawal::kTooLate;
    setup_.agent->run_on_loop([&] { outcome = try_withdraw(version); });
    if (outcome == Withdrawal::kDone) observe_withdrawal(version);
    if (outcome != Withdrawal::kUndecided) return outcome == Withdrawal::kDone;
    const MutexLock lock(mutex_);
    if (!changed_.wait_until(mutex_, {}, deadline, [&]() REQUIRES(mutex_) { return decisions_ != seen; })) return false;
  }
}

// The sessions bound how long that takes.
void SenderBatch::await_readers() {
  if (!staged()) return;
  const Status why = failed(ErrorCode::kPeerLost, "{} has closed the batch"_message, identity().name());
  setup_.agent->run_on_loop([&] {
    for (const auto& [job, session] : sessions_) session->leave(why);
  });
  while (true) {
    uint64_t seen = 0;
    {
      const MutexLock lock(mutex_);
      seen = decisions_;
    }
    bool idle = false;
    setup_.agent->run_on_loop(
        [&] { idle = std::ranges::all_of(sessions_, [](const auto& entry) { return entry.second->idle(); }); });
    if (idle) return;
    {
      const MutexLock lock(mutex_);
      const auto changed = [&]() REQUIRES(mutex_) { return decisions_ != seen; };
      if (changed_.wait_until(mutex_, {}, Deadline::after(kStopPeriod), changed)) continue;
    }
    setup_.agent->run_on_loop([this] { setup_.runs->check(); });
  }
}

void SenderBatch::on_deadline() {
  if (offering_ == 0) return;
  if (staged() && copying_.target && copying_.preparing.empty()) return;  // the copy is on its way
  if (staged() && !copying_.target)
    return fail_operation(failed(
        ErrorCode::kDeadlineExceeded,
        "{}: {} waited {:.1f} s to send version {}: all {} snapshots are being read: allow more"_message, describe(),
        identity().name(), to_seconds(Clock::steady().now() - present_.start), offering_, slots_.size()));
  if (!any_offering()) return fail_operation(nobody_attached());
  // Jobs that are all at it, and were heard of lately, go on.
  const TimePoint now = Clock::steady().now();
  TimePoint until = TimePoint::max();
  for (const auto& [job, session] : sessions_) {
    if (!session->offering()) continue;
    if (session->flows_since(now - setup_.stall)) {
      until = std::min(until, session->last_activity() + setup_.stall);
      continue;
    }
    ending_ = failed(ErrorCode::kDeadlineExceeded, "waited {:.1f} s: {}"_message, to_seconds(now - present_.start),
                     session->who_has_not_taken());
    session->fail_offer(ending_);
  }
  if (offering_ != 0 && until != TimePoint::max()) set_deadline(Deadline::at(until));
}

bool SenderBatch::cancel_operation() {
  if (offering_ == 0 || !ending_.ok() || outcome_.taken) return false;
  if (staged() && copying_.target) return false;
  const auto begun = [&](const auto& entry) { return entry.second->begun(offering_); };
  if (std::ranges::any_of(sessions_, begun)) return false;
  observe_withdrawal(offering_);
  fail_operation(failed(ErrorCode::kCancelled, "the send was cancelled"_message));
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
