#include "bus/session/meeting.h"

#include <algorithm>
#include <utility>

#include "base/fail.h"
#include "base/log.h"
#include "base/metrics.h"
#include "base/thread.h"
#include "base/trace.h"

namespace tessera::bus {
namespace {

constexpr Duration kFirstPause = seconds(0.05);  // after a registration that failed
constexpr Duration kLongestPause = seconds(5);
constexpr Duration kAttachTimeout = seconds(60);  // in the background

}  // namespace

Meeting::Meeting(Agent& agent, Rendezvous& rendezvous, BatchExchange& exchange, MeetingOwner& owner, std::string batch,
                 PairView view, bool parts)
    : agent_(agent),
      rendezvous_(rendezvous),
      exchange_(exchange),
      owner_(owner),
      batch_(std::move(batch)),
      job_(view.peer_job),
      subject_(fmt::format("{}/{}", view.name, batch_)),
      parts_(parts),
      view_(std::move(view)) {}

Meeting::~Meeting() {
  TESSERA_CHECK(!thread_.joinable());
}

std::shared_ptr<Session> Meeting::meet_once(const CallLimits& limits) {
  Metrics& metrics = Metrics::process();
  const TimePoint start = Clock::steady().now();
  const TraceSpan span("register", {.subject = subject_});
  try {
    std::shared_ptr<Session> session = register_and_attach(limits);
    metrics.registrations(outcome_of({})).add();
    metrics.registration_seconds.observe(Clock::steady().now() - start);
    return session;
  } catch (...) {
    metrics.registrations(outcome_of(status_of_current_exception())).add();
    throw;
  }
}

// Retries until a session is attached that all ranks of both jobs have read alike.
std::shared_ptr<Session> Meeting::register_and_attach(const CallLimits& limits) {
  const Status renewed =
      failed(ErrorCode::kUnavailable, "newer registrations are there"_message);  // the peers try again as well
  exchange_.begin();
  Status broken;  // why the session before was given up
  while (true) {
    Agreement agreed;
    try {
      const TraceSpan span("exchange", {.subject = subject_});
      agreed = exchange_.exchange(view_, owner_.own_offer(), limits);
    } catch (const Error& error) {
      if (broken.ok() || error.code() != ErrorCode::kDeadlineExceeded) throw;
      throw Error(error.code(), fmt::format("{}; before that: {}"_message, error.what(), broken.message()));
    }
    std::shared_ptr<Session> session = owner_.make_session(view_, std::move(agreed));
    const Agreement& agreement = session->setup().agreement;
    const TraceSpan span("attach", {.subject = subject_});
    try {
      // The callbacks refer to the session itself: `session` is moved from when this returns, before they are waited
      // for.
      Session& attached = *session;
      const auto watch = exchange_.watch(
          view_, agreement, [&attached](const std::string& rank) { attached.supersede(rank); },
          [&attached](const Status& heard) { attached.give_up(heard); });
      CallLimits attaching = limits;
      if (limits.background) attaching.deadline = Deadline::after(kAttachTimeout);
      if (session->attach(attaching) == Session::Outcome::kAttached) return session;
    } catch (...) {
      Status status = status_of_current_exception();
      if (status.code() == ErrorCode::kCancelled && limits.background && !stop_.stop_requested())
        status = renewed;  // only this attempt was given up
      const bool gone = status.code() == ErrorCode::kPeerLost || status.code() == ErrorCode::kUnavailable;
      const bool late = status.code() == ErrorCode::kDeadlineExceeded;  // it may register again, and so do the others
      bool again = false;                                               // another rank registers again, or will
      const Status told = gone ? exchange_.given_up(view_, agreement) : Status();
      const std::string what = fmt::format("batch {} of pair {}", batch_, view_.name);
      if (!told.ok()) status = Status(told.code(), fmt::format("{}: {}", what, told.message()));
      agent_.run_on_loop([&] {
        again = session->renewed() && !limits.background;
        session->close(late ? renewed : status);
        session.reset();
      });
      if (!told.ok()) status.throw_if_error();
      if (!again) throw;
      broken = status;
    }
    agent_.run_on_loop([&] {
      if (!session) return;
      broken = session->broken_status();
      session->close(renewed);
      session.reset();
    });
    view_ = rendezvous_.rejoin(view_, limits);
  }
}

void Meeting::meet(const CallLimits& limits) {
  std::shared_ptr<Session> session = meet_once(limits);
  agent_.run_on_loop([&] { owner_.on_met(std::move(session)); });
}

void Meeting::wake() {
  if (stop_.stop_requested()) return;
  if (!thread_.joinable()) thread_ = start_thread("tessera-meet", [this] { work(); });
  changed_.notify_all();
}

void Meeting::meet_in_background() {
  const MutexLock lock(mutex_);
  wanted_ = true;
  wake();
}

void Meeting::do_in_background(std::function<void()> task) {
  const MutexLock lock(mutex_);
  if (stop_.stop_requested()) return;
  tasks_.push_back(std::move(task));
  round_.request_stop();
  wake();
}

void Meeting::stop() {
  std::thread thread;
  {
    const MutexLock lock(mutex_);
    stop_.request_stop();
    round_.request_stop();
    thread = std::move(thread_);
  }
  if (thread.joinable()) thread.join();
  {
    const MutexLock lock(mutex_);
    tasks_.clear();  // nobody adds tasks any more
  }
  if (!parted_)
    take_back([&] {
      exchange_.withdraw();
      exchange_.retract();
    });
}

void Meeting::withdraw() {
  take_back([&] { exchange_.withdraw(); });
}

template <typename Request>
void Meeting::take_back(const Request& request) {
  try {
    request();
  } catch (const Error& error) {
    log_event(LogLevel::info, "records.kept", {{"with", job_}},
              "batch {}: its records stay in the store until the lease ends: {}", batch_, error.what());
  }
}

void Meeting::work() {
  Duration pause = kFirstPause;
  bool meets = false;
  while (!stop_.stop_requested()) {
    std::vector<std::function<void()>> tasks;
    bool again = false;
    {
      const MutexLock lock(mutex_);
      const auto asked = [this]() REQUIRES(mutex_) { return wanted_ || !tasks_.empty(); };
      if (!meets && !changed_.wait(mutex_, stop_.get_token(), asked)) return;
      if (meets && changed_.wait_until(mutex_, stop_.get_token(), Deadline::after(pause), asked)) pause = kFirstPause;
      if (stop_.stop_requested()) return;
      again = std::exchange(wanted_, false);
      tasks = std::exchange(tasks_, {});
      round_ = std::stop_source();
    }
    if (again) withdraw();
    meets = meets || again;
    for (const auto& task : tasks) task();
    if (!meets) continue;
    const Outcome outcome = retry();
    meets = outcome != Outcome::kMet && outcome != Outcome::kParted;
    pause = outcome == Outcome::kFailed ? std::min(2 * pause, kLongestPause) : kFirstPause;
  }
}

void Meeting::log_registration_failure(const Status& why) const {
  const LogScope scope = log_scope(agent_.identity(), view_.name, batch_);
  log_event(LogLevel::warn, "registration.failed", {{"with", job_}}, "{}", why.message());
}

Meeting::Outcome Meeting::retry() {
  std::stop_source round;
  {
    const MutexLock lock(mutex_);
    round = round_;
  }
  const CallLimits limits{
      .deadline = Deadline::at(TimePoint::max()), .stop = round.get_token(), .background = true, .parts = parts_};
  bool registered = false;
  try {
    view_ = rendezvous_.rejoin(view_, limits);
    const auto watch = rendezvous_.watch_pair(view_, parts_, [&round] { round.request_stop(); });
    registered = true;
    std::shared_ptr<Session> session = meet_once(limits);
    agent_.run_on_loop([&] { owner_.on_met(std::move(session)); });
    return Outcome::kMet;
  } catch (...) {
    const Status why = status_of_current_exception();
    if (stop_.stop_requested()) return Outcome::kMet;
    if (why.code() == ErrorCode::kCancelled) return Outcome::kFailed;
    if (parts_ && !registered && why.code() == ErrorCode::kNotFound) {
      withdraw();  // before on_parted(), since another meeting may be made with the job as soon as it is back
      parted_ = true;
      agent_.run_on_loop([&] { owner_.on_parted(job()); });
      return Outcome::kParted;
    }
    if (why.message() != std::exchange(last_error_, why.message())) log_registration_failure(why);
    // Published records stay: others may have read them, and would wait for newer ones if they had to try again.
    agent_.run_on_loop([&] { owner_.on_not_met(job(), why); });
    // Each failure is reported once, so a rank that only hears of failures does not retry faster than they come.
    return registered && exchange_.other_failed() ? Outcome::kTold : Outcome::kFailed;
  }
}

}  // namespace tessera::bus
