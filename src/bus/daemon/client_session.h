// A worker's session with the daemon of its rank: their shared command queue, and a separate connection for each call
// that takes longer.
#pragma once

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <stop_token>
#include <string>
#include <thread>
#include <vector>

#include "base/fork_guard.h"
#include "base/framing.h"
#include "base/mutex.h"
#include "bus/daemon/messages.h"
#include "command/client.h"
#include "memory/host/shared_arena.h"
#include "peer/agent.h"
#include "peer/stop_detector.h"
#include "tessera/bus.h"

namespace tessera::bus {

// Added to a call's own timeout, so that the agent can answer.
inline constexpr Timeout kAnswerGrace = std::chrono::seconds(10);

// Thread-safe. Once the daemon is lost, every call throws kPeerLost. A daemon that a waiting call finds stopped counts
// as lost, too; what it does when it continues no longer concerns this session.
class AgentSession {
 public:
  // Waits for the daemon as long as `options` say, which must come from complete().
  explicit AgentSession(BusOptions options);
  // When it returns, the daemon has released what this rank holds in the store, unless it did not answer within
  // kAnswerGrace.
  ~AgentSession();
  AgentSession(const AgentSession&) = delete;
  AgentSession& operator=(const AgentSession&) = delete;

  const BusOptions& options() const { return options_; }
  const Identity& identity() const { return identity_; }
  const std::string& agent_name() const { return agent_name_; }  // "the agent of trainer/0 (pid 4711)"
  uint64_t number() const { return number_; }
  CommandClient& commands() { return *commands_; }
  void require_own_process() const { process_.require(identity_.name()); }
  bool in_own_process() const { return process_.here(); }
  bool alive() const { return lost().ok(); }

  // Sends `message` as a `type` on a new connection, after the descriptors `fds`, and waits for the answer. Rethrows an
  // error that the agent answers. Once `stop` is requested, the agent ends the call's waits and answers so.
  template <typename Answer, typename Message>
  Answer call(AgentMessage type, const Message& message, Timeout timeout, std::span<const int> fds = {},
              const std::stop_token& stop = {}) {
    const Frame frame = exchange(type, message_bytes(message), Answer::kType, timeout, fds, stop);
    return read_message<Answer>(frame.payload, agent_name_);
  }
  // A command that is answered immediately.
  template <typename Message>
  std::vector<std::byte> ask(AgentCommand command, const Message& message) {
    return ask_bytes(command, message_bytes(message));
  }
  // Blocks until the outcome of `call` is there; false at the deadline.
  bool await(CommandCall& call, const Deadline& deadline);
  // The agent ends all calls that wait for other ranks.
  void interrupt() {
    if (alive()) tell(AgentMessage::kInterrupt);
  }
  // For a caller that has waited for the agent for kSilence. Does not block.
  void look_whether_stopped();

 private:
  // A connection to the daemon that runs, or is starting.
  UniqueFd find(Deadline deadline);
  UniqueFd connect(Deadline deadline) const;
  void open(UniqueFd socket);
  // Sends an empty frame on the session's connection. Never blocks for long; any thread.
  void tell(AgentMessage type) noexcept;
  // Calls `step` with short deadlines until it succeeds or `deadline` has passed.
  template <typename Step>
  auto patiently(const Deadline& deadline, const Step& step) {
    for (Duration period = kSilence;; period = kStopPeriod) {
      try {
        return step(Deadline::at(std::min(deadline.when(), Deadline::after(period).when())));
      } catch (const Error& error) {
        if (error.code() != ErrorCode::kDeadlineExceeded || deadline.passed()) throw;
      }
      look_whether_stopped();
      lost().throw_if_error();
    }
  }
  Frame wait_answer(int socket, FrameReader& reader, AgentMessage expected, Deadline deadline);
  Frame exchange(AgentMessage type, std::span<const std::byte> payload, AgentMessage expected, Timeout timeout,
                 std::span<const int> fds, const std::stop_token& stop);
  std::vector<std::byte> ask_bytes(AgentCommand command, std::span<const std::byte> payload);
  void watch();  // until the session ends, or the agent does
  void lose(const Status& why);
  Status lost() const;

  const ForkGuard process_;
  const BusOptions options_;
  const Identity identity_;
  std::string agent_name_;
  pid_t agent_ = 0;     // 0: not visible from here
  const UniqueFd end_;  // an eventfd that ends the watcher
  std::string address_;
  UniqueFd socket_;  // the session's
  UniqueFd pidfd_;   // empty if the agent's pid is not visible
  FrameReader reader_{kAgentMagic, {.payload_bytes = kMaxAgentFrame}};
  uint64_t number_ = 0;
  std::unique_ptr<CommandClient> commands_;
  Mutex tell_mutex_;  // held while a frame is sent
  mutable Mutex mutex_;
  Status lost_ GUARDED_BY(mutex_);
  StopDetector stop_detector_ GUARDED_BY(mutex_);
  TimePoint looked_ GUARDED_BY(mutex_){};
  std::thread watcher_;
  std::optional<std::stop_callback<std::function<void()>>> on_stop_;
};

}  // namespace tessera::bus
