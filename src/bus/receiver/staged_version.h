// A version that is pulled into the snapshot, and taken there by all ranks of the job or by none.
#pragma once

#include "bus/receiver/decision.h"
#include "bus/receiver/taken_version.h"

namespace tessera::bus {

class StagedVersion : public TakenVersion {
 public:
  StagedVersion(const ReceiverParts& parts, const Chosen& chosen);

  bool registered() const override { return false; }
  bool may_go_on() const override;
  std::vector<Link*> awaited_links() const override;
  std::string awaited() const override;

  void fail(const Status& why) override;  // a vote is given up: see Decision::give_up()
  bool report_progress() override;

  void hear_got() override;
  void hear(const Decided& decided) override;
  void hear(const ProgressReport& report) override;
  void decided(Decided::Verdict verdict, const Status& reason) override;
  void peer_lost() override;

 protected:
  // Called once the vote has ended. After an abort, or if the decision is not known, failure_ says why.
  virtual void end_vote(Decided::Verdict verdict);
  void end(const Status& status) final;

 private:
  void complete() override;
  void tell_failure() override;
  void moved() override;
  Status overdue() const override;
  void over(Decided::Verdict verdict, const Status& reason);

  Decision decision_;
  bool flowed_ = false;  // bytes of this rank, or at rank 0 of any, have moved, which is not reported yet
};

}  // namespace tessera::bus
