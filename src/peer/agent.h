// The event loop, the listening socket and the worker threads through which one rank takes part in transfers. It runs
// in the user's process, or in a daemon (daemon.h).
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "base/event_loop.h"
#include "base/fork_guard.h"
#include "base/listener.h"
#include "base/log.h"
#include "base/mutex.h"
#include "base/runtime_dir.h"
#include "exec/worker_pool.h"
#include "peer/connection_pool.h"
#include "peer/handshake.h"
#include "peer/identity.h"
#include "peer/link.h"
#include "peer/report.h"
#include "peer/session_table.h"
#include "peer/wait_list.h"
#include "transport/transport.h"

namespace tessera {

// A batch that contributes to the agent's report. Called on the loop's thread.
class Inspected {
 public:
  virtual ~Inspected() = default;
  virtual BatchReport report() const = 0;
};

// call(), claim_batch(), run_on_loop() and the getters may be used from any thread; the rest only on the loop's thread.
class Agent {
 public:
  Agent(Identity identity, int threads);
  ~Agent();

  const Identity& identity() const { return identity_; }
  const Incarnation& incarnation() const { return incarnation_; }  // of this agent: a process may have several
  const std::string& address() const { return address_; }          // of the Unix socket
  EventLoop& loop() { return loop_; }
  // Pulls and sources never share threads: a stream is filled only while it is drained.
  WorkerPool& pull_pool() { return pull_pool_; }
  WorkerPool& source_pool() { return source_pool_; }
  int threads() const { return pull_pool_.threads(); }
  // Batches that this agent has planned so far. It shows whether a transfer plans, which none should.
  void count_plan() { plans_.fetch_add(1); }
  int64_t plans() const { return plans_.load(); }

  // From now on this rank has the batch with these jobs. Throws kAlreadyExists if another batch of that name has named
  // one of them already. If another one only took a job that joined (claim_batch_of()), its `let_go` has been called
  // when this returns.
  void claim_batch(const std::string& pair, const std::string& batch, std::span<const std::string> jobs);
  // The same for a job that has joined and was not named. False if the rank has the batch with it already. `let_go` is
  // called by a later claim_batch() that names the job, on the thread of that call.
  bool claim_batch_of(const std::string& pair, const std::string& batch, const std::string& job,
                      const std::function<void()>& let_go);
  void release_batch(const std::string& pair, const std::string& batch, const std::string& job);
  // From now on `acceptor` gets the callers that attach to `session`; those that came early, at once. On the loop.
  void open_session(const std::string& session, Acceptor* acceptor) { sessions_.open(session, acceptor); }
  void close_session(const std::string& session, const Acceptor* acceptor) { sessions_.close(session, acceptor); }

  // The batches whose reports the agent's report contains. On the loop.
  void add_inspected(const Inspected* batch) { inspected_.push_back(batch); }
  void remove_inspected(const Inspected* batch) { std::erase(inspected_, batch); }
  WaitList& waits() { return waits_; }
  // Gives the state of the worker's command queue for report(), if there is one. On the loop.
  void set_command_queue(std::function<CommandQueueReport()> queue) { command_queue_ = std::move(queue); }

  // Opens a link to another agent, over the connection with it if there is one. Otherwise it connects, which blocks,
  // and sends Hello. Not on the loop's thread. `on_link` runs on the loop's thread, and must set the link's handlers.
  // They get what arrives once the link is attached, and its end: kMismatch if a peer other than `callee` answers, or
  // one that answers in a protocol that this release does not speak.
  void call(const Callee& callee, const Attach& attach, Deadline deadline, const ConnectionPool::OnLink& on_link);
  // The first message of this agent on a new connection.
  Hello hello() const { return connections_.hello(); }

  // Runs `task` on the loop's thread and waits until it has run; rethrows what it throws.
  template <typename Task>
  void run_on_loop(Task&& task) {
    try_on_loop(task).throw_if_error();
  }
  // The same for destructors, which must not throw.
  template <typename Task>
  Status try_on_loop(Task&& task) {
    return run_and_wait(std::ref(task));  // a reference fits into std::function without an allocation
  }

 private:
  Status run_and_wait(const std::function<void()>& task);
  Report report() const;

  const Identity identity_;
  const ForkGuard process_;
  const Incarnation incarnation_;
  const std::vector<std::unique_ptr<Consent>> consents_ = TransportRegistry::builtin().consents();
  RuntimeDir runtime_dir_;
  std::string address_;
  Listener listener_;
  EventLoop loop_;
  WorkerPool pull_pool_;
  WorkerPool source_pool_;
  std::atomic<int64_t> plans_{0};
  WaitList waits_;
  std::vector<const Inspected*> inspected_;
  std::function<CommandQueueReport()> command_queue_;
  SessionTable sessions_;
  ConnectionPool connections_;
  DialTurns dial_turns_;
  Mutex mutex_;
  // By pair, batch and the other job: `let_go` of claim_batch_of(), or null if the job was named.
  std::map<std::tuple<std::string, std::string, std::string>, std::function<void()>> batches_ GUARDED_BY(mutex_);
};

}  // namespace tessera
