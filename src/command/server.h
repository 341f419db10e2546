// The agent's end of a command queue: a thread that takes commands and passes them to a handler, which answers each
// when it can.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <utility>

#include "base/fork_guard.h"
#include "command/log.h"
#include "command/memory.h"
#include "tessera/error.h"

namespace tessera {

struct Command {
  uint64_t id = 0;
  uint16_t type = 0;
  std::span<const std::byte> payload;  // valid while the handler runs
};

// The obligation to answer a command. Move-only; answers on any thread, even after the server has been destroyed: the
// log keeps the outcome for a client that repeats the command. Never blocks. If it is destroyed without an answer, it
// answers kInternal.
class Replier {
 public:
  Replier(std::shared_ptr<CommandLog> log, uint64_t id) : log_(std::move(log)), id_(id) {}
  Replier(Replier&&) noexcept = default;
  Replier& operator=(Replier&&) = delete;
  ~Replier();

  explicit operator bool() const { return log_ != nullptr; }  // whether the answer is still due
  void succeed(std::span<const std::byte> result = {});
  void fail(const Status& status);

 private:
  void answer(CommandOutcome outcome);

  std::shared_ptr<CommandLog> log_;
  uint64_t id_;
};

// One queue's thread, `tessera-cmd`. It sleeps while there is nothing to do. A client that breaks the protocol (invalid
// memory, more commands in progress than there is room for replies, another incarnation) ends the queue.
class CommandServer {
 public:
  // Called on the thread, one command after another; must not block. It answers, or moves the Replier to code that
  // will. If it throws while it still has the Replier, the exception is the answer.
  using Handler = std::function<void(const Command& command, Replier& replier)>;
  // Called on the thread once no command will follow: ok if the client has closed the queue, otherwise why it ended.
  // The server must not be destroyed in it.
  using EndHandler = std::function<void(const Status& status)>;

  // The log belongs to the client's incarnation. `client` is the name of the other end in errors. Throws
  // Error(kInvalidArgument) if the memory belongs to another incarnation.
  CommandServer(std::shared_ptr<CommandMemory> memory, std::shared_ptr<CommandLog> log, std::string client,
                Handler handler, EndHandler on_end = {});
  ~CommandServer();  // closes and joins
  CommandServer(const CommandServer&) = delete;
  CommandServer& operator=(const CommandServer&) = delete;

  // Ends the queue: no command begins after the one in the handler, and answers only reach the log. Also for a watcher
  // that learns of the client's death. Thread-safe; the first reason is kept.
  void close(const Status& reason);

  // The commands that the thread has not taken yet: size(), capacity(), pending(). Any thread.
  const CommandRing& commands() const;

 private:
  struct State;
  std::shared_ptr<State> state_;
  const ForkGuard process_;
  std::thread thread_;
};

}  // namespace tessera
