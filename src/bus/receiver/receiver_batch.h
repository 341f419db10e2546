// A batch that is received. recv() and wait_version() wait for a version across sessions: any session may bring it.
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <stop_token>

#include "bus/batch/batch.h"
#include "bus/receiver/receiver_session.h"

namespace tessera::bus {

class ReceiverBatch final : public BatchImpl {
 public:
  explicit ReceiverBatch(BatchSetup setup) : BatchImpl(std::move(setup)) {}

  std::shared_ptr<OperationClient> recv(std::optional<int64_t> min_version, Timeout timeout) override;
  std::shared_ptr<OperationClient> stage(std::optional<int64_t> min_version, Timeout timeout) override;
  int64_t commit() override;
  bool undecided() const override;
  int64_t newest() const override { return newest_.load(); }
  int64_t wait_version(int64_t version, Timeout timeout) override;
  bool torn() const override { return torn_.load(); }
  BatchReport report() const override;

  // --- for its sessions and their versions, on the loop's thread ---
  void on_newest(int64_t version);          // the newest that all senders offer; 0: none
  void on_wait_over(const Status& status);  // without a version
  void on_unavailable(const Status& why);   // the session will bring no more versions
  void on_session_retired();                // broken and idle
  bool commits_at_once() const;             // the present version, and the tensors lie where the session knows
  void on_chosen(int64_t version);          // data flows from now on
  void on_flow();                           // bytes have moved since the last call, or on_chosen()
  void on_writing() { torn_ = true; }       // into the registered tensors
  void on_voting() { enter("decide"); }     // this rank has got it, and waits for the decision
  void on_committing();                     // the same as on_writing(), after the decision
  // Has the store decide about a version of the present session, or asks for its decision, in the background.
  // ReceiverSession::decided() follows.
  void ask_store(int64_t version, uint32_t epoch, bool commit);
  void observe_decision(int64_t version, const Status& status);  // counts and logs how a staged version has ended
  // Nothing writes for it any more: it is taken, or the status says why not.
  void on_version_over(const TakenVersion& version, const Status& status);

 private:
  bool sends() const override { return false; }
  std::shared_ptr<Session> make_session(const PairView& view, Agreement agreement) override;
  void on_met(std::shared_ptr<Session> session) override;
  void on_not_met(const std::string& job, const Status& why) override;

  int64_t await_version(int64_t version, Timeout timeout, const std::stop_token& stop);

  void fail_operation(const Status& status) override;
  void on_deadline() override;
  bool cancel_operation() override;
  Progress sample_sessions() const override;
  void close_sessions() override;
  void renew_sessions() override {}  // not needed: the batch is staged, so no session has the registered tensors
  std::vector<const Session*> sessions() const override;
  std::vector<std::string> waits_for() const override;
  void check_peers() override;
  void on_copied() override;
  void on_closed() override;
  BatchOffer own_offer() const override;

  // A staged version about which this rank does not know the decision.
  struct Undecided {
    int64_t version = 0;
    std::string key;  // of the decision
    std::weak_ptr<ReceiverSession> session;
  };
  std::shared_ptr<Operation> begin(const char* what, std::optional<int64_t> min_version, Timeout timeout);
  void wait_for_version();
  void begin_commit();
  void end_with(const Status& failure);
  void settle(Duration timeout = Rendezvous::kDecisionTimeout) const;  // throws kUnavailable
  std::string decision_key(uint32_t epoch) const;

  std::string waited() const;  // "batch ...: inference/0 waited 1.0 s for version 3 or newer"

  std::shared_ptr<ReceiverSession> session_;  // null while there is none
  bool pending_ = false;                      // a recv waits for a session
  int64_t min_version_ = 0;
  Status absent_;  // why there is no session

  // Staged.
  bool only_stages_ = false;                        // the current operation is stage()
  bool waits_then_ = false;                         // the operation commits an earlier version, then waits for one
  std::string last_decision_;                       // rank 0: its key is removed with the next decision
  mutable std::atomic<int64_t> staged_version_{0};  // decided, not yet committed

  std::atomic<int64_t> newest_{0};
  std::atomic<bool> torn_{false};
  mutable std::optional<Undecided> undecided_ GUARDED_BY(mutex_);
  // For wait_version().
  uint64_t losses_ GUARDED_BY(mutex_) = 0;
  Status lost_ GUARDED_BY(mutex_);              // why the last loss happened
  bool unreported_ GUARDED_BY(mutex_) = false;  // no call has failed with lost_: the next will, unless the job is back
  const Session* lost_session_ GUARDED_BY(mutex_) = nullptr;
  // Threads in wait_version().
  struct VersionWait {
    int64_t version = 0;
    TimePoint since;
    bool operator==(const VersionWait&) const = default;
  };
  std::vector<VersionWait> version_waits_ GUARDED_BY(mutex_);
};

}  // namespace tessera::bus
