// The client's end of a command queue: posts commands to the agent and waits for their outcomes.
//
//   CommandClient client(memory, "agent of trainer/0");
//   CommandCall call = client.post(kSend, payload, deadline);   // from any thread
//   std::vector<std::byte> result = call.wait(deadline);        // or throws what the agent answered
//
// A command has one outcome: a result, an error, or, with the code of the reason that the queue ended for (kPeerLost
// where the agent was lost), an error that says "outcome unknown". It may then be repeated under its id through another
// queue of the same incarnation: an agent that knows the id answers as before and executes nothing.
//
// There is no thread for replies. Of the threads that wait, one leads: it sleeps on the ring and hands out what it
// pops, until its own wait is over; then it wakes another to lead.
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

// A command on its way. Move-only; used by one thread at a time, except cancel(). May outlive its client. If it is
// destroyed before its outcome is there, the outcome is dropped when it comes; the command is executed all the same.
class CommandCall {
 public:
  CommandCall(CommandCall&&) noexcept = default;
  CommandCall& operator=(CommandCall&& other) noexcept;
  ~CommandCall();

  uint64_t id() const { return id_; }
  // The result, once. Throws what the agent answered, or why the outcome is unknown. Throws kDeadlineExceeded or
  // kCancelled while the command goes on: it may be waited for again then.
  std::vector<std::byte> wait(const Deadline& deadline);
  // Whether wait() would return at once. Does not block.
  bool done();
  // Blocks until it would, or until the deadline; whether it would.
  bool await(const Deadline& deadline);
  // Ends a wait() or await() under way on another thread, or else the next one: with kCancelled, and with true.
  void cancel();
  // Takes back a cancel() that no wait() has ended with. Whether the outcome is there.
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
  // `agent` is what errors call the other end. Ids begin at `first_id`: a later queue of an incarnation goes on where
  // the one before it ended.
  CommandClient(std::shared_ptr<CommandMemory> memory, std::string agent, uint64_t first_id = 1);
  ~CommandClient();  // closes with kCancelled
  CommandClient(const CommandClient&) = delete;
  CommandClient& operator=(const CommandClient&) = delete;

  // Waits for room until the deadline: in the ring, and for as many commands as may be on their way. Throws
  // kDeadlineExceeded, or why the queue has ended; the command was not sent then. REQUIRES: at most kMaxRecordPayload.
  CommandCall post(uint16_t type, std::span<const std::byte> payload, const Deadline& deadline);
  // A command of before, under the id that it had. Throws kAlreadyExists if it is on its way in this queue.
  CommandCall repeat(uint64_t id, uint16_t type, std::span<const std::byte> payload, const Deadline& deadline);
  std::vector<std::byte> call(uint16_t type, std::span<const std::byte> payload, const Deadline& deadline) {
    return post(type, payload, deadline).wait(deadline);
  }

  uint64_t next_id() const;
  // Ends the queue, and with `reason` every wait, under way or to come, except outcomes that are in the ring already:
  // also for a watcher that learns of the agent's death. The first reason stays.
  void close(const Status& reason);
  Status status() const;  // why the queue has ended; ok while it has not

 private:
  std::shared_ptr<CommandCall::State> state_;
};

}  // namespace tessera
