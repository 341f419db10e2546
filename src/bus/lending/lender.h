// The worker's side of memory that it lends to its agent daemon (lent_memory.h): runs that read and write private
// tensors in place, on threads of this process, as the agent requests.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/event_loop.h"
#include "base/fd.h"
#include "base/mutex.h"
#include "bus/lending/messages.h"
#include "bus/registration/local_tensors.h"
#include "exec/transfer_run.h"
#include "exec/worker_pool.h"
#include "peer/link.h"
#include "peer/loop_signal.h"
#include "transport/transport.h"

namespace tessera {
class SharedArena;
}

namespace tessera::bus {

// Serves one batch. Works on its own thread ("tessera-lend") and on pools that it makes when needed. Requests of the
// agent are checked against what was registered: it can reach no other memory of this process.
class Lender {
 public:
  // `tensors` as registered: their memory must outlive the lender. Either all are sent, or all received. `name` is this
  // rank's ("trainer/3").
  Lender(std::string name, std::vector<LocalTensor> tensors, bool sends, int threads);
  ~Lender();
  Lender(const Lender&) = delete;
  Lender& operator=(const Lender&) = delete;

  // The agent's end of the socket; call it once.
  UniqueFd take_agent_end() { return std::move(agent_end_); }
  // Orders the user's accesses and those of runs: a run that begins later sees what this thread has written to the
  // tensors, and this thread sees what runs that have ended wrote. The other process between them is outside the
  // language's memory model.
  void fence() { const MutexLock lock(mutex_); }
  // After a failed operation: ends all current runs, handles all frames that the agent has sent, and waits for both.
  // Then nothing touches the tensors until the agent begins another operation. Not to be called on the lender's own
  // thread.
  void quiesce();
  // The same, for good. May be called more than once.
  void close();

 private:
  struct Entry {
    MakeRun make;
    struct Arena {
      std::shared_ptr<SharedArena> memory;
      bool writable = false;
    };
    std::map<uint32_t, Arena> own;  // the agent's arenas, by its numbers
    std::vector<RemoteKey> peer_keys;
    bool made = false;
    Status failed;                     // why there is no run
    std::unique_ptr<WorkerPool> pool;  // for a run that fills a stream, which blocks until it is drained
    std::unique_ptr<LoopSignal> done;
    std::unique_ptr<TransferRun> run;
    bool running = false;  // until the loop has heard of the end
    bool ending = false;   // it was aborted, and may still read and write for a moment
    uint32_t epoch = 0;
    std::optional<StartRun> next;  // to begin once nothing is ending any more
    bool dropped = false;          // to be forgotten then
  };

  void handle(Frame& frame);
  Entry& unmade(uint32_t number, size_t more);
  void lend_arenas(const LendArenas& lend, std::vector<UniqueFd> fds);
  void lend_keys(LendKeys lend, std::vector<UniqueFd> fds);
  void make_run(MakeRun make);
  void build(uint32_t number, Entry& entry, StreamEnd end);
  std::unique_ptr<TransferRun> source_run(Entry& entry, std::unique_ptr<ByteStream> stream);
  std::shared_ptr<const Connection> connect_to_peer(Entry& entry) const;
  std::unique_ptr<TransferRun> pull_run(Entry& entry, std::unique_ptr<ByteStream> stream);
  void start(const StartRun& message);
  void begin(Entry& entry, const StartRun& message);
  void abort(Entry& entry, const Status& status);
  void begin_deferred();
  void drop(uint32_t number);
  void handle_done(uint32_t number);
  void report();
  void end(const Status& status);
  Entry& entry(uint32_t number);
  // The memory at that place, checked, and its array if it is part of a tensor.
  std::byte* resolve(const Entry& entry, const RouteRegion& what, DType dtype, LentPlace& place, bool writes) const;
  WorkerPool& pool(std::unique_ptr<WorkerPool>& pool, const char* name) const;
  Endpoint self() const { return {.process = Incarnation::self(), .name = name_}; }

  const std::string name_;
  const std::vector<LocalTensor> tensors_;
  const bool sends_;
  const int threads_;
  UniqueFd agent_end_;
  Mutex mutex_;
  CondVar idle_;
  int running_ GUARDED_BY(mutex_) = 0;  // current runs
  std::unique_ptr<WorkerPool> pull_pool_, source_pool_;
  EventLoop loop_;  // destroyed before the members that it uses
  std::shared_ptr<Link> link_;
  std::map<uint32_t, Entry> runs_;
  Status failed_;  // of a run that could not be made since the last Sync
  EventLoop::TimerId report_timer_ = 0;
};

}  // namespace tessera::bus
