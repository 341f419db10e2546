// Two jobs joined for one batch: from the registration that all their ranks have read until one of them is lost or
// leaves. A batch goes from session to session as processes come and go; each has connections, programs and scratch of
// its own. SenderSession and ReceiverSession are state machines on the agent's loop.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <set>
#include <stop_token>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "bus/registration/batch_exchange.h"
#include "bus/registration/batch_routes.h"
#include "bus/registration/local_tensors.h"
#include "exec/run_factory.h"
#include "peer/agent.h"
#include "peer/stop_detector.h"

namespace tessera::bus {

// All that a registration found out.
struct SessionSetup {
  Agent* agent = nullptr;
  RunFactory* runs = nullptr;  // of the batch
  Timeout stall = kTransferTimeout;
  std::string batch;
  uint64_t relocation = 0;  // of the tensors, that it was made after
  PairView view;
  Agreement agreement;
  BatchRoutes routes;
  // Of this rank, in the order of the match: what is sent or received, in the first slot if it is staged.
  std::vector<LocalTensor> tensors;
  std::vector<LocalTensor> staged_terms;  // if it is: as the user registered them
  bool staged = false;
  uint32_t slots = 1;       // of a sender: 1 in place
  uint64_t slot_bytes = 0;  // from one slot's tensors to the next one's

  // What the session has cost and done, for the batch's figures.
  std::function<void()> on_allocation;
  // To or from one peer, well; some of it as deltas.
  std::function<void(int64_t bytes, const DeltaBytes& deltas)> on_moved;
  std::function<void()> on_amaxes_agreed;  // by all ranks that send

  // What the user registered: Partial terms are read there.
  const std::vector<LocalTensor>& terms() const { return staged ? staged_terms : tensors; }
};

class Session : public Acceptor {
 public:
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;
  ~Session() override;  // on the loop's thread, or after it has ended. REQUIRES: idle()

  const SessionSetup& setup() const { return setup_; }
  const std::string& peer_job() const { return setup_.view.peer_job; }

  enum class Outcome { kAttached, kSuperseded };
  // Connects to the ranks of both jobs and waits until all are ready; on a user's thread, once. Throws kPeerLost,
  // kDeadlineExceeded, kCancelled, ...; close() it then, and where it is superseded.
  Outcome attach(const CallLimits& limits);
  // "inference/1" has registered again since, or asks this rank to: attach() gives up unless that rank is attached
  // already; its connection then tells what becomes of it. Any thread.
  void supersede(const std::string& rank);
  // A rank has given the registration up: so does attach(), unless all are attached already. Any thread.
  void give_up(const Status& why);

  // --- on the loop's thread ---
  void adopted();  // by its batch: from now on it tells when it is over
  bool broken() const { return !broken_.ok(); }
  // This rank's tensors lie elsewhere now: the session is over, and all register again.
  void renew();
  // Whether it was broken because a rank registers again: no process is lost.
  bool renewed() const { return is_renewal(broken_); }
  static bool is_renewal(const Status& status) { return status.code() == ErrorCode::kUnavailable; }
  // Gives up peers that something here waits for and that are stopped: as if they had been lost. Every kStopPeriod.
  void check_peers();
  Status broken_status() const;                               // why; names the batch
  virtual Status parting() const { return broken_status(); }  // what close() is to say once it is broken
  virtual bool idle() const = 0;                              // nothing reads or writes tensors for it
  void close(const Status& why);  // tells the peers; ok: it is simply over. REQUIRES: idle()
  virtual RankShare share() const = 0;

 protected:
  explicit Session(SessionSetup setup);

  virtual void connect() = 0;  // makes links, fills calls_
  // The ranks that this one has a connection with, or is to have; and whether it is ready.
  struct Linked {
    std::string name;
    bool ready = false;
  };
  virtual std::vector<Linked> linked() const = 0;
  // Rank 0 of the receivers, which has a connection with every rank of both jobs.
  virtual std::string leader() const = 0;
  std::vector<std::string> unready() const;              // those that are not attached yet
  virtual std::vector<Link*> links() const = 0;          // all that it has
  virtual std::vector<Link*> awaited_links() const = 0;  // that a transfer needs to hear from now
  virtual void detach_all(const Status& why) = 0;
  // Whether what was lost leaves a transfer, begun or to come, that can still be done.
  virtual bool may_go_on() const { return false; }
  // Ends a transfer that depends on what was lost and tells the other peers. Called for every loss.
  virtual void on_broken(const Status& latest) = 0;

  // A peer was lost: once it is idle the session is over. The first reason stays.
  void break_session(const Status& status);
  bool retires();                            // whether it is over, once: adopted, broken, and idle
  bool retired() const { return retired_; }  // it did; its batch lets it go
  void readiness_changed();                  // wakes attach() once nobody is unready
  std::string describe() const;              // "batch policy of pair weights"
  std::string tensor_name(uint32_t tensor) const { return setup_.tensors[tensor].name; }
  EventLoop& loop() { return setup_.agent->loop(); }
  const Identity& identity() const { return setup_.agent->identity(); }
  // The peer must be `job`/`hello.rank` as the pair knows it; throws kMismatch otherwise.
  void check_caller(const Caller& caller, const std::string& job, const std::vector<RankRecord>& ranks) const;

  // Connections this rank has to make, done by attach().
  struct Call {
    std::string name;
    RankRecord record;
    Attach::Purpose purpose = Attach::Purpose::kPull;
    std::function<void(std::shared_ptr<Link>)> on_link;
  };
  std::vector<Call> calls_;
  SessionSetup setup_;
  Status broken_;  // the first peer lost, and why

 private:
  void fail_attach(const Status& status);
  // Whether some rank has registered again so that this session will not be whole.
  bool superseded() const REQUIRES(mutex_);
  Outcome await_ready(const CallLimits& limits);
  void hear_peers();
  Status look_for_stopped(const std::vector<std::string>& names);
  void watch_members();  // until all are attached: a process that dies has no link yet to tell
  void unwatch_members();

  std::vector<UniqueFd> member_pidfds_;
  std::map<std::string, StopDetector> stop_detectors_;  // of attach(), by peer
  bool closed_ = false;
  bool adopted_ = false;
  bool retired_ = false;

  Mutex mutex_;
  StoppableCondVar changed_;
  bool ready_ GUARDED_BY(mutex_) = false;
  std::set<std::string> superseded_ GUARDED_BY(mutex_);  // ranks that have registered again, or ask this one to
  bool given_up_ GUARDED_BY(mutex_) = false;             // by another rank, because of such a one
  Status lost_ GUARDED_BY(mutex_);                       // why attach() must give up
  std::vector<Linked> linked_ GUARDED_BY(mutex_);
  std::vector<std::string> unready_ GUARDED_BY(mutex_);
};

}  // namespace tessera::bus
