// The client's end of a command queue: posts commands to the agent and waits for their outcomes.
//
//   CommandClient client(memory, "agent of trainer/0");
//   CommandCall call = client.post(kSend, payload, deadline);   // from any thread
//   std::vector<std::byte> result = call.wait(deadline);        // or throws what the agent answered
//
// A command has one outcome: a result, an error, or an error that says "outcome unknown", with the code for which the
// queue ended (kPeerLost if the agent was lost). It may then be repeated under its id through another queue of the same
// incarnation: an agent that knows the id answers as before and executes nothing.
//
// There is no thread for replies. One of the waiting threads leads: it sleeps on the ring and hands out what it pops
// until its own wait is over; then it wakes another to lead.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/clock.h"
#include "command/memory.h"
#include "tessera/error.h"

namespace tessera {

// A command in progress. Move-only; used by one thread at a time, except cancel(). May outlive its client. If it is
// destroyed before its outcome arrives, the outcome is dropped; the command is executed nevertheless.
class CommandCall {
 public:
  CommandCall(CommandCall&&) noexcept = default;
  CommandCall& operator=(CommandCall&& other) noexcept;
  ~CommandCall();

  uint64_t id() const { return id_; }
  // The result; call it once. Throws the error that the agent answered, or the reason why the outcome is unknown.
  // Throws kDeadlineExceeded or kCancelled while the command goes on: then it may be called again.
  std::vector<std::byte> wait(const Deadline& deadline);
  // Whether wait() would return immediately. Does not block.
  bool done();
  // Blocks until wait() would return immediately, or until the deadline; returns whether it would.
  bool await(const Deadline& deadline);
  // Ends a wait() or await() in progress on another thread, or otherwise the next one: wait() with kCancelled, await()
  // with true.
  void cancel();
  // Withdraws a cancel() that has not ended any wait. Returns whether the outcome is there.
  bool resume();

 private:
  friend class CommandClient;
  struct State;
  CommandCall(std::shared_ptr<State> state, uint64_t id) : state_(std::move(state)), id_(id) {}

  std::shared_ptr<State> state_;
  uint64_t id_ = 0;
};

// Thread-safe. In a forked child every call throws kInvalidArgument.
class CommandClient {
 public:
  // `agent` is the name of the other end in errors. Ids begin at `first_id`: a later queue of an incarnation continues
  // where the previous one ended.
  CommandClient(std::shared_ptr<CommandMemory> memory, std::string agent, uint64_t first_id = 1);
  ~CommandClient();  // closes with kCancelled
  CommandClient(const CommandClient&) = delete;
  CommandClient& operator=(const CommandClient&) = delete;

  // Waits until the deadline for room in the ring and among the commands that may be in progress. Throws
  // kDeadlineExceeded, or the reason for which the queue has ended; then the command was not sent. REQUIRES: at most
  // kMaxRecordPayload.
  CommandCall post(uint16_t type, std::span<const std::byte> payload, const Deadline& deadline);
  // An earlier command, under the id that it had. Throws kAlreadyExists if it is in progress in this queue.
  CommandCall repeat(uint64_t id, uint16_t type, std::span<const std::byte> payload, const Deadline& deadline);
  std::vector<std::byte> call(uint16_t type, std::span<const std::byte> payload, const Deadline& deadline) {
    return post(type, payload, deadline).wait(deadline);
  }

  uint64_t next_id() const;
  // Ends the queue. Every wait, now or later, ends with `reason`, except for outcomes that are already in the ring;
  // also for a watcher that learns of the agent's death. The first reason is kept.
  void close(const Status& reason);
  Status status() const;  // why the queue has ended; ok if it has not

 private:
  std::shared_ptr<CommandCall::State> state_;
};

}  // namespace tessera
