// What the two sides of a batch have in common. SenderBatch and ReceiverBatch are state machines on the agent's loop;
// the public methods are called from user threads.
#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <stop_token>
#include <string>
#include <vector>

#include "bus/agent.h"
#include "bus/batch_routes.h"
#include "bus/local_tensors.h"
#include "bus/operation.h"
#include "bus/own_process.h"
#include "bus/rendezvous.h"

namespace tessera::bus {

// All that registration found out. `keep_alive` holds the bus and the pair.
struct BatchSetup {
  std::shared_ptr<void> keep_alive;
  Agent* agent = nullptr;
  Rendezvous* rendezvous = nullptr;
  const Store* store = nullptr;
  std::stop_token stop;
  Timeout stall = kTransferTimeout;
  PairView view;
  std::string id;
  Agreement agreement;
  BatchRoutes routes;
  std::vector<LocalTensor> tensors;  // of this rank, in the order of the match
};

class BatchImpl : public Acceptor, public OperationOwner, public std::enable_shared_from_this<BatchImpl> {
 public:
  ~BatchImpl() override = default;

  // Connects to the ranks of the other side and waits until all are ready. Once.
  void attach(Deadline deadline);
  virtual std::shared_ptr<Operation> send(std::optional<int64_t> version, Timeout timeout);
  virtual std::shared_ptr<Operation> recv(std::optional<int64_t> min_version, Timeout timeout);
  virtual int64_t newest() const { return 0; }
  virtual int64_t wait_version(int64_t version, Timeout timeout);
  virtual bool torn() const { return false; }
  int64_t version() const { return version_.load(); }
  BatchStats stats() const;
  std::vector<TensorDigest> digests() const;
  bool cancel(uint64_t operation) override;
  void close();
  // False in a forked child, where no call may be made.
  bool in_own_process() const { return process_.here(); }

 protected:
  explicit BatchImpl(BatchSetup setup);

  // --- on the loop's thread ---
  virtual void connect() = 0;                            // makes links, fills calls_
  virtual std::vector<std::string> unready() const = 0;  // peers that are not attached yet
  virtual void detach_all(const Status& why) = 0;        // ok: it is simply over
  // Ends the current operation with `status`: now, or once nothing reads or writes the user's memory any more.
  virtual void fail_operation(const Status& status) = 0;
  // Whether what was lost leaves an operation, begun or to come, that can still be done.
  virtual bool may_go_on() const { return false; }
  // Fails an operation that depends on what was lost and tells the other peers. Called for every loss.
  virtual void on_broken(const Status& latest) = 0;
  // The current operation's deadline has come.
  virtual void on_deadline() = 0;
  // Ends the current operation early if nobody has begun to read or write for it; whether it did.
  virtual bool cancel_operation() = 0;

  // A peer was lost: the batch can do no more transfers. The first reason stays.
  void break_batch(const Status& status);
  Status broken_status() const;  // what later calls fail with
  void readiness_changed();      // wakes attach() once nobody is unready
  void fail_attach(const Status& status);
  void watch_members();  // until all are attached: a process that dies has no link yet to tell
  void unwatch_members();
  // The operation under way, if any; begin_operation() throws if there is one, or if the batch is broken or closed.
  // `although_broken`: what it needs was arranged before a peer was lost.
  std::shared_ptr<Operation> begin_operation(const char* what, Timeout timeout, bool although_broken = false);
  void set_deadline(Deadline deadline);  // of the operation
  void watch_deadline();
  void end_operation(const Status& status);
  double seconds_of_data() const;  // any thread
  std::string describe() const;    // "batch policy of pair weights"
  std::string tensor_name(uint32_t tensor) const { return setup_.tensors[tensor].name; }
  EventLoop& loop() { return setup_.agent->loop(); }
  const Identity& identity() const { return setup_.agent->identity(); }
  Attach attach_message(Attach::Purpose purpose) const;
  // The peer must be `job`/`hello.rank` as the pair knows it; throws kMismatch otherwise.
  void check_caller(const Caller& caller, const std::string& job, const std::vector<RankRecord>& ranks) const;

  // Connections this rank has to make, done by attach() on the user's thread.
  struct Call {
    std::string name;
    RankRecord record;
    std::function<void(std::shared_ptr<Link>)> on_link;
  };
  std::vector<Call> calls_;
  std::vector<UniqueFd> member_pidfds_;

  BatchSetup setup_;
  std::shared_ptr<Operation> operation_;  // current
  std::shared_ptr<Operation> ended_;      // the last one: used again once its handles have gone
  std::vector<Digest> sums_;              // those of the present transfer, as it ends; swapped with digests_
  const char* operation_name_ = "";
  TimePoint operation_start_{};
  Deadline deadline_ = Deadline::at({});
  // Left alone as the deadline moves on or the operation ends: when it is due it looks. So an operation seldom sets
  // one.
  EventLoop::TimerId timer_ = 0;
  TimePoint timer_due_{};
  std::atomic<TimePoint> data_start_{TimePoint{}};  // of the operation; the epoch before any data flows
  Status broken_;                                   // the first peer lost, and why
  uint64_t operation_number_ = 0;
  bool closed_ = false;
  std::atomic<int64_t> version_{0};
  std::atomic<int64_t> transfers_{0};
  std::atomic<int64_t> rank_bytes_{0};
  std::atomic<int64_t> allocations_{0};
  int64_t allocations_at_start_ = 0;
  int64_t plans_at_start_ = 0;
  uint64_t store_requests_at_start_ = 0;
  double register_seconds_ = 0;
  const TimePoint created_;
  const OwnProcess process_;

  mutable std::mutex mutex_;  // what follows
  std::condition_variable_any changed_;
  bool attached_ = false;
  Status lost_;  // why attach() and wait_version() must give up
  std::vector<std::string> unready_;
  std::vector<Digest> digests_;  // by tensor, of the last transfer
};

}  // namespace tessera::bus
