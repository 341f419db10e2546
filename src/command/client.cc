#include "command/client.h"

#include <algorithm>
#include <functional>
#include <map>
#include <optional>
#include <utility>

#include "base/fail.h"
#include "base/fork_guard.h"
#include "base/mutex.h"
#include "command/log.h"

namespace tessera {
namespace {

struct Call {
  std::optional<CommandOutcome> outcome;
  bool cancelled = false;
  bool dropped = false;  // its handle was destroyed
};

using Ready = std::function<bool()>;

// A thread that waits while another leads.
struct Follower {
  const Ready& ready;
  CondVar woken;
};

}  // namespace

struct CommandCall::State {
  State(std::shared_ptr<CommandMemory> queue, std::string agent_name, uint64_t first_id, Duration spin)
      : memory(std::move(queue)),
        agent(std::move(agent_name)),
        next_id(first_id),
        commands(memory->commands(), spin),
        replies(memory->replies(), spin) {}

  uint64_t post(std::optional<uint64_t> id, uint16_t type, std::span<const std::byte> payload,
                const Deadline& deadline);
  std::vector<std::byte> wait(uint64_t id, const Deadline& deadline);
  bool done(uint64_t id);
  bool await_call(uint64_t id, const Deadline& deadline);
  void cancel(uint64_t id);
  bool resume(uint64_t id);
  void drop(uint64_t id);
  void close(const Status& reason);

  // Waits until ready(), which is called with the mutex held, either as leader or as follower; false at the deadline.
  bool await(const Deadline& deadline, const Ready& ready) REQUIRES(mutex);
  void lead(const Deadline& deadline, const Ready& ready) REQUIRES(mutex);
  void follow(const Deadline& deadline, const Ready& ready) REQUIRES(mutex);

  bool has_room() const REQUIRES(mutex) { return !pushing && on_their_way < memory->replies().capacity(); }
  void take_what_is_there() REQUIRES(mutex);
  void take(RingState state, const Record& reply) REQUIRES(mutex);
  void deliver(const Record& reply) REQUIRES(mutex);
  void end(Status reason) REQUIRES(mutex);
  void wake_ready() REQUIRES(mutex);
  Status closed_by_agent() const { return Status(ErrorCode::kPeerLost, "the agent has closed it"_message); }
  [[noreturn]] void fail_ended() const REQUIRES(mutex);
  Call& call_of(uint64_t id) REQUIRES(mutex);

  const std::shared_ptr<CommandMemory> memory;
  const std::string agent;
  const ForkGuard process;

  mutable Mutex mutex;
  std::map<uint64_t, Call> calls GUARDED_BY(mutex);
  size_t on_their_way GUARDED_BY(mutex) = 0;  // pushed, without a reply yet
  uint64_t next_id GUARDED_BY(mutex);
  bool pushing GUARDED_BY(mutex) = false;              // a thread uses `commands`, possibly without the mutex
  bool leading GUARDED_BY(mutex) = false;              // likewise `replies`
  std::vector<Follower*> followers GUARDED_BY(mutex);  // if there are any, one leads, or is woken to lead
  Status closed GUARDED_BY(mutex);                     // the reason, if close() was called
  Status ended GUARDED_BY(mutex);                      // the reason, once all replies have been taken

