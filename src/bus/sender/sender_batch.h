// A batch that is offered to every job that is attached: the jobs, a session with each, and the numbers of versions.
// How a version is sent is its kinds': in_place_sender.h, staged_sender.h.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bus/batch/batch.h"
#include "bus/sender/numbering.h"
#include "bus/sender/offered_version.h"
#include "bus/sender/sender_session.h"

namespace tessera::bus {

class SenderBatch : public BatchImpl {
 public:
  void open(const PairView& view, const CallLimits& limits) override;
  std::shared_ptr<OperationClient> send(std::optional<int64_t> version, Timeout timeout) final;
  void wait_peers(int jobs, int64_t version, Timeout timeout) final;
  BatchReport report() const final;

  // --- for its sessions; on the loop's thread, unless they say otherwise ---
  virtual std::unique_ptr<OfferedVersion> make_offered(SenderSession& session, uint32_t slot) = 0;  // any thread
  // A receiver attaches: whatever its process read before, it is done with.
  virtual void on_receiver(const Incarnation&) {}
  // A receiver begins to read the version from a rank of this job, or may have: it was lost while it had it held.
  void on_begun(int64_t version);
  void on_taken(const SenderSession& session, int64_t version);  // by all receiving ranks
  // Another rank of this job offers receivers that version, which is newer than what this one offers.
  virtual void on_others_ahead(int64_t version) = 0;
  // Likewise its terms: nobody will take an older one that is on offer here, unless they are at it already.
  void on_terms_ahead(int64_t version);
  virtual void on_unpinned() = 0;                  // a slot, or a version that withdraw() waits for
  void on_sender_retired(SenderSession& session);  // broken and idle: closed and dropped, not at once

 protected:
  explicit SenderBatch(BatchSetup setup) : BatchImpl(std::move(setup)) {}

  // --- a kind's, on the loop's thread ---
  virtual void check_before_send() {}  // throws what no call has ended with yet
  virtual void begin_send() = 0;       // of offering_
  virtual void check_ended() = 0;      // that send
  virtual void note_begun(int64_t version) = 0;
  enum class Withdrawal { kDone, kTooLate, kUndecided };
  virtual Withdrawal try_withdraw(int64_t version) = 0;
  virtual void fall_behind(int64_t version) = 0;  // see on_terms_ahead()
  virtual Untaken untaken() const = 0;            // of what was sent last, or is being sent
  virtual void on_attached(SenderSession& session, bool first) = 0;
  virtual void on_dropped(const SenderSession& session) = 0;
  virtual void note_absence(const SenderSession& session);

  bool sends() const final { return true; }
  void on_met(std::shared_ptr<Session> session) override;
  void fail_operation(const Status& status) final;
  std::vector<std::string> waits_for() const override;
  void check_peers() override;

  bool several() const { return setup_.several; }
  bool any_offering() const;
  bool any_whole() const;                     // session that is not broken
  bool any_undecided(int64_t version) const;  // see SenderSession
  // The send under way may end for an offer of another rank: it has no number of its own, and is not failing already.
  bool may_fall_behind(int64_t version) const;
  Status came_too_late(int64_t version) const;
  double seconds_waited() const { return to_seconds(Clock::steady().now() - present_.start); }
  void count_decision();  // wakes who waits for what jobs do
  void observe_offer(int64_t version);
  void observe_withdrawal(int64_t version);
  // A job does not get the version, and that is no failure of the send: it did not come to take it in time.
  void observe_late(const SenderSession& session, const Status& why);
  std::string who_is_missing(int64_t version) const;
  uint64_t decisions() const;
  // Sleeps until a job has done something since `seen`. Whether one has before the deadline.
  bool await_decision(uint64_t seen, Deadline deadline);

  std::map<std::string, std::shared_ptr<SenderSession>> sessions_;  // by receiving job
  // What is known of a job that was attached, or was tried.
  struct Known {
    Status absence = {};  // why it is not attached
    Status missed = {};   // why it has not the version that was offered last
    int64_t version = 0;  // the newest that all its ranks have taken
    int world = 0;
  };
  std::map<std::string, Known> known_;  // by job
  int64_t offering_ = 0;                // what is being sent. 0: nothing
  Status ending_;                       // why it is failing: nobody is offered it any more
  Status failure_;                      // of the send: it ends with that once nobody reads any more
  Numbering numbers_;

 private:
  std::shared_ptr<Session> make_session(const PairView& view, Agreement agreement) final;
  void on_not_met(const std::string& job, const Status& why) final;
  void on_parted(const std::string& job) final;
  void on_meetings_stopped() final { stop_parted(); }
  Progress sample_sessions() const final;
  void close_sessions() final;
  void renew_sessions() final;
  std::vector<const Session*> sessions() const final;
  BatchOffer own_offer() const final;
  bool withdraw(int64_t version) final;
  void describe_peer(BatchPeer& peer) const final;
  Untaken await_takers(Timeout linger) final;
  void observe_untaken(const Untaken& untaken, Timeout linger, bool interrupted);

  void watch_jobs();
  void watch_jobs_again();
  void meet_also(const std::string& job);
  void let_go(const std::string& job);  // another batch of this rank takes it. Not on the loop's thread
  void stop_parted();
  bool attached(const std::string& job) const;

  std::unique_ptr<Watch> jobs_watch_;
  std::vector<std::unique_ptr<Meeting>> parted_;  // with jobs that have left, to be stopped
  uint64_t decisions_ GUARDED_BY(mutex_) = 0;
};

}  // namespace tessera::bus
