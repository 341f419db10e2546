// Two jobs joined for one batch, from the registration that all their ranks have read until one of them is lost or
// leaves. A batch goes from session to session as processes come and go; each has its own connections, programs and
// scratch memory. Its versions are objects of SenderSession and ReceiverSession, on the
// agent's loop.
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

// The result of a registration.
struct SessionSetup {
  Agent* agent = nullptr;
  RunFactory* runs = nullptr;  // the batch's
  Timeout stall = kTransferTimeout;
  std::string batch;
  uint64_t relocation = 0;  // counts the tensors' moves; the session was made after this one
  PairView view;
  Agreement agreement;
  BatchRoutes routes;
  // This rank's tensors in the order of the match: what is sent or received, in the first slot if it is staged.
  std::vector<LocalTensor> tensors;
  std::vector<LocalTensor> staged_terms;  // if it is staged: as the user registered them
  bool staged = false;
  uint32_t slots = 1;       // on a sender; 1 in place
  uint64_t slot_bytes = 0;  // from the tensors of one slot to those of the next

  // Callbacks for the batch's statistics.
  std::function<void()> on_allocation;
  // A transfer to or from one peer succeeded; some of it as deltas.
  std::function<void(int64_t bytes, const DeltaBytes& deltas)> on_moved;
  std::function<void()> on_amaxes_agreed;  // by all sending ranks

  // The tensors that the user registered: Partial terms are read there.
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
  // kDeadlineExceeded, kCancelled, ...; then, and if it is superseded, call close().
  Outcome attach(const CallLimits& limits);
  // "inference/1" has registered again since, or asks this rank to: attach() gives up, unless that rank is already
  // attached; then the connection tells what becomes of it. Any thread.
  void supersede(const std::string& rank);
  // A rank has given the registration up: attach() does too, unless all are already attached. Any thread.
  void give_up(const Status& why);

  // --- on the loop's thread ---
  void adopted();  // by its batch, which is told from now on when it is over
  bool broken() const { return !broken_.ok(); }
  // This rank's tensors have moved: the session is over, and all register again.
  void renew();
  // Whether it broke because a rank registers again: no process is lost.
  bool renewed() const { return is_renewal(broken_); }
  static bool is_renewal(const Status& status) { return status.code() == ErrorCode::kUnavailable; }
  // Treats stopped peers that something here waits for as lost. Call it every kStopPeriod.
  void check_peers();
  Status broken_status() const;                               // the reason; names the batch
  virtual Status parting() const { return broken_status(); }  // what close() tells once it is broken
  virtual bool idle() const = 0;                              // nothing accesses tensors for it
  void close(const Status& why);  // tells the peers; ok: it is simply over. REQUIRES: idle()
  virtual RankShare share() const = 0;

 protected:
  explicit Session(SessionSetup setup);

  virtual void connect() = 0;  // makes links, fills calls_
  // The ranks that this one has or will have a connection with, and whether it is ready.
  struct Linked {
    std::string name;
    bool ready = false;
  };
  virtual std::vector<Linked> linked() const = 0;
  // Rank 0 of the receivers, which has a connection with every rank of both jobs.
  virtual std::string leader() const = 0;
  std::vector<std::string> unready() const;              // those that are not attached yet
  virtual std::vector<Link*> links() const = 0;          // all its links
  virtual std::vector<Link*> awaited_links() const = 0;  // those that a transfer must hear from now
  virtual void detach_all(const Status& why) = 0;
  // Whether a transfer, begun or to come, can still succeed after the loss.
  virtual bool may_go_on() const { return false; }
  // Ends a transfer that depends on what was lost, and tells the other peers. Called for every loss.
  virtual void on_broken(const Status& latest) = 0;

  // A peer was lost: once it is idle the session is over. The first reason is kept.
  void break_session(const Status& status);
  bool retires();                            // true once, when it is over: adopted, broken and idle
  bool retired() const { return retired_; }  // it did; its batch releases it
  void readiness_changed();                  // wakes attach() once nobody is unready
  std::string describe() const;              // "batch policy of pair weights"
  std::string tensor_name(uint32_t tensor) const { return setup_.tensors[tensor].name; }
  EventLoop& loop() { return setup_.agent->loop(); }
  const Identity& identity() const { return setup_.agent->identity(); }
  // Checks that the peer is `job`/`hello.rank` as the pair knows it; throws kMismatch otherwise.
  void check_caller(const Caller& caller, const std::string& job, const std::vector<RankRecord>& ranks) const;

  // Connections that this rank has to make in attach().
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
  // Whether some rank has registered again, so that this session will never be complete.
  bool superseded() const REQUIRES(mutex_);
  Outcome await_ready(const CallLimits& limits);
  void hear_peers();
  Status look_for_stopped(const std::vector<std::string>& names);
  void watch_members();  // until all are attached: a process that dies before has no link yet
  void unwatch_members();

  std::vector<UniqueFd> member_pidfds_;
  std::map<std::string, StopDetector> stop_detectors_;  // for attach(), by peer
  bool closed_ = false;
  bool adopted_ = false;
  bool retired_ = false;

  Mutex mutex_;
  StoppableCondVar changed_;
  bool ready_ GUARDED_BY(mutex_) = false;
  std::set<std::string> superseded_ GUARDED_BY(mutex_);  // ranks that have registered again, or ask this one to
  bool given_up_ GUARDED_BY(mutex_) = false;             // by another rank, because of one of those
  Status lost_ GUARDED_BY(mutex_);                       // why attach() must give up
  std::vector<Linked> linked_ GUARDED_BY(mutex_);
  std::vector<std::string> unready_ GUARDED_BY(mutex_);
};

}  // namespace tessera::bus
