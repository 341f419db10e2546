// What a worker has opened at its agent daemon: a bus, and what it registered there.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <stop_token>
#include <string>
#include <vector>

#include "base/fd.h"
#include "base/framing.h"
#include "base/process.h"
#include "base/socket.h"
#include "bus/agent_protocol.h"
#include "bus/batch.h"
#include "bus/client.h"
#include "bus/command_server.h"
#include "bus/operation.h"

namespace tessera {
class SharedArena;
}

namespace tessera::bus {

// A connection of a worker. The daemon's loop reads from it, whoever handles its request writes.
struct WorkerConnection {
  explicit WorkerConnection(UniqueFd connected) : socket(std::move(connected)) {}
  UniqueFd socket;
  FrameReader reader{kAgentMagic, {.payload_bytes = kMaxAgentFrame, .fds = kMaxFdsPerMessage}};
  std::vector<UniqueFd> arenas;

  // Blocks until the worker has room for it; one that does not read is given up.
  template <typename Message>
  void answer(const Message& message) noexcept {
    answer(Message::kType, message_bytes(message));
  }
  void answer(AgentMessage type, std::span<const std::byte> payload = {}) noexcept;
};

// Thread-safe. What it does blocks, on the daemon's threads; commands come on the queue's.
class WorkerSession : public std::enable_shared_from_this<WorkerSession> {
 public:
  WorkerSession(OpenSession open, std::shared_ptr<WorkerConnection> connection);

  uint64_t number() const { return number_; }
  const Incarnation& worker() const { return worker_; }
  const std::shared_ptr<WorkerConnection>& connection() const { return connection_; }
  std::string name() const;  // "the worker pid 4711 (started 123456)"

  // Connects and claims, and takes commands from then on. Counts as a call.
  void open(const std::shared_ptr<CommandMemory>& memory);
  // Answers a call of the worker, whose frame names this session. Throws what the call fails with.
  void serve(WorkerConnection& connection, const Frame& frame);
  // Around each of the two; false once the session is retired.
  bool begin_serving();
  void end_serving();

  // Ends all that waits for other ranks to come.
  void request_stop() { stop_.request_stop(); }
  bool stop_requested() const { return stop_.stop_requested(); }
  // The worker has gone: no call is begun any more, and those that wait end.
  void retire();
  // From now on sends that nobody has begun to take are not waited for: another worker has come.
  void hasten();
  // Finishes what the worker had posted from shared memory and gives everything back. REQUIRES: retired.
  void end();

 private:
  struct RegisteredBatch {
    std::shared_ptr<BatchImpl> batch;
    std::vector<std::shared_ptr<SharedArena>> arenas;  // what its tensors lie in
    bool sends = false;
  };

  bool hastened() const;
  std::shared_ptr<PairClient> pair(uint32_t number) const;
  std::shared_ptr<BatchImpl> batch(uint32_t number) const;
  std::shared_ptr<Operation> operation(uint64_t command) const;  // null once it has ended
  Paired join(const PairCall& call);
  Registered register_batch(RegisterCall call, std::vector<UniqueFd> fds);
  int64_t number_of(AgentMessage type, const ObjectCall& call);
  void execute(const Command& command, Replier& replier);
  void transfer(const Command& command, Replier& replier);

  const uint64_t number_;
  const Incarnation worker_;
  const std::shared_ptr<WorkerConnection> connection_;
  std::stop_source stop_;
  BusOptions options_;
  std::shared_ptr<BusClient> bus_;
  std::unique_ptr<CommandServer> commands_;
  mutable std::mutex mutex_;  // what follows
  std::condition_variable idle_;
  int serving_ = 0;
  bool retired_ = false;
  bool hastened_ = false;
  uint32_t last_number_ = 0;
  std::map<uint32_t, std::shared_ptr<PairClient>> pairs_;
  std::map<uint32_t, RegisteredBatch> batches_;
  std::map<uint64_t, std::shared_ptr<Operation>> operations_;  // under way, by command
};

}  // namespace tessera::bus
