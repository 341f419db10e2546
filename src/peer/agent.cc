#include "peer/agent.h"

#include <optional>

#include "base/fail.h"
#include "base/metrics.h"
#include "base/socket.h"
#include "tessera/version.h"

namespace tessera {
namespace {

constexpr Duration kHandshakeTimeout = seconds(10);
constexpr Duration kEarlyTimeout = seconds(300);  // the other side may still be registering
constexpr size_t kMaxWaiting = 4096;

}  // namespace

Agent::Agent(Identity identity, int threads)
    : identity_(std::move(identity)),
      incarnation_(Incarnation::next()),
      runtime_dir_(RuntimeDir::open(RuntimeDir::default_root(), identity_.name())),
      address_(runtime_dir_.path("agent")),
      listener_(loop_, listen_unix(address_)),
      loop_("tessera-agent"),
      pull_pool_(threads, "tessera-pull"),
      source_pool_(threads, "tessera-src") {
  listener_.start([this](UniqueFd socket) { accept_connection(std::move(socket)); },
                  [](const Error& why) { log_refusal("a caller", Status(why.code(), why.what())); });
  loop_.start({{"job", identity_.job}, {"rank", identity_.rank}});
}

Agent::~Agent() {
  run_on_loop([this] {
    listener_.stop();
    waiting_.clear();
  });
  loop_.stop();
}

void Agent::run_and_wait(const std::function<void()>& task) {
  process_.require(identity_.name());
  if (loop_.on_thread()) {
    task();
    return;
  }
  struct TaskOutcome {
    Mutex mutex;
    CondVar done_changed;
    bool done GUARDED_BY(mutex) = false;
    Status status GUARDED_BY(mutex);
  } outcome;
  const bool posted = loop_.post([&outcome, &task] {
    Status status;
    try {
      task();
    } catch (...) {
      status = status_of_current_exception();
    }
    const MutexLock lock(outcome.mutex);  // held to the end: the waiter may not go before it is released
    outcome.status = status;
    outcome.done = true;
    outcome.done_changed.notify_all();
  });
  if (!posted) fail(ErrorCode::kCancelled, "the bus of {} is closed", identity_.name());
  const MutexLock lock(outcome.mutex);
  outcome.done_changed.wait(outcome.mutex,
                            [&]() REQUIRES(outcome.mutex) { return outcome.done; });  // loop tasks do not block
  outcome.status.throw_if_error();
}

void Agent::claim_batch(const std::string& pair, const std::string& batch) {
  const MutexLock lock(mutex_);
  if (!batches_.emplace(pair, batch).second)
    fail(ErrorCode::kAlreadyExists, "{} has registered batch {} of pair {} already: close that one first",
         identity_.name(), batch, pair);
}

void Agent::release_batch(const std::string& pair, const std::string& batch) {
  const MutexLock lock(mutex_);
  batches_.erase({pair, batch});
}

void Agent::open_session(const std::string& session, Acceptor* acceptor) {
  TESSERA_CHECK(sessions_.emplace(session, acceptor).second);
  std::vector<uint64_t> early;
  for (const auto& [id, waiting] : waiting_)
    if (waiting.attach && waiting.attach->session == session) early.push_back(id);
  for (const uint64_t id : early) hand_over(id, *acceptor);
}

void Agent::close_session(const std::string& session, const Acceptor* acceptor) {
  const auto it = sessions_.find(session);
  if (it != sessions_.end() && it->second == acceptor) sessions_.erase(it);
}

void Agent::call(const std::string& address, const std::string& peer_name, const Attach& attach, Deadline deadline,
                 const std::function<void(std::shared_ptr<Link>)>& on_link) {
  UniqueFd socket = connect_unix(address, deadline);
  require_same_user(socket.get());
  run_on_loop([&] {
    std::shared_ptr<Link> link = Link::adopt(loop_, std::move(socket), peer_name);
    link->set_greeting([this, attach, to = link.get()](Frame& frame) {
      check_welcome(frame, *to);
      const bool pulls = attach.purpose == Attach::Purpose::kPull || attach.purpose == Attach::Purpose::kReduce;
      to->set_limits({.payload_bytes = kMaxMessageBytes, .fds = static_cast<uint16_t>(pulls ? kMaxFdsPerMessage : 0)});
      to->send(attach);
    });
    on_link(link);
    link->send(hello());
  });
}

Hello Agent::hello() const {
  return {.protocol_min = kProtocolMin,
          .protocol_max = kProtocolMax,
          .release = kVersion,
          .name_space = identity_.name_space,
          .job = identity_.job,
          .rank = identity_.rank,
          .incarnation = incarnation_};
}

void Agent::check_welcome(Frame& frame, Link& link) const {
  if (frame.type != kCode<Welcome>) fail(ErrorCode::kMismatch, "answered Hello with message {}", frame.type);
  const Welcome welcome = parse<Welcome>(frame.payload);
  if (welcome.protocol < kProtocolMin || welcome.protocol > kProtocolMax)
    fail(ErrorCode::kMismatch, "answers (release {}) with protocol {}, and {} (release {}) speaks {} to {}",
         welcome.release, welcome.protocol, identity_.name(), kVersion, kProtocolMin, kProtocolMax);
  link.agree_on(welcome.protocol);
  if (rank_name(welcome.job, welcome.rank) != link.name())
    fail(ErrorCode::kMismatch, "is {} now", rank_name(welcome.job, welcome.rank));
}

void Agent::accept_connection(UniqueFd socket) {
  const std::string caller = fmt::format("a caller (pid {})", require_same_user(socket.get()));
  if (waiting_.size() >= kMaxWaiting) fail(ErrorCode::kResourceExhausted, "{} wait already", waiting_.size());
  const uint64_t id = next_id_++;
  Waiting& waiting = waiting_[id];
  waiting.link = Link::adopt(loop_, std::move(socket), caller);
  waiting.link->set_handlers([this, id](Frame& frame) { handle_frame(id, frame); },
                             [this, id](const Status&) { drop(id); });
  waiting.timer = loop_.add_timer_after(kHandshakeTimeout, [this, id] {
    reject(id, failed(ErrorCode::kDeadlineExceeded, "{}: no Hello within {} s", identity_.name(),
                      to_seconds(kHandshakeTimeout)));
  });
}

void Agent::handle_frame(uint64_t id, Frame& frame) {
  Waiting& waiting = waiting_.at(id);
  const auto is = [&frame](uint16_t code) { return frame.type == code; };
  if (is(kCode<Hello>) && waiting.hello.job.empty()) {
    waiting.hello = parse<Hello>(frame.payload);
    const Hello& hello = waiting.hello;
    if (!hello.speaks_ours()) {
      reject(id, failed(ErrorCode::kMismatch,
                        "no common protocol: {} (release {}) speaks {} to {}, {} (release {}) speaks {} to {}",
                        waiting.link->name(), hello.release, hello.protocol_min, hello.protocol_max, identity_.name(),
                        kVersion, kProtocolMin, kProtocolMax));
      return;
    }
    const std::string caller = rank_name(hello.job, hello.rank);
    if (hello.name_space != identity_.name_space) {
      reject(id, failed(ErrorCode::kMismatch, "{} is of namespace {}, {} of {}", caller, hello.name_space,
                        identity_.name(), identity_.name_space));
      return;
    }
    waiting.link->set_name(caller);
    const uint16_t protocol = std::min(hello.protocol_max, kProtocolMax);
    waiting.link->agree_on(protocol);
    waiting.link->send(Welcome{.protocol = protocol,
                               .release = kVersion,
                               .job = identity_.job,
                               .rank = identity_.rank,
                               .incarnation = incarnation_});
    return;
  }
  if (is(kCode<Inspect>) && waiting.hello.job.empty()) {
    (void)parse<Inspect>(frame.payload);
    return waiting.link->send(report());  // the asker closes
  }
  if (is(kCode<Detach>) || is(kCode<Broken>)) {  // it gave up before this rank was ready
    waiting.link->close();
    return drop(id);
  }
  if (!is(kCode<Attach>) || waiting.hello.job.empty() || waiting.attach)
    fail(ErrorCode::kMismatch, "message {} where Hello and then Attach were due", frame.type);
  waiting.attach = parse<Attach>(frame.payload);
  loop_.cancel_timer(waiting.timer);
  const auto it = sessions_.find(waiting.attach->session);
  if (it != sessions_.end()) {
    hand_over(id, *it->second);
    return;
  }
  waiting.timer = loop_.add_timer_after(kEarlyTimeout, [this, id] {
    reject(id, failed(ErrorCode::kDeadlineExceeded, "{} has read no such registrations of batch {} of pair {}",
                      identity_.name(), waiting_.at(id).attach->batch, waiting_.at(id).attach->pair));
  });
}

Report Agent::report() const {
  Report report{.release = kVersion,
                .name_space = identity_.name_space,
                .job = identity_.job,
                .rank = identity_.rank,
                .world = identity_.world,
                .incarnation = incarnation_,
                .commands = command_queue_ ? command_queue_() : CommandQueueReport{},
                .waits = waits_.now()};
  for (const Inspected* batch : inspected_) report.batches.push_back(batch->report());
  return report;
}

void Agent::hand_over(uint64_t id, Acceptor& acceptor) {
  Waiting waiting = std::move(waiting_.at(id));
  loop_.cancel_timer(waiting.timer);
  waiting_.erase(id);
  const std::shared_ptr<Link> link = waiting.link;
  try {
    link->set_limits({.payload_bytes = kMaxMessageBytes, .fds = 0});
    acceptor.accept({waiting.link, std::move(waiting.hello), std::move(*waiting.attach)});
  } catch (const std::exception&) {
    const Status status = status_of_current_exception();
    log_refusal(link->name(), status);
    link->reject(status);
  }
}

void Agent::reject(uint64_t id, const Status& status) {
  const auto it = waiting_.find(id);
  if (it == waiting_.end()) return;
  log_refusal(it->second.link->name(), status);
  it->second.link->reject(status);
  drop(id);
}

void Agent::log_refusal(const std::string& caller, const Status& why) {
  log_event(LogLevel::warn, "connection.refused", {{"peer", caller}}, "{}", why.message());
  Metrics::process().connections_refused.add();
}

void Agent::drop(uint64_t id) {
  const auto it = waiting_.find(id);
  if (it == waiting_.end()) return;
  loop_.cancel_timer(it->second.timer);
  waiting_.erase(it);
}

}  // namespace tessera
