// The receiving side of a session.
//
//   idle --recv()--> waiting --chosen--> pulling --all pulled--> idle, version held
//                       |                    |     \--staged--> voting --decided--> idle, or copying and then idle
//                    failure              failure: runs are aborted, the tensors stay torn
//
// election.h chooses the version; decision.h decides about a staged one.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "bus/receiver/decision.h"
#include "bus/receiver/election.h"
#include "bus/receiver/own_ranks.h"
#include "bus/session/pull_link.h"
#include "bus/session/session.h"
#include "tessera/bus.h"

namespace tessera::bus {

// Events of a session for the receiving batch. Called on the loop's thread.
class ReceiverSessionOwner {
 public:
  virtual ~ReceiverSessionOwner() = default;
  virtual void on_newest(int64_t version) = 0;  // the newest that all senders offer; 0: none
  virtual void on_chosen(int64_t version) = 0;  // data flows from now on
  virtual void on_writing() = 0;                // tensors are written from now on
  virtual void on_flow() = 0;                   // bytes have moved since the last call, or on_chosen()
  virtual void on_voting() = 0;                 // staged: this rank has got it, and waits for the decision
  // What recv() began has ended, and nothing writes for it any more.
  virtual void on_recv_over(const Status& status) = 0;
  // Staged: whether the version that is taken now is committed at once, and the tensors lie where this session knows.
  virtual bool commits_at_once() const = 0;
  virtual void on_committing() = 0;  // staged: the registered tensors are written from now until on_recv_over()
  // Staged: all ranks have got it. The owner writes the decision to the store and calls decided() soon, not at once.
  virtual void on_all_got(int64_t version, uint32_t epoch) = 0;
  // Staged: the deciding rank was lost, or does not know. The owner asks the store and calls decided(), not at once.
  virtual void on_ask_store(int64_t version, uint32_t epoch) = 0;
  virtual void on_unavailable(const Status& why) = 0;  // this session will bring no more versions
  virtual void on_receiver_retired() = 0;              // broken and idle: to be closed and dropped, but not at once
};

class ReceiverSession final : public Session, public PullLinkOwner {
 public:
  ReceiverSession(SessionSetup setup, ReceiverSessionOwner& owner);
  ~ReceiverSession() override;

  void accept(Caller caller) override;  // rank 0 accepts the other ranks of its job
  bool idle() const override { return phase_ == Phase::kIdle && !(election_.chosen() && may_go_on()); }
  RankShare share() const override { return share_; }
  // If a rank of this job closed the batch normally, the whole job leaves it so: the senders have lost nothing.
  Status parting() const override { return left_ ? Status() : broken_status(); }

  // Whether a recv() may begin: the session is not broken, or a version was chosen that can still be taken.
  bool usable() const { return !broken() || (!retired() && election_.chosen() && may_go_on()); }
  // Takes a version of at least `min_version` that this session has not delivered yet.
  void recv(int64_t min_version);
  bool waiting() const { return phase_ == Phase::kWaiting; }
  // Ends the recv with `status` once nothing writes any more.
  void fail_recv(const Status& status);
  void end_wait(const Status& status);                         // `status` stays unchanged. REQUIRES: waiting()
  Status stalled() const;                                      // the error if no byte has come for too long
  std::string missing() const { return election_.missing(); }  // the ranks awaited
  std::string awaited() const;                                 // and what for: "trainer/0 to offer version 8"
  int64_t min_version() const { return election_.min_version(); }
  // This rank has that version: it has learned the decision in the meantime.
  void hold(int64_t version) { election_.held(version); }
  bool deciding() const { return phase_ == Phase::kVoting; }
  void give_up_deciding(const Status& why);  // see Decision::give_up()
  // The decision of that epoch. `reason` of an abort, or why the store gave no answer: then kAskStore ends the recv.
  void decided(uint32_t epoch, Decided::Verdict verdict, const Status& reason);
  int64_t complete_version() const { return newest_; }  // the newest that all senders offer; 0: none
  void sum_digests(std::vector<Digest>& sums) const;
  Progress sample() const;  // any thread

 private:
  enum class Phase { kIdle, kWaiting, kPulling, kVoting, kCopying, kFailing };

  void connect() override;
  std::vector<Linked> linked() const override;
  std::string leader() const override { return rank_name(identity().job, 0); }
  std::vector<Link*> links() const override;
  std::vector<Link*> awaited_links() const override;
  void detach_all(const Status& why) override;
  void on_broken(const Status& latest) override;
  bool may_go_on() const override;

  void on_pull_ready(PullLink& link) override;
  void on_offer(PullLink& link) override;
  void on_withdrawn(PullLink& link, int64_t version) override;
  void on_held(PullLink& link, bool held) override;
  void on_pulled(PullLink& link, const Status& status) override;
  void on_granted(PullLink& link) override;
  void on_copied(PullLink& link) override;
  void on_pull_detached(PullLink& link, const Status& reason) override;
  void on_pull_lost(PullLink& link, const Status& status) override;
  void on_pull_broken(PullLink& link, const Status& status) override;

  bool leads() const { return election_.leads(); }
  void adopt_leader(std::shared_ptr<Link> link);
  void handle_leader(Frame& frame);
  void leave_with(const Detach& detach, const std::string& name);
  void handle_got(Rank rank, const Got& got);
  void handle_decided(const Decided& decided);
  void tell_got(const Status& status);
  void vote();
  void end_vote(Decided::Verdict verdict, const Status& reason);
  bool can_lease() const;
  void begin(const Chosen& chosen);
  void refuse(const Status& why);
  void take_more();
  void check_ended();
  void end_recv(const Status& status);
  void watch_progress();
  void tell_flow();
  void handle_flow(const ProgressReport& report);
  Duration progress_period() const;
  bool needs_lost_sender() const;  // REQUIRES: a version is being taken or chosen
  void broadcast_broken();

  ReceiverSessionOwner& owner_;
  SenderLinks links_;
  OwnRanks own_ranks_;
  Election election_;
  Decision decision_;
  RankShare share_;

  Phase phase_ = Phase::kIdle;
  int64_t newest_ = 0;  // the newest that all senders offer, as rank 0 determines it
  int64_t taking_ = 0;
  std::vector<PullLink*> to_take_;  // in the order in which they will be asked
  size_t streams_busy_ = 0;
  bool leases_ = false;  // the version being taken is copied straight from the senders' snapshots, once decided
  Status failure_;
  bool broken_told_ = false;
  bool sender_lost_ = false;  // why it broke: the other senders must be told, since they have no links to that one
  EventLoop::TimerId progress_timer_ = 0;
  int64_t progress_seen_ = 0;
  bool left_ = false;    // broken because a rank of this job has closed the batch normally
  bool flowed_ = false;  // staged: bytes of this rank, or at rank 0 of any, have moved, which is not reported yet
};

}  // namespace tessera::bus
