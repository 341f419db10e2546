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
  const auto attached = std::static_pointer_cast<SenderSession>(session);
  if (closed_ || session->broken()) {
    note_absence(*attached);
    return retire(std::move(session));
  }
  known_[job] = {.version = agreement.floor, .world = static_cast<int>(session->setup().view.peer.size())};
  const bool first = !any_whole();
  sessions_[job] = attached;
  attached->adopted();
  RankShare share;
  for (const auto& [name, other] : sessions_) share += other->share();
  count_session(*session, share);
  on_attached(*attached, first);
  count_decision();
}

void SenderBatch::on_sender_retired(SenderSession& session) {
  const std::string& job = session.peer_job();
  note_absence(session);
  on_dropped(session);
  // Later: whoever is at it may be going through the sessions.
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
    if (session->offering()) texts.push_back(session->latest().awaited());
  return texts;
}

void SenderBatch::check_peers() {
  for (const auto& [job, session] : sessions_) session->check_peers();
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

bool SenderBatch::any_whole() const {
  return std::ranges::any_of(sessions_, [](const auto& entry) { return !entry.second->broken(); });
}

bool SenderBatch::any_offering() const {
  return std::ranges::any_of(sessions_, [](const auto& entry) { return entry.second->offering(); });
}

bool SenderBatch::any_undecided(int64_t version) const {
  return std::ranges::any_of(sessions_, [&](const auto& entry) { return entry.second->undecided(version); });
}

// --- what is known of the jobs -------------------------------------------------------------------

void SenderBatch::note_absence(const SenderSession& session) {
  if (!session.renewed()) known_[session.peer_job()].absence = session.broken_status();
}

void SenderBatch::on_not_met(const std::string& job, const Status& why) {
  known_[job].absence = why;
}

void SenderBatch::on_taken(const SenderSession& session, int64_t version) {
  Known& known = known_[session.peer_job()];
  known.version = std::max(known.version, version);
  known.missed = {};
  count_decision();
}

void SenderBatch::describe_peer(BatchPeer& peer) const {
  const auto it = known_.find(peer.job);
  if (it == known_.end()) return;
  const Known& known = it->second;
  peer.version = known.version;
  peer.world = known.world;
  if (!peer.attached && peer.error.ok()) peer.error = known.absence;
  if (peer.error.ok()) peer.error = known.missed;
}

// "job engine0; job engine1: engine1/0 has died"; those that have not taken `version`, or are not attached.
std::string SenderBatch::who_is_missing(int64_t version) const {
  std::string text;
  for (const auto& meeting : meetings_) {
    BatchPeer peer{.job = meeting->job(), .attached = attached(meeting->job())};
    describe_peer(peer);
    if (version != 0 ? peer.version >= version : peer.attached) continue;
    text += fmt::format("{}job {}{}{}", text.empty() ? "" : "; ", peer.job, peer.error.ok() ? "" : ": ",
                        peer.error.message());
  }
  return text;
}

bool SenderBatch::attached(const std::string& job) const {
  const auto it = sessions_.find(job);
  return it != sessions_.end() && !it->second->broken();
}

void SenderBatch::wait_peers(int jobs, int64_t version, Timeout timeout) {
  process_.require(identity().name());
  const Deadline deadline = Deadline::after(timeout);
  const std::stop_token stop = setup_.interruption->token();
  while (true) {
    const uint64_t seen = decisions();
    std::string missing;
    int64_t reached = 0;
    setup_.agent->run_on_loop([&] {
      if (closed_) fail(ErrorCode::kCancelled, "{}: {} has closed it"_message, describe(), identity().name());
      reached = version != 0
                    ? std::ranges::count_if(known_, [&](const auto& entry) { return entry.second.version >= version; })
                    : std::ranges::count_if(sessions_, [&](const auto& entry) { return attached(entry.first); });
      missing = who_is_missing(version);
    });
    if (reached >= jobs) return;
    {
      const MutexLock lock(mutex_);
      const auto changed = [&]() REQUIRES(mutex_) { return decisions_ != seen || ended_; };
      if (changed_.wait_until(mutex_, stop, deadline, changed)) continue;
    }
    const std::string what =
        version != 0 ? fmt::format("{} jobs to take version {}", jobs, version) : fmt::format("{} jobs", jobs);
    if (stop.stop_requested())
      fail(ErrorCode::kCancelled, "{}: the wait of {} for {} was interrupted; missing: {}"_message, describe(),
           identity().name(), what, missing);
    fail(ErrorCode::kDeadlineExceeded, "{}: {} waited {:.1f} s for {}: {} so far; missing: {}"_message, describe(),
         identity().name(), to_seconds(timeout), what, reached, missing);
  }
}

Untaken SenderBatch::await_takers(Timeout linger) {
  const Deadline deadline = Deadline::after(linger);
  const std::stop_token stop = setup_.interruption->token();
  Duration period = kSilence;
  while (true) {
    const uint64_t seen = decisions();
    Untaken left;
    setup_.agent->run_on_loop([&] {
      closing_ = true;
      if (!closed_) left = untaken();
    });
    if (left.jobs.empty()) return {};
    {
      const MutexLock lock(mutex_);
      const auto changed = [&]() REQUIRES(mutex_) { return decisions_ != seen || ended_; };
      if (changed_.wait_until(mutex_, stop, Deadline::after(std::min(deadline.left(), period)), changed)) continue;
    }
    if (stop.stop_requested() || deadline.passed()) {
      observe_untaken(left, linger, stop.stop_requested());
      return left;
    }
    period = kStopPeriod;
    setup_.agent->run_on_loop([&] {
      for (const std::string& job : left.jobs)
        if (const auto it = sessions_.find(job); it != sessions_.end()) it->second->check_receivers();
    });
  }
}

void SenderBatch::observe_untaken(const Untaken& untaken, Timeout linger, bool interrupted) {
  const LogScope scope = log_scope();
  for (const std::string& job : untaken.jobs)
    log_event(linger == Timeout(0) ? LogLevel::info : LogLevel::warn, "version.dropped",
              {{"with", job}, {"version", untaken.version}},
              "{}: {} closes it, and job {} has not taken version {}{}"_message, describe(), identity().name(), job,
              untaken.version,
              interrupted            ? ": the wait was interrupted"
              : linger == Timeout(0) ? std::string()
                                     : fmt::format(" within {:.1f} s"_message, to_seconds(linger)));
}

uint64_t SenderBatch::decisions() const {
  const MutexLock lock(mutex_);
  return decisions_;
}

bool SenderBatch::await_decision(uint64_t seen, Deadline deadline) {
  const MutexLock lock(mutex_);
  return changed_.wait_until(mutex_, {}, deadline, [&]() REQUIRES(mutex_) { return decisions_ != seen; });
}

void SenderBatch::count_decision() {
  {
    const MutexLock lock(mutex_);
    ++decisions_;
  }
  changed_.notify_all();
}

// --- sending -------------------------------------------------------------------------------------

std::shared_ptr<OperationClient> SenderBatch::send(std::optional<int64_t> version, Timeout timeout) {
  std::shared_ptr<Operation> operation;
  setup_.agent->run_on_loop([&] {
    const int64_t next = numbers_.of(version);
    require_version(next);
    if (next <= version_.load())
      fail(ErrorCode::kInvalidArgument, "{}: version {} is not newer than {}, which {} has sent already"_message,
           describe(), next, version_.load(), identity().name());
    if (!closed_) check_before_send();
    operation = begin_operation("send", timeout);
    operation->set_version(next);
    offering_ = next;
    numbers_.begin(next, version.has_value());
    ending_ = {};
    failure_ = {};
    begin_send();
  });
  return operation;
}

void SenderBatch::on_begun(int64_t version) {
  numbers_.begun();
  note_begun(version);
  count_decision();
}

void SenderBatch::fail_operation(const Status& status) {
  if (offering_ == 0 || !ending_.ok()) return;
  ending_ = status;
  if (!any_offering()) failure_ = status;
  for (const auto& [job, session] : sessions_) session->fail_offer(status);
  check_ended();
}

void SenderBatch::on_terms_ahead(int64_t version) {
  numbers_.hear(version, false);
  // Later: whoever tells may be in the middle of an offer.
  loop().post([weak = weak_from_this(), version] {
    if (const auto self = std::static_pointer_cast<SenderBatch>(weak.lock())) self->fall_behind(version);
  });
}

bool SenderBatch::may_fall_behind(int64_t version) const {
  return !closed_ && offering_ != 0 && version > offering_ && !numbers_.given() && ending_.ok() && any_offering();
}

Status SenderBatch::came_too_late(int64_t version) const {
  return failed(ErrorCode::kDeadlineExceeded, "it came too late: other ranks of job {} offer version {} by now"_message,
                identity().job, version);
}

bool SenderBatch::withdraw(int64_t version) {
  const Deadline deadline = Deadline::after(kWithdrawTimeout);
  while (true) {
    const uint64_t seen = decisions();
    Withdrawal outcome = Withdrawal::kTooLate;
    setup_.agent->run_on_loop([&] { outcome = try_withdraw(version); });
    if (outcome == Withdrawal::kDone) observe_withdrawal(version);
    if (outcome != Withdrawal::kUndecided) return outcome == Withdrawal::kDone;
    if (!await_decision(seen, deadline)) return false;
  }
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

void SenderBatch::observe_late(const SenderSession& session, const Status& why) {
  const LogScope scope = log_scope();
  log_event(LogLevel::info, "job.late", {{"with", session.peer_job()}, {"version", offering_}}, "{}", why.message());
}

}  // namespace tessera::bus
