// A batch that is offered to every job that is attached: in place, one version at a time; staged, the newest copy.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "bus/batch/batch.h"
#include "bus/sender/leases.h"
#include "bus/sender/numbering.h"
#include "bus/sender/sender_session.h"

namespace tessera::bus {

class SenderBatch final : public BatchImpl, public SenderSessionOwner {
 public:
  explicit SenderBatch(BatchSetup setup) : BatchImpl(std::move(setup)) {}

  void open(const PairView& view, const CallLimits& limits) override;
  std::shared_ptr<OperationClient> send(std::optional<int64_t> version, Timeout timeout) override;
  void wait_peers(int jobs, int64_t version, Timeout timeout) override;
  BatchReport report() const override;

 private:
  bool sends() const override { return true; }
  std::shared_ptr<Session> make_session(const PairView& view, Agreement agreement) override;
  void on_met(std::shared_ptr<Session> session) override;
  void on_not_met(const std::string& job, const Status& why) override;
  void on_parted(const std::string& job) override;
  void on_meetings_stopped() override { stop_parted(); }

  void on_taking(SenderSession& session) override;
  void on_begun(int64_t version) override;
  void on_offer_over(SenderSession& session, const Status& status) override;
  void on_prepared(SenderSession& session, const Status& status) override;
  void on_taken(SenderSession& session, int64_t version) override;
  void on_digested(SenderSession& session, int64_t version) override;
  void on_lease_cut(uint32_t slot, const Incarnation& process) override;
  void on_receiver(const Incarnation& process) override;
  void on_ahead(int64_t version, bool over) override;
  void on_unpinned(SenderSession& session) override;
  void on_sender_retired(SenderSession& session) override;

  void fail_operation(const Status& status) override;
  void on_deadline() override;
  bool cancel_operation() override;
  Progress sample_sessions() const override;
  void close_sessions() override;
  void renew_sessions() override;
  std::vector<const Session*> sessions() const override;
  std::vector<std::string> waits_for() const override;
  void check_peers() override;
  BatchOffer own_offer() const override;
  void on_copied() override;
  bool withdraw(int64_t version) override;
  void await_readers() override;
  void drop_snapshots() override;

  void watch_jobs();
  void watch_jobs_again();
  void meet_also(const std::string& job);
  void let_go(const std::string& job);  // another batch of this rank takes it. Not on the loop's thread
  void stop_parted();
  bool begun(int64_t version) const;
  void fall_behind(int64_t version);
  void join(int64_t version, const Status& why);
  void offer_joined();
  void count_decision();
  void observe_offer(int64_t version);
  void observe_withdrawal(int64_t version);
  void check_ended();
  void describe_peer(BatchPeer& peer) const override;
  bool several() const { return setup_.several; }
  void begin_grace();
  void end_grace();
  void leave_newcomers();
  bool any_offering() const;
  // Staged.
  void begin_snapshot();
  void begin_waiting_snapshot();
  void check_snapshot();
  bool pinned(uint32_t slot) const;
  std::optional<uint32_t> free_slot() const;
  enum class Withdrawal { kDone, kTooLate, kUndecided };
  Withdrawal try_withdraw(int64_t version);
  Status nobody_attached() const;
  void note_absence(const SenderSession& session);
  void observe_late(const SenderSession& session, const Status& why);
  std::string who_is_missing(int64_t version) const;
  bool attached(const std::string& job) const;

  std::map<std::string, std::shared_ptr<SenderSession>> sessions_;  // by receiving job
  // In place: jobs that came while others were there and have taken nothing yet, or did not come to take a version in
  // time. The ranks of this job may have met them at different versions, so that a send does not wait for them before
  // they have begun to take it from all ranks.
  std::set<const SenderSession*> newcomers_;
  // What is known of a job that was attached, or was tried.
  struct Known {
    Status absence = {};  // why it is not attached
    Status missed = {};   // why it has not the version that was offered last
    int64_t version = 0;  // the newest that all its ranks have taken
    int world = 0;
  };
  std::map<std::string, Known> known_;  // by job
  std::unique_ptr<Watch> jobs_watch_;
  std::vector<std::unique_ptr<Meeting>> parted_;  // with jobs that have left, to be stopped
  int64_t offering_ = 0;                          // 0: nothing
  Numbering numbers_;
  int64_t joining_ = 0;  // in place: offered instead, once nobody is offered the other any more. 0: nothing
  Status ending_;        // why it is failing: nobody is offered it any more
  bool begun_ = false;   // a receiver has begun to take it, and may have left since
  // Staged: what lies in each slot; which one is newest.
  struct Snapshot {
    int64_t version = 0;  // 0: none
    bool begun = false;   // likewise
  };
  std::vector<Snapshot> slots_;
  uint32_t newest_slot_ = 0;
  std::unique_ptr<Leases> leases_;  // from the first one on
  // The version on its way into a slot.
  struct Copying {
    std::optional<uint32_t> target;  // the slot; none while it waits for one
    bool copied = false;
    std::set<const SenderSession*> preparing, prepared;
  };
  Copying copying_;
  uint64_t decisions_ GUARDED_BY(mutex_) = 0;  // for those that wait for what jobs do
  // What comes of the offer.
  struct Outcome {
    bool taken = false;  // by a whole job
    Status failure;      // of the offer: it ends with that once nobody reads any more
    Status lost;         // a job that was at it
    EventLoop::TimerId grace = 0;
  };
  Outcome outcome_;
  // A loss that no call has ended with: the next one does, unless the job has come back by then.
  Status unreported_;
  const SenderSession* reported_ = nullptr;
};

}  // namespace tessera::bus
