#include "bus/session/session.h"

#include <algorithm>
#include <filesystem>
#include <utility>

#include "base/fail.h"
#include "base/log.h"
#include "base/metrics.h"

namespace tessera::bus {
namespace {

constexpr Duration kAttachReminder = seconds(10);

// Why a registered peer could not be connected to: it has gone, or it cannot be reached from here.
Status why_not_reached(const std::string& name, const RankRecord& record, const Error& error) {
  const bool absent = error.code() == ErrorCode::kUnavailable || error.code() == ErrorCode::kNotFound;
  const bool refused = error.code() == ErrorCode::kPermissionDenied;
  const std::filesystem::path root = std::filesystem::path(record.address).parent_path().parent_path();
  std::error_code ignored;
  const bool sees_its_root =
      record.incarnation.pid_namespace == Incarnation::self().pid_namespace && std::filesystem::exists(root, ignored);
  if (refused || (absent && !sees_its_root && liveness_of(record.incarnation) != Liveness::kDead))
    return failed(ErrorCode::kUnavailable,
                  "{} runs on this host, but its socket does not open: {}: run both jobs as one user, with the same "
                  "TESSERA_RUNTIME_DIR"_message,
                  name, error.what());
  return failed(absent ? ErrorCode::kPeerLost : error.code(), "cannot reach {}: {}"_message, name, error.what());
}

}  // namespace

Session::Session(SessionSetup setup) : setup_(std::move(setup)) {}

Session::~Session() = default;

std::string Session::describe() const {
  return fmt::format("batch {} of pair {}", setup_.batch, setup_.view.name);
}

void Session::check_caller(const Caller& caller, const std::string& job, const std::vector<RankRecord>& ranks) const {
  const Hello& hello = caller.hello;
  const std::string who = rank_name(hello.job, hello.rank);
  if (hello.job != job || hello.rank < 0 || static_cast<size_t>(hello.rank) >= ranks.size())
    fail(ErrorCode::kMismatch, "{}: {} is not of job {} with its {} ranks"_message, describe(), who, job, ranks.size());
  if (ranks[static_cast<size_t>(hello.rank)].incarnation != hello.incarnation)
    fail(ErrorCode::kMismatch, "{}: {} is not the process that joined the pair"_message, describe(), who);
}

Session::Outcome Session::attach(const CallLimits& limits) {
  setup_.agent->run_on_loop([this] {
    connect();
    watch_members();
    setup_.agent->open_session(setup_.agreement.session, this);
    readiness_changed();
  });
  for (const Call& call : calls_) {
    if (!Incarnation::self().same_host(call.record.incarnation))
      fail(ErrorCode::kUnavailable,
           "{}: {}: {} runs on another host (their boot ids differ): run both jobs on one host"_message, describe(),
           identity().name(), call.name);
    try {
      const Attach attach{setup_.view.name, setup_.batch, call.purpose, setup_.agreement.session};
      setup_.agent->call({call.record.address, call.name, call.record.incarnation}, attach, limits.deadline,
                         call.on_link);
    } catch (const Error& error) {
      const Status why = why_not_reached(call.name, call.record, error);
      throw Error(why.code(), fmt::format("{}: {}: {}", describe(), identity().name(), why.message()));
    }
  }
  if (await_ready(limits) == Outcome::kSuperseded) return Outcome::kSuperseded;
  setup_.agent->run_on_loop([this] { unwatch_members(); });
  return Outcome::kAttached;
}

Session::Outcome Session::await_ready(const CallLimits& limits) {
  WaitList::Entry entry(setup_.agent->waits());
  const MutexLock lock(mutex_);
  const auto decided = [&]() REQUIRES(mutex_) {
    if (!unready_.empty()) entry.set(fmt::format("{} to attach ({})", fmt::join(unready_, ", "), describe()));
    return ready_ || superseded() || !lost_.ok();
  };
  Deadline reminder = Deadline::after(kAttachReminder);
  Duration period = kSilence;
  const auto next_look = [&] { return Deadline::after(std::min(limits.deadline.left(), period)); };
  size_t heard = 0;  // how many had superseded it when the peers' messages were last read
  while (true) {
    if (changed_.wait_until(mutex_, limits.stop, next_look(), decided)) {
      if (ready_)
        return Outcome::kAttached;  // a loss then counts as if it had come later: a version may be there to take
      if (!superseded()) lost_.throw_if_error();
      if (given_up_ || superseded_.size() == heard) return Outcome::kSuperseded;
      heard = superseded_.size();
      const MutexUnlock unlocked(mutex_);
      hear_peers();
      continue;
    }
    const std::string waiting = fmt::format("{}: {} waits to be attached to {}"_message, describe(), identity().name(),
                                            fmt::join(unready_, ", "));
    if (limits.stop.stop_requested()) fail(ErrorCode::kCancelled, "{}: interrupted"_message, waiting);
    if (limits.deadline.passed()) fail(ErrorCode::kDeadlineExceeded, "{}: the deadline has passed"_message, waiting);
    const Status stopped = look_for_stopped(unready_);
    if (!stopped.ok()) throw Error(stopped.code(), fmt::format("{}: {}", waiting, stopped.message()));
    period = kStopPeriod;
    if (!reminder.passed()) continue;
    reminder = Deadline::after(kAttachReminder);
    log_event(LogLevel::warn, "ranks.awaited", {{"job", identity().job}, {"rank", identity().rank}}, "{}", waiting);
  }
}

// Messages of peers may still be in their sockets while the store reports what they did later.
void Session::hear_peers() {
  setup_.agent->run_on_loop([this] {
    std::vector<std::shared_ptr<Link>> open;  // kept alive: one message may end another link
    for (Link* link : links()) open.push_back(link->shared_from_this());
    for (const auto& link : open) link->poll();
  });
}

// For a rank that this one has no connection with, the leader decides, which has one with both: it reports when it
// loses either. (The rank may just be done with a version that this one has yet to take.)
bool Session::superseded() const {
  const auto attached = [this](const std::string& name) REQUIRES(mutex_) {
    return std::ranges::any_of(linked_, [&](const Linked& peer) { return peer.name == name && peer.ready; });
  };
  const auto matters = [&](const std::string& name) REQUIRES(mutex_) {
    const bool connected = std::ranges::find(linked_, name, &Linked::name) != linked_.end();
    return connected ? !attached(name) : !attached(leader());
  };
  return given_up_ || std::ranges::any_of(superseded_, matters);
}

Status Session::look_for_stopped(const std::vector<std::string>& names) {
  const auto look = [&](const std::string& job, const std::vector<RankRecord>& ranks) {
    for (size_t rank = 0; rank < ranks.size(); ++rank) {
      const std::string name = rank_name(job, static_cast<Rank>(rank));
      if (std::ranges::find(names, name) == names.end()) continue;
      const Status status = stop_detectors_[name].look(name, ranks[rank].incarnation, ranks[rank].worker);
      if (!status.ok()) return status;
    }
    return Status();
  };
  const Status status = look(identity().job, setup_.view.own);
  return status.ok() ? look(setup_.view.peer_job, setup_.view.peer) : status;
}

void Session::check_peers() {
  for (Link* link : awaited_links()) link->end_if_stopped();
}

void Session::renew() {
  break_session(
      failed(ErrorCode::kUnavailable, "{} registers it again: its tensors have been moved"_message, identity().name()));
}

void Session::supersede(const std::string& rank) {
  const MutexLock lock(mutex_);
  superseded_.insert(rank);
  changed_.notify_all();
}

void Session::give_up(const Status& why) {
  const MutexLock lock(mutex_);
  if (lost_.ok()) lost_ = Status(why.code(), fmt::format("{}: {}", describe(), why.message()));
  changed_.notify_all();
}

void Session::watch_members() {
  const auto watch = [&](const std::string& job, const std::vector<RankRecord>& ranks) {
    for (size_t rank = 0; rank < ranks.size(); ++rank) {
      UniqueFd fd = open_pidfd(ranks[rank].incarnation);
      const std::string name = rank_name(job, static_cast<Rank>(rank));
      if (!fd) {
        if (liveness_of(ranks[rank].incarnation) == Liveness::kDead)
          break_session(failed(ErrorCode::kPeerLost, "the process of {} has ended"_message, name));
        continue;
      }
      loop().add_fd(fd.get(), EPOLLIN, [this, name, raw = fd.get()](uint32_t) {
        loop().remove_fd(raw);
        break_session(failed(ErrorCode::kPeerLost, "the process of {} has ended"_message, name));
      });
      member_pidfds_.push_back(std::move(fd));
    }
  };
  watch(identity().job, setup_.view.own);
  watch(setup_.view.peer_job, setup_.view.peer);
}

void Session::unwatch_members() {
  for (const UniqueFd& fd : member_pidfds_) loop().remove_fd(fd.get());
  member_pidfds_.clear();
}

std::vector<std::string> Session::unready() const {
  std::vector<std::string> names;
  for (const Linked& peer : linked())
    if (!peer.ready) names.push_back(peer.name);
  return names;
}

void Session::readiness_changed() {
  std::vector<std::string> waiting = unready();
  const MutexLock lock(mutex_);
  ready_ = waiting.empty();
  unready_ = std::move(waiting);
  linked_ = linked();
  changed_.notify_all();
}

void Session::fail_attach(const Status& status) {
  const MutexLock lock(mutex_);
  if (ready_ || !lost_.ok()) return;
  given_up_ = is_renewal(status);  // see Meeting
  lost_ = Status(status.code(),
                 fmt::format("{}: {} was attaching: {}"_message, describe(), identity().name(), status.message()));
  changed_.notify_all();
}

void Session::adopted() {
  adopted_ = true;
  for (Link* link : links()) link->set_in_use();
  Metrics::process().sessions.add(1);
}

void Session::break_session(const Status& status) {
  if (closed_) return;
  if (broken_.ok()) {
    broken_ = status;
    Metrics::process().sessions_lost.add();
    const LogScope scope = log_scope(identity(), setup_.view.name, setup_.batch);
    log_event(LogLevel::info, "session.lost", {{"with", peer_job()}}, "{}", status.message());
  }
  if (!may_go_on()) fail_attach(status);
  on_broken(status);  // every time: a further loss may take away what the transfer still needs
}

bool Session::retires() {
  return adopted_ && broken() && idle() && !std::exchange(retired_, true);
}

Status Session::broken_status() const {
  return broken_.ok() ? Status() : Status(broken_.code(), fmt::format("{}: {}", describe(), broken_.message()));
}

void Session::close(const Status& why) {
  if (closed_) return;
  closed_ = true;
  if (adopted_) Metrics::process().sessions.add(-1);
  setup_.agent->close_session(setup_.agreement.session, this);
  unwatch_members();
  detach_all(why);
}

}  // namespace tessera::bus
