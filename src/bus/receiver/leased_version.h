// A staged version whose bytes stay in the senders' snapshots until the decision. Then they are copied straight into
// the registered tensors. After the decision nothing may prevent this rank from taking the version, so all of it must
// lie in memory that outlives the senders.
#pragma once

#include "bus/receiver/staged_version.h"

namespace tessera::bus {

class LeasedVersion final : public StagedVersion {
 public:
  using StagedVersion::StagedVersion;  // REQUIRES: all links are direct()

  bool registered() const override { return true; }
  void copied() override;

 private:
  void ask(PullLink& link) override { link.take(version(), epoch(), /*lease=*/true); }
  void end_leases(const Status& why) override;
  void end_vote(Decided::Verdict verdict) override;
};

}  // namespace tessera::bus
