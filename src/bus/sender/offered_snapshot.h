// A version that lies in a snapshot. What offer() began is over once it is prepared; then it stays on offer until its
// slot is wanted for a newer version. Its slot is pinned by a reader, by rank 0 of the receivers while it decides, and
// then by all ranks of its job until each of them has the version.
#pragma once

#include "bus/sender/offered_version.h"

namespace tessera::bus {

class StagedSender;

class OfferedSnapshot final : public OfferedVersion {
 public:
  OfferedSnapshot(SenderSession& session, StagedSender& sender, uint32_t slot)
      : OfferedVersion(session, slot), sender_(sender) {}

  bool under_way() const override { return preparing() || failing(); }
  // The slot holds `version`, which is prepared where it must be: receivers may have it. REQUIRES: not under_way()
  void show_to_receivers(int64_t version);
  void clear();  // it is offered no longer. REQUIRES: not pinned()

  bool may_be_taken() const override;
  bool awaits(const SourceLink& receiver) const override;
  bool undecided() const override { return false; }

  void on_prepared() override;
  void on_reading() override {}
  void on_not_taken(const SourceLink& receiver, const Status& status) override;
  void on_stream_failed(const Status&) override {}  // the receiver reports it, and may take it again
  void on_digests() override;
  void on_lease_cut(const Incarnation& process) override;
  void on_broken(const Status& latest) override;
  void on_leaving(const Status& why) override;
  void check_ended() override;

 private:
  void take_back(const Status&) override {}  // it was not offered yet

  StagedSender& sender_;
};

}  // namespace tessera::bus
