// What a worker has opened at its agent daemon: a bus, and what it registered there.
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

// A connection of a worker. The daemon's loop reads from it, whoever handles its request writes.
struct WorkerConnection {
  explicit WorkerConnection(UniqueFd connected) : socket(std::move(connected)) {}
  UniqueFd socket;
  FrameReader reader{kAgentMagic, {.payload_bytes = kMaxAgentFrame, .fds = kMaxFdsPerMessage}};
  std::vector<UniqueFd> arenas;
  std::stop_source given_up;  // the worker has closed its sending end: its call is to end

  // Blocks until the worker has room for it; one that does not read is given up. False if it did not go: nobody waits
  // for it any more.
  template <typename Message>
  bool answer(const Message& message) noexcept {
    return answer(Message::kType, message_bytes(message));
  }
  bool answer(AgentMessage type, std::span<const std::byte> payload = {}) noexcept;
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
  // Held around each of the two, and around whatever begins an operation.
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

  // Ends all that waits for other ranks to come, now and from then on.
  void request_stop() { stop_.request_stop(); }
  bool stop_requested() const { return stop_.stop_requested(); }
  // Ends what waits for them now.
  void interrupt();
  // The worker has gone: no call is begun any more, and those that wait end.
  void retire();
  // From now on sends that nobody has begun to take are not waited for: another worker has come.
  void hasten();
  // Finishes what the worker had posted from shared memory and gives everything back. A worker that has `vanished` has
  // not said that it goes: its peers are told so. REQUIRES: retired.
  void end(bool vanished);

 private:
  struct RegisteredBatch {
    std::shared_ptr<BatchImpl> batch;
    std::vector<std::shared_ptr<SharedArena>> arenas;  // what its tensors lie in
    bool sends = false;
  };

  bool begin_serving();
  void end_serving();
  // To whoever asks the agent.
  static void show_queue(BusClient& bus, std::function<CommandQueueReport()> queue);
  bool hastened() const;
  Status why_gone(bool vanished) const;    // ok: in good order
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
  void close_batch(uint32_t number);
  Registered register_batch(RegisterCall call, std::vector<UniqueFd> fds);
  int64_t number_of(AgentMessage type, const ObjectCall& call);
  void execute(const Command& command, Replier& replier);
  void transfer(const Command& command, Replier& replier);
  // Begins an operation; a settling batch blocks in it.
  void begin_transfer(AgentCommand type, uint64_t id, const TransferCommand& wanted,
                      const std::shared_ptr<BatchImpl>& with, Replier replier);
  void end_transfer(uint64_t id, Replier& owed, const Status& why);  // it was not begun

  const uint64_t number_;
  const Incarnation worker_;
  const std::shared_ptr<WorkerConnection> connection_;
  std::stop_source stop_;
  BusOptions options_;
  std::unique_ptr<CommandServer> commands_;
  std::unique_ptr<EventLoop> settling_;  // the queue's thread makes it: for what would block that
  mutable Mutex mutex_;
  std::shared_ptr<BusClient> bus_ GUARDED_BY(mutex_);
  CondVar idle_;
  int serving_ GUARDED_BY(mutex_) = 0;
  bool retired_ GUARDED_BY(mutex_) = false;
  bool hastened_ GUARDED_BY(mutex_) = false;
  uint32_t last_number_ GUARDED_BY(mutex_) = 0;
  std::map<uint32_t, std::shared_ptr<PairClient>> pairs_ GUARDED_BY(mutex_);
  std::map<uint32_t, RegisteredBatch> batches_ GUARDED_BY(mutex_);
  // Under way, by command; null while being begun.
  std::map<uint64_t, std::shared_ptr<Operation>> operations_ GUARDED_BY(mutex_);
};

}  // namespace tessera::bus
