// What a worker has opened at its agent daemon: a bus, and what it registered on it.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <stop_token>
#include <string>
#include <vector>

#include "base/event_loop.h"
#include "base/fd.h"
#include "base/framing.h"
#include "base/mutex.h"
#include "base/process.h"
#include "base/socket.h"
#include "bus/batch/batch.h"
#include "bus/batch/client.h"
#include "bus/batch/operation.h"
#include "bus/daemon/messages.h"
#include "command/server.h"
#include "peer/report.h"

namespace tessera {
class SharedArena;
}

namespace tessera::bus {

// A connection of a worker. The daemon's loop reads from it; the thread that handles its request writes.
struct WorkerConnection {
  WorkerConnection(UniqueFd connected, uint64_t id) : socket(std::move(connected)), number(id) {}
  UniqueFd socket;
  const uint64_t number;  // in order of arrival
  FrameReader reader{kAgentMagic, {.payload_bytes = kMaxAgentFrame, .fds = kMaxFdsPerMessage}};
  std::vector<UniqueFd> arenas;
  std::stop_source given_up;  // the worker has closed its sending end: its call must end

  // Blocks until the worker has room for the message; a worker that does not read is given up. False if it was not
  // sent, because nobody waits for it any more.
  template <typename Message>
  bool answer(const Message& message) noexcept {
    return answer(Message::kType, message_bytes(message));
  }
  bool answer(AgentMessage type, std::span<const std::byte> payload = {}) noexcept;
};

// Thread-safe. Its calls block, on the daemon's threads; commands arrive on the queue's thread.
class WorkerSession : public std::enable_shared_from_this<WorkerSession> {
 public:
  WorkerSession(OpenSession open, std::shared_ptr<WorkerConnection> connection);

  uint64_t number() const { return number_; }
  const Incarnation& worker() const { return worker_; }
  const std::shared_ptr<WorkerConnection>& connection() const { return connection_; }
  std::string name() const;  // "the worker pid 4711 (started 123456)"

  // Connects and claims the rank, then takes commands. Counts as a call.
  void open(const std::shared_ptr<CommandMemory>& memory);
  // Answers a call of the worker, whose frame names this session. Throws if the call fails.
  void serve(WorkerConnection& connection, const Frame& frame);
  // Held during both of these, and while an operation is being begun.
  class Serving {
   public:
    static std::shared_ptr<Serving> begin(std::shared_ptr<WorkerSession> session);  // null once it is retired
    explicit Serving(std::shared_ptr<WorkerSession> session) : session_(std::move(session)) {}
    ~Serving() { session_->end_serving(); }
    Serving(const Serving&) = delete;
    Serving& operator=(const Serving&) = delete;

   private:
    const std::shared_ptr<WorkerSession> session_;
  };

  // Ends all waits for other ranks, now and from now on.
  void request_stop() { stop_.request_stop(); }
  bool stop_requested() const { return stop_.stop_requested(); }
  // Ends the present waits for other ranks.
  void interrupt();
  // The worker has gone: no more calls begin, and those that wait end.
  void retire();
  // From now on, does not wait for sends that nobody has begun to take: another worker has come.
  void hasten();
  // Completes what the worker had posted from shared memory and releases everything. If the worker has `vanished`
  // without saying that it leaves, its peers are told so. REQUIRES: retired.
  void end(bool vanished);

 private:
  struct RegisteredBatch {
    std::shared_ptr<BatchImpl> batch;
    std::vector<std::shared_ptr<SharedArena>> arenas;  // that its tensors are in
    bool sends = false;
  };

  bool begin_serving();
  void end_serving();
  // For queries to the agent.
  static void show_queue(BusClient& bus, std::function<CommandQueueReport()> queue);
  bool hastened() const;
  Status why_gone(bool vanished) const;    // ok: it left normally
  std::shared_ptr<BusClient> bus() const;  // throws kNotFound once the session has ended
  std::shared_ptr<PairClient> pair(uint32_t number) const;
  std::shared_ptr<BatchImpl> batch(uint32_t number) const;
  struct Found {
    bool under_way = false;
    std::shared_ptr<Operation> operation;  // null while it is being begun
  };
  Found operation(uint64_t command) const;
  Paired join(const PairCall& call);
  std::shared_ptr<PairClient> remove_pair(uint32_t number);
  Untaken close_batch(uint32_t number, Timeout linger);
  Registered register_batch(RegisterCall call, std::vector<UniqueFd> fds);
  int64_t number_of(AgentMessage type, const ObjectCall& call);
  void execute(const Command& command, Replier& replier);
  void transfer(const Command& command, Replier& replier);
  // Begins an operation; for a settling batch this blocks.
  void begin_transfer(AgentCommand type, uint64_t id, const TransferCommand& wanted,
                      const std::shared_ptr<BatchImpl>& with, Replier replier);
  void end_transfer(uint64_t id, Replier& owed, const Status& why);  // the operation was not begun

  const uint64_t number_;
  const Incarnation worker_;
  const std::shared_ptr<WorkerConnection> connection_;
  std::stop_source stop_;
  BusOptions options_;
  std::unique_ptr<CommandServer> commands_;
  std::unique_ptr<EventLoop> settling_;  // made by the queue's thread, for what would block it
  mutable Mutex mutex_;
  std::shared_ptr<BusClient> bus_ GUARDED_BY(mutex_);
  CondVar idle_;
  int serving_ GUARDED_BY(mutex_) = 0;
  bool retired_ GUARDED_BY(mutex_) = false;
  bool hastened_ GUARDED_BY(mutex_) = false;
  uint32_t last_number_ GUARDED_BY(mutex_) = 0;
  std::map<uint32_t, std::shared_ptr<PairClient>> pairs_ GUARDED_BY(mutex_);
  std::map<uint32_t, RegisteredBatch> batches_ GUARDED_BY(mutex_);
  // Current operations by command; null while they are being begun.
  std::map<uint64_t, std::shared_ptr<Operation>> operations_ GUARDED_BY(mutex_);
};

}  // namespace tessera::bus
