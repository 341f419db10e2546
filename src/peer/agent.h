// The event loop, the listening socket and the worker threads with which one rank takes part in transfers: in the
// user's process, or in a daemon (daemon.h).
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

// What a batch says when somebody asks its agent. Called on the loop's thread.
class Inspected {
 public:
  virtual ~Inspected() = default;
  virtual BatchReport report() const = 0;
};

// call(), claim_batch(), run_on_loop() and the getters may be used from any thread; the rest happens on the loop.
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
  // Batches planned by this agent so far; a transfer that plans would show here.
  void count_plan() { plans_.fetch_add(1); }
  int64_t plans() const { return plans_.load(); }

  // From now on this rank has that batch with these jobs. Throws kAlreadyExists if it has it with one of them already.
  // Where a job has only come to another batch of that name, that one is told to let go of it, and has when this
  // returns.
  void claim_batch(const std::string& pair, const std::string& batch, std::span<const std::string> jobs);
  // Likewise with a job that has come. False if the rank has the batch with it already. `let_go` is called on the
  // thread of the claim that wants it.
  bool claim_batch_of(const std::string& pair, const std::string& batch, const std::string& job,
                      const std::function<void()>& let_go);
  void release_batch(const std::string& pair, const std::string& batch, const std::string& job);
  // From now on callers that attach to `session` are given to `acceptor`; those that came early, at once. On the loop.
  void open_session(const std::string& session, Acceptor* acceptor) { sessions_.open(session, acceptor); }
  void close_session(const std::string& session, const Acceptor* acceptor) { sessions_.close(session, acceptor); }

  // Whose report goes into the agent's. On the loop.
  void add_inspected(const Inspected* batch) { inspected_.push_back(batch); }
  void remove_inspected(const Inspected* batch) { std::erase(inspected_, batch); }
  WaitList& waits() { return waits_; }
  // What report() says of the worker's command queue; without one, nothing. On the loop.
  void set_command_queue(std::function<CommandQueueReport()> queue) { command_queue_ = std::move(queue); }

  // Opens a link to another agent, over the connection with it if there is one; else connects, which blocks, and says
  // Hello. Not on the loop's thread. The link's handlers are the caller's to set, on the loop's thread: `on_link` runs
  // there. They see what comes once the link is attached, and its end: kMismatch where another peer than `callee`
  // answers, or in a protocol that this release does not speak.
  void call(const Callee& callee, const Attach& attach, Deadline deadline, const ConnectionPool::OnLink& on_link);
  // What this agent says first on a new connection.
  Hello hello() const { return connections_.hello(); }

  // Runs `task` on the loop's thread and waits until it has run; rethrows what it throws.
  template <typename Task>
  void run_on_loop(Task&& task) {
    try_on_loop(task).throw_if_error();
  }
  // The same for destructors, which throw nothing.
  template <typename Task>
  Status try_on_loop(Task&& task) {
    return run_and_wait(std::ref(task));  // a reference is what std::function holds without a block of its own
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
  // By pair, batch and the other job: how to have it let go; null where the job was named.
  std::map<std::tuple<std::string, std::string, std::string>, std::function<void()>> batches_ GUARDED_BY(mutex_);
};

}  // namespace tessera
