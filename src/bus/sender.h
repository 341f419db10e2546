// The sending side of a batch.
//
//   idle --send(v)--> reducing --own share reduced--> offered --every receiver done--> idle, v sent
//          (only with Partial tensors)                   |
//                                                     failing: withdrawn; ends once nobody reads any more
//
// The memory is the receivers' to read from send() until the operation ends, and the user's again afterwards.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "bus/batch.h"
#include "bus/loop_signal.h"
#include "bus/reducer.h"
#include "bus/source_link.h"

namespace tessera::bus {

class SenderBatch final : public BatchImpl, public SourceLinkOwner {
 public:
  explicit SenderBatch(BatchSetup setup);
  ~SenderBatch() override = default;

  std::shared_ptr<Operation> send(std::optional<int64_t> version, Timeout timeout) override;
  void accept(Caller caller) override;

 private:
  enum class Phase { kIdle, kReducing, kOffered, kFailing };

  void connect() override;
  std::vector<std::string> unready() const override;
  void detach_all(const Status& why) override;
  Progress sample() const override;
  void fail_operation(const Status& status) override;
  void on_broken(const Status& latest) override;
  void on_deadline() override;
  bool cancel_operation() override;

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
  void offer();
  void on_digests();
  void send_digests(SourceLink& link);
  void check_ended();
  void sum_digests();
  std::string who_has_not_taken() const;

  std::map<Rank, std::unique_ptr<SourceLink>> receivers_;
  std::map<Rank, std::unique_ptr<SourceLink>> owners_;  // ranks of this job that reduce what this one holds
  std::unique_ptr<Reducer> reducer_;                    // what this rank reduces; null if nothing

  // One digest a sent route, whoever takes it; receivers with a ring have theirs computed as the ring is filled.
  std::shared_ptr<const SourceProgram> digest_program_;
  std::vector<uint32_t> digested_;  // indices into routes.sent, in the program's order
  LoopSignal digests_done_;
  std::unique_ptr<SourceRun> digest_run_;
  bool digest_running_ = false;
  bool have_digests_ = false;
  std::vector<bool> counted_;  // by sent route, while digests are summed

  Phase phase_ = Phase::kIdle;
  int64_t offering_ = 0;
  Status failure_;
  Status failure_cause_;  // as others hear it
  TimePoint last_activity_{};
};

}  // namespace tessera::bus
