// The sending side of a session: one receiving job.
//
//   idle --offer(v)--> reducing --own share reduced--> offered --every receiver done--> idle
//          (only with Partial tensors)                   |
//                                                     failing: withdrawn; ends once nobody reads any more
//
// The memory is the receivers' to read from offer() until on_offer_over().
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <vector>

#include "bus/loop_signal.h"
#include "bus/reducer.h"
#include "bus/session.h"
#include "bus/source_link.h"
#include "tessera/bus.h"

namespace tessera::bus {

class SenderSession;

// What a session tells the batch that offers. Called on the loop's thread.
class SenderSessionOwner {
 public:
  virtual ~SenderSessionOwner() = default;
  virtual void on_taking(SenderSession& session) = 0;  // a receiver begins to read
  // Nobody reads the version any more: every receiving rank has it, or why not.
  virtual void on_offer_over(SenderSession& session, const Status& status) = 0;
  virtual void on_sender_retired(SenderSession& session) = 0;  // broken and idle: close and drop it, not at once
};

class SenderSession final : public Session, public SourceLinkOwner {
 public:
  SenderSession(SessionSetup setup, SenderSessionOwner& owner);
  ~SenderSession() override = default;

  void accept(Caller caller) override;
  bool idle() const override { return phase_ == Phase::kIdle; }
  int64_t rank_bytes() const override { return rank_bytes_; }

  void offer(int64_t version);  // REQUIRES: idle(), attached, not broken
  // Ends the offer with `status` once nobody reads any more.
  void fail_offer(const Status& status);
  bool left() const { return left_; }  // it is broken because a rank has closed the batch, as it should
  bool begun() const;  // whether a receiver or an owner of a reduction has begun to read the version on offer
  // Whether all receivers are at it and one was heard of since then.
  bool flows_since(TimePoint then) const;
  TimePoint last_activity() const { return last_activity_; }
  std::string who_has_not_taken() const;
  Progress sample() const;  // any thread
  // By tensor, of the last version; each sent route once.
  void sum_digests(std::vector<Digest>& sums);

 private:
  enum class Phase { kIdle, kReducing, kOffered, kFailing };

  void connect() override;
  std::vector<std::string> unready() const override;
  void detach_all(const Status& why) override;
  void on_broken(const Status& latest) override;

  void on_source_ready(SourceLink& link) override;
  void on_take(SourceLink& link, int64_t version, uint32_t epoch) override;
  void on_done(SourceLink& link, const Done& done) override;
  void on_progress(SourceLink& link) override;
  void on_source_run_done(SourceLink& link) override;
  void on_source_detached(SourceLink& link, const Status& reason) override;
  void on_source_lost(SourceLink& link, const Status& status) override;
  void on_source_broken(SourceLink& link, const Status& status) override;

  SourceRoute source_route(const LinkRoute& route) const;  // in this rank's tensor
  SourceRoute sent_route(const SentRoute& route) const;    // there, or in the reduced scratch
  std::vector<Served> served_to(const Caller& caller) const;
  void attached_one();  // a receiver, an owner, or a peer of a reduction
  void build_digest_program();
  void on_reduced(const Status& status);
  void offer_reduced();
  void on_digests();
  void send_digests(SourceLink& link);
  void check_ended();
  void end_offer(const Status& status);
  void stop_waiting_for_readers();

  SenderSessionOwner& owner_;
  std::map<Rank, std::unique_ptr<SourceLink>> receivers_;
  std::map<Rank, std::unique_ptr<SourceLink>> owners_;  // ranks of this job that reduce what this one holds
  std::unique_ptr<Reducer> reducer_;                    // what this rank reduces; null if nothing
  int64_t rank_bytes_ = 0;
  bool left_ = false;

  // One digest a sent route, whoever takes it; receivers with a ring have theirs computed as the ring is filled.
  std::shared_ptr<const SourceProgram> digest_program_;
  std::vector<uint32_t> digested_;  // indices into routes.sent, in the program's order
  LoopSignal digests_done_;
  std::unique_ptr<SourceRun> digest_run_;
  bool digest_running_ = false;
  bool have_digests_ = false;
  std::vector<bool> counted_;  // by sent route, while digests are summed

  Phase phase_ = Phase::kIdle;
  uint32_t offers_ = 0;  // so far
  int64_t offering_ = 0;
  Status failure_;
  Status failure_cause_;  // as others hear it
  TimePoint last_activity_{};
  EventLoop::TimerId revoke_timer_ = 0;
};

}  // namespace tessera::bus
