#include "peer/agent.h"

#include "base/fail.h"
#include "base/log.h"
#include "base/socket.h"
#include "tessera/version.h"

namespace tessera {

Agent::Agent(Identity identity, int threads)
    : identity_(std::move(identity)),
      incarnation_(Incarnation::next()),
      runtime_dir_(RuntimeDir::open(RuntimeDir::default_root(), identity_.name())),
      address_(runtime_dir_.path("agent")),
      listener_(loop_, listen_unix(address_)),
      loop_("tessera-agent"),
      pull_pool_(threads, "tessera-pull"),
      source_pool_(threads, "tessera-src"),
      sessions_(loop_, identity_),
      connections_(loop_, identity_, incarnation_,
                   {.on_caller = [this](Caller caller) { sessions_.take(std::move(caller)); },
                    .report = [this] { return report(); }}) {
  listener_.start([this](UniqueFd socket) { connections_.accept(std::move(socket)); },
                  [](const Error& why) { log_refusal("a caller", Status(why.code(), why.what())); });
  loop_.start({{"job", identity_.job}, {"rank", identity_.rank}});
}

Agent::~Agent() {
  const Status closed = try_on_loop([this] {
    listener_.stop();
    connections_.close();
    sessions_.clear();
  });
  if (!closed.ok())
    log_event(LogLevel::info, "connections.unclosed", {{"job", identity_.job}, {"rank", identity_.rank}},
              "{} ends with connections that are not closed: {}", identity_.name(), closed.message());
  loop_.stop();
}

Status Agent::run_and_wait(const std::function<void()>& task) {
  try {
    process_.require(identity_.name());
    if (loop_.on_thread()) {
      task();
      return {};
    }
  } catch (...) {
    return status_of_current_exception();
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
    const MutexLock lock(outcome.mutex);  // held to the end, so that the waiter cannot destroy it before
    outcome.status = status;
    outcome.done = true;
    outcome.done_changed.notify_all();
  });
  if (!posted) return failed(ErrorCode::kCancelled, "the bus of {} is closed"_message, identity_.name());
  const MutexLock lock(outcome.mutex);
  outcome.done_changed.wait(outcome.mutex,
                            [&]() REQUIRES(outcome.mutex) { return outcome.done; });  // loop tasks do not block
  return outcome.status;
}

void Agent::claim_batch(const std::string& pair, const std::string& batch, std::span<const std::string> jobs) {
  std::vector<std::function<void()>> others;
  {
    const MutexLock lock(mutex_);
    for (const std::string& job : jobs) {
      const auto it = batches_.find({pair, batch, job});
      if (it == batches_.end()) continue;
      if (!it->second)
        fail(ErrorCode::kAlreadyExists,
             "{} has registered batch {} of pair {} with job {} already: close that one first"_message,
             identity_.name(), batch, pair, job);
      others.push_back(it->second);
    }
    for (const std::string& job : jobs) batches_[{pair, batch, job}] = nullptr;
  }
  for (const auto& let_go : others) let_go();
}

bool Agent::claim_batch_of(const std::string& pair, const std::string& batch, const std::string& job,
                           const std::function<void()>& let_go) {
  const MutexLock lock(mutex_);
  return batches_.try_emplace({pair, batch, job}, let_go).second;
}

void Agent::release_batch(const std::string& pair, const std::string& batch, const std::string& job) {
  const MutexLock lock(mutex_);
  batches_.erase({pair, batch, job});
}

void Agent::call(const Callee& callee, const Attach& attach, Deadline deadline, const ConnectionPool::OnLink& on_link) {
  const DialTurns::Turn turn(dial_turns_, callee, deadline);
  bool connected = false;
  run_on_loop([&] { connected = connections_.attach(callee, attach, on_link); });
  if (connected) return;
  UniqueFd socket = connect_unix(callee.address, deadline);
  require_same_user(socket.get());
  run_on_loop([&] { connections_.dial(std::move(socket), callee, attach, on_link); });
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

}  // namespace tessera