  CommandProducer commands;
  CommandConsumer replies;
};

bool CommandCall::State::await(const Deadline& deadline, const Ready& ready) {
  while (!ready() && !deadline.passed()) {
    if (leading)
      follow(deadline, ready);
    else
      lead(deadline, ready);
  }
  if (leading) return ready();
  if (!ready()) take_what_is_there();
  if (!followers.empty()) followers.front()->woken.notify_one();
  return ready();
}

void CommandCall::State::lead(const Deadline& deadline, const Ready& ready) {
  leading = true;
  while (!ready() && !deadline.passed()) {
    Record reply;
    RingState state = RingState::kNotYet;
    {
      const MutexUnlock unlocked(mutex);
      state = replies.pop(reply, deadline);
    }
    take(state, reply);
  }
  leading = false;
}

void CommandCall::State::follow(const Deadline& deadline, const Ready& ready) {
  Follower self{.ready = ready, .woken = {}};
  followers.push_back(&self);
  self.woken.wait_until(mutex, deadline);
  std::erase(followers, &self);
}

// REQUIRES: no thread leads.
void CommandCall::State::take_what_is_there() {
  Record reply;
  RingState state = RingState::kReady;
  while (state == RingState::kReady && ended.ok()) {
    state = replies.try_pop(reply);
    take(state, reply);
  }
}

void CommandCall::State::take(RingState state, const Record& reply) {
  switch (state) {
    case RingState::kReady:
      return deliver(reply);
    case RingState::kEnded:
      return end(closed.ok() ? closed_by_agent() : closed);
    case RingState::kBroken:
      return end(failed(ErrorCode::kDataLoss, "its memory holds data that no agent writes"_message));
    case RingState::kNotYet:
    case RingState::kInterrupted:
      return;
  }
}

void CommandCall::State::deliver(const Record& reply) {
  const auto found = calls.find(reply.head.id);
  if (reply.head.incarnation != memory->incarnation() || found == calls.end() || found->second.outcome)
    return end(failed(ErrorCode::kDataLoss, "a reply to command {}, which is not on its way"_message, reply.head.id));
  try {
    found->second.outcome = read_outcome(reply);
  } catch (...) {
    return end(Status(ErrorCode::kDataLoss, status_of_current_exception().message()));
  }
  --on_their_way;
  if (found->second.dropped) calls.erase(found);
  wake_ready();
}

void CommandCall::State::end(Status reason) {
  if (ended.ok()) ended = std::move(reason);
  commands.close();
  replies.close();
  wake_ready();
}

void CommandCall::State::wake_ready() {
  for (Follower* follower : followers)
    if (follower->ready()) follower->woken.notify_one();
}

void CommandCall::State::fail_ended() const {
  const Status& reason = !ended.ok() ? ended : !closed.ok() ? closed : closed_by_agent();
  fail(reason.code(), "{}: the command queue has ended: {}"_message, agent, reason.message());
}

Call& CommandCall::State::call_of(uint64_t id) {
  const auto found = calls.find(id);
  if (found == calls.end())
    fail(ErrorCode::kInvalidArgument, "command {} to {}: its outcome was taken before"_message, id, agent);
  return found->second;
}

uint64_t CommandCall::State::post(std::optional<uint64_t> id, uint16_t type, std::span<const std::byte> payload,
                                  const Deadline& deadline) {
  TESSERA_CHECK_LE(payload.size(), kMaxRecordPayload);
  process.require(agent);
  const MutexLock lock(mutex);
  if (!await(deadline, [this]() REQUIRES(mutex) { return has_room() || !ended.ok(); }))
    fail(ErrorCode::kDeadlineExceeded, "{}: no room for a command: {} are on their way, {} is the limit"_message, agent,
         on_their_way, memory->replies().capacity());
  if (!ended.ok()) fail_ended();
  const RecordHead head{.incarnation = memory->incarnation(), .id = id.value_or(next_id), .type = type};
  if (!calls.try_emplace(head.id).second)
    fail(ErrorCode::kAlreadyExists, "command {} to {} is on its way"_message, head.id, agent);

  ++on_their_way;
  RingState state = commands.try_push(head, payload);
  if (state == RingState::kNotYet && !deadline.passed()) {
    pushing = true;
    {
      const MutexUnlock unlocked(mutex);
      state = commands.push(head, payload, deadline);
    }
    pushing = false;
    if (leading) replies.nudge();  // that thread may be waiting for its turn to push
  }
  if (state == RingState::kReady) {
    next_id = std::max(next_id, head.id + 1);
    wake_ready();
    return head.id;
  }
  --on_their_way;
  calls.erase(head.id);
  if (state == RingState::kBroken)
    end(failed(ErrorCode::kDataLoss, "its memory holds data that no agent writes"_message));
  wake_ready();
  if (state != RingState::kNotYet) fail_ended();
  fail(ErrorCode::kDeadlineExceeded, "{}: no room for a command: the agent has not taken the last {}"_message, agent,
       memory->commands().capacity());
}

std::vector<std::byte> CommandCall::State::wait(uint64_t id, const Deadline& deadline) {
  process.require(agent);
  const MutexLock lock(mutex);
  Call& call = call_of(id);
  await(deadline, [&]() REQUIRES(mutex) { return call.outcome || call.cancelled || !ended.ok(); });
  if (call.outcome) {
    CommandOutcome outcome = std::move(*call.outcome);
    calls.erase(id);
    outcome.status.throw_if_error();
    return std::move(outcome.result);
  }
  if (std::exchange(call.cancelled, false))
    fail(ErrorCode::kCancelled, "command {} to {}: no longer waited for; it goes on"_message, id, agent);
  if (ended.ok())
    fail(ErrorCode::kDeadlineExceeded, "command {} to {}: no outcome by the deadline; it goes on"_message, id, agent);
  calls.erase(id);
  fail(ended.code(), "command {} to {}: {}outcome unknown: {}"_message, id, agent,
       ended.code() == ErrorCode::kPeerLost ? "agent lost, " : "", ended.message());
}

bool CommandCall::State::done(uint64_t id) {
  process.require(agent);
  const MutexLock lock(mutex);
  const Call& call = call_of(id);
  if (!call.outcome && !leading) take_what_is_there();
  return call.outcome || call.cancelled || !ended.ok();
}

bool CommandCall::State::await_call(uint64_t id, const Deadline& deadline) {
  process.require(agent);
  const MutexLock lock(mutex);
  const Call& call = call_of(id);
  return await(deadline, [&]() REQUIRES(mutex) { return call.outcome || call.cancelled || !ended.ok(); });
}

void CommandCall::State::cancel(uint64_t id) {
  process.require(agent);
  const MutexLock lock(mutex);
  call_of(id).cancelled = true;
  if (leading) replies.nudge();
  wake_ready();
}

bool CommandCall::State::resume(uint64_t id) {
  process.require(agent);
  const MutexLock lock(mutex);
  Call& call = call_of(id);
  call.cancelled = false;
  return call.outcome || !ended.ok();
}

// The outcome is still awaited: until it comes, the command takes up room.
void CommandCall::State::drop(uint64_t id) {
  if (!process.here()) return;
  const MutexLock lock(mutex);
  const auto found = calls.find(id);
  if (found == calls.end()) return;
  if (found->second.outcome || !ended.ok())
    calls.erase(found);
  else
    found->second.dropped = true;
}

void CommandCall::State::close(const Status& reason) {
  TESSERA_CHECK(!reason.ok());
  if (!process.here()) return;
  const MutexLock lock(mutex);
  if (closed.ok()) closed = reason;
  commands.close();
  replies.close();
}

CommandCall& CommandCall::operator=(CommandCall&& other) noexcept {
  if (this == &other) return *this;
  if (state_) state_->drop(id_);
  state_ = std::move(other.state_);
  id_ = other.id_;
  return *this;
}

CommandCall::~CommandCall() {
  if (state_) state_->drop(id_);
}

std::vector<std::byte> CommandCall::wait(const Deadline& deadline) {
  return state_->wait(id_, deadline);
}

bool CommandCall::done() {
  return state_->done(id_);
}

bool CommandCall::await(const Deadline& deadline) {
  return state_->await_call(id_, deadline);
}

void CommandCall::cancel() {
  state_->cancel(id_);
}

bool CommandCall::resume() {
  return state_->resume(id_);
}

CommandClient::CommandClient(std::shared_ptr<CommandMemory> memory, std::string agent, uint64_t first_id)
    : state_(std::make_shared<CommandCall::State>(std::move(memory), std::move(agent), first_id, command_spin())) {}

CommandClient::~CommandClient() {
  close(Status(ErrorCode::kCancelled, "this process has closed it"_message));
}

CommandCall CommandClient::post(uint16_t type, std::span<const std::byte> payload, const Deadline& deadline) {
  return {state_, state_->post({}, type, payload, deadline)};
}

CommandCall CommandClient::repeat(uint64_t id, uint16_t type, std::span<const std::byte> payload,
                                  const Deadline& deadline) {
  return {state_, state_->post(id, type, payload, deadline)};
}

uint64_t CommandClient::next_id() const {
  const MutexLock lock(state_->mutex);
  return state_->next_id;
}

void CommandClient::close(const Status& reason) {
  state_->close(reason);
}

Status CommandClient::status() const {
  const MutexLock lock(state_->mutex);
  return state_->ended.ok() ? state_->closed : state_->ended;
}

}  // namespace tessera
